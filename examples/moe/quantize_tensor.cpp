// SPDX-License-Identifier: Apache-2.0
// examples/moe/quantize_tensor.cpp: a tensor of a safetensors file through a scheme: codes, scales, dequantised values.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>

#include "examples/moe/output.hpp"
#include "examples/moe/quantize.hpp"
#include "moe/core/error.hpp"
#include "moe/io/safetensors.hpp"
#include "moe/io/safetensors_writer.hpp"
#include "moe/quantization/schemes.hpp"

namespace moe_tool {
namespace {

using namespace moe::quantization;
using moe::Error;
using moe::ErrorCode;

struct Shape {
  std::int64_t rows, cols;
};

template <class T>
void append(std::vector<T>& to, std::vector<T> const& from) {
  to.insert(to.end(), from.begin(), from.end());
}

/// Shape of the scales as the reference files have it: [1], [rows, 1], [rows, groups] or [block rows, block columns].
template <class Weights>
std::vector<std::int64_t> scale_shape(Shape shape) {
  if constexpr (Weights::kWeightGranularity == ScaleGranularity::per_tensor) {
    return {1};
  } else {
    std::int64_t const cols = Weights::weight_scale_cols(shape.cols);
    return {Weights::kWeightGroupRows > 1 ? (shape.rows + Weights::kWeightGroupRows - 1) / Weights::kWeightGroupRows : shape.rows, cols};
  }
}

/// One matrix through the weight half of a scheme, appended to `out`.
template <class Weights>
void quantize_one(float const* w, Shape shape, QuantizedTensor& out) {
  using Codec = typename Weights::WeightCodec;
  auto const elements = static_cast<std::size_t>(shape.rows * shape.cols);
  std::int64_t const code_cols = Weights::weight_code_cols(shape.cols);
  std::vector<typename Codec::Code> codes(static_cast<std::size_t>(shape.rows * code_cols));
  std::vector<typename Weights::WeightScale> scales(static_cast<std::size_t>(Weights::weight_scale_count(shape.rows, shape.cols)));
  Weights const weights{};
  weights.template quantize_weight<float>(w, shape.rows, shape.cols, codes.data(), scales.data());
  std::size_t const at = out.dq.size();
  out.dq.resize(at + elements);
  for (std::int64_t r = 0; r < shape.rows; ++r) {
    weights.template dequantize_weight_row<float>(codes.data(), scales.data(), shape.rows, shape.cols, r,
                                                  out.dq.data() + at + static_cast<std::size_t>(r * shape.cols));
  }

  out.is_signed = Codec::kCodeDType == moe::DType::i8;
  if constexpr (Codec::kPack == 1) {
    for (auto const code : codes) out.q.push_back(static_cast<std::uint8_t>(code));
  } else {
    for (std::int64_t r = 0; r < shape.rows; ++r) {
      for (std::int64_t c = 0; c < shape.cols; ++c) {
        out.q.push_back(nibble(codes.data() + r * code_cols, c));
      }
    }
    append(out.packed, codes);
  }

  out.scale_shape = scale_shape<Weights>(shape);
  Codec codec{};
  std::size_t blocks = scales.size();
  if constexpr (std::is_same_v<Codec, Nvfp4Codec>) {
    codec.global_scale = Weights::weight_global(scales.data(), shape.rows, shape.cols);
    out.global_scale.push_back(codec.global_scale);
    blocks = static_cast<std::size_t>(shape.rows * Weights::weight_scale_cols(shape.cols));
    append(out.block_scale, {scales.begin(), scales.begin() + static_cast<std::ptrdiff_t>(blocks)});
  }
  for (std::size_t i = 0; i < blocks; ++i) out.scale.push_back(codec.factor(scales[i]));
  if constexpr (Codec::kPowerOfTwo) {
    for (std::size_t i = 0; i < blocks; ++i) {
      if constexpr (std::is_same_v<typename Weights::WeightScale, float>) {
        out.scale_byte.push_back(ceil_e8m0(scales[i]));
      } else {
        out.scale_byte.push_back(scales[i]);
      }
    }
  }
}

constexpr std::array kInt4Schemes{
    "int4_group32",           "int4_group32_zero", "int4_group64",          "int4_group64_zero", "int4_group128",
    "int4_group128_zero",     "int4_group32_fp8",  "int4_group32_zero_fp8", "int4_group64_fp8",  "int4_group64_zero_fp8",
    "int4_group128_zero_fp8", "int4_group128_fp8", "w4a8_fp8_group32",      "w4a8_fp8",          "w4a8_int8"};

/// int4 weights, appended to `out`. A group that does not divide the rows is halved, as in WNa16.
void quantize_int4_one(char const* scheme, float const* w, Shape shape, QuantizedTensor& out) {
  Int4Form const form = *int4_form(scheme);
  std::int64_t const group = shape.cols % 2 == 0 ? effective_group(shape.cols, form.group) : 0;
  if (group == 0) {
    throw Error(ErrorCode::config, moe::text(scheme, " needs the row length to be a multiple of 32, got ", shape.cols));
  }
  std::vector<float> const matrix(w, w + shape.rows * shape.cols);
  IntWeight const t = quantize_int4(matrix, shape.rows, shape.cols, group, form.zero_points);
  out.is_signed = !form.zero_points;
  for (std::size_t i = 0; i < t.codes.size(); ++i) {
    out.q.push_back(static_cast<std::uint8_t>(form.zero_points ? t.codes[i] : t.codes[i] - 8));
    if (i % 2 == 1) out.packed.push_back(pack_nibbles(t.codes[i - 1], t.codes[i]));
  }
  append(out.scale, t.scales);
  append(out.zero_point, t.zeros);
  append(out.dq, t.dequantize());
  out.scale_shape = {shape.rows, shape.cols / group};
}

using Quantizer = std::function<void(float const*, Shape, QuantizedTensor&)>;

template <ScaleFormat Format>
void add_fp8(std::map<std::string, Quantizer>& all, std::string const& suffix) {
  using Codec = Fp8Codec<ScaleFloor::amax_1e10, Format>;
  all["fp8_per_tensor" + suffix] = quantize_one<BlockWeights<Codec, 0, 0>>;
  // A row is a token of activations or an output channel of weights: the same arithmetic.
  all["fp8_per_token" + suffix] = quantize_one<BlockWeights<Codec, 1, 0>>;
  all["fp8_per_channel" + suffix] = quantize_one<BlockWeights<Codec, 1, 0>>;
  all["fp8_group128" + suffix] = quantize_one<BlockWeights<Codec, 1, 128>>;
  all["fp8_block128" + suffix] = quantize_one<BlockWeights<Codec, 128, 128>>;
}

/// Calls f with the rule as a constant.
template <class F>
Quantizer with_rule(MxRule rule, F f) {
  switch (rule) {
    case MxRule::ceil: return f.template operator()<MxRule::ceil>();
    case MxRule::ocp: return f.template operator()<MxRule::ocp>();
    case MxRule::even: break;
  }
  return f.template operator()<MxRule::even>();
}

std::map<std::string, Quantizer> quantizers(std::optional<MxRule> rule) {
  std::map<std::string, Quantizer> all;
  add_fp8<ScaleFormat::f32>(all, "");
  add_fp8<ScaleFormat::f32_pow2>(all, "_ue8m0");
  all["int8_per_token"] = quantize_one<BlockWeights<Int8Codec, 1, 0>>;
  all["int8_per_channel"] = quantize_one<BlockWeights<Int8Codec, 1, 0>>;
  all["int8_group128"] = quantize_one<BlockWeights<Int8Codec, 1, 128>>;
  for (char const* const name : kInt4Schemes) {
    all[name] = [name](float const* w, Shape shape, QuantizedTensor& out) { quantize_int4_one(name, w, shape, out); };
  }
  all["mxfp8"] = all["mxfp8_w8a16"] = with_rule(
      rule.value_or(MxRule::ceil), []<MxRule Rule>() -> Quantizer { return quantize_one<BlockWeights<Mxfp8Codec<Rule>, 1, 32>>; });
  all["mxfp4"] =
      with_rule(rule.value_or(MxRule::ocp), []<MxRule Rule>() -> Quantizer { return quantize_one<BlockWeights<Mxfp4Codec<Rule>, 1, 32>>; });
  for (char const* const rows : {"mxfp4_w4a16", "mxfp4_w4a8", "mxfp4_fp8"}) all[rows] = all["mxfp4"];
  all["nvfp4"] = all["nvfp4_w4a16"] = quantize_one<Nvfp4Weights>;
  return all;
}

struct ErrorStatistics {
  double rms_relative = 0, max_absolute = 0;
};
ErrorStatistics statistics(std::vector<float> const& x, std::vector<float> const& dq) {
  double error = 0, norm = 0, largest = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    double const d = static_cast<double>(dq[i]) - x[i];
    error += d * d;
    norm += static_cast<double>(x[i]) * x[i];
    largest = std::max(largest, std::abs(d));
  }
  return {norm > 0 ? std::sqrt(error / norm) : 0, largest};
}

}  // namespace

