// SPDX-License-Identifier: Apache-2.0
// io/checkpoint_quantization.hpp: what the quantization_config of a config.json says about how weights are stored.
//
// Names and dtypes of the tensors mostly determine the format. The configuration decides the rest (GPTQ and AWQ use the same names) and
// must agree with the tensors that are found.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/io/hf_config.hpp"
#include "moe/io/one_line.hpp"
#include "moe/quantization/format/packed_int.hpp"

namespace moe::io {

/// quant_method of a quantization_config.
enum class QuantMethod : std::uint8_t { none, fp8, mxfp4, gptq, awq, compressed_tensors, modelopt };

constexpr std::string_view name(QuantMethod m) {
  constexpr std::string_view kNames[] = {"none", "fp8", "mxfp4", "gptq", "awq", "compressed-tensors", "modelopt"};
  return kNames[static_cast<std::size_t>(m)];
}

/// Weights of one kind: element type, width, and how many elements along K share a scale.
struct StoredWeights {
  bool integer = false;
  int bits = 0;
  std::int64_t group = 0;  ///< -1: a whole row; 0: a tensor, a block, or not stated
  bool zeros = false;      ///< integers of which the configuration states that they have zero points
  friend bool operator==(StoredWeights const&, StoredWeights const&) = default;
};
/// "int4 in groups of 128", "float8"
inline std::string text_of(StoredWeights const& w) {
  std::string const type = text(w.integer ? "int" : "float", w.bits);
  return w.group == 0 ? type : w.group == -1 ? type + " per row" : text(type, " in groups of ", w.group);
}

/// How the weights of a checkpoint are stored.
struct CheckpointQuantization {
  QuantMethod method = QuantMethod::none;
  std::vector<StoredWeights> weights{};  ///< the kinds that the configuration states; gptq and awq: exactly one
  std::int64_t block[2] = {128, 128};    ///< rows and columns that one scale of a block-quantised weight covers
  bool zeros_minus_one = true;           ///< gptq: the format v1 stores z - 1
  bool split = false;                    ///< set by a loader that splits matrices between ranks: an activation order is then refused

