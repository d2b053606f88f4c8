// SPDX-License-Identifier: Apache-2.0
// backends/window/host/batch.hpp: common parts of batched host exchanges over a window: where rows were sent, the packed batches of the
// experts, the weighted sums.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "moe/backends/common/exchange_common.hpp"
#include "moe/core/buffer.hpp"

namespace moe::detail {

/// out[0, n) = Σ_i scale(i) · row(i)[0, n) over i in [0, terms), float32 in this order, one rounding; row(i) may be null.
template <class To, class Row, class Scale>
void sum_rows(std::int64_t terms, Row&& row, Scale&& scale, std::int64_t n, To* out) {
  std::array<float, 512> sum;
  for (std::int64_t begin = 0; begin < n; begin += static_cast<std::int64_t>(sum.size())) {
    std::int64_t const width = std::min(n - begin, static_cast<std::int64_t>(sum.size()));
    sum.fill(0.0F);
    for (std::int64_t i = 0; i < terms; ++i) {
      auto const* const from = row(i);
      if (from == nullptr) {
        continue;
      }
      float const factor = scale(i);
      for (std::int64_t h = 0; h < width; ++h) {
        sum[static_cast<std::size_t>(h)] += factor * to_float(from[begin + h]);
      }
    }
    convert_row(sum.data(), width, out + begin);
  }
}

/// Row t times the token's only weight, rounded, into `scaled`.
template <class Act, int Hidden>
Act const* weighted_row(RoutedTokens<Act, Hidden> const& in, std::int64_t t, Act* scaled) {
  Act const* const row = row_ptr(in.hidden, t);
  float const w = in.topk_weights(t, 0);
  for (std::int64_t h = 0; h < in.hidden.extent(1); ++h) {
    scaled[h] = from_float<Act>(w * to_float(row[h]));
  }
  return scaled;
}

/// A quantised row with `words` 32-bit words: payload, scales, words, each at a multiple of kAlignment.
template <class Config, class Quant>
class BatchMessage {
 public:
  using Act = typename Config::Act;
  using Payload = typename Quant::template Payload<Act>;
  using Scale = typename Quant::Scale;
  static_assert(kAlignment % sizeof(Payload) == 0 && kAlignment % sizeof(Scale) == 0);

  /// `words`: 32-bit words behind the row.
  BatchMessage(std::int64_t hidden, std::int64_t words)
      : hidden_(hidden),
        scales_at_(aligned(Quant::payload_cols(hidden) * static_cast<std::int64_t>(sizeof(Payload)))),
        words_at_(scales_at_ + aligned(Quant::scale_cols(hidden) * static_cast<std::int64_t>(sizeof(Scale)))),
        bytes_(words_at_ + aligned(words * 4)) {}
  std::int64_t bytes() const { return bytes_; }
  /// Bytes of payload and scales, which copies of one token share.
  std::int64_t row_bytes() const { return words_at_; }
  std::int32_t* words(std::byte* message) const { return reinterpret_cast<std::int32_t*>(message + words_at_); }
  std::int32_t const* words(std::byte const* message) const { return reinterpret_cast<std::int32_t const*>(message + words_at_); }
  void pack(Quant const& quant, Act const* row, std::byte* message) const {
    quant.template quantize_row<Act>(row, hidden_, reinterpret_cast<Payload*>(message), reinterpret_cast<Scale*>(message + scales_at_));
  }
  void unpack(std::byte const* message, Payload* payload, Scale* scales) const {
    std::copy_n(reinterpret_cast<Payload const*>(message), Quant::payload_cols(hidden_), payload);
    std::copy_n(reinterpret_cast<Scale const*>(message + scales_at_), Quant::scale_cols(hidden_), scales);
  }

 private:
  static std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
  std::int64_t hidden_;
  std::int64_t scales_at_;
  std::int64_t words_at_;
  std::int64_t bytes_;
};

/// One dispatch on this rank: what it sent, and the batches that it received for its experts. Two per buffer set, used alternately.
template <class Config, class Quant, class Partial>
class BatchRecord : public DispatchRecord {
 public:
  using Act = typename Config::Act;
  using Payload = typename Quant::template Payload<Act>;
  using Scale = typename Quant::Scale;
  using Tokens = BatchedTokensOf<Config, Quant>;

