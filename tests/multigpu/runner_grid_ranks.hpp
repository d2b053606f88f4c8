// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_grid_ranks.hpp: one rank of a grid of GPUs, one process each: its communicators, its part of the model of
// runner_grid_model.hpp, its block. Host C++ only; for programs of one translation unit.
#pragma once

#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "../expect_close.hpp"
#include "../mpi_world.hpp"
#include "grid_on_device.hpp"
#include "moe/comm/self.hpp"

namespace moe_test::grid {

using moe_test::expect_close;
using moe_test::world_rank;
using moe_test::world_size;
inline constexpr std::int64_t kTimeout = 20'000;
inline constexpr float kTolerance = 1.5e-2F;  // of expect_close(), for sums of bf16 in another order
/// Widths that every exchange takes: those over windows ask for multiples of 128 (docs/semantics/exchange.md §9).
inline constexpr int kWideHidden = 256, kWideLatent = 128;

/// A gate before the layer, and no more.
struct GateParts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using Parallel = runner::parallel::Groups<Nccl>;
};

/// The ranks of the group, in world order. One communicator for each kind, for all tests.
inline std::map<std::string, std::unique_ptr<Nccl>> communicators;
inline Nccl* group(GridGroup const& g) {
  auto& found = communicators[g.kind];
  if (found == nullptr) {
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, g.color, world_rank(), &part);
    int rank = 0, size = 1;
    MPI_Comm_rank(part, &rank);
    MPI_Comm_size(part, &size);
    auto const broadcast = [&](void* data, std::size_t bytes) { MPI_Bcast(data, static_cast<int>(bytes), MPI_BYTE, 0, part); };
    found = std::make_unique<Nccl>(Nccl::over(rank, size, broadcast, {.timeout_ms = kTimeout}));
    MPI_Comm_free(&part);
  }
  return found.get();
}
inline Nccl* layer_comm(MoeParallel const& p) { return group(layer_ranks(p)); }
inline Nccl* tp_comm(MoeParallel const& p) { return group(tp_ranks(p)); }
/// call(comm) with the communicator of a backend over NCCL or of one rank.
template <class Backend, class Call>
auto with_comm(MoeParallel const& moe, Call const& call) {
  if constexpr (std::is_same_v<typename Backend::Comm, Nccl>) {
    return call(*layer_comm(moe));
  } else {
    static comm::Self<Cuda> self;
    return call(self);
  }
}
class Communicators : public testing::Environment {
  void TearDown() override { communicators.clear(); }
};
[[maybe_unused]] inline auto* const cleared = testing::AddGlobalTestEnvironment(new Communicators);

/// Waits for the stream within the deadline, and throws what the exchange or a communicator has found.
template <class R>
void finish(R& runner, Nccl* comm, cudaStream_t stream) {
  if (comm != nullptr) comm->synchronize(stream);
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  if constexpr (requires { runner.layer().exchange().check(); }) runner.layer().exchange().check();
}

/// A rank of a grid.
template <class Backend, class Experts = experts::CudaReference>
class Rank {
 public:
  using R = Runner<LayerOf<Backend, Experts>, Parts>;
  Rank(Grid const& g, Model const& m, bool rows_agree, BackendFacts const& facts = Backend::kFacts)
      : hidden(m.hidden),
        moe(parallel_of(g, world_rank(), facts)),
        tp(tp_comm(moe)),
        layer_group(layer_comm(moe)),
        placement(kExperts, moe.ep_size),
        store(experts_of<Store>(m, placement, moe.ep_rank, moe.moe_tp_rank, moe.moe_tp_size)),
        runner(comm(), store.view(), grid_params<R>(m, moe, placement, tp, rows_agree, weights)) {}
  std::vector<float> forward(std::vector<float> const& x) {
    Rowset rows(x, hidden);
    runner.forward(rows.x(), rows.y(), {}, stream);
    finish(runner, tp, stream);
    std::vector<float> out = rows.result();
    if (!runner.reductions().result_partial) return out;
    Buffer<float, Cuda> terms(std::max<std::int64_t>(static_cast<std::int64_t>(out.size()), 1));
    out.resize(static_cast<std::size_t>(terms.size()));
    terms.copy_from_host(out.data());
    tp->all_reduce(terms.data(), terms.size(), terms.data(), stream);
    stream.synchronize();
    terms.copy_to_host(out.data());
    out.resize(x.size());
    return out;
  }

  int hidden;
  MoeParallel moe;
  Nccl *tp, *layer_group;
  ExpertPlacement placement;
  OnDevice weights;
  Store store;
  comm::Self<Cuda> self;
  CudaStream stream;
  R runner;

 private:
  typename Backend::Comm& comm() {
    if constexpr (std::is_same_v<typename Backend::Comm, Nccl>) {
      return *layer_group;
    } else {
      return self;
    }
  }
};

}  // namespace moe_test::grid
