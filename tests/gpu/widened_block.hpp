// SPDX-License-Identifier: Apache-2.0
// tests/gpu/widened_block.hpp: every family's block in sizes that all kernels take, its output on the device, enqueued and replayed from a
// graph, and in the host space.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "moe/backends/no_expert_parallel.hpp"
#include "moe/comm/self.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/experts/reference.hpp"
#include "moe/models/block_runner.hpp"
#include "moe/runner/device/captured_sizes.hpp"

namespace moe_test {

using Weights = moe::io::HostLayerWeights<float>;

/// Values that bf16 holds exactly.
class Numbers {
 public:
  explicit Numbers(std::string const& seed) : gen_(static_cast<unsigned>(std::hash<std::string>{}(seed))) {}
  void fill(std::vector<float>& v, std::int64_t count, double bound, double middle = 0) {
    v.resize(static_cast<std::size_t>(count));
    for (float& x : v)
      x = moe::to_float(moe::from_float<moe::bf16>(static_cast<float>(middle + std::uniform_real_distribution<>(-bound, bound)(gen_))));
  }
  /// If there is such an array.
  void refill(std::vector<float>& v, std::int64_t count, double bound, double middle = 0) {
    if (!v.empty()) fill(v, count, bound, middle);
  }

 private:
  std::mt19937 gen_;
};

/// The same block with sizes that all kernels take, and other weights.
inline Weights widened(Weights w, std::string const& name) {
  constexpr std::int64_t kHidden = 256, kLatent = 128, kInner = 128;
  Numbers numbers(name);
  moe::io::LayerDescription& d = w.description;
  d.hidden = kHidden;
  d.latent = d.latent > 0 ? kLatent : 0;
  d.intermediate = w.intermediate = kInner;
  std::int64_t const h = d.expert_hidden(), count = static_cast<std::int64_t>(w.experts.size()), logits = d.router.num_logits();
  auto const bound = [](std::int64_t inputs) { return std::sqrt(3.0 / static_cast<double>(inputs)); };
  numbers.refill(w.router_weight, logits * kHidden, bound(kHidden));
  numbers.refill(w.router_scale, kHidden, 0.2, 1);
  numbers.refill(w.router_mlp.down, w.router_mlp.width * kHidden, bound(kHidden));
  numbers.fill(w.w13, count * w.w13_rows() * h, 2 * bound(h));
  numbers.fill(w.w2, count * h * kInner, 2 * bound(kInner));
  numbers.refill(w.w13_bias, count * w.w13_rows(), 0.2);
  numbers.refill(w.w2_bias, count * h, 0.2);
  numbers.refill(w.latent_in, h * kHidden, bound(kHidden));
  numbers.refill(w.latent_out, h * kHidden, bound(h));
  numbers.refill(w.latent_norm, h, 0.2, 1);
  numbers.refill(w.latent_in_norm, h, 0.2, 1);
  numbers.refill(w.expert_norm, h, 0.2, 1);
  numbers.refill(w.output_bias, kHidden, 0.2);
  numbers.refill(w.post_norm, kHidden, 0.2, 1);
  if (w.shared.count > 0) {
    std::int64_t const wide = w.shared.count > 1 ? kInner : 2 * kInner;
    w.shared.intermediate = wide;
    d.shared.intermediate = wide * w.shared.count;
    std::int64_t const parts = d.shared.activation.gated() ? 2 : 1;
    numbers.fill(w.shared.w13, w.shared.count * parts * wide * kHidden, 2 * bound(kHidden));
    numbers.fill(w.shared.w2, w.shared.count * kHidden * wide, 2 * bound(wide));
    numbers.refill(w.shared.gate, kHidden, bound(kHidden));
  }
  return w;
}

/// The output of a block on the device for these rows, enqueued, after checking that a graph of the call has the same bits.
template <class Block>
std::vector<float> device_output(moe::comm::Self<moe::space::cuda>& self, Block& block, std::string const& obstacle, std::int64_t width,
                                 std::vector<float> const& hidden, std::vector<std::int64_t> const& tokens) {
  using Cuda = moe::space::cuda;
  using moe::bf16;
  std::int64_t const rows = static_cast<std::int64_t>(hidden.size()) / width;
  std::vector<bf16> values(hidden.size());
  std::transform(hidden.begin(), hidden.end(), values.begin(), [](float v) { return moe::from_float<bf16>(v); });
  moe::Buffer<bf16, Cuda> x(rows * width), y(rows * width);
  moe::Buffer<std::int64_t, Cuda> ids(static_cast<std::int64_t>(tokens.size()));
  x.copy_from_host(values.data());
  if (!tokens.empty()) ids.copy_from_host(tokens.data());
  moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  moe::ForwardOptions options;
  options.token_ids = tokens.empty() ? nullptr : ids.data();
  auto const forward = [&](std::int64_t n, cudaStream_t stream) {
    block.forward(moe::make_rows(static_cast<bf16 const*>(x.data()), n, width), moe::make_rows(y.data(), n, width), options, stream);
  };
  auto const result = [&] {
    std::vector<bf16> out(values.size());
    y.copy_to_host(out.data());
    std::vector<float> wide(out.size());
    std::transform(out.begin(), out.end(), wide.begin(), [](bf16 v) { return moe::to_float(v); });
    return wide;
  };
  moe::CudaStream stream;
  forward(rows, stream);
  stream.synchronize();
  std::vector<float> output = result();
  moe::runner::CapturedSizes<Cuda> graphs;
  std::vector<std::int64_t> const sizes{rows};
  graphs.capture(self, sizes, obstacle, forward);
  moe::check_cuda(cudaMemset(y.data(), 0xff, y.bytes()), "cudaMemset");
  moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  graphs.replay(rows, stream);
  stream.synchronize();
  EXPECT_EQ(result(), output) << "a replayed graph differs";
  return output;
}

/// The same block in the host space. fill: writes the experts' codes and scales itself.
template <class Quant>
std::vector<float> host_output(Weights const& weights, std::vector<float> const& hidden, std::vector<std::int64_t> const& tokens,
                               auto const&... fill) {
  using Block = moe::models::BlockRunner<Quant, moe::backends::NoExpertParallel<>, moe::experts::Reference<float>>;
  std::vector<float> out(hidden.size());
  moe::comm::Self<> self;
  Block block(self, Weights(weights), moe::ExpertPlacement(static_cast<int>(weights.experts.size()), 1),
              static_cast<std::int64_t>(hidden.size()) / weights.description.hidden, Quant{}, {}, {}, fill...);
  block.forward(hidden, tokens.empty() ? nullptr : tokens.data(), out);
  return out;
}

}  // namespace moe_test
