// SPDX-License-Identifier: Apache-2.0
// examples/moe/quantize.hpp: `moe quantize`: one tensor, or the experts of a checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "moe/quantization/format/packed_int.hpp"
#include "moe/quantization/format/scales.hpp"

namespace moe_tool {

/// The command line.
struct QuantizeOptions {
  std::string scheme;
  std::filesystem::path input;   ///< a safetensors file, or a checkpoint directory
  std::string tensor;            ///< of the file
  std::filesystem::path output;  ///< a safetensors file, or a directory
  std::optional<moe::quantization::MxRule> mx_rule;
  bool json = false;
};

/// A quantised matrix [rows, cols] or a stack of them: value(q) · scale = dq.
struct QuantizedTensor {
  bool is_signed = false;                 ///< q are int8 values, else unsigned codes
  std::vector<std::uint8_t> q;            ///< one code per byte, as many as elements
  std::vector<std::uint8_t> packed;       ///< 4-bit schemes: two codes a byte, offset 8 for integers
  std::vector<float> scale;               ///< [scale_shape]
  std::vector<std::int64_t> scale_shape;  ///< of one matrix
  std::vector<std::uint8_t> scale_byte;   ///< exponents of power-of-two scales, else empty
  std::vector<std::uint8_t> block_scale;  ///< nvfp4: e4m3 codes of the block scales
  std::vector<float> global_scale;        ///< nvfp4: one per matrix
  std::vector<std::uint8_t> zero_point;   ///< int4 with zero points: [scale_shape]; q are then the unsigned codes
  std::vector<float> dq;
};

/// int4 weights by the name of a scheme: their group, and whether each has a zero point. Nullopt for schemes with other weights.
struct Int4Form {
  std::int64_t group = 128;
  bool zero_points = false;
};
std::optional<Int4Form> int4_form(std::string_view scheme);
/// One matrix [rows, cols] in groups of `group`, which divides cols: symmetric around 8 with s = amax / 7; with zero points s = (max - min)
/// / 15 of the group and 0, and an error of at most s / 2.
moe::quantization::IntWeight quantize_int4(std::vector<float> const& w, std::int64_t rows, std::int64_t cols, std::int64_t group,
                                           bool zero_points);

/// Names that --scheme takes.
std::vector<std::string> quantize_schemes();
/// The subset in which a checkpoint can be written.
std::vector<std::string> checkpoint_schemes();
/// `count` matrices [rows, cols], one after the other. E_ARG for an unknown scheme, E_CONFIG for a shape that it cannot take.
QuantizedTensor quantize_matrices(std::string const& scheme, std::optional<moe::quantization::MxRule> rule, std::vector<float> const& w,
                                  std::int64_t count, std::int64_t rows, std::int64_t cols);

/// The global scale of nvfp4 that fits all of these values.
float nvfp4_global_scale(std::initializer_list<std::vector<float>> parts);
/// The codes and block scales (`packed`, `block_scale`) of one matrix [rows, cols] under a global scale; cols is a multiple of 16.
QuantizedTensor quantize_nvfp4(std::vector<float> const& w, std::int64_t rows, std::int64_t cols, float global_scale);

/// E_ARG naming `where`, the index in `shape` and the value, unless all elements are finite: no scheme can hold them.
void require_finite(std::vector<float> const& w, std::vector<std::int64_t> const& shape, std::string const& where);

/// Writes q, scale, dq and the other arrays of the scheme for one tensor. Returns the exit code.
int quantize_tensor_file(QuantizeOptions const& options);
/// Writes a checkpoint with quantised routed experts; everything else is unchanged. Returns the exit code.
int quantize_checkpoint(QuantizeOptions const& options);

}  // namespace moe_tool
