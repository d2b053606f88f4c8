// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/problem.hpp: the stored form of the weights of the layer that widens codes of 4 or 8 bits in registers, and its
// arguments. Plain host C++.
//
// A brick is 64 weight rows by 64 of K: the codes in the order of a warpgroup's threads (thread t reads 16 bytes at 16 t: its A fragments
// of four wgmma steps of 16; of 8 bits those of two steps, and 16 bytes at 2048 + 16 t, those of the other two), then the scales of each
// thread's rows r and r + 8, one 32-bit word per (warp, r):
//   int4       fp16 scale of row r, of row r + 8, each over a power of two of its row (row_factors.hpp)
//   int4_zero  the same, then 32 words more: 128 + zero point of row r, of row r + 8, in bf16
//   mxfp4      bytes: row r, first and second 32 of K; row r + 8, the same; a byte is the exponent field of the bf16 multiplier, over a
//              power of two of the expert if its largest scale is over 2: weights 133 binades below it become subnormal bf16
//   int4_32    as int4, but 32 words for the first 32 of K, then 32 words for the second
//   int4_32_zero  the same, then 32 words of zero points, a byte each: row r, first and second 32 of K; row r + 8, the same
//   nvfp4      bytes: 32 words of row r, the four 16 of K, then 32 words of row r + 8; a byte is a scale as nvfp4_scale_byte() writes it
//   mxfp8      as mxfp4, over a power of two if the largest scale is over 2^7
//   int8, fp8  none
// Of int4, int8 and fp8 all bricks are followed by float32 factors of their rows [E, packed rows], in the order of the rows in bricks: the
// powers of two, or the rows' scales. The rows of a w13 brick are those of 32 features: in each warp's 16 rows first 8 gate rows, then the
// 8 up rows of the same features, so that one thread holds both. Without a gate they are 64 features in order, as those of w2. Four bricks
// that lie side by side are a weight tile's step of K: one copy fetches them.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>

#include "moe/activation/activation.hpp"
#include "moe/core/error.hpp"
#include "moe/core/types.hpp"
#include "moe/experts/hopper/common/problem.hpp"
#include "moe/experts/hopper/w4/packed_experts.hpp"

struct CUstream_st;

