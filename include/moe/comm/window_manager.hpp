// SPDX-License-Identifier: Apache-2.0
// comm/window_manager.hpp: owns the windows of a group of ranks, so that layers of one shape share one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "moe/core/error.hpp"

namespace moe::comm {

/// The key of a window: equal arguments get the same window.
struct WindowArguments {
  std::string backend;               ///< its name
  std::vector<std::int64_t> values;  ///< everything that decides the layout of the window, the same on all ranks
  std::int64_t user_bytes = 0;       ///< size behind the control part
  bool operator==(WindowArguments const&) const = default;
};

/// State that the exchanges of one window share on a rank.
struct WindowUse {
  static constexpr int kMaxBufferSets = 16;
  int exchanges = 0;  ///< constructed so far; gives each its number, the same on all ranks
  /// Number per buffer set, of device exchanges; host exchanges count in the window.
  std::array<std::uint32_t, kMaxBufferSets> dispatches{};
  std::array<std::uint32_t, 2> layouts{};  ///< high_throughput: which dispatch filled the layout of each parity
  bool dispatched = false;                 ///< one_sided, two_sided, pplx: a dispatch of some exchange has not been combined yet
};

/// All calls are collective and in the same order on all ranks. Windows are destroyed from the newest to the oldest.
template <class WindowT>
class WindowManager {
 public:
  using Window = WindowT;
  using Comm = typename Window::Comm;
  using Params = typename Window::Params;

  /// `comm` is borrowed and must outlive the manager. All windows use `params`.
  WindowManager(Comm& comm, Params const& params) : comm_(&comm), params_(params) {}
  explicit WindowManager(Comm& comm) : WindowManager(comm, Params{}) {}
  WindowManager(WindowManager const&) = delete;
  WindowManager& operator=(WindowManager const&) = delete;
  ~WindowManager() { destroy(); }

  /// The window of these arguments, constructed on the first call. Errors of the window's constructor; E_ARG without a backend name.
  Window& window(WindowArguments const& arguments) { return *entry(arguments).window; }
  /// The state that the window's exchanges share; lives as long as the window.
  WindowUse& use(WindowArguments const& arguments) { return *entry(arguments).use; }
  /// The number of live windows.
  std::size_t size() const { return entries_.size(); }
  /// Destroys all windows, the newest first. No exchange that uses one may be used again.
  void destroy() {
    while (!entries_.empty()) {
      entries_.pop_back();
    }
  }
  Comm& comm() const { return *comm_; }

 private:
  struct Entry {
    WindowArguments arguments;
    std::unique_ptr<Window> window;
    std::unique_ptr<WindowUse> use;
  };
  Entry& entry(WindowArguments const& arguments) {
    if (arguments.backend.empty()) {
      throw Error(ErrorCode::argument, "window manager: a window needs the name of its backend");
    }
    for (Entry& entry : entries_) {
      if (entry.arguments == arguments) {
        return entry;
      }
    }
    entries_.push_back({arguments, std::make_unique<Window>(*comm_, arguments.user_bytes, params_), std::make_unique<WindowUse>()});
    return entries_.back();
  }

  Comm* comm_;
  Params params_;
  std::vector<Entry> entries_;
};

/// The window of an exchange: the manager's, or its own.
template <class Window>
class WindowHandle {
 public:
  /// Collective. With a manager, `params` is ignored.
  WindowHandle(typename Window::Comm& comm, WindowManager<Window>* manager, WindowArguments const& arguments,
               typename Window::Params const& params)
      : owned_(manager == nullptr ? std::make_unique<Window>(comm, arguments.user_bytes, params) : nullptr),
        window_(manager == nullptr ? owned_.get() : &manager->window(arguments)),
        owned_use_(manager == nullptr ? std::make_unique<WindowUse>() : nullptr),
        use_(manager == nullptr ? owned_use_.get() : &manager->use(arguments)),
        number_(use_->exchanges++) {}
  Window& operator*() const { return *window_; }
  Window* operator->() const { return window_; }
  bool shared() const { return owned_ == nullptr; }
  WindowUse& use() const { return *use_; }
  /// The number of this exchange among those of the window, in order of construction.
  int number() const { return number_; }

 private:
  std::unique_ptr<Window> owned_;
  Window* window_;
  std::unique_ptr<WindowUse> owned_use_;
  WindowUse* use_;
  int number_;
};

}  // namespace moe::comm
