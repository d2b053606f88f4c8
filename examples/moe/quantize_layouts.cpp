// SPDX-License-Identifier: Apache-2.0
// examples/moe/quantize_layouts.cpp: the tensors that a quantised weight becomes, in the layouts of released checkpoints.
//
// fp8_block128: `.weight` e4m3 with `.weight_scale_inv` [⌈N/128⌉, ⌈K/128⌉], as DeepSeek-V3; fused experts `gate_up_proj` with
// `gate_up_proj_scale_inv`. All others: compressed-tensors. fp8_per_tensor, fp8_per_channel, int8_per_channel: `.weight` with
// `.weight_scale`; int4_group128: `.weight_packed`, `.weight_scale`, `.weight_shape`; mxfp4: `.weight_packed`, `.weight_scale` (exponents);
// nvfp4: `.weight_packed`, `.weight_scale` e4m3, `.weight_global_scale`. mxfp4 of fused experts with biases: gpt-oss's blocks and scales.
#include "examples/moe/quantize_layouts.hpp"

#include <algorithm>
#include <cstring>
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

/// int4 codes with offset 8 in groups of `group`.
moe::quantization::IntWeight int4(std::vector<float> const& w, std::int64_t rows, std::int64_t cols, std::int64_t group) {
  moe::quantization::IntWeight out{.bits = 4, .rows = rows, .cols = cols, .group = group, .codes = {}, .scales = {}, .zeros = {}};
  moe::quantization::OffsetIntUnit<4> const unit;
  for (std::int64_t begin = 0; begin < rows * cols; begin += group) {
    std::uint32_t amax = 0;
    for (std::int64_t i = begin; i < begin + group; ++i) amax = std::max(amax, unit.magnitude(w[static_cast<std::size_t>(i)]));
    out.scales.push_back(unit.scale(amax));
    for (std::int64_t i = begin; i < begin + group; ++i) {
      out.codes.push_back(unit.encode(w[static_cast<std::size_t>(i)], out.scales.back()));
    }
  }
  return out;
}

std::vector<NewTensor> packed_int4(SourceMatrix const& s, std::int64_t group) {
  std::int64_t const rows = s.rows, cols = s.cols;
  auto const quantized = [=] { return int4(s.read(), rows, cols, group); };
  return {
      // the original [N, K]; the packed shape does not determine it
      {s.base + ".weight_shape", FileDType::i64, {2}, [=] { return bytes_of(std::vector<std::int64_t>{rows, cols}); }},
      {s.base + ".weight_packed", FileDType::i32, {rows, cols / 8}, [=] { return bytes_of(moe::quantization::pack_words(quantized())); }},
      {s.base + ".weight_scale", FileDType::f32, {rows, cols / group}, [=] { return bytes_of(quantized().scales); }}};
}

/// Shape of the scales of one matrix.
std::vector<std::int64_t> scale_shape(std::string const& scheme, std::int64_t rows, std::int64_t cols) {
  if (scheme == "fp8_block128") return {(rows + 127) / 128, (cols + 127) / 128};
  if (scheme == "fp8_per_tensor") return {1};
  return {rows, 1};
}
FileDType code_dtype(std::string const& scheme) { return scheme == "int8_per_channel" ? FileDType::i8 : FileDType::f8_e4m3; }

}  // namespace

std::vector<std::string> checkpoint_schemes() {
  return {"fp8_block128", "fp8_per_channel", "fp8_per_tensor", "int4_group128", "int8_per_channel", "mxfp4", "nvfp4"};
}

void fit_scheme(CheckpointScheme& scheme, std::int64_t cols, std::string const& where) {
  std::int64_t const multiple = scheme.name == "int4_group128" || scheme.name == "mxfp4" ? 32 : scheme.name == "nvfp4" ? 16 : 1;
  if (cols % multiple != 0) {
    throw Error(ErrorCode::config, moe::text(where, ": ", scheme.name, " needs K to be a multiple of ", multiple, ", got ", cols));
  }
  // One group size for the checkpoint: the configuration states it once.
  if (scheme.name == "int4_group128") scheme.int4_group = std::min(scheme.int4_group, moe::quantization::effective_group(cols, 128));
}

