// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/grid_on_device.hpp: the model of runner_grid_model.hpp on one GPU of a grid: its layers, weights, rows and parameters.
// Host C++ only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <vector>

#include "../runner_grid_model.hpp"
#include "moe/comm/nccl.hpp"
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

/// The parameters of a rank's runner.
template <class R>
typename R::Params grid_params(Model const& m, MoeParallel const& parallel, ExpertPlacement const& placement, Nccl* tp, bool rows_agree,
                               OnDevice& weights) {
  int const shards = m.form.shared == SharedOutput::partial ? parallel.tp_size : 1, shard = parallel.tp_rank % shards;
  auto p = params<R>(m, placement, kIntermediate / parallel.moe_tp_size, cut13(m.shared13, kShared, m.hidden, shard, shards),
                     cut2(m.shared2, kShared, m.hidden, shard, shards), weights);
  p.parallel = {.moe = parallel, .tp = tp, .reduce_results = m.form.reduce_results, .rows_agree = rows_agree};
  return p;
}

}  // namespace moe_test::grid
