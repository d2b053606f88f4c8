// SPDX-License-Identifier: Apache-2.0
// backends/common/wire_row.hpp: one token as it travels between ranks, in the layout that the experts read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe/core/tokens.hpp"

namespace moe::detail {

/// A record of bytes per token: payload, scales, top-k weights, ids, each starting at a multiple of kAlignment. A token's data travels in
/// one piece; the arrays that the experts get are views whose row stride is the record's length.
template <class Config, class Quant>
class WireRow {
 public:
  using Act = typename Config::Act;
  using Payload = typename Quant::template Payload<Act>;
  using Scale = typename Quant::Scale;
  using Tokens = StandardTokensOf<Config, Quant>;
  static_assert(kAlignment % sizeof(Payload) == 0 && kAlignment % sizeof(Scale) == 0);

  WireRow(std::int64_t hidden, std::int64_t topk)
      : hidden_(hidden),
        topk_(topk),
        scales_at_(aligned(Quant::payload_cols(hidden) * static_cast<std::int64_t>(sizeof(Payload)))),
        weights_at_(scales_at_ + aligned(Quant::scale_cols(hidden) * static_cast<std::int64_t>(sizeof(Scale)))),
        ids_at_(weights_at_ + aligned(topk * static_cast<std::int64_t>(sizeof(float)))),
        bytes_(ids_at_ + aligned(topk * static_cast<std::int64_t>(sizeof(std::int32_t)))) {}

  /// Bytes of one record.
  MOE_HD std::int64_t bytes() const { return bytes_; }
  MOE_HD std::int64_t hidden() const { return hidden_; }
  MOE_HD std::int64_t topk() const { return topk_; }
  /// The parts of a record: payload, scales, k weights, k ids.
  MOE_HD Payload* payload(std::byte* record) const { return reinterpret_cast<Payload*>(record); }
  MOE_HD Scale* scales(std::byte* record) const { return reinterpret_cast<Scale*>(record + scales_at_); }
  MOE_HD float* weights(std::byte* record) const { return reinterpret_cast<float*>(record + weights_at_); }
  MOE_HD std::int32_t* ids(std::byte* record) const { return reinterpret_cast<std::int32_t*>(record + ids_at_); }

  /// Writes row t of `in`, quantised, with its weights; the caller writes the ids.
  template <int Hidden>
  void pack(Quant const& quant, RoutedTokens<Act, Hidden> const& in, std::int64_t t, std::byte* record) const {
    quant.template quantize_row<Act>(row_ptr(in.hidden, t), hidden_, payload(record), scales(record));
    for (std::int64_t j = 0; j < topk_; ++j) {
      weights(record)[j] = in.topk_weights(t, j);
    }
  }

  /// `rows` records, null if there are none, as the experts read them.
  Tokens tokens(std::byte const* records, std::int64_t rows) const {
    return {view<Payload>(records, 0, rows, Quant::payload_cols(hidden_)),
            view<Scale>(records, scales_at_, rows, Quant::scale_cols(hidden_)), view<std::int32_t>(records, ids_at_, rows, topk_),
            view<float>(records, weights_at_, rows, topk_)};
  }

 private:
  static std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
  template <class T>
  Rows<T const> view(std::byte const* records, std::int64_t at, std::int64_t rows, std::int64_t cols) const {
    std::byte const* const first = records == nullptr ? nullptr : records + at;
    return make_strided_rows(reinterpret_cast<T const*>(first), rows, cols, bytes_ / static_cast<std::int64_t>(sizeof(T)));
  }

  std::int64_t hidden_;
  std::int64_t topk_;
  std::int64_t scales_at_;
  std::int64_t weights_at_;
  std::int64_t ids_at_;
  std::int64_t bytes_;
};

}  // namespace moe::detail
