// SPDX-License-Identifier: Apache-2.0
// tests/declared_window.hpp: a window between GPUs with all that a policy needs to compile, and no definition: for layers that are judged
// and never made.
#pragma once

#include <cstdint>

#include "moe/comm/self.hpp"
#include "moe/comm/symmetric_memory.hpp"

namespace moe_test {

struct DeclaredWindow {
  using Space = moe::space::cuda;
  using Comm = moe::comm::Self<Space>;
  struct Params {};
  DeclaredWindow(Comm&, std::int64_t, Params const&);
  int rank() const;
  int size() const;
  void* peer(int, std::int64_t) const;
  std::int64_t bytes() const;
  moe::comm::WindowView const& view() const;
};

}  // namespace moe_test
