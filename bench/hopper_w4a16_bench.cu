// SPDX-License-Identifier: Apache-2.0
// bench/hopper_w4a16_bench.cu: checks and times whole layers with 4- or 8-bit weights: CUDA graphs, rotated inputs, weights larger than L2.
//
//   hopper_w4a16_bench <int4|int4_zero|mxfp4|int4_32|int4_32_zero|nvfp4|int8|fp8|mxfp8> <shape|all> <tokens,tokens,…> [tile_rows]
//
// mxfp4_fp8, int4_fp8, int4_zero_fp8 …: such weights and rows of e4m3 with a scale per 128, which are quantised before the times
// (W4A8Layer).
// A result that differs from experts::CudaReference is printed, not timed, and makes the exit code 1.
// The floor is the larger of the useful operations over the sustained rate of bf16, or of fp8 with rows of e4m3, and the least bytes
// (packed weights of the experts hit, once, plus input and output) over the stream rate; these rates are those of docs/log/hopper.md.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <map>
#include <string>

#include "bench/arguments.hpp"
#include "bench/bench_report.hpp"
#include "bench/layer_problem.cuh"
#include "bench/w4_launchers.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/hopper/w4a8_layer.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w8a16.hpp"
#include "moe/quantization/int4_fp8.hpp"
#include "moe/quantization/mxfp4_fp8.hpp"
#include "moe/quantization/rows/quantize_rows.cuh"

namespace {

using namespace moe::hopper;
using namespace moe_test;
using moe::check_cuda;

using Kind = moe::activation::Kind;

struct Model {
  LocalShape shape;
  Kind kind = Kind::swigluoai_halves;  ///< of the experts; every form of SwiGLU has the same kernel
};

std::map<std::string, Model> const kModels{{"gpt-oss-20b", {{32, 2880, 2880, 4}}},        {"gpt-oss-120b", {{128, 2880, 2880, 4}}},
                                           {"kimi-k2", {{384, 7168, 2048, 8}}},           {"kimi-k3", {{896, 3584, 3072, 16}, Kind::situ}},
                                           {"deepseek-v4-flash", {{256, 4096, 2048, 6}}}, {"deepseek-v4-pro", {{384, 7168, 3072, 6}}},
                                           {"qwen3-30b-a3b", {{128, 2048, 768, 8}}}};
moe::activation::Constants const kConstants{1.702F, 1.0F, 7.0F, 4.0F, 25.0F};

using Fp8Rows = moe::quantization::Mxfp4Fp8<>;

/// What is timed: weights in `scheme`, and rows of bf16 or of e4m3.
struct Mode {
  W4Scheme scheme;
  bool fp8_rows;
  std::string label() const { return std::string(name(scheme)) + (fp8_rows ? "_fp8" : ""); }
};

int failures = 0;

__global__ void fill_bytes(std::uint8_t* data, long long count, std::uint64_t seed, std::uint8_t low, unsigned range) {
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<long long>(gridDim.x) * blockDim.x) {
    data[i] = static_cast<std::uint8_t>(low + mix(seed + static_cast<std::uint64_t>(i)) % range);
  }
}
__global__ void fill_pairs(float2* data, long long count, std::uint64_t seed, float sigma) {
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<long long>(gridDim.x) * blockDim.x) {
    std::uint64_t const r = mix(seed + static_cast<std::uint64_t>(i));
    data[i] = make_float2(sigma * (0.5F + static_cast<float>(r & 1023) / 1024.0F), static_cast<float>((r >> 20) % 16));
  }
}

/// Codes of e4m3 that are not a number become zero.
__global__ void clear_nans(std::uint8_t* data, long long count) {
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<long long>(gridDim.x) * blockDim.x) {
    if ((data[i] & 0x7F) == 0x7F) data[i] = 0;
  }
}

/// A layer with random weights and biases. The unpacked codes stay for the check.
struct Layer {
  TypedMemory<char> packed;
  TypedMemory<std::uint8_t> c13, c2, s13, s2;
  TypedMemory<float> b13, b2;
  std::unique_ptr<W4A16Layer> layer;     // of rows of bf16
  std::unique_ptr<W4A8Layer> fp8_layer;  // of rows of e4m3

