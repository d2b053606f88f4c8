// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/eplb_backends_test.cpp: experts move between GPUs while layers serve, over every backend of the registry: each step's
// outputs are those without load balancing, bit for bit where no map changes the order of a sum. Weights move by messages and by stores
// into peers' windows. Between hosts they move by messages alone, and windows are refused, for rows and for weights. eplb_runtime_test.cu
// has tuned experts.
// moe-ranks: 2 4
#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdint>
#include <initializer_list>
#include <iostream>
#include <optional>
#include <type_traits>

#include "../expect_error.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/eplb/group.hpp"
#include "moe/eplb/weight_mover.hpp"
#include "moe/experts/cuda_reference.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "registry_backends.hpp"
#include "several_hosts.hpp"
#include "tests/gpu/eplb_device_serving.hpp"

namespace {

using namespace moe_test;
using experts::CudaReference;
using quantization::None;
using Self = comm::Self<space::cuda>;

/// Layers whose sizes are known at run time.
struct RuntimeSizes {
  using Config = models::RuntimeLayer<bf16, bf16>;
  using Router = routing::AnyRouter;
  int topk = EplbConfig::topk;
  template <class Params>
  void set(Params& p) const {
    p.shape = {
        .hidden = EplbConfig::hidden, .intermediate = EplbConfig::intermediate, .num_experts = EplbConfig::num_experts, .topk = topk};
    p.router = {.num_experts = EplbConfig::num_experts, .topk = topk, .renorm = routing::Renorm::sum};
  }
};

/// Whether another map may only change which rank computes a product, never the order of a sum.
template <class Backend, class Experts>
bool same_bits(int topk) {
  bool const one_rank_sums = topk == 1 || Backend::kFacts.transport == Transport::local || Backend::kReduction == TopKReduction::backend;
  return facts::experts_are_batch_invariant<Experts>() && one_rank_sums;
}

/// call() needs a window, so that all ranks refuse it. They meet again before the first one ends the group.
template <class Call>
void expect_no_window(comm::Mpi& host, Call const& call) {
  expect_error(ErrorCode::unsupported, "AllToAllV and AllGatherReduceScatter need", call);
  host.barrier({});
}
/// A layer whose rows travel through a window.
template <class Backend>
void expect_no_layer(comm::Mpi& host, comm::Nccl& tokens) {
  using Model = DeviceServing<None, Backend, CudaReference, RuntimeSizes, comm::Nccl, eplb::CommGroup<comm::Mpi>>;
  CudaStream stream;
  expect_no_window(host, [&] { Model const refused({}, tokens, stream); });
}

template <class Backend>
class EplbBackends : public testing::Test {};
TYPED_TEST_SUITE(EplbBackends, TestTypes<all_backends_between_gpus>, BackendNames);

TYPED_TEST(EplbBackends, ExpertsMoveUnderLoad) {
  static_assert(registry::CompositionOf<RuntimeSizes::Config, None, TypeParam, CudaReference>::kLegal);
  int ran = 0, exact = 0;
  auto const serve = [&](auto& tokens, auto& weights, auto& group, std::initializer_list<int> topks, auto const& peers) {
    for (int topk : topks) {
      for (MoveMode mode : {MoveMode::pause, MoveMode::background}) {
        bool const bits = same_bits<TypeParam, CudaReference>(topk);
        expect_same_while_moving<None, TypeParam, CudaReference>(tokens, weights, group, mode, false, RuntimeSizes{topk}, bits, peers);
        if (this->HasFatalFailure()) return;
        ++ran;
        exact += bits ? 1 : 0;
      }
    }
  };
  constexpr bool kAlone = std::is_same_v<typename TypeParam::Comm, Self>;
  comm::Mpi host(MPI_COMM_WORLD, {.timeout_ms = 40'000});
  if constexpr (kAlone) {
    Self tokens, weights;
    eplb::SelfGroup group;
    serve(tokens, weights, group, {1, EplbConfig::topk}, ByMessages{});
  } else {
    eplb::CommGroup<comm::Mpi> group(host);
    comm::Nccl tokens = comm::Nccl::over_communicator(host, {.timeout_ms = 20'000});
    comm::Nccl weights = comm::Nccl::over_communicator(host, {.timeout_ms = 20'000});
    bool const hosts = on_several_hosts();
    constexpr bool kOverWindow = decltype(hana::contains(backends_over_nccl_windows, hana::type_c<TypeParam>))::value;
    if (hosts && kOverWindow) return expect_no_layer<TypeParam>(host, tokens);
    serve(tokens, weights, group, {1, EplbConfig::topk}, ByMessages{});
    if (hosts) {
      expect_no_window(host, [&] { comm::NcclSymmetric const refused(weights, 1); });
      EXPECT_EQ(ran, 4) << TypeParam::kName;
      EXPECT_GE(exact, 2) << TypeParam::kName;
      return;
    }
    std::optional<comm::NcclSymmetric> window;
    serve(tokens, weights, group, {EplbConfig::topk}, [&](std::int64_t bytes) {
      if (!window) window.emplace(weights, bytes);
      return eplb::peer_buffers(*window);
    });
    EXPECT_TRUE(window);
  }
  EXPECT_EQ(ran, kAlone ? 4 : 6) << TypeParam::kName;
  EXPECT_GE(exact, 2) << TypeParam::kName << ": with one expert for each token no sum has two terms";
  if (host.rank() == 0) std::cout << TypeParam::kName << ": experts moved in " << ran << " cases, " << exact << " of them bit for bit\n";
}

}  // namespace
