// SPDX-License-Identifier: Apache-2.0
// examples/moe/quantize_layouts.cpp: the tensors that a quantised weight becomes, in the layouts of released checkpoints.
//
// fp8_block128: `.weight` e4m3 with `.weight_scale_inv` [⌈N/128⌉, ⌈K/128⌉], as DeepSeek-V3; fused experts `gate_up_proj` with
// `gate_up_proj_scale_inv`. All others: compressed-tensors. fp8_per_tensor, fp8_per_channel, int8_per_channel: `.weight` with
// `.weight_scale`; int4: `.weight_packed`, `.weight_scale`, `.weight_shape` (`.weight_zero_point`); mxfp4: `.weight_packed`,
// `.weight_scale` (exponents); mxfp8: `.weight` with `.weight_scale` (exponents); nvfp4: `.weight_packed`, `.weight_scale` e4m3,
// `.weight_global_scale`. mxfp4 of fused experts with biases: gpt-oss's blocks and scales.
#include "examples/moe/quantize_layouts.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "examples/moe/quantize.hpp"
#include "moe/core/error.hpp"
#include "moe/io/expert_reader.hpp"
#include "moe/quantization/format/packed_int.hpp"
#include "moe/quantization/schemes.hpp"

namespace moe_tool {
namespace {

using moe::Error;
using moe::ErrorCode;
using moe::io::FileDType;

template <class T>
void append_bytes(std::vector<std::byte>& to, std::vector<T> const& v) {
  auto const* bytes = reinterpret_cast<std::byte const*>(v.data());
  to.insert(to.end(), bytes, bytes + v.size() * sizeof(T));
}
template <class T>
std::vector<std::byte> bytes_of(std::vector<T> const& v) {
  std::vector<std::byte> out;
  append_bytes(out, v);
  return out;
}

using Bytes = std::vector<std::byte>;

/// Functions for the tensors that one computation makes. The first call makes all; what the others return is kept until their call. A file
/// has tensors of one width in the order of their names, so those of a module follow each other.
template <std::size_t N>
std::array<std::function<Bytes()>, N> together(std::function<std::array<Bytes, N>()> const& make) {
  auto const kept = std::make_shared<std::array<std::optional<Bytes>, N>>();
  std::array<std::function<Bytes()>, N> out;
  for (std::size_t i = 0; i < N; ++i) {
    out[i] = [make, kept, i] {
      if (!(*kept)[i]) {
        std::array<Bytes, N> all = make();
        std::move(all.begin(), all.end(), kept->begin());
      }
      return *std::exchange((*kept)[i], std::nullopt);
    };
  }
  return out;
}

/// One word of a column holds the zero points of eight rows.
std::vector<std::uint32_t> zero_point_words(moe::quantization::IntWeight const& w) {
  std::int64_t const groups = w.cols / w.group;
  std::vector<std::uint32_t> words(static_cast<std::size_t>(w.rows / 8 * groups));
  for (std::int64_t n = 0; n < w.rows; ++n) {
    for (std::int64_t g = 0; g < groups; ++g) {
      words[static_cast<std::size_t>(n / 8 * groups + g)] |= static_cast<std::uint32_t>(w.zero(n, g)) << n % 8 * 4;
    }
  }
  return words;
}

std::vector<NewTensor> packed_int4(SourceMatrix const& s, std::int64_t group, bool zero_points) {
  std::int64_t const rows = s.rows, cols = s.cols;
  auto const parts = together<3>([=] {
    moe::quantization::IntWeight const w = quantize_int4(s.read(), rows, cols, group, zero_points);
    return std::array{bytes_of(moe::quantization::pack_words(w)), bytes_of(w.scales),
                      zero_points ? bytes_of(zero_point_words(w)) : Bytes()};
  });
  std::vector<NewTensor> out{
      // the original [N, K]; the packed shape does not determine it
      {s.base + ".weight_shape", FileDType::i64, {2}, [=] { return bytes_of(std::vector<std::int64_t>{rows, cols}); }},
      {s.base + ".weight_packed", FileDType::i32, {rows, cols / 8}, parts[0]},
      {s.base + ".weight_scale", FileDType::f32, {rows, cols / group}, parts[1]}};
  if (zero_points) out.push_back({s.base + ".weight_zero_point", FileDType::i32, {rows / 8, cols / group}, parts[2]});
  return out;
}
bool is_mxfp4(std::string const& scheme) { return scheme.starts_with("mxfp4"); }
bool is_mxfp8(std::string const& scheme) { return scheme.starts_with("mxfp8"); }
bool is_nvfp4(std::string const& scheme) { return scheme.starts_with("nvfp4"); }

/// Shape of the scales of one matrix.
std::vector<std::int64_t> scale_shape(std::string const& scheme, std::int64_t rows, std::int64_t cols) {
  if (scheme == "fp8_block128") return {(rows + 127) / 128, (cols + 127) / 128};
  if (scheme == "fp8_per_tensor") return {1};
  return {rows, 1};
}
FileDType code_dtype(std::string const& scheme) { return scheme == "int8_per_channel" ? FileDType::i8 : FileDType::f8_e4m3; }

}  // namespace

std::vector<std::string> checkpoint_schemes() {
  return {"fp8_block128",
          "fp8_per_channel",
          "fp8_per_tensor",
          "int4_group128",
          "int4_group128_fp8",
          "int4_group128_zero",
          "int4_group128_zero_fp8",
          "int4_group32",
          "int4_group32_fp8",
          "int4_group32_zero",
          "int4_group32_zero_fp8",
          "int4_group64",
          "int4_group64_fp8",
          "int4_group64_zero",
          "int4_group64_zero_fp8",
          "int8_per_channel",
          "mxfp4",
          "mxfp4_fp8",
          "mxfp4_w4a16",
          "mxfp4_w4a8",
          "mxfp8",
          "mxfp8_w8a16",
          "nvfp4",
          "nvfp4_w4a16",
          "w4a8_fp8",
          "w4a8_fp8_group32",
          "w4a8_int8"};
}

void fit_scheme(CheckpointScheme& scheme, std::int64_t rows, std::int64_t cols, std::string const& where) {
  auto const int4 = int4_form(scheme.name);
  std::int64_t const multiple = int4 || scheme.name.starts_with("mx") ? 32 : is_nvfp4(scheme.name) ? 16 : 1;
  if (cols % multiple != 0) {
    throw Error(ErrorCode::config, moe::text(where, ": ", scheme.name, " needs K to be a multiple of ", multiple, ", got ", cols));
  }
  if (int4 && int4->zero_points && rows % 8 != 0) {
    throw Error(ErrorCode::config, moe::text(where, ": ", scheme.name, " needs N to be a multiple of 8, got ", rows));
  }
  // One group size for the checkpoint: the configuration states it once.
  if (int4) scheme.int4_group = std::min(scheme.int4_group, moe::quantization::effective_group(cols, int4->group));
}

std::function<float()> once(std::function<float()> f) {
  return [f = std::move(f), value = std::make_shared<std::optional<float>>()] {
    if (!*value) *value = f();
    return **value;
  };
}

std::vector<NewTensor> quantized_linear(CheckpointScheme const& scheme, SourceMatrix const& s) {
  if (auto const int4 = int4_form(scheme.name)) return packed_int4(s, scheme.int4_group, int4->zero_points);
  std::int64_t const rows = s.rows, cols = s.cols;
  auto const quantized = [name = scheme.name, rule = scheme.mx_rule, s] {
    return quantize_matrices(name, rule, s.read(), 1, s.rows, s.cols);
  };
  if (is_mxfp4(scheme.name)) {
    auto const parts = together<2>([=] {
      QuantizedTensor const t = quantized();
      return std::array{bytes_of(t.packed), bytes_of(t.scale_byte)};
    });
    return {{s.base + ".weight_packed", FileDType::u8, {rows, cols / 2}, parts[0]},
            {s.base + ".weight_scale", FileDType::u8, {rows, cols / 32}, parts[1]}};
  }
  if (is_mxfp8(scheme.name)) {
    auto const parts = together<2>([=] {
      QuantizedTensor const t = quantized();
      return std::array{bytes_of(t.q), bytes_of(t.scale_byte)};
    });
    return {{s.base + ".weight", FileDType::f8_e4m3, {rows, cols}, parts[0]},
            {s.base + ".weight_scale", FileDType::u8, {rows, cols / 32}, parts[1]}};
  }
  if (is_nvfp4(scheme.name)) {
    auto const global = s.global_scale ? s.global_scale : once([s] { return nvfp4_global_scale({s.read()}); });
    auto const parts = together<2>([=] {
      QuantizedTensor const t = quantize_nvfp4(s.read(), rows, cols, global());
      return std::array{bytes_of(t.packed), bytes_of(t.block_scale)};
    });
    return {{s.base + ".weight_packed", FileDType::u8, {rows, cols / 2}, parts[0]},
            {s.base + ".weight_scale", FileDType::f8_e4m3, {rows, cols / 16}, parts[1]},
            // compressed-tensors stores the divisor
            {s.base + ".weight_global_scale", FileDType::f32, {1}, [=] { return bytes_of(std::vector<float>{1.0F / global()}); }}};
  }
  char const* const suffix = scheme.name == "fp8_block128" ? ".weight_scale_inv" : ".weight_scale";
  return {{s.base + ".weight", code_dtype(scheme.name), {rows, cols}, [=] { return bytes_of(quantized().q); }},
          {s.base + suffix, FileDType::f32, scale_shape(scheme.name, rows, cols), [=] { return bytes_of(quantized().scale); }}};
}

std::vector<NewTensor> quantized_stack(CheckpointScheme const& scheme, SourceStack const& s) {
  // "….gate_up_proj" and "….gate_up_proj_scale_inv", or "….input_linear.weight" and "….input_linear.weight_scale_inv"
  std::string const scales = s.tensor + (scheme.name == "fp8_block128" ? "_scale_inv" : "_scale");
  auto const each = [name = scheme.name, s](auto part) {
    std::vector<std::byte> out;
    for (std::int64_t e = 0; e < s.count; ++e) append_bytes(out, part(quantize_matrices(name, {}, s.read(e), 1, s.rows, s.cols)));
    return out;
  };
  std::vector<std::int64_t> shape{s.count};
  for (std::int64_t d : scale_shape(scheme.name, s.rows, s.cols)) shape.push_back(d);
  return {
      {s.tensor, code_dtype(scheme.name), {s.count, s.rows, s.cols}, [=] { return each([](QuantizedTensor const& t) { return t.q; }); }},
      {scales, FileDType::f32, shape, [=] { return each([](QuantizedTensor const& t) { return t.scale; }); }}};
}

std::vector<NewTensor> mxfp4_blocks(CheckpointScheme const& scheme, SourceStack const& s) {
  std::int64_t const in = s.rows, out_rows = s.cols;
  auto const parts = together<2>([=, rule = scheme.mx_rule] {
    std::array<Bytes, 2> out;
    for (std::int64_t e = 0; e < s.count; ++e) {
      std::vector<float> const stored = s.read(e);
      std::vector<float> turned(stored.size());
      moe::io::detail::transpose(stored.data(), in, out_rows, turned.data());
      QuantizedTensor const t = quantize_matrices("mxfp4", rule, turned, 1, out_rows, in);
      append_bytes(out[0], t.packed);
      append_bytes(out[1], t.scale_byte);
    }
    return out;
  });
  return {{s.tensor + "_blocks", FileDType::u8, {s.count, out_rows, in / 32, 16}, parts[0]},
          {s.tensor + "_scales", FileDType::u8, {s.count, out_rows, in / 32}, parts[1]}};
}

nlohmann::ordered_json quantization_config(CheckpointScheme const& scheme, bool blocks, std::vector<std::string> const& unquantized) {
  nlohmann::ordered_json q;
  if (blocks && is_mxfp4(scheme.name)) {
    q["quant_method"] = "mxfp4";
    q["modules_to_not_convert"] = unquantized;
    return q;
  }
  if (scheme.name == "fp8_block128") {
    q["quant_method"] = "fp8";
    q["fmt"] = "e4m3";
    q["activation_scheme"] = "dynamic";
    q["weight_block_size"] = {128, 128};
    q["modules_to_not_convert"] = unquantized;
    return q;
  }
  auto const int4 = int4_form(scheme.name);
  struct Words {
    char const *format, *type, *strategy;
    int bits;
    std::int64_t group;
  };
  Words const w = int4                                ? Words{"pack-quantized", "int", "group", 4, scheme.int4_group}
                  : is_mxfp4(scheme.name)             ? Words{"mxfp4-pack-quantized", "float", "group", 4, 32}
                  : is_nvfp4(scheme.name)             ? Words{"nvfp4-pack-quantized", "float", "tensor_group", 4, 16}
                  : is_mxfp8(scheme.name)             ? Words{"mxfp8-quantized", "float", "group", 8, 32}
                  : scheme.name == "int8_per_channel" ? Words{"int-quantized", "int", "channel", 8, 0}
                  : scheme.name == "fp8_per_tensor"   ? Words{"float-quantized", "float", "tensor", 8, 0}
                                                      : Words{"float-quantized", "float", "channel", 8, 0};
  bool const exponents = scheme.name.starts_with("mx");
  nlohmann::ordered_json weights{
      {"num_bits", w.bits}, {"type", w.type}, {"symmetric", !(int4 && int4->zero_points)}, {"dynamic", false}, {"strategy", w.strategy}};
  if (w.group > 0) weights["group_size"] = w.group;
  if (exponents) weights["scale_dtype"] = "torch.uint8";
  nlohmann::ordered_json group{{"targets", {"Linear"}}, {"weights", weights}, {"input_activations", nullptr}};
  // Rows: 8 bits with a scale a token, or a group.
  bool const in_groups = scheme.name == "mxfp4_fp8" || (scheme.name.starts_with("int4") && scheme.name.ends_with("_fp8"));
  std::int64_t const rows = scheme.name == "mxfp8" || scheme.name == "mxfp4_w4a8" ? 32 : in_groups ? 128 : 0;
  bool const weights_alone = scheme.name == "mxfp8_w8a16";
  if (rows > 0 || (w.bits == 8 && !weights_alone) || scheme.name.starts_with("w4a8")) {
    bool const integers = int4 ? scheme.name == "w4a8_int8" : w.type == std::string_view("int");
    group["input_activations"] = {{"num_bits", 8},
                                  {"type", integers ? "int" : "float"},
                                  {"symmetric", true},
                                  {"dynamic", true},
                                  {"strategy", rows > 0 ? "group" : "token"}};
    if (rows > 0) group["input_activations"]["group_size"] = rows;
    if (rows == 32) group["input_activations"]["scale_dtype"] = "torch.uint8";
  }
  q["quant_method"] = "compressed-tensors";
  q["format"] = w.format;
  q["quantization_status"] = "compressed";
  q["config_groups"]["group_0"] = group;
  q["ignore"] = unquantized;
  return q;
}

}  // namespace moe_tool