  Layer(Model const& model, Mode const& mode, std::uint64_t seed) {
    LocalShape const& s = model.shape;
    W4Scheme const scheme = mode.scheme;
    auto const codes = [&](long long rows, long long cols) {
      TypedMemory<std::uint8_t> c(static_cast<std::size_t>(s.num_experts * rows * cols * code_bits(scheme) / 8));
      fill_bytes<<<2048, 256>>>(c.data(), static_cast<long long>(c.size()), ++seed, 0, 256);
      if (is_e4m3(scheme)) clear_nans<<<2048, 256>>>(c.data(), static_cast<long long>(c.size()));
      return c;
    };
    auto const scales = [&](long long rows, long long cols, int group) {
      long long const count = s.num_experts * rows * (cols / group);
      float const sigma = (code_bits(scheme) == 8 ? 0.0125F : 0.2F) / std::sqrt(static_cast<float>(cols));
      if (scheme == W4Scheme::nvfp4) {  // scales of 0.5 to 3.75
        auto const bytes = static_cast<std::size_t>(moe::quantization::Nvfp4W4A16::weight_scale_count(rows, cols));
        TypedMemory<std::uint8_t> v(bytes * static_cast<std::size_t>(s.num_experts));
        fill_bytes<<<1024, 256>>>(v.data(), static_cast<long long>(v.size()), ++seed, 0x30, 24);
        float const global = 0.5F * sigma;
        for (int e = 0; e < s.num_experts; ++e) {
          std::uint8_t* const at = v.data() + (static_cast<std::size_t>(e) + 1) * bytes - sizeof(float);
          check_cuda(cudaMemcpy(at, &global, sizeof(float), cudaMemcpyHostToDevice), "cudaMemcpy");
        }
        return v;
      }
      TypedMemory<std::uint8_t> v(static_cast<std::size_t>(count) * (has_exponents(scheme) ? 1 : has_zero_points(scheme) ? 8 : 4));
      if (has_exponents(scheme)) {
        fill_bytes<<<1024, 256>>>(v.data(), count, ++seed, static_cast<std::uint8_t>(125 + std::ilogb(sigma)), 3);
      } else if (!has_zero_points(scheme)) {
        fill_positive<<<1024, 256>>>(reinterpret_cast<float*>(v.data()), count, ++seed, 0.5F * sigma, 1.5F * sigma);
      } else {
        fill_pairs<<<1024, 256>>>(reinterpret_cast<float2*>(v.data()), count, ++seed, sigma);
      }
      return v;
    };
    auto const group = [&](int cols) {
      return scales_rows(scheme) ? cols : scale_group(scheme) != 0 ? scale_group(scheme) : cols % 128 == 0 ? 128 : 64;
    };
    W4Weights w{};
    w.w13_group = group(s.hidden);
    w.w2_group = group(s.intermediate);
    c13 = codes(2LL * s.intermediate, s.hidden);
    c2 = codes(s.hidden, s.intermediate);
    s13 = scales(2LL * s.intermediate, s.hidden, w.w13_group);
    s2 = scales(s.hidden, s.intermediate, w.w2_group);
    b13 = TypedMemory<float>(static_cast<std::size_t>(2) * s.num_experts * s.intermediate);
    b2 = TypedMemory<float>(static_cast<std::size_t>(s.num_experts) * s.hidden);
    fill_normal<<<256, 256>>>(b13.data(), static_cast<long long>(b13.size()), ++seed, 1.0F);
    fill_normal<<<256, 256>>>(b2.data(), static_cast<long long>(b2.size()), ++seed, 1.0F);
    w.w13 = c13.data();
    w.w2 = c2.data();
    w.w13_scales = s13.data();
    w.w2_scales = s2.data();
    w.b13 = b13.data();
    w.b2 = b2.data();
    W4Activation const activation{kConstants.alpha, kConstants.beta, kConstants.limit};
    W4AnyActivation const any{model.kind, kConstants};
    auto const bytes = mode.fp8_rows ? W4A8Layer::packed_bytes(s, scheme) : W4A16Layer::packed_bytes(s, scheme);
    packed = TypedMemory<char>(static_cast<std::size_t>(bytes));
    if (mode.fp8_rows) {
      fp8_layer = std::make_unique<W4A8Layer>(s, scheme, w, activation, packed.data(), moe_bench::fp8_launcher_of(scheme));
    } else if (model.kind == Kind::swigluoai_halves) {
      layer = std::make_unique<W4A16Layer>(s, scheme, w, activation, packed.data(), moe_bench::launcher_of(scheme));
    } else {
      layer = std::make_unique<W4A16Layer>(s, scheme, w, any, packed.data(), moe_bench::any_launcher_of(scheme));
    }
    check_cuda(cudaDeviceSynchronize(), "packing");
  }

