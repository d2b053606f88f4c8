// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/missing_include.cpp: a backend of the CUDA space without the header of its exchange. The unit test
// core_contract_test goes through all backends.
// expect: the exchange of no_expert_parallel in the CUDA space is not included. Fix: #include
// expect: <moe/backends/collective/device/no_expert_parallel.cuh> before the layer is named (docs/errors.md#missing-include)
// prints: LocalExchange<
#include "../archetypes.hpp"
//
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/routing/softmax_topk.hpp"
#ifdef MOE_FIXED
#include "moe/backends/collective/device/no_expert_parallel.hpp"  // all of the .cuh but its kernels, which a g++ program links
#endif

struct OnDevice : moe_test::ExpertsFacts {
  static constexpr bool kOnDevice = true;
};
using Layer =
    moe::ModularKernel<moe_test::Tiny, moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>, moe_test::ArchetypeQuantization<>,
                       moe::backends::NoExpertParallel<moe::space::cuda>, moe_test::ArchetypeExperts<OnDevice>>;

static_assert(sizeof(Layer) > 0);