namespace moe::hopper {

/// Storage of the weights. Activations are bf16.
enum class W4Scheme : std::uint8_t {
  int4,          ///< codes 0 … 15 with zero point 8, one scale per group of 64, 128, … along K
  int4_zero,     ///< the same with an integer zero point per group
  mxfp4,         ///< e2m1 with a power of two (ue8m0) per 32 along K
  int4_32,       ///< as int4, one scale per group of 32 along K
  int4_32_zero,  ///< the same with an integer zero point per group
  nvfp4,         ///< e2m1 with an e4m3 scale per 16 along K and a float32 scale per expert
  int8,          ///< two's complement, one float32 scale per row
  fp8,           ///< e4m3, one float32 scale per row
  mxfp8          ///< e4m3 with a power of two (ue8m0) per 32 along K
};

constexpr char const* name(W4Scheme s) {
  switch (s) {
    case W4Scheme::int4: return "int4";
    case W4Scheme::int4_zero: return "int4_zero";
    case W4Scheme::mxfp4: return "mxfp4";
    case W4Scheme::int4_32: return "int4_32";
    case W4Scheme::int4_32_zero: return "int4_32_zero";
    case W4Scheme::nvfp4: return "nvfp4";
    case W4Scheme::int8: return "int8";
    case W4Scheme::fp8: return "fp8";
    case W4Scheme::mxfp8: return "mxfp8";
  }
  return "?";
}
MOE_HD constexpr bool is_e2m1(W4Scheme s) { return s == W4Scheme::mxfp4 || s == W4Scheme::nvfp4; }
MOE_HD constexpr bool is_e4m3(W4Scheme s) { return s == W4Scheme::fp8 || s == W4Scheme::mxfp8; }
/// Whether scales are powers of two, as exponent bytes.
MOE_HD constexpr bool has_exponents(W4Scheme s) { return s == W4Scheme::mxfp4 || s == W4Scheme::mxfp8; }
MOE_HD constexpr bool has_zero_points(W4Scheme s) { return s == W4Scheme::int4_zero || s == W4Scheme::int4_32_zero; }
/// int4 in groups of that many, or of whole rows (0).
constexpr W4Scheme int4_scheme(int group, bool zero_points) {
  if (group == 32) return zero_points ? W4Scheme::int4_32_zero : W4Scheme::int4_32;
  return zero_points ? W4Scheme::int4_zero : W4Scheme::int4;
}
MOE_HD constexpr int code_bits(W4Scheme s) { return s == W4Scheme::int8 || is_e4m3(s) ? 8 : 4; }
/// Whether a row has one scale, which multiplies its whole sum.
MOE_HD constexpr bool scales_rows(W4Scheme s) { return s == W4Scheme::int8 || s == W4Scheme::fp8; }
/// Whether scales multiply the codes, as bf16.
MOE_HD constexpr bool scales_codes(W4Scheme s) { return is_e2m1(s) || s == W4Scheme::mxfp8; }
/// Whether scales multiply the sums of groups.
MOE_HD constexpr bool scales_sums(W4Scheme s) { return !scales_codes(s) && !scales_rows(s); }
/// Whether a float32 factor multiplies a row's whole sum: the scale of int8 and fp8, int4's power of two.
MOE_HD constexpr bool has_row_factors(W4Scheme s) { return !scales_codes(s); }
/// The experts policy of the scheme, for messages.
constexpr char const* policy_name(W4Scheme s) { return code_bits(s) == 8 ? "hopper_w8a16" : "hopper_w4a16"; }
/// Elements of K that share a scale; 0: a multiple of 64, chosen at run time. Not for scales_rows().
MOE_HD constexpr int scale_group(W4Scheme s) {
  return s == W4Scheme::int4 || s == W4Scheme::int4_zero ? 0 : s == W4Scheme::nvfp4 ? 16 : 32;
}
/// Groups whose sums are scaled apart, of the 64 of K of a brick.
MOE_HD constexpr int sum_groups(W4Scheme s) { return s == W4Scheme::int4_32 || s == W4Scheme::int4_32_zero ? 2 : 1; }

inline constexpr int kBrickRows = 64;
inline constexpr int kBrickDepth = 64;  ///< of K
inline constexpr int kTileBricks = 4;   ///< of a weight tile: 256 rows

MOE_HD constexpr int brick_code_bytes(W4Scheme s) { return kBrickRows * kBrickDepth * code_bits(s) / 8; }
/// Words of scales of one brick, without zero points.
MOE_HD constexpr int scale_words(W4Scheme s) { return scales_rows(s) ? 0 : s == W4Scheme::nvfp4 ? 64 : 32 * sum_groups(s); }
MOE_HD constexpr int brick_bytes(W4Scheme s) { return brick_code_bytes(s) + 4 * (scale_words(s) + (has_zero_points(s) ? 32 : 0)); }

/// Most rows of one tile: scaled sums need half as many registers again.
constexpr int most_rows(W4Scheme s) { return scales_sums(s) ? 80 : 128; }

/// The intermediate width that the layer computes with; the added features have zero weights.
constexpr int padded_intermediate(int intermediate) { return (intermediate + kBrickDepth - 1) / kBrickDepth * kBrickDepth; }

/// The floats of the factors of a matrix of `rows` packed rows.
MOE_HD constexpr std::int64_t factor_count(W4Scheme s, std::int64_t rows) { return has_row_factors(s) ? rows : 1; }
/// Bytes of the bricks of one matrix of `rows` (2I or H) by `cols`, both multiples of 64.
MOE_HD constexpr std::int64_t bricks_bytes(W4Scheme s, std::int64_t rows, std::int64_t cols) {
  return rows / kBrickRows * (cols / kBrickDepth) * brick_bytes(s);
}
/// The same with the factors of rows.
MOE_HD constexpr std::int64_t packed_bytes(W4Scheme s, std::int64_t rows, std::int64_t cols) {
  return bricks_bytes(s, rows, cols) + (has_row_factors(s) ? 4 * rows : 0);
}

/// y = (clamp(up, ±limit) + beta) · g σ(alpha g), g = min(gate, limit). alpha 1, beta 0, no limit: SwiGLU. gpt-oss: 1.702, 1, 7.
struct W4Activation {
  float alpha = 1.0F;
  float beta = 0.0F;
  float limit = std::numeric_limits<float>::infinity();
};

/// Any activation, chosen at run time, and on which side the router weight multiplies. It is compiled into kernels of its own.
struct W4AnyActivation {
  activation::Kind kind = activation::Kind::silu;
  activation::Constants constants{};
  bool weight_on_input = false;  ///< standard format: the router weight multiplies the expert's input instead of its output
};

/// The weights as checkpoints and WeightStore hold them, in device memory: rows of codes, low nibble first along K, or bytes; gate rows
/// before up rows. int8 and fp8: float32 scales [E, rows]; int4: float32 scales [E, rows, cols / group], with zero points {scale, zero}
/// pairs of float32; mxfp4 and mxfp8: exponent bytes [E, rows, cols / 32]; nvfp4: for each expert e4m3 bytes [rows, cols / 16], padded to a
/// multiple of 4, and its float32 scale. The constructor and weights_changed() read them; forward() reads only the biases.
struct W4Weights {
  std::uint8_t const* w13 = nullptr;  ///< [E, 2I, H / 2]; ungated [E, I, H / 2]; codes of 8 bits: H instead of H / 2
  std::uint8_t const* w2 = nullptr;   ///< [E, H, I / 2], of 8 bits [E, H, I]
  void const* w13_scales = nullptr;
  void const* w2_scales = nullptr;
  int w13_group = 32;          ///< elements of K that share a scale: scale_group(scheme), or a multiple of 64; not of int8 and fp8
  int w2_group = 32;           ///< the same of w2
  float const* b13 = nullptr;  ///< [E, 2I], ungated [E, I]; or null
  float const* b2 = nullptr;   ///< [E, H], or null; added before the router weight
  W4Packed packed{};           ///< if given, the weights are these, and codes and scales are not read
};

/// Of the intermediate width: half a brick whose codes are scaled can be padding, of codes with one scale per row any part.
constexpr int intermediate_multiple(W4Scheme s) { return scales_codes(s) ? kBrickDepth / 2 : scales_rows(s) ? 1 : kBrickDepth; }

namespace w4 {

/// E_CONFIG unless the sizes are such multiples and in range. Messages begin with `policy`.
inline void check_sizes(char const* policy, LocalShape const& s, W4Scheme scheme, int hidden_multiple, int intermediate_multiple) {
  auto const expect_multiple = [&](char const* what, int value, int multiple) {
    if (value < multiple || value % multiple != 0) {
      throw Error(ErrorCode::config, text(policy, ": ", what, " ", value, " must be a multiple of ", multiple, " in ", name(scheme),
                                          ". Pad it, or use the experts cuda_reference"));
    }
  };
  expect_multiple("hidden", s.hidden, hidden_multiple);
  expect_multiple("intermediate", s.intermediate, intermediate_multiple);
  if (s.num_experts < 1 || s.num_experts > 1024) {
    throw Error(ErrorCode::config, text(policy, ": ", s.num_experts, " local experts are out of range [1, 1024]"));
  }
  if (s.topk < 1) throw Error(ErrorCode::config, text(policy, ": topk ", s.topk, " must be at least 1"));
}
/// E_CONFIG unless the scales are for groups that the kernels can apply.
inline void check_groups(char const* policy, LocalShape const& s, W4Scheme scheme, W4Weights const& w) {
  if (scales_rows(scheme)) return;
  auto const group = [&](char const* what, int size, int cols) {
    int const fixed = scale_group(scheme);
    if (fixed != 0 ? size != fixed : size < kBrickDepth || size % kBrickDepth != 0 || cols % size != 0) {
      throw Error(ErrorCode::config,
                  text(policy, ": ", what, " has groups of ", size, " in ", cols, " columns, ", name(scheme), " needs ",
                       fixed != 0 ? text(fixed) : text("a multiple of 64 that divides them"), ". Use the experts cuda_reference"));
    }
  };
  group("w13", w.w13_group, s.hidden);
  group("w2", w.w2_group, s.intermediate);
}
/// E_ARG for null or misaligned weights.
inline void check_stored(char const* policy, W4Weights const& w) {
  if (w.packed.given()) {
    for (auto const& [what, pointer] : {std::pair<char const*, void const*>{"packed w13", w.packed.bricks[0]},
                                        {"packed w2", w.packed.bricks[1]},
                                        {"factors of w13", w.packed.factor[0]},
                                        {"factors of w2", w.packed.factor[1]}}) {
      if (pointer == nullptr || reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) {
        throw Error(ErrorCode::argument, text(policy, ": address ", pointer, " of ", what, " is null or not a multiple of 16 bytes"));
      }
    }
    return;
  }
  for (auto const& [what, pointer] :
       {std::pair<char const*, void const*>{"w13", w.w13}, {"w2", w.w2}, {"w13_scales", w.w13_scales}, {"w2_scales", w.w2_scales}}) {
    if (pointer == nullptr || reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) {
      throw Error(ErrorCode::argument, text(policy, ": address ", pointer, " of ", what, " is null or not a multiple of 16 bytes"));
    }
  }
}

}  // namespace w4

/// E_CONFIG unless the kernels can run these sizes and groups; E_ARG for null or misaligned weights.
inline void check_w4(LocalShape const& s, W4Scheme scheme, W4Weights const& w) {
  char const* const policy = policy_name(scheme);
  w4::check_sizes(policy, s, scheme, kBrickDepth, intermediate_multiple(scheme));
  w4::check_groups(policy, s, scheme, w);
  w4::check_stored(policy, w);
}

/// Byte offsets in the workspace of at most `max_tokens` tokens. Tiles are counted for the smallest tile, so any tile size fits.
struct W4Workspace {
  static constexpr int kMaxSplitUnits = 8192;
  static constexpr std::int64_t kPartialBytes = std::int64_t{32} << 20;
  std::int64_t slots = 0;
  std::int64_t max_tiles = 0;
  std::int64_t control = 0;
  std::int64_t tiles = 0;
  std::int64_t counters = 0;
  std::int64_t sorted_rows = 0;
  std::int64_t inter = 0;
  std::int64_t slot_rows = 0;
  std::int64_t partials = 0;
  std::int64_t bytes = 0;  ///< total
};

constexpr W4Workspace plan_w4_workspace(LocalShape const& s, int max_tokens) {
  W4Workspace w{};
  w.slots = std::int64_t{max_tokens} * s.topk;
  w.max_tiles = w.slots / 8 + 2 * s.num_experts + 2;
  std::int64_t at = 0;
  auto const take = [&at](std::int64_t bytes) {
    std::int64_t const here = at;
    at = (at + bytes + 1023) / 1024 * 1024;
    return here;
  };
  w.control = take(1024);
  w.tiles = take(w.max_tiles * 32);
  w.counters = take((w.max_tiles + 2 * W4Workspace::kMaxSplitUnits) * 4);
  w.sorted_rows = take((w.slots + 128) * 8);
  w.inter = take(w.slots * padded_intermediate(s.intermediate) * 2);
  w.slot_rows = take(s.topk > 1 ? w.slots * s.hidden * 2 : 0);
  w.partials = take(W4Workspace::kPartialBytes);
  w.bytes = at;
  return w;
}

/// The most rows in a tile of the middle one of the three kernels; the largest kernel does not split K.
constexpr int medium_rows(W4Scheme s) { return scales_sums(s) ? 32 : 64; }

/// Tile choices of the layer: rows of one expert in one tile, and the most parts of K.
struct W4Tuning {
  int tile_rows = 16;      ///< 8 to most_rows(scheme), a multiple of 8
  int max_splits = 16;     ///< used with tiles of 8, 16, 32 and, unless scales_sums(scheme), 64 rows
  int raster = 16;         ///< row tiles that are walked before the next weight tile
  bool one_token = false;  ///< the kernel for one token, where it takes the call
  friend bool operator==(W4Tuning const&, W4Tuning const&) = default;
};

constexpr W4Tuning choose_w4_tuning(LocalShape const& shape, W4Scheme scheme, int max_tokens) {
  W4Tuning t{};
  std::int64_t const slots = std::int64_t{max_tokens} * shape.topk;
  std::int64_t const rows = slots / (shape.num_experts > 0 ? shape.num_experts : 1);
  int const medium = medium_rows(scheme);
  // gpt-oss-120b, mxfp4, 8 rows an expert: tiles of 16 take 547 us, of 64 614 us; kimi-k2, int4, 5 rows: 16 2732 us, 32 2928 us, 80 3962
  // us, 21 rows: 16 5257 us, 32 4174 us, 80 4316 us.
  // One token of 352 million weights (kimi-k2) takes 74.5 us in its kernel and 71.2 in the layer kernel, of 100 million (gpt-oss-120b) 26.9
  // and 35.5: docs/log/w4.md.
  constexpr std::int64_t kMostWeights = 200'000'000;
  t.one_token = max_tokens == 1 && std::int64_t{3} * shape.topk * shape.hidden * shape.intermediate <= kMostWeights;
  t.tile_rows = rows <= 9 ? 16 : rows <= medium * 7 / 8 ? medium : most_rows(scheme);
  return t;
}

namespace w4 {
struct Params;
}  // namespace w4

/// Enqueues the layer kernel of one scheme on this number of multiprocessors.
using W4Launcher = void (*)(w4::Params const& params, int workers, CUstream_st* stream);
/// The launchers of a scheme: of W4Activation, of any activation, and of one product of rounded rows (rounded_rows.hpp). Defined in
/// experts/hopper/w4/launch.cuh, from which a program instantiates them or links them (moe_add_hopper_kernels).
template <W4Scheme S>
W4Launcher w4_launcher();
template <W4Scheme S>
W4Launcher w4_any_launcher();
template <W4Scheme S>
W4Launcher w4_rounded_launcher();

}  // namespace moe::hopper