  std::int64_t workspace_bytes(int tokens) const { return layer ? layer->workspace_bytes(tokens) : fp8_layer->workspace_bytes(tokens); }
  void forward(LayerCall const& call, W4Tuning const& tuning, void* workspace, cudaStream_t stream) const {
    if (layer) {
      layer->forward(call, tuning, workspace, stream);
    } else {
      fp8_layer->forward(call, tuning, workspace, stream);
    }
  }
};

/// One batch of random rows; with rows of e4m3 also their codes and scales.
struct Batch {
  TypedMemory<__nv_bfloat16> x;
  TypedMemory<std::uint8_t> codes;
  TypedMemory<float> scales;
  TypedMemory<float> weights;
  TypedMemory<std::int32_t> ids;
  int hit = 0;

  Batch(LocalShape const& s, int tokens, int set, bool fp8_rows)
      : x(std::size_t(tokens) * s.hidden), weights(std::size_t(tokens) * s.topk), ids(weights.size()) {
    fill_normal<<<1024, 256>>>(x.data(), static_cast<long long>(x.size()), 900 + static_cast<unsigned>(set), 1.0F);
    fill_positive<<<256, 256>>>(weights.data(), static_cast<long long>(weights.size()), 800 + static_cast<unsigned>(set), 0.05F, 1.0F);
    std::vector<std::int32_t> host = make_ids(s, tokens, Pattern::random, 700 + static_cast<unsigned>(set));
    if (tokens == 1) {  // disjoint experts, so that weights come from memory
      for (int j = 0; j < s.topk; ++j) host[static_cast<std::size_t>(j)] = (set * s.topk + j) * 5 % s.num_experts;
    }
    ids.upload(host);
    std::vector<char> seen(static_cast<std::size_t>(s.num_experts), 0);
    for (std::int32_t id : host) seen[static_cast<std::size_t>(id)] = 1;
    for (char c : seen) hit += c;
    if (!fp8_rows) return;
    codes = TypedMemory<std::uint8_t>(x.size());
    scales = TypedMemory<float>(std::size_t(tokens) * static_cast<std::size_t>(Fp8Rows::scale_cols(s.hidden)));
    moe::quantization::quantize_rows_on_device<Fp8Rows, moe::bf16>(
        Fp8Rows{}, moe::make_rows(reinterpret_cast<moe::bf16 const*>(x.data()), tokens, s.hidden),
        moe::make_rows(codes.data(), tokens, s.hidden), moe::make_rows(scales.data(), tokens, Fp8Rows::scale_cols(s.hidden)), nullptr);
  }
};

struct Config : moe::LayerDefaults {
  using Act = moe::bf16;
  using Weight = moe::bf16;
  using Activation = moe::activation::Any;
};

