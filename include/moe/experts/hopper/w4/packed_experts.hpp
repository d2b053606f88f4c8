// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/packed_experts.hpp: experts that are packed outside of a layer, one matrix of a few experts at a time: where each lies,
// and the device memory through which its codes pass. Plain host C++.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moe::hopper {

/// What one expert takes among packed experts: of w13, of w2.
struct W4ExpertSizes {
  std::int64_t bricks[2] = {0, 0};   ///< bytes
  std::int64_t factors[2] = {0, 0};  ///< float32: one of each packed row, or one
  constexpr std::int64_t bytes() const { return bricks[0] + bricks[1] + 4 * (factors[0] + factors[1]); }
};

/// Packed experts in device memory, each array [E, …]: an expert's part does not depend on its place, so experts can be moved.
struct W4Packed {
  std::uint8_t* bricks[2] = {nullptr, nullptr};
  float* factor[2] = {nullptr, nullptr};
  constexpr bool given() const { return bricks[0] != nullptr; }
  /// The same from that expert on.
  constexpr W4Packed from(std::int64_t expert, W4ExpertSizes const& each) const {
    W4Packed out = *this;
    for (int i = 0; i < 2; ++i) {
      out.bricks[i] += expert * each.bricks[i];
      out.factor[i] += expert * each.factors[i];
    }
    return out;
  }
};

/// Some features of one expert's matrix, packed apart: of w13 their gate rows, then their up rows, of w2 rows.
struct W4Part {
  int first = 0;  ///< a multiple of features_of_tile(), as count is, but for the last part
  int count = 0;  ///< 0: the whole matrix
  int whole = 0;  ///< features of the whole matrix
  constexpr bool given() const { return count > 0; }
  /// Features of a tile of four bricks, which lie together.
  static constexpr int features_of_tile(bool gate_up) { return gate_up ? 128 : 256; }
  /// Row `row` of the part, of the whole matrix.
  constexpr std::int64_t whole_row(std::int64_t row) const {
    if (!given()) return row;
    return row < count ? first + row : whole + first + row - count;
  }
  /// The place in the whole matrix of place `at` of the part, with so many places in a row.
  constexpr std::int64_t whole_place(std::int64_t at, std::int64_t in_row) const { return whole_row(at / in_row) * in_row + at % in_row; }
};

/// One matrix of some experts in device memory, as W4Weights holds all of them, to be packed.
struct W4StagedMatrix {
  bool down = false;  ///< w2, else w13
  std::uint8_t const* codes = nullptr;
  void const* scales = nullptr;
  int group = 0;            ///< as W4Weights::w13_group
  int experts = 0;          ///< 1 to 1024
  int first_expert = 0;     ///< of its layer, for messages
  void* scratch = nullptr;  ///< W4Staging::scratch_bytes(experts)
  W4Part part{};            ///< of one expert; else whole matrices
  int largest = -1;         ///< of a part under powers of two: the largest exponent byte below 255 of the whole matrix
};

/// The largest byte below 255 of a matrix's exponents, as find_largest_exponent() of w4/pack.cuh.
inline int largest_exponent(std::uint8_t const* exponents, std::int64_t count) {
  int largest = 0;
  for (std::int64_t i = 0; i < count; ++i) largest = std::max<int>(largest, exponents[i] == 255 ? 0 : exponents[i]);
  return largest;
}

/// Device memory through which matrices of `experts` experts pass: codes, then scales, then scratch memory.
struct W4Staging {
  static constexpr std::int64_t kAlign = 256;
  static constexpr std::int64_t kMostAtOnce = 8;
  std::int64_t experts = 0;  ///< that pass at once
  std::int64_t scales = 0;   ///< byte offset
  std::int64_t scratch = 0;  ///< byte offset
  std::int64_t bytes = 0;
  static constexpr std::int64_t scratch_bytes(std::int64_t experts) { return std::max<std::int64_t>(4 * experts, 8); }
};
/// The features of a part of one expert's matrix that a 16th of all experts' bytes have room for, at least a tile's; 0: parts are not
/// needed.
constexpr int part_features(std::int64_t all_experts, std::int64_t expert_bytes, std::int64_t matrix_bytes, int features, bool gate_up) {
  std::int64_t const most = all_experts * expert_bytes / 16;
  if (matrix_bytes <= most) return 0;
  int const tile = W4Part::features_of_tile(gate_up);
  std::int64_t const some = most / ((matrix_bytes + features - 1) / features) / tile * tile;
  std::int64_t const count = some < tile ? tile : some;
  return count < features ? static_cast<int>(count) : 0;
}
/// One expert in 32 at once, so that the memory is at most about 1/32 of the packed experts, or one expert's larger matrix.
constexpr W4Staging plan_w4_staging(std::int64_t all_experts, std::int64_t code_bytes, std::int64_t scale_bytes) {
  auto const rounded = [](std::int64_t n) { return (n + W4Staging::kAlign - 1) / W4Staging::kAlign * W4Staging::kAlign; };
  W4Staging s{};
  s.experts = std::clamp<std::int64_t>(all_experts / 32, 1, W4Staging::kMostAtOnce);
  s.scales = rounded(s.experts * code_bytes);
  s.scratch = s.scales + rounded(s.experts * scale_bytes);
  s.bytes = s.scratch + rounded(W4Staging::scratch_bytes(s.experts));
  return s;
}

}  // namespace moe::hopper
