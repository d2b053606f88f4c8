// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/counting_nccl.hpp: NCCL with a count of the bytes that this rank gives to its gathers.
#pragma once

#include <cstdint>
#include <utility>

#include "moe/comm/nccl.hpp"

namespace moe_test {

class CountingNccl : public moe::comm::Nccl {
 public:
  explicit CountingNccl(moe::comm::Nccl&& comm) : Nccl(std::move(comm)) {}
  void all_gather_v(void const* in, std::int64_t n, void* out, std::int64_t const* counts, std::int64_t const* offsets, StreamType stream) {
    gathered += n;
    Nccl::all_gather_v(in, n, out, counts, offsets, stream);
  }
  std::int64_t gathered = 0;
};

}  // namespace moe_test
