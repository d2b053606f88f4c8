// SPDX-License-Identifier: Apache-2.0
// core/line_sink.hpp: where lines of text go. <functional> would cost every program a twentieth of the time that <moe/moe.hpp> takes.
#pragma once

#include <concepts>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace moe {

/// A callable that takes a std::string const&, or nothing, as an empty std::function. Copies share the callable.
class LineSink {
 public:
  LineSink() = default;
  template <std::invocable<std::string const&> F>
    requires(!std::same_as<std::remove_cvref_t<F>, LineSink>)
  LineSink(F&& f) {
    using Callable = std::decay_t<F>;
    // A std::function or a pointer may be empty. A lambda without captures converts to a pointer, which never is.
    if constexpr (std::is_pointer_v<Callable> || (std::is_constructible_v<bool, Callable const&> && !requires { +f; })) {
      if constexpr (!std::is_function_v<std::remove_reference_t<F>>) {
        if (!static_cast<bool>(f)) return;
      }
    }
    call_ = std::make_shared<Of<Callable>>(std::forward<F>(f));
  }

  explicit operator bool() const { return call_ != nullptr; }
  void operator()(std::string const& line) const { call_->take(line); }

 private:
  struct Call {
    virtual ~Call() = default;
    virtual void take(std::string const& line) = 0;
  };
  template <class F>
  struct Of : Call {
    F f;
    explicit Of(F given) : f(std::move(given)) {}
    void take(std::string const& line) override { f(line); }
  };
  std::shared_ptr<Call> call_;
};

}  // namespace moe
