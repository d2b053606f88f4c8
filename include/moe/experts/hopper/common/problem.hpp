// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/problem.hpp: a problem for the Hopper expert kernels: sizes, device pointers, tile choices. Plain host C++.
#pragma once

#include <cstdint>
#include <limits>
#include <ostream>

#include "moe/activation/activation.hpp"
#include "moe/core/error.hpp"

namespace moe::comm {
struct Arrivals;     // comm/arrivals.hpp
struct Completions;  // comm/completions.hpp
}  // namespace moe::comm

namespace moe::hopper {

/// Number format of weights and activations.
enum class Scheme : std::uint8_t {
  bf16,       ///< bf16 × bf16
  f16,        ///< fp16 × fp16
  fp8_block,  ///< e4m3 × e4m3, activations scaled per 1×128, weights per 128×128, promoted to float32 every 128 of K
  fp8_row,    ///< e4m3 × e4m3, one scale per activation row and per weight row (or one each); promoted likewise
  int8_row    ///< int8 × int8, one scale per activation row (or one for all) and per weight row; exact int32 sums
};

constexpr bool is_fp8(Scheme s) { return s == Scheme::fp8_block || s == Scheme::fp8_row; }
/// One scale for a whole row of activations. The scale of a row of the intermediate is known only once all its columns are.
constexpr bool is_row_scaled(Scheme s) { return s == Scheme::fp8_row || s == Scheme::int8_row; }
/// Elements have scales.
constexpr bool is_scaled(Scheme s) { return is_fp8(s) || s == Scheme::int8_row; }
/// Bytes of an element of the operands.
constexpr int element_bytes(Scheme s) { return is_scaled(s) ? 1 : 2; }
constexpr char const* name(Scheme s) {
  switch (s) {
    case Scheme::bf16: return "bf16";
    case Scheme::f16: return "f16";
    case Scheme::fp8_block: return "fp8_block";
    case Scheme::fp8_row: return "fp8_row";
    case Scheme::int8_row: return "int8_row";
  }
  return "?";
}

/// Most rows of one tile, limited by registers. The tensor cores add fp8 products with about 14 bits, so these sums are promoted to
/// float32, which takes half as many registers again. Sums in int8 are exact; the scales after them take registers too.
constexpr int most_rows(Scheme s) { return is_fp8(s) ? 80 : s == Scheme::int8_row ? 128 : 160; }
template <Scheme S>
inline constexpr int kMostRows = most_rows(S);

/// fp8_block, kernels that plan for themselves: with tiles of at most this many rows they quantise x while loading it; with larger tiles
/// every CTA quantises all of x first.
inline constexpr int kQuantizingRows = 16;
inline constexpr int kBlockRows = 128;  ///< rows of a tile of the kernel for block-scaled fp8 with many rows per expert

inline constexpr int kSharedMemoryLimit = 232448;  ///< of one thread block on sm_90
inline constexpr int kUnitEntries = 8;  ///< more than a ring's stages: one CTA of a cluster is never this many units ahead of the other

/// Throws E_UNSUPPORTED unless the compute capability is 9.0; the message names the device and what to use instead.
inline void check_device(int device, char const* device_name, int major, int minor) {
  if (major != 9 || minor != 0) {
    throw Error(ErrorCode::unsupported, text("hopper experts: they are built for compute capability 9.0 (sm_90a), device ", device, " (",
                                             device_name, ") has ", major, ".", minor, ". Use the experts cuda_reference"));
  }
}

/// H and I must be multiples of these: rows of 16 bytes, and with block scales no block with both gate and up rows. The rest
/// of a tile is zero: the copy engine and the gathering loader fill it with zeros, and nothing past the end is stored.
constexpr int hidden_multiple(Scheme s) { return 16 / element_bytes(s); }
constexpr int intermediate_multiple(Scheme s) { return s == Scheme::fp8_block ? 128 : 16 / element_bytes(s); }
/// H and I are at most this. int8_row: the largest K whose int32 sum cannot overflow, in multiples of 16, since 128 · 128 · 2^17 = 2^31.
constexpr int most_columns(Scheme s) { return s == Scheme::int8_row ? (1 << 17) - 16 : std::numeric_limits<int>::max(); }

/// Sizes of one layer on this rank.
struct LocalShape {
  int num_experts;   ///< local experts, E
  int hidden;        ///< H, a multiple of hidden_multiple(scheme)
  int intermediate;  ///< I, a multiple of intermediate_multiple(scheme)
  int topk;          ///< slots per token; 1 for rows that are already token-expert pairs
  friend bool operator==(LocalShape const&, LocalShape const&) = default;
};

/// Choices that change speed but not results (except the order of float32 sums under split-K). Printable and comparable.
struct Tuning {
  int tile_rows = 160;      ///< most rows of one expert in one tile, a multiple of 8, at most 160; int8: 128; fp8: 80, fp8_block also 128
  int max_splits = 16;      ///< most parts of K if there are fewer tiles than multiprocessors; tiles of 8, 16, 32, 64 or 96
  int raster = 16;          ///< row tiles that are walked before the next weight tile, for reuse of weights in L2
  int cluster = 1;          ///< CTAs that share what they load through multicast: 1, or 2 with the most rows a tile (fp8: 128)
  bool self_align = false;  ///< up to 128 slots: every CTA sorts the slots itself, so that no kernel runs before the products
  bool one_token = false;   ///< one token: both products as matrix-vector products, in one kernel
  /// 1 to 8: GEMM2 in at most so many blocks of columns, and the sums over the slots in its kernel. E_ARG if the layer lacks those kernels;
  /// launcher_with_columns() has them in bf16 and fp8_block. A call has no blocks, and the same bits, with topk 1; in bf16 also with tiles
  /// of up to 64 rows; in fp8_block with tiles of up to 80 rows, biases, weights on the input, or a hidden size that is no multiple of 128.
  int column_blocks = 0;
  friend bool operator==(Tuning const&, Tuning const&) = default;
  friend std::ostream& operator<<(std::ostream& out, Tuning const& t) {
    return out << "Tuning{tile_rows " << t.tile_rows << ", max_splits " << t.max_splits << ", raster " << t.raster << ", cluster "
               << t.cluster << ", self_align " << t.self_align << ", one_token " << t.one_token << ", column_blocks " << t.column_blocks
               << "}";
  }
};

/// Whether every kernel has exactly this number of columns. Tiles whose K is split need that: the parts of their sums are stored back to
/// back.
constexpr bool is_column_count(int tile_rows) { return tile_rows <= 16 ? tile_rows % 8 == 0 : tile_rows % 32 == 0; }

/// What the layer does in addition to its two products.
struct LayerOptions {
  activation::Kind activation = activation::Kind::silu;
  activation::Constants constants{};
  bool weight_on_input = false;         ///< the router weight multiplies the expert's input instead of its output (Llama-4)
  float static_scale = 0.0F;            ///< fp8_row, int8_row: if positive, the scale of x and of the intermediate; else one per row
  float scale_floor = 1e-10F / 448.0F;  ///< fp8, int8: smallest scale of a group or row of the intermediate
  float amax_bound = std::numeric_limits<float>::max();  ///< fp8_row: larger magnitudes of the intermediate saturate
  int workers = 0;                                       ///< multiprocessors to use at most; 0: all
  bool batch_invariant = false;  ///< a row's bits do not depend on the other rows: one kernel for any number of rows, K is never cut
};

/// One call. Every pointer is device memory; arrays are row-major and 16-byte aligned.
struct LayerCall {
  void const* x = nullptr;                   ///< [M, H] bf16 or fp16; fp8, int8: codes, or bf16 (fp8_block without x_scales)
  std::int64_t x_stride = 0;                 ///< elements between rows of x; 0: H
  float const* x_scales = nullptr;           ///< fp8_block: [M, H / 128], last group maybe shorter; row-scaled: [M]; or null, see x
  std::int64_t x_scale_stride = 0;           ///< between rows of x_scales; 0: packed
  std::int32_t const* gather = nullptr;      ///< batched: [M] the row of x that each row reads, or null: row i reads row i
  std::int32_t const* topk_ids = nullptr;    ///< [M, k] local expert ids; outside [0, E): the slot is not computed
  std::int64_t id_stride = 0;                ///< elements between rows of topk_ids; 0: k
  float const* topk_weights = nullptr;       ///< [M, k]
  std::int64_t weight_stride = 0;            ///< between rows of topk_weights; 0: k
  std::int32_t const* num_tokens = nullptr;  ///< [1] number of valid tokens, at most M, or null for all M
  void* out = nullptr;                       ///< [M, H] bf16 or fp16; every row up to *num_tokens is written
  int max_tokens = 0;                        ///< M
  /// bf16, fp16, or fp8_block with x_scales: rows of x, and their scales, are still coming. x, its ids and weights, or its batches, are
  /// what the counts are of.
  comm::Arrivals const* arrivals = nullptr;
  /// The words that tell other kernels which columns of `out` are complete. Calls that may have blocks of columns (Tuning::column_blocks;
  /// here also with topk 1) write them block by block, in the blocks given here. Other calls, also those with max_tokens 0, write all of
  /// them behind their last kernel. The kernel after a call in the stream may begin before the call ends; it must then wait for that end.
  comm::Completions const* completions = nullptr;
};

/// Elements between rows of k; E_ARG for an impossible stride.
inline int slot_gap(std::int64_t stride, int topk) {
  if (stride != 0 && (stride < topk || stride - topk > std::numeric_limits<std::int32_t>::max())) {
    throw Error(ErrorCode::argument, text("hopper experts: row stride ", stride, " of topk_ids or topk_weights, k is ", topk));
  }
  return stride == 0 ? 0 : static_cast<int>(stride - topk);
}

/// Row limits of the buffers for at most `max_tokens` tokens.
struct Workspace {
  static constexpr int kMaxSplitUnits = 8192;
  std::int64_t slots;      ///< M·k
  std::int64_t max_tiles;  ///< token tiles
  std::int64_t control;    ///< byte offsets of the parts
  std::int64_t tiles;
  std::int64_t counters;
  std::int64_t sorted_rows;
  std::int64_t x_codes;
  std::int64_t x_scales;
  std::int64_t positions;
  std::int64_t inter;
  std::int64_t inter_wide;
  std::int64_t inter_scales;
  std::int64_t slot_rows;
  std::int64_t partials;
  std::int64_t bytes;  ///< total
  static constexpr std::int64_t kPartialBytes = std::int64_t{32} << 20;
};

/// The distance from the scales of one block of columns to those of the next, with rows as the inner dimension: whole 16 bytes for tensor
/// maps.
constexpr std::int64_t scale_stride(std::int64_t rows) { return (rows + 3) / 4 * 4; }

/// Row-scaled: bytes of an element of the intermediate before its scale is known. Codes of int8 have as many bits as bf16's mantissa, so a
/// value rounded to bf16 before would often get the neighbouring code.
constexpr int wide_bytes(Scheme s) { return s == Scheme::int8_row ? 4 : 2; }

constexpr Workspace plan_workspace(LocalShape const& s, Scheme scheme, int max_tokens, int tile_rows) {
  auto const align = [](std::int64_t v) { return (v + 1023) / 1024 * 1024; };
  Workspace w{};
  w.slots = std::int64_t{max_tokens} * s.topk;
  w.max_tiles = w.slots / tile_rows + 2 * s.num_experts + 2;
  std::int64_t const element = element_bytes(scheme);
  std::int64_t at = 0;
  auto const take = [&](std::int64_t bytes) {
    std::int64_t const here = at;
    at = align(at + bytes);
    return here;
  };
  w.control = take(1024);
  w.tiles = take(w.max_tiles * 32);
  w.counters = take((w.max_tiles + 2 * Workspace::kMaxSplitUnits) * 4);
  w.sorted_rows = take((w.slots + 128) * 8);
  bool const block = scheme == Scheme::fp8_block;
  w.x_codes = take(block ? w.slots * s.hidden : 0);  // of tokens, or of slots in the sorted order
  w.x_scales = take(block ? scale_stride(w.slots) * (s.hidden / 128) * 4 : 0);
  w.positions = take(block ? w.slots * 4 : 0);
  w.inter = take(w.slots * s.intermediate * element);
  w.inter_wide = take(is_row_scaled(scheme) ? w.slots * s.intermediate * wide_bytes(scheme) : 0);
  w.inter_scales = take(is_scaled(scheme) ? scale_stride(w.slots) * (block ? s.intermediate / 128 : 1) * 4 : 0);
  w.slot_rows = take(s.topk > 1 ? w.slots * s.hidden * 2 : 0);
  w.partials = take(Workspace::kPartialBytes);
  w.bytes = at;
  return w;
}

}  // namespace moe::hopper