std::vector<NewTensor> quantized_linear(CheckpointScheme const& scheme, SourceMatrix const& s) {
  if (scheme.name == "int4_group128") return packed_int4(s, scheme.int4_group);
  std::int64_t const rows = s.rows, cols = s.cols;
  auto const quantized = [name = scheme.name, rule = scheme.mx_rule, s] {
    return quantize_matrices(name, rule, s.read(), 1, s.rows, s.cols);
  };
  if (scheme.name == "mxfp4") {
    return {{s.base + ".weight_packed", FileDType::u8, {rows, cols / 2}, [=] { return bytes_of(quantized().packed); }},
            {s.base + ".weight_scale", FileDType::u8, {rows, cols / 32}, [=] { return bytes_of(quantized().scale_byte); }}};
  }
  if (scheme.name == "nvfp4") {
    return {{s.base + ".weight_packed", FileDType::u8, {rows, cols / 2}, [=] { return bytes_of(quantized().packed); }},
            {s.base + ".weight_scale", FileDType::f8_e4m3, {rows, cols / 16}, [=] { return bytes_of(quantized().block_scale); }},
            // compressed-tensors stores the divisor
            {s.base + ".weight_global_scale", FileDType::f32, {1}, [=] {
               return bytes_of(std::vector<float>{1.0F / quantized().global_scale.at(0)});
             }}};
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
  auto const each = [=, rule = scheme.mx_rule](auto part) {
    std::vector<std::byte> out;
    for (std::int64_t e = 0; e < s.count; ++e) {
      std::vector<float> const stored = s.read(e);
      std::vector<float> turned(stored.size());
      moe::io::detail::transpose(stored.data(), in, out_rows, turned.data());
      append_bytes(out, part(quantize_matrices("mxfp4", rule, turned, 1, out_rows, in)));
    }
    return out;
  };
  return {{s.tensor + "_blocks",
           FileDType::u8,
           {s.count, out_rows, in / 32, 16},
           [=] { return each([](QuantizedTensor const& t) { return t.packed; }); }},
          {s.tensor + "_scales", FileDType::u8, {s.count, out_rows, in / 32}, [=] {
             return each([](QuantizedTensor const& t) { return t.scale_byte; });
           }}};
}

nlohmann::ordered_json quantization_config(CheckpointScheme const& scheme, bool blocks, std::vector<std::string> const& unquantized) {
  nlohmann::ordered_json q;
  if (blocks && scheme.name == "mxfp4") {
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
  struct Words {
    char const *format, *type, *strategy;
    int bits;
    std::int64_t group;
    bool quantizes_activations;
  };
  Words const w = scheme.name == "int4_group128"      ? Words{"pack-quantized", "int", "group", 4, scheme.int4_group, false}
                  : scheme.name == "mxfp4"            ? Words{"mxfp4-pack-quantized", "float", "group", 4, 32, false}
                  : scheme.name == "nvfp4"            ? Words{"nvfp4-pack-quantized", "float", "tensor_group", 4, 16, false}
                  : scheme.name == "int8_per_channel" ? Words{"int-quantized", "int", "channel", 8, 0, true}
                  : scheme.name == "fp8_per_tensor"   ? Words{"float-quantized", "float", "tensor", 8, 0, true}
                                                      : Words{"float-quantized", "float", "channel", 8, 0, true};
  nlohmann::ordered_json weights{{"num_bits", w.bits}, {"type", w.type}, {"symmetric", true}, {"dynamic", false}, {"strategy", w.strategy}};
  if (w.group > 0) weights["group_size"] = w.group;
  if (scheme.name == "mxfp4") weights["scale_dtype"] = "torch.uint8";
  nlohmann::ordered_json group{{"targets", {"Linear"}}, {"weights", weights}, {"input_activations", nullptr}};
  if (w.quantizes_activations) {
    group["input_activations"] = {{"num_bits", 8}, {"type", w.type}, {"symmetric", true}, {"dynamic", true}, {"strategy", "token"}};
  }
  q["quant_method"] = "compressed-tensors";
  q["format"] = w.format;
  q["quantization_status"] = "compressed";
  q["config_groups"]["group_0"] = group;
  q["ignore"] = unquantized;
  return q;
}

}  // namespace moe_tool
