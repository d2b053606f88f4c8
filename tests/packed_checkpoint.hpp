// SPDX-License-Identifier: Apache-2.0
// tests/packed_checkpoint.hpp: checkpoints of one Qwen-like layer that tests write, with experts in any packing. The packings are written
// here from their definitions, element by element; the library's readers are not used.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/io/safetensors_writer.hpp"
#include "moe/quantization/format/packed_int.hpp"

namespace moe_test {

using moe::io::FileDType;
using nlohmann::json;

/// Collects tensors; random numbers are the same in every run.
struct CheckpointWriter {
  moe::io::SafetensorsWriter file;
  std::mt19937 random{7};
  std::vector<std::vector<std::uint8_t>> kept;

  static std::size_t count(std::vector<std::int64_t> const& shape) {
    std::int64_t n = 1;
    for (std::int64_t d : shape) n *= d;
    return static_cast<std::size_t>(n);
  }
  /// Random codes; those that are not numbers in e4m3 are left out.
  void codes(std::string const& name, FileDType type, std::vector<std::int64_t> const& shape) {
    kept.emplace_back(count(shape) * static_cast<std::size_t>(moe::io::bits(type)) / 8);
    for (std::uint8_t& v : kept.back()) {
      v = static_cast<std::uint8_t>(random());
      if (type == FileDType::f8_e4m3 && (v & 0x7F) == 0x7F) v = 0x7E;
    }
    file.add_bytes(name, type, shape, std::as_bytes(std::span(kept.back())));
  }
  void exponents(std::string const& name, std::vector<std::int64_t> const& shape) {
    std::vector<std::uint8_t> v(count(shape));
    for (std::uint8_t& x : v) x = static_cast<std::uint8_t>(120 + random() % 10);
    file.add(name, shape, v);
  }
  /// Multiples of `step` up to 100 of them.
  void scales(std::string const& name, std::vector<std::int64_t> const& shape, float step = 1.0F / 64) {
    std::vector<float> v(count(shape));
    for (float& x : v) x = static_cast<float>(1 + random() % 100) * step;
    file.add(name, shape, v);
  }
  std::vector<float> normal(std::vector<std::int64_t> const& shape) {
    std::vector<float> v(count(shape));
    for (float& x : v) x = std::normal_distribution<float>()(random);
    return v;
  }
};

/// Sizes of the layer.
struct PackedSizes {
  std::int64_t experts = 3, hidden = 128, intermediate = 128;
  std::int64_t shared = 0;  ///< width of the shared expert, which has a sigmoid gate; 0: none
};

/// Writes config.json and model.safetensors; write(writer, base, n, k) adds what belongs to each matrix [n, k] of each expert, the shared
/// one ("shared_expert." in base) last.
template <class Write>
void write_checkpoint(std::filesystem::path const& directory, json const& quantization, Write const& write, PackedSizes s = {}) {
  json config{
      {"model_type", "qwen3_moe"},        {"hidden_act", "silu"},     {"hidden_size", s.hidden}, {"moe_intermediate_size", s.intermediate},
      {"num_experts", s.experts},         {"num_experts_per_tok", 2}, {"num_hidden_layers", 1},  {"norm_topk_prob", true},
      {"mlp_only_layers", json::array()}, {"decoder_sparse_step", 1}};
  if (s.shared > 0) {
    config["model_type"] = "qwen2_moe";
    config["shared_expert_intermediate_size"] = s.shared;
  }
  if (!quantization.is_null()) config["quantization_config"] = quantization;
  std::ofstream(directory / "config.json") << config;
  CheckpointWriter writer;
  std::string const root = "model.layers.0.mlp.";
  writer.file.add(root + "gate.weight", {s.experts, s.hidden}, writer.normal({s.experts, s.hidden}));
  auto const expert = [&](std::string const& base, std::int64_t width) {
    for (auto const& [name, n, k] :
         {std::tuple{"gate_proj", width, s.hidden}, {"up_proj", width, s.hidden}, {"down_proj", s.hidden, width}}) {
      write(writer, base + name, n, k);
    }
  };
  for (int e = 0; e < s.experts; ++e) expert(moe::text(root, "experts.", e, '.'), s.intermediate);
  if (s.shared > 0) {
    std::vector<float> gate = writer.normal({1, s.hidden});
    for (float& v : gate) v /= std::sqrt(static_cast<float>(s.hidden));
    writer.file.add(root + "shared_expert_gate.weight", {1, s.hidden}, gate);
    expert(root + "shared_expert.", s.shared);
  }
  writer.file.write(directory / "model.safetensors");
}

// ---- fp8 in blocks of 128 x 128

inline json fp8_block_config() { return {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}}; }
inline void add_fp8_blocks(CheckpointWriter& w, std::string const& base, std::int64_t n, std::int64_t k) {
  w.codes(base + ".weight", FileDType::f8_e4m3, {n, k});
  w.scales(base + ".weight_scale_inv", {n / 128, k / 128}, 1.0F / (64 * 4096));
}

