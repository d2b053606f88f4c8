// SPDX-License-Identifier: Apache-2.0
// experts/hopper/calls.hpp: what the kernel objects of the Hopper policies share: the sizes of a layer, and checks of a call's tokens
// against them.
#pragma once

#include <cstdint>
#include <limits>

#include "moe/core/error.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/tokens.hpp"
#include "moe/experts/common/check_rows.hpp"
#include "moe/experts/hopper/common/problem.hpp"

namespace moe::experts::detail {

class HopperCalls {
 protected:
  /// Error messages begin with `who`.
  template <class Config>
  HopperCalls(char const* who, Shape<Config> const& shape, std::int64_t max_rows, std::int64_t num_local)
      : who_(who), hidden_(shape.hidden()), topk_(shape.topk()), max_rows_(max_rows), num_local_(num_local) {}

  /// The number of tokens that the workspace is for; E_CAPACITY if their slots exceed the kernels' 32-bit counts.
  int workspace_tokens(ActivationFormat format) const {
    std::int64_t const tokens = max_rows_ * (format == ActivationFormat::standard ? 1 : num_local_);
    if (tokens * topk_ > std::numeric_limits<std::int32_t>::max()) {
      throw Error(ErrorCode::capacity, text(who_, ": ", tokens, " rows of ", topk_, " slots, at most 2^31 - 1 slots"));
    }
    return static_cast<int>(tokens);
  }

  /// Fills `call` with the tokens and the output. False if there are no rows; E_ARG for sizes that do not fit.
  template <class Tokens, class Output>
  bool standard_call(Tokens const& tokens, Rows<Output> y, hopper::LayerCall& call) const {
    return standard_call(tokens, y, call, hidden_);
  }
  /// The same of rows of `columns` stored elements.
  template <class Tokens, class Output>
  bool standard_call(Tokens const& tokens, Rows<Output> y, hopper::LayerCall& call, std::int64_t columns) const {
    std::int64_t const rows = tokens.rows.extent(0);
    check_rows(rows, y.extent(0), max_rows_);
    if (rows == 0) return false;
    expect("rows of topk_ids", tokens.topk_ids.extent(0), rows);
    expect("columns of topk_ids", tokens.topk_ids.extent(1), topk_);
    expect("columns of x", tokens.rows.extent(1), columns);
    expect("columns of the output", y.extent(1), hidden_);
    expect("row stride of the output", y.stride(0), hidden_);
    call.x = tokens.rows.data_handle();
    call.x_stride = tokens.rows.stride(0);
    call.topk_ids = tokens.topk_ids.data_handle();
    call.id_stride = tokens.topk_ids.stride(0);
    call.topk_weights = tokens.topk_weights.data_handle();
    call.weight_stride = tokens.topk_weights.stride(0);
    call.num_tokens = tokens.num_rows;
    call.out = y.data_handle();
    call.max_tokens = static_cast<int>(rows);
    return true;
  }

  /// The capacity of a block; 0: nothing to do. E_ARG for sizes that do not fit.
  template <class Tokens, class Output>
  int checked_capacity(Tokens const& tokens, Blocks<Output> y) const {
    return checked_capacity(tokens, y, hidden_);
  }
  /// The same of rows of `columns` stored elements.
  template <class Tokens, class Output>
  int checked_capacity(Tokens const& tokens, Blocks<Output> y, std::int64_t columns) const {
    std::int64_t const capacity = tokens.capacity();
    bool const gathers = tokens.gather.extent(0) > 0;
    check_rows(capacity, y.extent(1), max_rows_);
    if (capacity == 0) return 0;
    expect(gathers ? "blocks of gathered rows" : "blocks of x", gathers ? tokens.gather.extent(0) : tokens.rows.extent(0), num_local_);
    expect("columns of x", tokens.rows.extent(2), columns);
    expect("rows of an output block", y.extent(1), capacity);
    expect("entries of expert_num_tokens", tokens.expert_num_tokens.extent(0), num_local_);
    return static_cast<int>(capacity);
  }
  /// The row indices of the batch, or null: rows are in place.
  template <class Tokens>
  static std::int32_t const* gather_of(Tokens const& tokens) {
    return tokens.gather.extent(0) > 0 ? tokens.gather.data_handle() : nullptr;
  }

  std::int64_t hidden() const { return hidden_; }
  std::int64_t topk() const { return topk_; }
  std::int64_t max_rows() const { return max_rows_; }
  std::int64_t num_local() const { return num_local_; }

 private:
  void expect(char const* what, std::int64_t value, std::int64_t wanted) const {
    if (value != wanted) throw Error(ErrorCode::argument, text(who_, ": ", what, ": ", value, ", expected ", wanted));
  }

  char const* who_;
  std::int64_t hidden_;
  std::int64_t topk_;
  std::int64_t max_rows_;
  std::int64_t num_local_;
};

}  // namespace moe::experts::detail
