// SPDX-License-Identifier: Apache-2.0
// bench/layer.cu: whole layers on one GPU, by policy, scheme, shape and tokens: time, TFLOP/s, GB/s and the ratio to the floor.
//
// hopper_contiguous sorts the slots, quantises x if the scheme does, multiplies, applies the activation and the router weights and sums
// over the slots; cuda_reference takes x quantised. Times are of CUDA graph replays between events, after warming up, over rotating inputs
// and weights. Every layer is compared with float32 before it is timed; a wrong one makes the exit code 1. Routing is timed by
// routing_bench.
//
//   layer --benchmark_filter='hopper_contiguous/bf16/qwen3-30b.*/tokens:64/'
//   layer --benchmark_filter='/preset:'      every model of the catalogue in its preset's scheme, but for the 4-bit ones
//   (hopper_w4a16_bench)
#include <benchmark/benchmark.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "bench/checked.hpp"
#include "bench/layer_problem.cuh"
#include "moe/activation/activation.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/hopper/contiguous_layer.hpp"
#include "moe/models/catalog.hpp"
#include "moe/models/preset_choice.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/none.hpp"

namespace {

using namespace moe_bench;
using moe::Rows;

/// The layer of experts::HopperContiguous.
class Hopper {
 public:
  static constexpr char const* kName = "hopper_contiguous";
  static constexpr bool kQuantizesX = true;
  using Output = std::uint16_t;

  explicit Hopper(Rotation const& r) {
    for (int s = 0; s < r.sets; ++s) layers_.emplace_back(r.shape, r.scheme, r.weights_of(s).layer_weights());
    workspace_ = TypedMemory<char>(static_cast<std::size_t>(layers_[0].workspace_bytes(r.tokens)));
  }
  void apply(Rotation const& r, int s, Output* out, cudaStream_t stream) const {
    layers_[static_cast<std::size_t>(s)].forward(r.batch(s).call(out), workspace_.data(), stream);
  }

 private:
  std::vector<moe::hopper::ContiguousLayer> layers_;
  TypedMemory<char> workspace_;
};

struct Config : moe::LayerDefaults {
  using Act = moe::bf16;
  using Weight = moe::bf16;
  using Activation = moe::activation::Silu;
};

/// experts::CudaReference. It dequantises the weights once, to 4 bytes each.
template <class Quant>
class Reference {
 public:
  static constexpr char const* kName = moe::experts::CudaReference::kName;
  static constexpr bool kQuantizesX = false;
  using Output = float;

  explicit Reference(Rotation const& r) {
    moe::LayerShape const sizes{r.shape.hidden, r.shape.intermediate, r.shape.num_experts, r.shape.topk};
    for (int s = 0; s < r.weight_sets; ++s) {
      kernels_.push_back(std::make_unique<Kernel>(moe::Shape<Config>(sizes), weights(r.shape, r.batch(s)), r.tokens, Quant{},
                                                  typename Config::Activation{}, moe::experts::CudaReference::Params{}, arena_));
    }
  }
  void apply(Rotation const& r, int s, Output* out, cudaStream_t stream) const {
    Problem const& p = r.batch(s);
    using Payload = typename Quant::template Payload<moe::bf16>;
    int const h = r.shape.hidden;
    int const k = r.shape.topk;
    moe::StandardTokensOf<Config, Quant> const tokens{
        moe::make_rows(reinterpret_cast<Payload const*>(p.x.data()), r.tokens, h),
        moe::make_rows(reinterpret_cast<typename Quant::Scale const*>(p.x_scales.data()), r.tokens, Quant::scale_cols(h)),
        moe::make_rows(static_cast<std::int32_t const*>(p.ids.data()), r.tokens, k),
        moe::make_rows(static_cast<float const*>(p.weights.data()), r.tokens, k)};
    kernels_[static_cast<std::size_t>(s % r.weight_sets)]->apply(tokens, moe::make_rows(out, r.tokens, h), stream);
  }

 private:
  using Kernel = moe::experts::CudaReference::Kernel<Config, Quant, moe::ActivationFormat::standard>;
  using Weights = moe::WeightsOf<Config, Quant>;

  static Weights weights(LocalShape const& shape, Problem const& p) {
    auto const matrix = [&](TypedMemory<char> const& codes, TypedMemory<float> const& scales, std::int64_t rows, std::int64_t cols) {
      using Code = typename Quant::template WeightCode<moe::bf16>;
      return moe::ExpertMatrix<Code, typename Quant::WeightScale>{
          moe::make_blocks(reinterpret_cast<Code const*>(codes.data()), shape.num_experts, rows, cols),
          moe::make_rows(reinterpret_cast<typename Quant::WeightScale const*>(scales.data()), shape.num_experts,
                         Quant::weight_scale_count(rows, cols)),
          {},
          rows,
          cols};
    };
    return {matrix(p.w13, p.w13_scales, 2 * shape.intermediate, shape.hidden), matrix(p.w2, p.w2_scales, shape.hidden, shape.intermediate)};
  }

  moe::Arena<moe::space::cuda> arena_;
  std::vector<std::unique_ptr<Kernel>> kernels_;
};

__global__ void round_to_bf16(float const* from, std::uint16_t* to, std::int64_t count) {
  std::int64_t const step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    to[i] = __bfloat16_as_ushort(__float2bfloat16_rn(from[i]));
  }
}