  /// E_CONFIG, naming both, if the configuration states weights other than `found` for rows of `cols`; `where` names the tensor.
  void require(StoredWeights found, std::int64_t cols, std::string_view where) const {
    if (method == QuantMethod::none) return;
    auto const whole = [&](std::int64_t group) { return group == -1 ? cols : group; };
    for (StoredWeights const& w : weights) {
      if (w.integer == found.integer && w.bits == found.bits && (w.group == 0 || found.group == 0 || whole(w.group) == whole(found.group)))
        return;
    }
    std::string announced;
    for (StoredWeights const& w : weights) announced += (announced.empty() ? "" : ", ") + text_of(w);
    throw Error(ErrorCode::config,
                one_line(where, ": holds ", text_of(found), ", but quantization_config (", name(method), ") announces ", announced));
  }
  /// E_ARG if all integers of these bits that the configuration states have zero points; `missing` is the tensor that has none.
  void refuse_missing_zero_points(int bits, std::string_view where, std::string_view missing) const {
    bool stated = false;
    for (StoredWeights const& w : weights) {
      if (!w.integer || w.bits != bits) continue;
      if (!w.zeros) return;
      stated = true;
    }
    if (!stated) return;
    throw Error(ErrorCode::argument, one_line(where, ": quantization_config (", name(method), ") announces int", bits,
                                              " with zero points, but '", missing, "' is missing"));
  }
};

namespace detail {

/// A "bits" field: 4 or 8, else E_CONFIG.
inline int weight_bits(HfConfig const& q, std::initializer_list<std::string_view> fields) {
  int const bits = static_cast<int>(q.integer(fields, 0, 64));
  if (bits != 4 && bits != 8) q.fail(one_line("only 4 and 8 bit weights, got ", bits, " bits"));
  return bits;
}
/// The group size of stored integers, -1 for a whole row; else E_CONFIG.
inline std::int64_t weight_group(HfConfig const& q, std::initializer_list<std::string_view> fields, int bits) {
  std::int64_t const group = q.integer(fields, -1);
  try {
    quantization::check_int_format(bits, static_cast<int>(group));
  } catch (Error const& error) {
    q.fail(error.message());
  }
  return group;
}

/// "weights" of a config_groups entry, as compressed-tensors and ModelOpt write it.
inline StoredWeights scheme_weights(HfConfig const& w, CheckpointQuantization& out) {
  StoredWeights s;
  s.bits = weight_bits(w, {"num_bits"});
  s.integer = !w.has("type") || w.string("type", {"int", "float"}) == "int";
  s.zeros = s.integer && w.has("symmetric") && !w.flag("symmetric");
  std::string const strategy = w.has("strategy")     ? w.string("strategy", {"tensor", "channel", "group", "block", "tensor_group"})
                               : w.has("group_size") ? "group"
                                                     : "";
  if (strategy == "channel") s.group = -1;
  if (strategy == "group" || strategy == "tensor_group") {
    s.group = s.integer ? weight_group(w, {"group_size"}, s.bits) : w.integer("group_size", -1);
  }
  if (strategy == "block" && w.has("block_structure")) {
    for (std::int64_t i : {0, 1}) out.block[i] = w.integer_at("block_structure", i, 1, 1 << 20);
  }
  return s;
}

/// E_UNSUPPORTED unless the "format" of compressed-tensors is one that can be read.
inline void compressed_format(HfConfig const& q) {
  q.string("format", {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
                      "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense"});
}
/// Adds the weights that each group states.
inline void config_groups(HfConfig const& groups, CheckpointQuantization& out) {
  for (auto const& [key, value] : groups.json().items()) {
    HfConfig const group = groups.section(key);
    if (group.has("format")) compressed_format(group);
    if (group.has("weights")) out.weights.push_back(scheme_weights(group.section("weights"), out));
  }
}
inline void compressed_tensors(HfConfig const& q, CheckpointQuantization& out) {
  if (q.has("format")) compressed_format(q);
  config_groups(q.section("config_groups"), out);
  if (out.weights.empty()) q.fail("'config_groups' has no group with 'weights'");
}

inline void modelopt(HfConfig const& outer, CheckpointQuantization& out) {
  HfConfig const q = outer.has("quantization") ? outer.section("quantization") : outer;
  std::string algo = q.string("quant_algo");
  std::ranges::transform(algo, algo.begin(), [](char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c; });
  StoredWeights const fp8{false, 8, 0}, nvfp4{false, 4, 16}, mxfp8{false, 8, 32};
  if (algo == "FP8" || algo == "FP8_PER_CHANNEL_PER_TOKEN" || algo == "FP8_PB_WO") {
    out.weights = {fp8};
  } else if (algo == "NVFP4" || algo == "W4A16_NVFP4") {
    out.weights = {nvfp4};
    if (q.has("group_size") && q.integer("group_size") != 16)
      q.fail(one_line("'group_size' is ", q.integer("group_size"), ", nvfp4 has 16"));
  } else if (algo == "MXFP8") {
    out.weights = {mxfp8};
  } else if (algo == "MIXED_PRECISION") {
    out.weights = {fp8, nvfp4};  // float8 in groups of 32 is a float8 too
  } else {
    throw Error(ErrorCode::unsupported, one_line("'", q.label(), "': 'quant_algo' is \"", algo.substr(0, 60),
                                                 "\", known: FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, W4A16_NVFP4, MXFP8, "
                                                 "MIXED_PRECISION"));
  }
}

}  // namespace detail

/// Reads a quantization_config. E_UNSUPPORTED naming a method, format or algorithm that is not known, E_CONFIG for a missing or invalid
/// field (bits other than 4 and 8, a group size that no packing has).
inline CheckpointQuantization checkpoint_quantization(HfConfig const& q) {
  CheckpointQuantization out;
  std::string const method = q.string("quant_method", {"fp8", "mxfp4", "gptq", "awq", "compressed-tensors", "modelopt", "modelopt_fp4"});
  if (method == "fp8") {
    out.method = QuantMethod::fp8;
    out.weights = {{false, 8, 0}};
    if (q.has("fmt")) q.string("fmt", {"e4m3", "float8_e4m3fn"});
    if (q.has("weight_block_size")) {
      for (std::int64_t i : {0, 1}) out.block[i] = q.integer_at("weight_block_size", i, 1, 1 << 20);
    }
    if (q.has("config_groups")) detail::config_groups(q.section("config_groups"), out);  // releases whose experts are nvfp4 add them here
  } else if (method == "mxfp4") {
    out.method = QuantMethod::mxfp4;
    out.weights = {{false, 4, 32}};
  } else if (method == "gptq") {
    out.method = QuantMethod::gptq;
    int const bits = detail::weight_bits(q, {"bits"});
    out.weights = {{true, bits, detail::weight_group(q, {"group_size"}, bits), q.has("sym") && !q.flag("sym")}};
    if (q.has("checkpoint_format")) out.zeros_minus_one = q.string("checkpoint_format", {"gptq", "gptq_v2"}) == "gptq";
    if (q.has("pack_dtype")) q.string("pack_dtype", {"int32"});
  } else if (method == "awq") {
    out.method = QuantMethod::awq;
    int const bits = detail::weight_bits(q, {"bits", "w_bit"});
    if (bits != 4) q.fail(one_line("AWQ weights are 4 bit, got ", bits, " bits"));
    out.weights = {
        {true, bits, detail::weight_group(q, {"group_size", "q_group_size"}, bits), q.has("zero_point") && q.flag("zero_point")}};
    if (q.has("version")) q.string("version", {"gemm", "GEMM"});
  } else if (method == "compressed-tensors") {
    out.method = QuantMethod::compressed_tensors;
    detail::compressed_tensors(q, out);
  } else {
    out.method = QuantMethod::modelopt;
    detail::modelopt(q, out);
  }
  return out;
}

}  // namespace moe::io
