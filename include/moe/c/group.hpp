// SPDX-License-Identifier: Apache-2.0
// c/group.hpp: the ranks of a moe_group_t, over a communicator of any type.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "moe/core/error.hpp"
#include "moe/core/types.hpp"
#include "moe/parallel/construction.hpp"

namespace moe::c {

/// One call at a time on what `busy` guards. E_STATE, at once, if another thread is in one.
class Exclusive {
 public:
  Exclusive(std::atomic<bool>& busy, char const* what) : busy_(busy) {
    if (busy_.exchange(true, std::memory_order_acquire)) {
      throw Error(ErrorCode::state, text(what, ": another thread is in a call on it"));
    }
  }
  Exclusive(Exclusive const&) = delete;
  Exclusive& operator=(Exclusive const&) = delete;
  ~Exclusive() { busy_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool>& busy_;
};

class Group {
 public:
  Group() = default;
  Group(Group const&) = delete;
  Group& operator=(Group const&) = delete;
  virtual ~Group() = default;
  virtual char const* name() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Collective with the other ranks' moe_runner_create(): this rank has refused its arguments, and they get E_PEER.
  virtual void refuse(ErrorCode code) noexcept = 0;

  std::atomic<bool> busy{false};
};

template <class Comm>
class GroupOver final : public Group {
 public:
  template <class... Arguments>
  explicit GroupOver(Arguments&&... arguments) : comm(std::forward<Arguments>(arguments)...) {}
  char const* name() const override { return Comm::kName; }
  int rank() const override { return comm.rank(); }
  int size() const override { return comm.size(); }
  void refuse(ErrorCode code) noexcept override {
    try {
      moe::detail::gather_construction(comm, 1 + static_cast<std::int64_t>(code));
    } catch (...) {  // the communicator reports its failure to the next call as well
    }
  }

  Comm comm;
};

/// One rank: a layer brings its own communicator, whatever its space.
class GroupOfOne final : public Group {
 public:
  char const* name() const override { return "self"; }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void refuse(ErrorCode) noexcept override {}
};

}  // namespace moe::c
