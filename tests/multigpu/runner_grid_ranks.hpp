// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_grid_ranks.hpp: one rank of a grid of GPUs, one process each: its communicators, its part of the model of
// runner_grid_model.hpp, its block. Host C++ only; for programs of one translation unit.
#pragma once

#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "../runner_grid_model.hpp"
#include "moe/comm/nccl.hpp"
#include "moe/comm/self.hpp"
#include "moe/experts/cuda_reference.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/runner/device/dense_shared.hpp"
#include "moe/runner/device/linear.hpp"
#include "moe/runner/device/ranks.hpp"
#include "moe/runner/device/row_kernels.hpp"

namespace moe_test::grid {

using comm::Nccl;
using Cuda = space::cuda;
using Config = models::RuntimeLayer<bf16, bf16>;
template <class Backend, class Experts = experts::CudaReference>
using LayerOf = ModularKernel<Config, routing::AnyRouter, quantization::None, Backend, Experts>;
using Store = experts::WeightStore<Config, quantization::None, Cuda>;
inline constexpr std::int64_t kTimeout = 20'000;
/// Widths that every exchange takes: those over windows ask for multiples of 128 (docs/semantics/exchange.md §9).
inline constexpr int kWideHidden = 256, kWideLatent = 128;

struct Alone : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using Input = runner::transform::Projection<bf16>;
  using Output = runner::transform::Projection<bf16>;
  using Shared = runner::shared::Dense<bf16>;
  using Scaling = runner::scaling::Factor;
  using ZeroExperts = runner::zero_experts::Identity;
  using End = runner::end::BiasNorm;
};
struct Parts : Alone {
  using Parallel = runner::parallel::Groups<Nccl>;
};
/// A gate before the layer, and no more.
struct GateParts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using Parallel = runner::parallel::Groups<Nccl>;
};

inline int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}
inline int world_size() {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

/// The ranks that have this rank's color, in world order. One communicator for each `kind`, for all tests.
inline std::map<std::string, std::unique_ptr<Nccl>> communicators;
inline Nccl* group(std::string const& kind, int color) {
  auto& found = communicators[kind];
  if (found == nullptr) {
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, color, world_rank(), &part);
    int rank = 0, size = 1;
    MPI_Comm_rank(part, &rank);
    MPI_Comm_size(part, &size);
    auto const broadcast = [&](void* data, std::size_t bytes) { MPI_Bcast(data, static_cast<int>(bytes), MPI_BYTE, 0, part); };
    found = std::make_unique<Nccl>(Nccl::over(rank, size, broadcast, {.timeout_ms = kTimeout}));
    MPI_Comm_free(&part);
  }
  return found.get();
}
/// The ranks that a rank's layer connects, and its TP group.
inline Nccl* layer_comm(MoeParallel const& p) {
  return runner::layer_group(p) == runner::LayerGroup::ep ? group("ep", 0) : group(text("tokens ", p.tp_size), p.tp_rank);
}
inline Nccl* tp_comm(MoeParallel const& p) { return group(text("tp ", p.tp_size), p.flat_rank / p.tp_size); }
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

/// Weights in device memory, in the element that is asked for.
class OnDevice {
 public:
  template <class T>
  T const* as(T const*, std::vector<float> const& from) {
    std::vector<T> values(from.size());
    std::transform(from.begin(), from.end(), values.begin(), [](float v) { return from_float<T>(v); });
    auto const bytes = static_cast<std::int64_t>(values.size() * sizeof(T));
    memory_.emplace_back(std::max<std::int64_t>(bytes, 1));
    Memory<Cuda>::copy_from_host(memory_.back().data(), values.data(), static_cast<std::size_t>(bytes));
    return reinterpret_cast<T const*>(memory_.back().data());
  }

 private:
  std::list<Buffer<std::byte, Cuda>> memory_;
};

/// Input and output of a forward.
struct Rowset {
  explicit Rowset(std::vector<float> const& x, std::int64_t width = kHidden)
      : hidden(width), rows(static_cast<std::int64_t>(x.size()) / hidden), in(room(x)), out(in.size()) {
    std::vector<bf16> values(static_cast<std::size_t>(in.size()));
    std::transform(x.begin(), x.end(), values.begin(), [](float v) { return from_float<bf16>(v); });
    in.copy_from_host(values.data());
    Memory<Cuda>::fill(out.data(), 0xff, out.bytes());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  Rows<bf16 const> x() const { return make_rows(static_cast<bf16 const*>(in.data()), rows, hidden); }
  Rows<bf16> y() { return make_rows(out.data(), rows, hidden); }
  std::vector<float> result() {
    std::vector<bf16> values(static_cast<std::size_t>(out.size()));
    out.copy_to_host(values.data());
    std::vector<float> wide;
    for (std::int64_t i = 0; i < rows * hidden; ++i) wide.push_back(to_float(values[static_cast<std::size_t>(i)]));
    return wide;
  }
  std::int64_t hidden, rows;
  Buffer<bf16, Cuda> in, out;

 private:
  std::int64_t room(std::vector<float> const& x) const { return std::max(static_cast<std::int64_t>(x.size()), hidden); }
};

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
        moe(place_of(g, world_rank(), facts)),
        tp(group(text("tp ", g.tp), world_rank() / g.tp)),
        layer_group(runner::layer_group(moe) == runner::LayerGroup::ep ? group("ep", 0) : group(text("tokens ", g.tp), moe.tp_rank)),
        placement(kExperts, moe.ep_size),
        shards(m.form.shared == SharedOutput::partial ? g.tp : 1),
        store(experts_of<Store>(m, placement, moe.ep_rank, moe.moe_tp_rank, moe.moe_tp_size)),
        runner(comm(), store.view(), grid_params(m, rows_agree)) {}
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
  int shards;
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
  typename R::Params grid_params(Model const& m, bool rows_agree) {
    auto p = params<R>(m, placement, kIntermediate / moe.moe_tp_size, cut13(m.shared13, kShared, hidden, moe.tp_rank % shards, shards),
                       cut2(m.shared2, kShared, hidden, moe.tp_rank % shards, shards), weights);
    if constexpr (requires { p.parallel.moe; }) {
      p.parallel = {.moe = moe, .tp = tp, .reduce_results = m.form.reduce_results, .rows_agree = rows_agree};
    }
    return p;
  }
};

inline void expect_close(std::vector<float> const& got, std::vector<float> const& want) {
  float largest = 0;
  for (float v : want) largest = std::max(largest, std::abs(v));
  for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 1.5e-2 * largest) << "value " << i;
}

}  // namespace moe_test::grid