/// ‖out − want‖ / ‖want‖ of up to four tokens of the batch. want: experts::CudaReference on the experts that these tokens choose.
template <class Quant>
double error_of(Layer const& layer, Model const& model, Batch const& batch, int tokens, TypedMemory<__nv_bfloat16> const& out) {
  LocalShape const& s = model.shape;
  using Kernel = moe::experts::CudaReference::Kernel<Config, Quant, moe::ActivationFormat::standard>;
  using Scale = typename Quant::WeightScale;
  int const samples = std::min(tokens, 4);
  auto const k = static_cast<std::size_t>(s.topk);
  auto const hidden = static_cast<std::size_t>(s.hidden);
  auto const copy = [](void* to, void const* from, std::size_t bytes) {
    check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
  };
  std::vector<std::int32_t> const all_ids = batch.ids.download();
  std::vector<std::int32_t> ids, chosen;  // ids: places in chosen
  constexpr bool kFp8Rows = Quant::kQuantizesActivations;
  using Element = typename Quant::template Payload<moe::bf16>;
  TypedMemory<Element> x(static_cast<std::size_t>(samples) * hidden);
  std::size_t const row_scales = batch.scales.size() / static_cast<std::size_t>(tokens);
  TypedMemory<float> scales(static_cast<std::size_t>(samples) * row_scales);
  TypedMemory<float> weights(static_cast<std::size_t>(samples) * k), want(x.size());
  std::vector<__nv_bfloat16> got(x.size());
  for (std::size_t i = 0; i < static_cast<std::size_t>(samples); ++i) {
    auto const token = samples == 1 ? 0 : i * static_cast<std::size_t>(tokens - 1) / static_cast<std::size_t>(samples - 1);
    if constexpr (kFp8Rows) {
      copy(x.data() + i * hidden, batch.codes.data() + token * hidden, hidden);
      copy(scales.data() + i * row_scales, batch.scales.data() + token * row_scales, row_scales * 4);
    } else {
      copy(x.data() + i * hidden, batch.x.data() + token * hidden, hidden * 2);
    }
    copy(weights.data() + i * k, batch.weights.data() + token * k, k * 4);
    copy(got.data() + i * hidden, out.data() + token * hidden, hidden * 2);
    for (std::size_t j = 0; j < k; ++j) {
      auto const at = std::find(chosen.begin(), chosen.end(), all_ids[token * k + j]);
      ids.push_back(static_cast<std::int32_t>(at - chosen.begin()));
      if (at == chosen.end()) chosen.push_back(all_ids[token * k + j]);
    }
  }
  TypedMemory<std::int32_t> device_ids(ids.size());
  device_ids.upload(ids);

  auto const experts = static_cast<std::int64_t>(chosen.size());
  auto const part = [&](auto const& all) {  // the chosen experts' parts of an array of all experts
    std::remove_cvref_t<decltype(all)> few(all.size() / static_cast<std::size_t>(s.num_experts) * chosen.size());
    std::size_t const bytes = few.bytes() / chosen.size();
    for (std::size_t e = 0; e < chosen.size(); ++e) {
      copy(reinterpret_cast<char*>(few.data()) + e * bytes,
           reinterpret_cast<char const*>(all.data()) + static_cast<std::size_t>(chosen[e]) * bytes, bytes);
    }
    return few;
  };
  auto const c13 = part(layer.c13), c2 = part(layer.c2), s13 = part(layer.s13), s2 = part(layer.s2);
  auto const b13 = part(layer.b13), b2 = part(layer.b2);
  auto const matrix = [&](auto const& codes, auto const& scales, auto const& bias, std::int64_t rows, std::int64_t cols) {
    using Code = typename Quant::template WeightCode<moe::bf16>;
    return moe::ExpertMatrix<Code, Scale>{
        moe::make_blocks(reinterpret_cast<Code const*>(codes.data()), experts, rows, Quant::weight_code_cols(cols)),
        moe::make_rows(reinterpret_cast<Scale const*>(scales.data()), experts, Quant::weight_scale_count(rows, cols)),
        moe::make_rows(static_cast<float const*>(bias.data()), experts, rows), rows, cols};
  };
  moe::Arena<moe::space::cuda> arena;
  moe::activation::Any const activation{model.kind, kConstants};
  Kernel const reference(moe::Shape<Config>(moe::LayerShape{s.hidden, s.intermediate, static_cast<int>(experts), s.topk}),
                         {matrix(c13, s13, b13, 2 * s.intermediate, s.hidden), matrix(c2, s2, b2, s.hidden, s.intermediate)}, samples,
                         Quant{}, activation, {}, arena);
  moe::StandardTokensOf<Config, Quant> rows{};
  rows.rows = moe::make_rows(static_cast<Element const*>(x.data()), samples, s.hidden);
  if constexpr (kFp8Rows) {
    rows.scales = moe::make_rows(static_cast<float const*>(scales.data()), samples, static_cast<std::int64_t>(row_scales));
  }
  rows.topk_ids = moe::make_rows(static_cast<std::int32_t const*>(device_ids.data()), samples, s.topk);
  rows.topk_weights = moe::make_rows(static_cast<float const*>(weights.data()), samples, s.topk);
  reference.apply(rows, moe::make_rows(want.data(), samples, s.hidden), nullptr);
  check_cuda(cudaDeviceSynchronize(), "reference");
  std::vector<float> const wanted = want.download();
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    auto const w = static_cast<double>(wanted[i]);
    error += std::pow(static_cast<double>(__bfloat162float(got[i])) - w, 2);
    norm += w * w;
  }
  return std::sqrt(error / norm);
}