std::optional<Int4Form> int4_form(std::string_view scheme) {
  if (std::find(kInt4Schemes.begin(), kInt4Schemes.end(), scheme) == kInt4Schemes.end()) return std::nullopt;
  auto const has = [&](char const* part) { return scheme.find(part) != std::string_view::npos; };
  return Int4Form{has("_group32") ? 32 : has("_group64") ? 64 : 128, has("_zero")};
}

IntWeight quantize_int4(std::vector<float> const& w, std::int64_t rows, std::int64_t cols, std::int64_t group, bool zero_points) {
  IntWeight out{.bits = 4, .rows = rows, .cols = cols, .group = group, .codes = {}, .scales = {}, .zeros = {}};
  out.codes.reserve(w.size());
  using Codec = OffsetIntCodec<4>;
  for (auto begin = w.begin(); begin != w.end(); begin += group) {
    auto const end = begin + group;
    float scale = 0;
    int zero = Codec::kZero, least = 1, most = 15;  // symmetric: -7 to 7
    if (zero_points) {
      float const low = std::min(0.0F, *std::min_element(begin, end)), high = std::max(0.0F, *std::max_element(begin, end));
      scale = std::max(high / 15 - low / 15, kAmaxFloor / 15);
      zero = std::clamp(static_cast<int>(std::nearbyint(-low / scale)), 0, 15);
      least = 0;
      out.zeros.push_back(static_cast<std::uint8_t>(zero));
    } else {
      std::uint32_t amax = 0;
      std::for_each(begin, end, [&](float x) { amax = std::max(amax, Codec::magnitude(x)); });
      scale = Codec::scale(amax);
    }
    out.scales.push_back(scale);
    std::transform(begin, end, std::back_inserter(out.codes), [&](float x) {
      return static_cast<std::uint8_t>(std::clamp(static_cast<int>(std::nearbyint(moe::div_rn(x, scale))) + zero, least, most));
    });
  }
  return out;
}