// ---- 4-bit floats of compressed-tensors

inline json compressed_config(char const* format, json const& weights) {
  return {{"quant_method", "compressed-tensors"}, {"format", format}, {"config_groups", {{"group_0", {{"weights", weights}}}}}};
}
inline json mxfp4_config() {
  return compressed_config("mxfp4-pack-quantized", {{"num_bits", 4}, {"type", "float"}, {"strategy", "group"}, {"group_size", 32}});
}
inline void add_mxfp4(CheckpointWriter& w, std::string const& base, std::int64_t n, std::int64_t k) {
  w.codes(base + ".weight_packed", FileDType::u8, {n, k / 2});
  w.exponents(base + ".weight_scale", {n, k / 32});
}
inline json nvfp4_config() {
  return compressed_config("nvfp4-pack-quantized", {{"num_bits", 4}, {"type", "float"}, {"strategy", "tensor_group"}, {"group_size", 16}});
}
/// The global scale multiplies (ModelOpt), or divides (compressed-tensors; a power of two here, whose reciprocal is exact).
inline void add_nvfp4(CheckpointWriter& w, std::string const& base, std::int64_t n, std::int64_t k, char const* codes = ".weight_packed",
                      char const* global = ".weight_global_scale", float value = 64) {
  w.codes(base + codes, FileDType::u8, {n, k / 2});
  w.codes(base + ".weight_scale", FileDType::f8_e4m3, {n, k / 16});
  w.file.add(base + global, {1}, std::vector<float>{value});
}

// ---- integers of GPTQ, AWQ and compressed-tensors

/// The integers of a matrix [n, k] before they are packed: what its values are, (code - zero) * scale.
struct IntegerCodes {
  int bits = 4;
  std::int64_t n = 0, k = 0, group = 0;
  std::vector<int> codes, zeros;    ///< [n, k], [n, k / group]
  std::vector<float> scales;        ///< [n, k / group]
  std::vector<std::int32_t> order;  ///< the group of each column, where columns are in the order of activations

  std::int64_t groups() const { return k / group; }
  std::int64_t group_of(std::int64_t column) const { return order.empty() ? column / group : order[static_cast<std::size_t>(column)]; }
  float value(std::int64_t row, std::int64_t column) const {
    auto const g = static_cast<std::size_t>(row * groups() + group_of(column));
    return static_cast<float>(codes[static_cast<std::size_t>(row * k + column)] - zeros[g]) * scales[g];
  }
};

enum class Zeros { symmetric, random };

/// Random codes; zero points of 2^(bits - 1), or random ones. group -1: a whole row.
inline IntegerCodes random_integers(CheckpointWriter& w, int bits, std::int64_t n, std::int64_t k, std::int64_t group, Zeros zeros) {
  IntegerCodes m;
  m.bits = bits, m.n = n, m.k = k, m.group = group == -1 ? k : group;
  m.codes.resize(static_cast<std::size_t>(n * k));
  m.zeros.resize(static_cast<std::size_t>(n * m.groups()));
  m.scales.resize(m.zeros.size());
  unsigned const values = 1U << static_cast<unsigned>(bits);
  for (int& c : m.codes) c = static_cast<int>(w.random() % values);
  for (int& z : m.zeros) z = zeros == Zeros::symmetric ? static_cast<int>(values / 2) : static_cast<int>(w.random() % values);
  for (float& s : m.scales) s = static_cast<float>(1 + w.random() % 100) / (64.0F * static_cast<float>(values));
  return m;
}

/// [rows, cols] integers, `per_word` neighbours of the same row in a word; element j in field order[j % per_word].
template <class At>
std::vector<std::int32_t> pack_words(std::int64_t rows, std::int64_t cols, int bits, std::array<int, 8> const& order, At const& at) {
  std::int64_t const per_word = 32 / bits;
  std::vector<std::uint32_t> words(static_cast<std::size_t>(rows * cols / per_word));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      auto const field = static_cast<unsigned>(order[static_cast<std::size_t>(c % per_word)] * bits);
      words[static_cast<std::size_t>((r * cols + c) / per_word)] |= static_cast<std::uint32_t>(at(r, c)) << field;
    }
  }
  return {words.begin(), words.end()};
}
inline constexpr std::array<int, 8> kInOrder{0, 1, 2, 3, 4, 5, 6, 7};
/// AWQ: the nibbles of a word hold columns 0, 2, 4, 6, 1, 3, 5, 7; column c is in nibble kAwqNibble[c].
inline constexpr std::array<int, 8> kAwqNibble{0, 4, 1, 5, 2, 6, 3, 7};