double error_of_mode(Mode const& mode, Layer const& layer, Model const& model, Batch const& batch, int tokens,
                     TypedMemory<__nv_bfloat16> const& out) {
  using namespace moe::quantization;
  if (mode.fp8_rows) {
    switch (mode.scheme) {
      case W4Scheme::int4: return error_of<Int4Fp8<>>(layer, model, batch, tokens, out);
      case W4Scheme::int4_zero: return error_of<Int4Fp8<128, true>>(layer, model, batch, tokens, out);
      case W4Scheme::int4_32: return error_of<Int4Fp8<32>>(layer, model, batch, tokens, out);
      case W4Scheme::int4_32_zero: return error_of<Int4Fp8<32, true>>(layer, model, batch, tokens, out);
      default: return error_of<Fp8Rows>(layer, model, batch, tokens, out);
    }
  }
  switch (mode.scheme) {
    case W4Scheme::int4: return error_of<Int4Group128>(layer, model, batch, tokens, out);
    case W4Scheme::int4_zero: return error_of<Int4Group128Zero>(layer, model, batch, tokens, out);
    case W4Scheme::mxfp4: return error_of<Mxfp4W4A16<>>(layer, model, batch, tokens, out);
    case W4Scheme::int4_32: return error_of<WNa16<4, 32>>(layer, model, batch, tokens, out);
    case W4Scheme::int4_32_zero: return error_of<WNa16<4, 32, true>>(layer, model, batch, tokens, out);
    case W4Scheme::nvfp4: return error_of<Nvfp4W4A16>(layer, model, batch, tokens, out);
    case W4Scheme::int8: return error_of<Int8PerChannel>(layer, model, batch, tokens, out);
    case W4Scheme::fp8: return error_of<Fp8PerChannel<>>(layer, model, batch, tokens, out);
    case W4Scheme::mxfp8: return error_of<Mxfp8W8A16<>>(layer, model, batch, tokens, out);
  }
  return std::numeric_limits<double>::quiet_NaN();
}

