// SPDX-License-Identifier: Apache-2.0
// core/tokens.hpp: what router, backend and experts pass to each other. All arrays are views in the composition's memory space.
#pragma once

#include <cstdint>

#include "moe/core/array.hpp"

namespace moe {

/// What a rank passes to prepare(): its own tokens and their routing.
template <class Act, int Hidden = dynamic>
struct RoutedTokens {
  Rows<Act const, Hidden> hidden;     ///< [M, H]
  Rows<std::int32_t const> topk_ids;  ///< [M, k] physical ids, or kNoExpert
  Rows<float const> topk_weights;     ///< [M, k]
  /// device: number of valid rows (at most M) if only the device knows it; null: all rows. For exchanges that take one (kTakesRowCount).
  std::int32_t const* num_rows = nullptr;
  bool experts_skip_foreign_ids = false;  ///< the experts look at ids of [0, L) only: on one rank ids need no change
};

/// Tokens as the experts read them, standard format: one row per token that has work on this rank (and possibly rows that have none).
template <class Payload, class Scale>
struct StandardTokens {
  Rows<Payload const> rows;                ///< [R, payload_cols(H)] in the quantisation's payload type
  Rows<Scale const> scales;                ///< [R, scale_cols(H)]; 0 columns if the scheme has none
  Rows<std::int32_t const> topk_ids;       ///< [R, k] **local** ids on this rank, or kNoExpert
  Rows<float const> topk_weights;          ///< [R, k]
  std::int32_t const* num_rows = nullptr;  ///< device: number of valid rows if only the device knows it; null: all rows
};

/// Tokens as the experts read them, batched format: a block of rows per local expert.
template <class Payload, class Scale>
struct BatchedTokens {
  Blocks<Payload const> rows;                    ///< [L, C, payload_cols(H)]
  Blocks<Scale const> scales;                    ///< [L, C, scale_cols(H)]
  Vector<std::int32_t const> expert_num_tokens;  ///< [L] valid rows of each block; rows past them are undefined and may be NaN
  /// [L, C], or no rows. If given, row i of block e is row gather(e, i) of `rows`, with the rows of all blocks numbered in order; `rows`
  /// may then have fewer than L blocks. Device exchanges only.
  Rows<std::int32_t const> gather = {};
  /// The most rows of a block, C.
  MOE_HD std::int64_t capacity() const { return gather.extent(0) > 0 ? gather.extent(1) : rows.extent(1); }
};

/// One weight matrix of every local expert: codes of the quantisation's weight type with their scales, and an optional bias.
template <class Code, class Scale>
struct ExpertMatrix {
  Blocks<Code const> codes;  ///< [L, rows, weight_code_cols(cols)], row-major, [out, in]
  Rows<Scale const> scales;  ///< [L, weight_scale_count(rows, cols)]; 0 columns if the scheme has none
  Rows<float const> bias;    ///< [L, rows], or 0 rows
  std::int64_t rows = 0;     ///< output width
  std::int64_t cols = 0;     ///< input width, unpacked
  bool has_bias() const { return bias.extent(0) > 0; }
};

/// The norm of an expert's output y, one for all experts of a layer: s·y / sqrt(mean((s·y)²) + eps), before the router's weight.
/// Muse-Spark: MuseSparkExperts.post_expert_norm, a MuseSparkTextInputScaledRMSNorm of transformers 5.23
/// (models/muse_spark/modeling_muse_spark.py), whose parameter is s - 1.
struct ExpertNormWeights {
  Vector<float const> scale = {};  ///< [H] s; no elements: outputs are not normalised
  float eps = 0.0F;
  bool given() const { return scale.extent(0) > 0; }
};

/// Experts in the layout of one experts policy, packed before the layer is constructed (the store of
/// experts::StoreFor, experts/hopper/packed_store.hpp), in the layer's space. Codes and scales are then null, with their usual extents.
struct PackedExperts {
  char const* policy = nullptr;  ///< kName of the experts that read it; null: the weights are codes and scales
  std::uint8_t* bricks[2] = {};  ///< [L, …] of w13, of w2
  float* factors[2] = {};        ///< [L, …] of w13, of w2
  bool given() const { return policy != nullptr; }
};

/// The weights of this rank's experts. w13 holds the gate rows, then the up rows (2I rows); an ungated expert has I rows.
template <class Code, class Scale>
struct ExpertWeights {
  ExpertMatrix<Code, Scale> w13;   ///< [L, 2I or I, H]
  ExpertMatrix<Code, Scale> w2;    ///< [L, H, I]
  std::int64_t unset_expert = -1;  ///< a local expert whose weights the owner of the memory was never given, or -1. Layers refuse it
  ExpertNormWeights norm = {};     ///< equal on all ranks
  PackedExperts packed = {};       ///< in place of codes and scales
};

/// The weight view that a composition of Config and Quant takes.
template <class Config, class Quant>
using WeightsOf = ExpertWeights<typename Quant::template WeightCode<typename Config::Weight>, typename Quant::WeightScale>;
template <class Config, class Quant>
using StandardTokensOf = StandardTokens<typename Quant::template Payload<typename Config::Act>, typename Quant::Scale>;
template <class Config, class Quant>
using BatchedTokensOf = BatchedTokens<typename Quant::template Payload<typename Config::Act>, typename Quant::Scale>;

}  // namespace moe