enum class StoredZeros { none, minus_one, as_they_are };

inline void add_group_scales(CheckpointWriter& w, std::string const& base, IntegerCodes const& m) {
  std::vector<float> turned(m.scales.size());
  for (std::int64_t r = 0; r < m.n; ++r) {
    for (std::int64_t g = 0; g < m.groups(); ++g) {
      turned[static_cast<std::size_t>(g * m.n + r)] = m.scales[static_cast<std::size_t>(r * m.groups() + g)];
    }
  }
  w.file.add(base + ".scales", {m.groups(), m.n}, turned);
}
/// qweight [K / per word, N]: neighbours along K in a word; qzeros [groups, N / per word], one less than the zero point in the first
/// version of the format.
inline void add_gptq(CheckpointWriter& w, std::string const& base, IntegerCodes const& m, StoredZeros stored) {
  std::int64_t const per_word = 32 / m.bits;
  auto const by_row = pack_words(m.n, m.k, m.bits, kInOrder,
                                 [&](std::int64_t r, std::int64_t c) { return m.codes[static_cast<std::size_t>(r * m.k + c)]; });
  std::vector<std::int32_t> turned(by_row.size());  // words [N, K / per word] -> [K / per word, N]
  for (std::int64_t r = 0; r < m.n; ++r) {
    for (std::int64_t word = 0; word < m.k / per_word; ++word) {
      turned[static_cast<std::size_t>(word * m.n + r)] = by_row[static_cast<std::size_t>(r * (m.k / per_word) + word)];
    }
  }
  w.file.add(base + ".qweight", {m.k / per_word, m.n}, turned);
  add_group_scales(w, base, m);
  if (stored != StoredZeros::none) {
    int const mask = (1 << m.bits) - 1;
    w.file.add(base + ".qzeros", {m.groups(), m.n / per_word},
               pack_words(m.groups(), m.n, m.bits, kInOrder, [&](std::int64_t g, std::int64_t r) {
                 int const zero = m.zeros[static_cast<std::size_t>(r * m.groups() + g)];
                 return stored == StoredZeros::minus_one ? (zero + mask) & mask : zero;
               }));
  }
  if (!m.order.empty()) w.file.add(base + ".g_idx", {m.k}, m.order);
}
/// qweight [K, N / 8] and qzeros [groups, N / 8]: neighbours along N in a word, even columns in the low half.
inline void add_awq(CheckpointWriter& w, std::string const& base, IntegerCodes const& m, StoredZeros stored) {
  w.file.add(base + ".qweight", {m.k, m.n / 8}, pack_words(m.k, m.n, 4, kAwqNibble, [&](std::int64_t c, std::int64_t r) {
               return m.codes[static_cast<std::size_t>(r * m.k + c)];
             }));
  add_group_scales(w, base, m);
  if (stored != StoredZeros::none) {
    w.file.add(base + ".qzeros", {m.groups(), m.n / 8}, pack_words(m.groups(), m.n, 4, kAwqNibble, [&](std::int64_t g, std::int64_t r) {
                 return m.zeros[static_cast<std::size_t>(r * m.groups() + g)];
               }));
  }
}

/// weight_packed [N, K / 8] and weight_scale of compressed-tensors, without the zero points.
inline json packed_integers_config(int group) {
  return compressed_config("pack-quantized", {{"num_bits", 4}, {"type", "int"}, {"strategy", "group"}, {"group_size", group}});
}
inline void add_packed_integers(CheckpointWriter& w, std::string const& base, IntegerCodes const& m) {
  w.file.add(base + ".weight_packed", {m.n, m.k / 8}, pack_words(m.n, m.k, 4, kInOrder, [&](std::int64_t r, std::int64_t c) {
               return m.codes[static_cast<std::size_t>(r * m.k + c)];
             }));
  w.file.add(base + ".weight_scale", {m.n, m.groups()}, m.scales);
  w.file.add(base + ".weight_shape", {2}, std::vector<std::int64_t>{m.n, m.k});
}

}  // namespace moe_test