  /// Where to return the output of a batch row.
  struct Origin {
    std::int32_t rank;
    std::int32_t entry;  ///< of `returned`
  };

  void take(std::int64_t hidden, std::int64_t topk, std::int64_t max_tokens, std::int64_t num_local, std::int64_t capacity,
            std::int64_t received_records, Arena<space::host>& arena, bool own_output = true) {
    hidden_ = hidden;
    topk_ = topk;
    num_local_ = num_local;
    capacity_ = capacity;
    weights = arena.take<float>(max_tokens * topk);
    entries = arena.take<std::int32_t>(max_tokens * topk);
    ranks = arena.take<std::int32_t>(max_tokens * topk);
    std::int64_t const rows = num_local * capacity;
    payload_ = arena.take<Payload>(rows * Quant::payload_cols(hidden));
    scales_ = arena.take<Scale>(rows * Quant::scale_cols(hidden));
    output_ = own_output ? arena.take<Partial>(rows * hidden) : nullptr;
    origins = arena.take<Origin>(rows);
    counts = arena.take_filled<std::int32_t>(num_local, 0);
    record_rows = arena.take<std::int32_t>(received_records * topk);
    record_weights = arena.take<float>(received_records * topk);
    record_origins = arena.take<Origin>(received_records);
  }

  /// Stores the weights of this rank's rows; 1 if they were applied to the input.
  void take_weights(Rows<float const> given, bool on_input) const {
    for (std::int64_t t = 0; t < rows; ++t) {
      for (std::int64_t j = 0; j < topk_; ++j) {
        weights[t * topk_ + j] = on_input ? 1.0F : given(t, j);
      }
    }
  }
  /// Sets where the outputs lie, if not in the dispatch record's own memory.
  void set_output(Partial* output) { output_ = output; }
  Tokens tokens() const {
    return {make_blocks(static_cast<Payload const*>(payload_), num_local_, capacity_, Quant::payload_cols(hidden_)),
            make_blocks(static_cast<Scale const*>(scales_), num_local_, capacity_, Quant::scale_cols(hidden_)),
            make_vector(static_cast<std::int32_t const*>(counts), num_local_)};
  }
  Blocks<Partial> output() const { return make_blocks(output_, num_local_, capacity_, hidden_); }
  Partial* output_row(std::int64_t row) const { return output_ + row * hidden_; }
  Payload* payload_row(std::int64_t row) const { return payload_ + row * Quant::payload_cols(hidden_); }
  Scale* scale_row(std::int64_t row) const { return scales_ + row * Quant::scale_cols(hidden_); }
  /// The next free row of expert `e`'s batch, as an index into all batches.
  std::int64_t append(std::int32_t e) const { return e * capacity_ + counts[e]++; }

  std::uint32_t round = 0;              ///< of the operation in progress
  std::int64_t rows = 0;                ///< tokens of this rank
  float* weights = nullptr;             ///< [T_max, k]
  std::int32_t* entries = nullptr;      ///< [T_max, k] the entry of `returned` that a choice uses (of the first with its expert), or -1
  std::int32_t* ranks = nullptr;        ///< [T_max, k] the rank that the row of that choice was sent to
  Origin* origins = nullptr;            ///< [L C]
  std::int32_t* counts = nullptr;       ///< [L]
  std::int64_t num_records = 0;         ///< deduplicated: rows received
  std::int32_t* record_rows = nullptr;  ///< [records, k] rows among all batches, or -1
  float* record_weights = nullptr;      ///< [records, k]
  Origin* record_origins = nullptr;     ///< [records]

 private:
  std::int64_t hidden_ = 0;
  std::int64_t topk_ = 0;
  std::int64_t num_local_ = 0;
  std::int64_t capacity_ = 0;
  Payload* payload_ = nullptr;
  Scale* scales_ = nullptr;
  Partial* output_ = nullptr;
};

}  // namespace moe::detail
