// SPDX-License-Identifier: Apache-2.0
// backends/window/host/low_latency_returns.hpp: how an expert output returns through a host window: plain, coded, or as a row index.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "moe/backends/common/combine_format.hpp"
#include "moe/backends/window/host/batch.hpp"

namespace moe::detail {

/// Coded: headers, then codes. Zero copy: an i32, the row at the expert's rank.
template <class Partial>
class ReturnedOutputs {
 public:
  ReturnedOutputs() = default;
  ReturnedOutputs(CombineFormat format, bool zero_copy, std::int64_t hidden, std::int64_t topk, Arena<space::host>& arena)
      : format_(format), zero_copy_(zero_copy), hidden_(hidden) {
    if (zero_copy) {
      bytes_ = 4;
    } else if (format == CombineFormat::plain) {
      bytes_ = hidden * static_cast<std::int64_t>(sizeof(Partial));
    } else {
      bytes_ = 4 * combine_groups(hidden) + (combine_row_bytes(format, hidden) + 3) / 4 * 4;
      sum_ = arena.take<Partial>(hidden);
      decoded_ = arena.take<float>(topk * hidden);
    }
  }
  /// Bytes of one returned output.
  std::int64_t bytes() const { return bytes_; }

  /// Stores an output to `to`; `row` is its row at the expert's rank.
  void store(Partial const* output, std::int64_t row, std::byte* to) const {
    if (zero_copy_) {
      *reinterpret_cast<std::int32_t*>(to) = static_cast<std::int32_t>(row);
    } else if (format_ == CombineFormat::plain) {
      std::copy_n(output, hidden_, reinterpret_cast<Partial*>(to));
    } else {
      encode_row(format_, output, hidden_, to + 4 * combine_groups(hidden_), reinterpret_cast<std::uint32_t*>(to));
    }
  }
  /// Stores sum_rows() of this rank's expert outputs.
  template <class Row, class Scale>
  void store_sum(std::int64_t terms, Row&& row, Scale&& scale, std::byte* to) const {
    if (format_ == CombineFormat::plain) {
      sum_rows(terms, row, scale, hidden_, reinterpret_cast<Partial*>(to));
    } else {
      sum_rows(terms, row, scale, hidden_, sum_);
      store(sum_, 0, to);
    }
  }
  /// sum_rows() of what store() wrote: at(j) is null if term j was not returned; zero copy reads the row at at_owner(j, row).
  template <class At, class AtOwner, class Scale, class Out>
  void sum(std::int64_t terms, At&& at, AtOwner&& at_owner, Scale&& scale, Out* out) const {
    if (format_ == CombineFormat::plain) {
      auto row = [&](std::int64_t j) {
        std::byte const* const from = at(j);
        return from == nullptr || !zero_copy_ ? reinterpret_cast<Partial const*>(from)
                                              : at_owner(j, *reinterpret_cast<std::int32_t const*>(from));
      };
      sum_rows(terms, row, scale, hidden_, out);
      return;
    }
    std::array<float const*, kMaxTopK> rows{};
    for (std::int64_t j = 0; j < terms; ++j) {
      if (std::byte const* const from = at(j); from != nullptr) {
        float* const decoded = decoded_ + j * hidden_;
        decode_row(format_, from + 4 * combine_groups(hidden_), reinterpret_cast<std::uint32_t const*>(from), hidden_, decoded);
        rows[static_cast<std::size_t>(j)] = decoded;
      }
    }
    sum_rows(terms, [&](std::int64_t j) { return rows[static_cast<std::size_t>(j)]; }, scale, hidden_, out);
  }

 private:
  CombineFormat format_ = CombineFormat::plain;
  bool zero_copy_ = false;
  std::int64_t hidden_ = 0;
  std::int64_t bytes_ = 0;
  Partial* sum_ = nullptr;    // [H]
  float* decoded_ = nullptr;  // [k, H]
};

}  // namespace moe::detail