/// Microseconds of one layer: all batches in one graph, repeated until it lasts at least 1.5 ms; median of 25 replays after warming up.
void time_one(std::string const& label, Model const& model, Mode const& mode, Layer const& layer, int tokens, int tile_rows) {
  LocalShape const& s = model.shape;
  int const sets = tokens <= 64 ? 8 : tokens <= 256 ? 4 : 2;
  std::vector<Batch> batches;
  double hit = 0;
  for (int set = 0; set < sets; ++set) {
    batches.emplace_back(s, tokens, set, mode.fp8_rows);
    hit += batches.back().hit;
  }
  hit /= sets;
  TypedMemory<char> workspace(static_cast<std::size_t>(layer.workspace_bytes(tokens)));
  TypedMemory<__nv_bfloat16> out(std::size_t(tokens) * s.hidden);
  W4Tuning tuning = mode.fp8_rows ? layer.fp8_layer->tuning(tokens) : choose_w4_tuning(s, mode.scheme, tokens);
  if (tile_rows > 0) {
    tuning.tile_rows = tile_rows;
    tuning.one_token = false;
  }
  auto const forward = [&](Batch const& b, cudaStream_t stream) {
    LayerCall call{};
    call.x = b.x.data();
    if (mode.fp8_rows) {
      call.x = b.codes.data();
      call.x_scales = b.scales.data();
      call.x_scale_stride = Fp8Rows::scale_cols(s.hidden);
    }
    call.topk_ids = b.ids.data();
    call.topk_weights = b.weights.data();
    call.out = out.data();
    call.max_tokens = tokens;
    layer.forward(call, tuning, workspace.data(), stream);
  };
  out.fill_bytes(0xFF);
  forward(batches[0], nullptr);
  check_cuda(cudaDeviceSynchronize(), label.c_str());
  double const error = error_of_mode(mode, layer, model, batches[0], tokens, out);
  double const most = tolerance(mode.fp8_rows ? Scheme::fp8_block : Scheme::bf16, tokens);
  if (!(error < most)) {
    ++failures;
    std::printf("%-20s %-16s M%-6d WRONG: differs from cuda_reference by %.3e, at most %.0e, tile %d: not timed\n", label.c_str(),
                mode.label().c_str(), tokens, error, most, tuning.tile_rows);
    return;
  }
  auto const round = [&](cudaStream_t stream) {
    for (Batch const& b : batches) forward(b, stream);
  };
  moe_bench::Replay replay(moe_bench::rounds_of(sets, round), sets, round);
  replay.warm_up(tokens >= 1024 ? 250 : 60);
  std::vector<double> times(25);
  for (double& t : times) t = replay.us();
  std::sort(times.begin(), times.end());
  double const us = times[times.size() / 2];
  double const flops = 6.0 * tokens * s.topk * s.hidden * s.intermediate;
  auto const matrix_bytes = [&](std::int64_t rows, int cols) {
    return static_cast<double>(mode.fp8_rows ? w4a8::packed_bytes(mode.scheme, rows, w4a8::padded(cols))
                                             : packed_bytes(mode.scheme, rows, cols));
  };
  std::int64_t const features = mode.fp8_rows ? w4a8::padded(s.intermediate) : s.intermediate;
  double const bytes = hit * (matrix_bytes(2 * features, s.hidden) + matrix_bytes(s.hidden, s.intermediate)) +
                       (mode.fp8_rows ? 3.0 : 4.0) * tokens * s.hidden;
  double const floor_us =
      1e6 * std::max(flops / (mode.fp8_rows ? moe_bench::kFp8Ceiling : moe_bench::kBf16Ceiling), bytes / moe_bench::kStreamCeiling);
  std::printf("%-20s %-16s M%-6d %8.1f us (min %.1f max %.1f) %6.1f TFLOP/s %5.0f GB/s floor %7.1f ratio %.2f tile %d\n", label.c_str(),
              mode.label().c_str(), tokens, us, times.front(), times.back(), flops / us * 1e-6, bytes / us * 1e-3, floor_us, us / floor_us,
              tuning.tile_rows);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) try {
  std::string const wanted = argc > 1 ? argv[1] : "";
  moe_bench::Names known = moe_bench::w4_scheme_names();
  for (W4Scheme const scheme : moe_bench::kW4Schemes) {
    if (moe_bench::fp8_launcher_of(scheme) != nullptr) known.push_back(Mode{scheme, true}.label());
  }
  bool const fp8_rows = wanted.ends_with("_fp8");
  std::optional<W4Scheme> const found = moe_bench::find_w4_scheme(fp8_rows ? wanted.substr(0, wanted.size() - 4) : wanted);
  if (!found || std::find(known.begin(), known.end(), wanted) == known.end()) moe_bench::refuse_name("scheme", wanted, known);
  Mode const mode{*found, fp8_rows};
  auto const models = moe_bench::find_shapes(kModels, argc > 2 ? argv[2] : "");
  std::vector<int> const token_counts = moe_bench::counts("tokens", argc > 3 ? argv[3] : "");
  for (auto const& [label, model] : models) {
    if (mode.fp8_rows && model.kind != Kind::swigluoai_halves) {
      std::printf("%-20s %-16s not timed: its activation is none of SwiGLU's forms\n", label.c_str(), mode.label().c_str());
      continue;
    }
    Layer const layer(model, mode, 1);
    for (int const tokens : token_counts) time_one(label, model, mode, layer, tokens, argc > 4 ? std::atoi(argv[4]) : 0);
  }
  return failures == 0 ? 0 : 1;
} catch (moe_bench::BadArgument const& error) {
  return moe_bench::refuse("hopper_w4a16_bench", error);
} catch (std::exception const& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