std::vector<std::string> quantize_schemes() {
  std::vector<std::string> names;
  for (auto const& [name, quantizer] : quantizers({})) names.push_back(name);
  return names;
}

QuantizedTensor quantize_matrices(std::string const& scheme, std::optional<MxRule> rule, std::vector<float> const& w, std::int64_t count,
                                  std::int64_t rows, std::int64_t cols) {
  auto const all = quantizers(rule);
  auto const at = all.find(scheme);
  if (at == all.end()) throw Error(ErrorCode::argument, moe::text("unknown scheme '", scheme, "'"));
  QuantizedTensor out;
  for (std::int64_t i = 0; i < count; ++i) at->second(w.data() + i * rows * cols, {rows, cols}, out);
  return out;
}

float nvfp4_global_scale(std::initializer_list<std::vector<float>> parts) {
  std::uint32_t amax = 0;
  for (std::vector<float> const& part : parts) {
    for (float const x : part) amax = std::max(amax, Nvfp4Codec::magnitude(x));
  }
  return Nvfp4Codec::global_from_amax(amax);
}

QuantizedTensor quantize_nvfp4(std::vector<float> const& w, std::int64_t rows, std::int64_t cols, float global_scale) {
  QuantizedTensor out;
  out.packed.resize(static_cast<std::size_t>(rows * Nvfp4Weights::weight_code_cols(cols)));
  out.block_scale.resize(static_cast<std::size_t>(rows * Nvfp4Weights::weight_scale_cols(cols)));
  moe::quantization::detail::quantize_blocks(Nvfp4Codec{global_scale}, w.data(), rows, cols, 1, 16, out.packed.data(),
                                             out.block_scale.data());
  return out;
}

