// SPDX-License-Identifier: Apache-2.0
// examples/moe/quantize_layouts.hpp: the tensors that a quantised weight becomes, in the layouts of released checkpoints.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "moe/io/element.hpp"
#include "moe/quantization/format/scales.hpp"

namespace moe_tool {

/// A tensor of a new checkpoint; its bytes are made when it is written.
struct NewTensor {
  std::string name;
  moe::io::FileDType dtype;
  std::vector<std::int64_t> shape;
  std::function<std::vector<std::byte>()> make;
};

/// A linear weight [rows, cols] = [out, in] of the source, `base` its name without ".weight".
struct SourceMatrix {
  std::string base;
  std::int64_t rows = 0, cols = 0;
  std::function<std::vector<float>()> read;
  std::function<float()> global_scale{};  ///< nvfp4, of gate and up: one for both; nothing: that of this matrix
};
/// A fused tensor [count, rows, cols] of the source, in its stored layout; read(e) gives matrix e.
struct SourceStack {
  std::string tensor;
  std::int64_t count = 0, rows = 0, cols = 0;
  std::function<std::vector<float>(std::int64_t)> read;
};

/// f's value, which the first call computes.
std::function<float()> once(std::function<float()> f);

/// The settings of a scheme besides its name: the rule of the shared exponents, and one group size for all int4 weights of a checkpoint.
struct CheckpointScheme {
  std::string name;
  std::optional<moe::quantization::MxRule> mx_rule{};  ///< of mxfp4; nothing: its default
  std::int64_t int4_group = 128;                       ///< at most
};

/// E_CONFIG unless the scheme can hold a matrix [rows, cols]; `where` names the tensor. Reduces the int4 group if necessary.
void fit_scheme(CheckpointScheme& scheme, std::int64_t rows, std::int64_t cols, std::string const& where);

/// One module: `.weight` with its scale, or `.weight_packed` and what belongs to it.
std::vector<NewTensor> quantized_linear(CheckpointScheme const& scheme, SourceMatrix const& source);
/// Schemes of 8 bits: the fused tensor with e4m3 or int8 elements in its own orientation and its scales beside it: blocks of 128 × 128, one
/// per row, or one per matrix.
std::vector<NewTensor> quantized_stack(CheckpointScheme const& scheme, SourceStack const& source);
/// gpt-oss: a fused tensor [E, in, out] becomes blocks U8 [E, out, in / 32, 16] and exponents U8 [E, out, in / 32].
std::vector<NewTensor> mxfp4_blocks(CheckpointScheme const& scheme, SourceStack const& source);

/// quantization_config of the new config.json, as inference servers read it. `blocks`: the experts are gpt-oss's mxfp4 blocks.
nlohmann::ordered_json quantization_config(CheckpointScheme const& scheme, bool blocks, std::vector<std::string> const& unquantized);

}  // namespace moe_tool
