// SPDX-License-Identifier: Apache-2.0
// backends/common/exchange_common.hpp: what all host exchanges share: checks of the arguments, expert ids, quantising and rounding of rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "moe/backends/common/handle_table.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/space.hpp"
#include "moe/core/tokens.hpp"
#include "moe/parallel/placement.hpp"

namespace moe::backends {

/// How many rows a device exchange over a Communicator moves; a host exchange always moves only the needed rows.
enum class Sizes : std::uint8_t {
  automatic,  ///< fixed where kMaxFixedBytes allows, else exact
  exact,      ///< only the needed rows: the host waits, with the deadline, for each dispatch's counts. Cannot be captured in a graph
  fixed,      ///< max_tokens_per_rank between each two ranks: no count reaches the host. Can be captured in a graph
};
/// `automatic` means `fixed` if the rows that a rank then receives in one dispatch take at most this many bytes: moving them takes about as
/// long as one wait of the host.
inline constexpr std::int64_t kMaxFixedBytes = std::int64_t{8} << 20;

}  // namespace moe::backends

namespace moe::detail {

/// Debug builds report an expert id out of range as E_ARG; release builds treat it as kNoExpert.
#ifdef NDEBUG
inline constexpr bool kChecksIds = false;
#else
inline constexpr bool kChecksIds = true;
#endif

/// If the payload of a scheme is the activation type itself, with as many columns and no scales, rows need no quantising.
template <class Quant, class Act>
bool stores_rows_unchanged(std::int64_t hidden) {
  return std::is_same_v<typename Quant::template Payload<Act>, Act> && Quant::payload_cols(hidden) == hidden &&
         Quant::scale_cols(hidden) == 0;
}

inline void expect_equal(char const* what, std::int64_t value, std::int64_t wanted) {
  if (value != wanted) {
    throw Error(ErrorCode::argument, text(what, ": ", value, ", expected ", wanted));
  }
}
inline void expect_data(char const* what, void const* data, std::int64_t rows) {
  if (rows > 0 && data == nullptr) {
    throw Error(ErrorCode::argument, text(what, ": null pointer for ", rows, " rows"));
  }
}

/// Checks the arguments of prepare() without looking at the ids. E_ARG, or E_CAPACITY for more than max_tokens rows.
template <class Act, int Hidden>
void check_routed_tokens(RoutedTokens<Act, Hidden> const& in, std::int64_t hidden, int topk, std::int64_t max_tokens) {
  std::int64_t const rows = in.hidden.extent(0);
  expect_data("hidden_states", in.hidden.data_handle(), rows);
  expect_data("topk_ids", in.topk_ids.data_handle(), rows);
  expect_data("topk_weights", in.topk_weights.data_handle(), rows);
  expect_equal("hidden_states: width", in.hidden.extent(1), hidden);
  expect_equal("topk_ids: rows", in.topk_ids.extent(0), rows);
  expect_equal("topk_ids: width", in.topk_ids.extent(1), topk);
  expect_equal("topk_weights: rows", in.topk_weights.extent(0), rows);
  expect_equal("topk_weights: width", in.topk_weights.extent(1), topk);
  if (rows > max_tokens) {
    throw Error(ErrorCode::capacity, text("hidden_states: ", rows, " rows exceed max_tokens_per_rank ", max_tokens));
  }
}

/// In debug builds E_ARG naming the first slot whose id is neither in [0, num_physical) nor kNoExpert.
inline void check_ids(Rows<std::int32_t const> ids, int num_physical) {
  if constexpr (kChecksIds) {
    for (std::int64_t t = 0; t < ids.extent(0); ++t) {
      for (std::int64_t j = 0; j < ids.extent(1); ++j) {
        std::int32_t const id = ids(t, j);
        if (id < kNoExpert || id >= num_physical) {
          throw Error(ErrorCode::argument,
                      text("topk_ids: ", id, " in slot (", t, ", ", j, ") is out of range [0, ", num_physical, ") and is not -1"));
        }
      }
    }
  }
}

/// Checks the arguments of finalize(): `out` must be [rows, hidden], with the number of rows that prepare() got.
template <class View>
void check_output(View const& out, std::int64_t rows, std::int64_t hidden) {
  expect_equal("output: rows", out.extent(0), rows);
  expect_equal("output: width", out.extent(1), hidden);
  expect_data("output", out.data_handle(), rows);
}

/// out[0, n) = in[0, n), one rounding if the types differ.
template <class To, class From>
void convert_row(From const* in, std::int64_t n, To* out) {
  if constexpr (std::is_same_v<To, From>) {
    std::memcpy(out, in, static_cast<std::size_t>(n) * sizeof(To));
  } else {
    for (std::int64_t i = 0; i < n; ++i) {
      out[i] = from_float<To>(to_float(in[i]));
    }
  }
}

/// The state of an exchange: prepare() and finalize() must alternate.
class CallOrder {
 public:
  /// E_STATE unless the previous round was finalized or abandoned.
  void expect_idle() const {
    if (dispatched_) {
      throw Error(ErrorCode::state, "prepare: called twice without finalize");
    }
  }
  /// E_STATE unless prepare() has run.
  void expect_dispatched(char const* what) const {
    if (!dispatched_) {
      throw Error(ErrorCode::state, text(what, ": called without prepare"));
    }
  }
  bool dispatched() const { return dispatched_; }
  void set_dispatched() { dispatched_ = true; }
  void set_idle() { dispatched_ = false; }

 private:
  bool dispatched_ = false;
};

}  // namespace moe::detail
