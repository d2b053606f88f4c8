// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_costs_test.cu: the kernel that holds a stream.
// moe-ranks: 2 4
#include <functional>

#include "tests/gpu/forward_costs.cuh"

namespace moe_test {

void expect_call_enqueues_only(cudaStream_t stream, char const* name, std::function<void()> const& forward, bool calls_nccl) {
  expect_enqueues_only(stream, name, forward, {.nccl = calls_nccl});
}

}  // namespace moe_test