/// ‖out − ref‖ / ‖ref‖ of the first input set, on sampled tokens.
template <class Candidate>
double error_of(Candidate const& candidate, Rotation const& r, TypedMemory<typename Candidate::Output>& out) {
  out.fill_bytes(0xFF);
  candidate.apply(r, 0, out.data(), nullptr);
  moe::check_cuda(cudaDeviceSynchronize(), "check");
  if constexpr (std::is_same_v<typename Candidate::Output, float>) {
    TypedMemory<std::uint16_t> rounded(out.size());
    round_to_bf16<<<1024, 256>>>(out.data(), rounded.data(), static_cast<std::int64_t>(out.size()));
    return moe_test::compare(r.batch(0), rounded.data(), 16).relative;
  } else {
    return moe_test::compare(r.batch(0), out.data(), 16).relative;
  }
}

template <class Candidate>
void layer(benchmark::State& state, LocalShape shape, Scheme scheme, int tokens) {
  try {
    moe_test::Features features{};
    features.quantized_x = moe::hopper::is_fp8(scheme) && !Candidate::kQuantizesX;
    Rotation const rotation(shape, scheme, tokens, features);
    Candidate const candidate(rotation);
    TypedMemory<typename Candidate::Output> out(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(shape.hidden));
    double const error = error_of(candidate, rotation, out);
    if (!(error < moe_test::tolerance(scheme, tokens))) {
      skip_wrong(state, "the error against float32 is " + std::to_string(error));
      return;
    }
    auto const round = [&](cudaStream_t stream) {
      for (int s = 0; s < rotation.sets; ++s) candidate.apply(rotation, s, out.data(), stream);
    };
    Replay replay(rounds_of(rotation.sets, round), rotation.sets, round);
    replay.warm_up(tokens >= 1024 ? 250 : 60);
    double us = 0;
    for (auto _ : state) {
      double const once = replay.us();
      us += once;
      state.SetIterationTime(once * 1e-6);
    }
    us /= static_cast<double>(state.iterations());
    LayerWork const& work = rotation.work;
    state.counters["TFLOP/s"] = work.flops / us * 1e-6;
    state.counters["GB/s"] = work.bytes / us * 1e-3;
    state.counters["floor_us"] = work.floor_us();
    state.counters["x_floor"] = us / work.floor_us();
    state.counters["error"] = error;
  } catch (std::exception const& e) {
    state.SkipWithError(e.what());
  }
}

template <class Candidate>
void add_shape(std::string const& name, LocalShape const& shape, Scheme scheme, std::vector<int> const& token_counts, int iterations) {
  for (int tokens : token_counts) {
    std::string const label =
        std::string(Candidate::kName) + "/" + moe::hopper::name(scheme) + "/" + name + "/tokens:" + std::to_string(tokens);
    benchmark::RegisterBenchmark(label.c_str(), layer<Candidate>, shape, scheme, tokens)
        ->UseManualTime()
        ->Iterations(iterations)
        ->Unit(benchmark::kMicrosecond);
  }
}

template <class Candidate>
void add(Scheme scheme, std::vector<int> const& token_counts, int iterations) {
  for (auto const& [name, shape] : kShapes) {
    if (moe::hopper::is_fp8(scheme) && (shape.hidden % 128 != 0 || shape.intermediate % 128 != 0)) continue;
    add_shape<Candidate>(name, shape, scheme, token_counts, iterations);
  }
}

/// The models of the catalogue; of one that does not fit a GPU twice, the experts of one rank of two or more, and as many slots of a token.
void add_presets(std::vector<int> const& token_counts, int iterations) {
  constexpr double kMostBytes = 34e9;
  boost::hana::for_each(moe::models::catalog, [&](auto type) {
    using Model = typename decltype(type)::type;
    using Quant = typename moe::models::PresetChoice<Model>::Quantization;
    Scheme const scheme = std::is_same_v<Quant, moe::quantization::None> ? Scheme::bf16 : Scheme::fp8_block;
    if (scheme == Scheme::fp8_block && !std::is_same_v<Quant, moe::quantization::Fp8Block<>>) return;
    LocalShape shape{Model::num_experts, Model::hidden, Model::intermediate, Model::topk};
    std::string name = std::string("preset:") + Model::kName;
    int ranks = 1;
    while (3.0 * shape.num_experts * shape.hidden * shape.intermediate * moe::hopper::element_bytes(scheme) > kMostBytes &&
           shape.num_experts % 2 == 0 && shape.topk % 2 == 0) {
      shape.num_experts /= 2;
      shape.topk /= 2;
      ranks *= 2;
    }
    if (ranks > 1) name += "-ep" + std::to_string(ranks) + "rank";
    add_shape<Hopper>(name, shape, scheme, token_counts, iterations);
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (!moe_bench::initialize(argc, argv)) return moe_bench::kBadArguments;
  if (!moe::has_device()) {
    std::printf("skipped: no GPU\n");
    return 77;
  }
  std::vector<int> const all{1, 8, 64, 256, 1024, 4096, 16384};
  std::vector<int> const few{1, 8, 64};
  add<Hopper>(Scheme::bf16, all, 25);
  add<Hopper>(Scheme::fp8_block, all, 25);
  add<Hopper>(Scheme::int8_row, all, 25);
  add_presets({64, 16384}, 25);
  add<Reference<moe::quantization::None>>(Scheme::bf16, few, 3);
  add<Reference<moe::quantization::Fp8Block<>>>(Scheme::fp8_block, few, 3);
  return moe_bench::run_benchmarks();
}