void require_finite(std::vector<float> const& w, std::vector<std::int64_t> const& shape, std::string const& where) {
  auto const bad = std::find_if(w.begin(), w.end(), [](float x) { return !std::isfinite(x); });
  if (bad == w.end()) return;
  std::int64_t rest = bad - w.begin();
  std::string index;
  for (std::size_t d = shape.size(); d-- > 0; rest /= shape[d]) index = moe::text(rest % shape[d], index.empty() ? "" : ", ", index);
  throw Error(ErrorCode::argument, moe::text(where, ": element [", index, "] is ", *bad, ", expected a finite number"));
}

int quantize_tensor_file(QuantizeOptions const& options) {
  moe::io::SafetensorsFile const file(options.input);
  check_output(options.output, {options.input});
  auto const& info = file.at(options.tensor);
  auto const& shape = info.shape;
  if (shape.empty() || shape.size() > 3 || info.elements() == 0) {
    throw Error(ErrorCode::argument, moe::text(file.where(info), ": expected one to three dimensions and at least 1 element"));
  }
  if (!moe::io::is_floating(info.dtype)) {
    throw Error(ErrorCode::argument, moe::text(file.where(info), ": only floating-point tensors can be quantised"));
  }
  std::int64_t const cols = shape.back();
  std::int64_t const rows = shape.size() == 1 ? 1 : shape[shape.size() - 2];
  std::int64_t const count = shape.size() == 3 ? shape[0] : 1;
  auto const x = file.read<float>(info);
  require_finite(x, shape, file.where(info));
  QuantizedTensor const t = quantize_matrices(options.scheme, options.mx_rule, x, count, rows, cols);
  require_finite(t.dq, shape, moe::text(file.where(info), " dequantised from ", options.scheme));

  auto scale_shape = t.scale_shape;
  auto packed_shape = shape;
  packed_shape.back() = (cols + 1) / 2;
  if (shape.size() == 3) scale_shape.insert(scale_shape.begin(), count);
  moe::io::SafetensorsWriter out;
  out.add_bytes("q", t.is_signed ? moe::io::FileDType::i8 : moe::io::FileDType::u8, shape, std::as_bytes(std::span(t.q)));
  out.add<float>("scale", scale_shape, std::span<float const>(t.scale));
  out.add<float>("dq", shape, std::span<float const>(t.dq));
  using Bytes = std::span<std::uint8_t const>;
  if (!t.packed.empty()) out.add<std::uint8_t>("packed", packed_shape, Bytes(t.packed));
  if (!t.scale_byte.empty()) out.add<std::uint8_t>("scale_byte", scale_shape, Bytes(t.scale_byte));
  if (!t.zero_point.empty()) out.add<std::uint8_t>("zero_point", scale_shape, Bytes(t.zero_point));
  if (!t.block_scale.empty()) out.add<std::uint8_t>("block_scale_e4m3", scale_shape, Bytes(t.block_scale));
  if (!t.global_scale.empty()) out.add<float>("global_scale", {count}, std::span<float const>(t.global_scale));
  out.set_metadata("scheme", options.scheme);
  out.set_metadata("tensor", options.tensor);
  out.write(options.output);

  auto const error = statistics(x, t.dq);
  std::size_t const code_bytes = t.packed.empty() ? t.q.size() : t.packed.size();
  std::size_t const scale_bytes = !t.scale_byte.empty()    ? t.scale_byte.size()
                                  : !t.block_scale.empty() ? t.block_scale.size() + 4 * t.global_scale.size()
                                                           : 4 * t.scale.size() + (t.zero_point.size() + 1) / 2;
  double const bits = 8.0 * static_cast<double>(code_bytes + scale_bytes) / static_cast<double>(x.size());
  if (options.json) {
    nlohmann::ordered_json report;
    report["scheme"] = options.scheme;
    report["tensor"] = options.tensor;
    report["shape"] = shape;
    report["scale_shape"] = scale_shape;
    report["bits_per_element"] = bits;
    report["rms_relative_error"] = error.rms_relative;
    report["max_absolute_error"] = error.max_absolute;
    report["output"] = options.output.string();
    fmt::print("{}\n", report.dump());
  } else {
    fmt::print(
        "{} {} as {}: {:.3f} bits an element\nerror of the dequantised values: rms {:.3e} relative, max {:.3e} absolute\nwritten to {}\n",
        options.tensor, moe::io::shape_text(shape), options.scheme, bits, error.rms_relative, error.max_absolute, options.output.string());
  }
  return 0;
}

}  // namespace moe_tool
