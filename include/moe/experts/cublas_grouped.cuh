// SPDX-License-Identifier: Apache-2.0
// experts/cublas_grouped.cuh: the launches of CublasGrouped's kernels (cublas_grouped/row_kernels.cuh) and of cuBLAS's grouped products.
#pragma once

#include <algorithm>
#include <limits>

#include "moe/experts/common/check_rows.hpp"
#include "moe/experts/cublas_grouped.hpp"
#include "moe/experts/cublas_grouped/products.hpp"
#include "moe/experts/cublas_grouped/row_kernels.cuh"

namespace moe::fix {
[[gnu::used]] inline void include_moe_experts_cublas_grouped_cuh_or_link_a_model_library() {}
}  // namespace moe::fix

namespace moe::experts {

template <class Config, class Quant, ActivationFormat Format>
void CublasGrouped::Kernel<Config, Quant, Format>::allocate(Arena<space::cuda>& arena) {
  bool const standard = Format == ActivationFormat::standard;
  std::int64_t const slots = standard ? max_rows_ * topk_ : 0;
  std::int64_t const rows = standard && !fixed_ ? slots : num_local_ * max_rows_;
  if (std::max({rows, hidden_, weights_.w13.rows}) > std::numeric_limits<std::int32_t>::max()) {
    throw Error(ErrorCode::capacity,
                text("cublas_grouped: ", rows, " rows of ", hidden_, " and ", weights_.w13.rows, " elements, at most 2^31 - 1"));
  }
  counts_ = arena.template take<std::int32_t>(num_local_);
  offsets_ = arena.template take<std::int64_t>(num_local_);
  pointers_ = arena.template take<void const*>(6 * num_local_);
  positions_ = arena.template take<std::int32_t>(slots);
  row_expert_ = arena.template take<std::int32_t>(standard ? rows : 0);
  row_weight_ = arena.template take<float>(standard ? rows : 0);
  x_ = arena.template take<Act>(rows * hidden_);
  gate_up_ = arena.template take<Act>(rows * weights_.w13.rows);
  inter_ = arena.template take<Act>(rows * intermediate_);
  out_ = arena.template take<Act>(standard ? rows * hidden_ : 0);
  products_ = std::make_shared<cublas::Products>(num_local_, arena);
}

template <class Config, class Quant, ActivationFormat Format>
void CublasGrouped::Kernel<Config, Quant, Format>::check(std::int64_t rows, std::int64_t out_rows, cudaStream_t stream) const {
  detail::check_rows(rows, out_rows, max_rows_);
  if (!fixed_ && StreamCapture<space::cuda>::is_active(stream)) {
    throw Error(ErrorCode::state,
                "cublas_grouped: a call reads the rows per expert back and cannot be captured; set Params::fixed_groups, or use "
                "cuda_reference");
  }
}

template <class Config, class Quant, ActivationFormat Format>
void CublasGrouped::Kernel<Config, Quant, Format>::multiply(std::int64_t capacity, Act const* x, Act* y, cudaStream_t stream) const {
  cublas::Products& products = *products_;
  std::int64_t const rows13 = weights_.w13.rows;
  std::int64_t const rows = products.begin(fixed_, capacity, counts_, stream);
  if (rows == 0) return;
  products.run<Act>({rows13, hidden_, capacity, weights_.w13.codes.data_handle(), x, gate_up_, pointers_});
  float const* const bias = weights_.w13.has_bias() ? weights_.w13.bias.data_handle() : nullptr;
  cublas::BlockRows const blocks{.counts = counts_, .capacity = capacity, .rows = capacity > 0 ? num_local_ * capacity : rows};
  cublas::ActivateRowsArgs<Act, typename Config::Activation> const args{.activation = activation_,
                                                                        .blocks = blocks,
                                                                        .gate_up = gate_up_,
                                                                        .bias = bias,
                                                                        .weights = weight_on_input_ ? row_weight_ : nullptr,
                                                                        .row_expert = row_expert_,
                                                                        .width = intermediate_,
                                                                        .inter = inter_};
  cublas::activate_rows<<<cublas::blocks_for(blocks.rows * intermediate_), cublas::kThreads, 0, stream>>>(args);
  check_launch("activate_rows");
  products.run<Act>({hidden_, intermediate_, capacity, weights_.w2.codes.data_handle(), inter_, y, pointers_ + 3 * num_local_});
}

template <class Config, class Quant, ActivationFormat Format>
void CublasGrouped::Kernel<Config, Quant, Format>::apply(StandardTokensOf<Config, Quant> const& tokens, Rows<Output> y,
                                                         cudaStream_t stream) const {
  std::int64_t const rows = tokens.rows.extent(0);
  check(rows, y.extent(0), stream);
  if (rows == 0) return;
  if (tokens.topk_ids.extent(0) != rows || tokens.topk_ids.extent(1) != topk_ || tokens.rows.extent(1) != hidden_ ||
      y.extent(1) != hidden_) {
    throw Error(ErrorCode::argument, text("cublas_grouped: rows ", rows, " x ", tokens.rows.extent(1), ", ids ", tokens.topk_ids.extent(0),
                                          " x ", tokens.topk_ids.extent(1), ", output of ", y.extent(1), " columns; expected ", rows, " x ",
                                          hidden_, " and ", rows, " x ", topk_));
  }
  cublas::Slots const slots{.ids = tokens.topk_ids.data_handle(),
                            .ids_stride = tokens.topk_ids.stride(0),
                            .weights = tokens.topk_weights.data_handle(),
                            .weights_stride = tokens.topk_weights.stride(0),
                            .num_rows = tokens.num_rows,
                            .rows = rows,
                            .topk = topk_,
                            .num_local = num_local_};
  cublas::SortedSlots const sorted{.slots = slots, .offsets = offsets_, .positions = positions_};
  std::int64_t const capacity = fixed_ ? rows : 0;
  if (num_local_ > 0) {
    cublas::position_slots<1024><<<static_cast<unsigned>(num_local_), 1024, 0, stream>>>(slots, positions_, counts_);
    check_launch("position_slots");
    cublas::plan_groups<1024><<<1, 1024, 0, stream>>>(
        {nullptr, capacity, num_local_, hidden_, intermediate_, weights_.w13.rows, static_cast<std::int64_t>(sizeof(Act)),
         reinterpret_cast<char const*>(x_), reinterpret_cast<char*>(gate_up_), reinterpret_cast<char*>(inter_),
         reinterpret_cast<char*>(out_), reinterpret_cast<char const*>(weights_.w13.codes.data_handle()),
         reinterpret_cast<char const*>(weights_.w2.codes.data_handle()), counts_, offsets_, pointers_});
    check_launch("plan_groups");
    cublas::GatherRowsArgs<Act> const args{.sorted = sorted,
                                           .x = tokens.rows.data_handle(),
                                           .stride = tokens.rows.stride(0),
                                           .hidden = hidden_,
                                           .to = x_,
                                           .row_expert = row_expert_,
                                           .row_weight = row_weight_};
    cublas::gather_rows<<<cublas::blocks_for(32 * rows * topk_), cublas::kThreads, 0, stream>>>(args);
    check_launch("gather_rows");
    multiply(capacity, x_, out_, stream);
  }
  float const* const bias = weights_.w2.has_bias() ? weights_.w2.bias.data_handle() : nullptr;
  cublas::SumSlotsArgs<Act> const args{.sorted = sorted,
                                       .out = out_,
                                       .bias = bias,
                                       .hidden = hidden_,
                                       .weighted = !weight_on_input_,
                                       .y = y.data_handle(),
                                       .stride = y.stride(0)};
  cublas::sum_slots<<<cublas::blocks_for(rows * hidden_), cublas::kThreads, 0, stream>>>(args);
  check_launch("sum_slots");
}

template <class Config, class Quant, ActivationFormat Format>
void CublasGrouped::Kernel<Config, Quant, Format>::apply(BatchedTokensOf<Config, Quant> const& tokens, Blocks<Output> y,
                                                         cudaStream_t stream) const {
  std::int64_t const capacity = tokens.capacity();
  check(capacity, y.extent(1), stream);
  if (capacity == 0 || num_local_ == 0) return;
  bool const gathers = tokens.gather.extent(0) > 0;
  std::int64_t const blocks = gathers ? tokens.gather.extent(0) : tokens.rows.extent(0);
  if (blocks != num_local_ || tokens.expert_num_tokens.extent(0) != num_local_ || tokens.rows.extent(2) != hidden_ ||
      y.extent(0) != num_local_ || y.extent(1) != capacity || y.extent(2) != hidden_) {
    throw Error(ErrorCode::argument,
                text("cublas_grouped: blocks ", blocks, " x ", capacity, " x ", tokens.rows.extent(2), ", output ", y.extent(0), " x ",
                     y.extent(1), " x ", y.extent(2), "; expected ", num_local_, " x ", capacity, " x ", hidden_));
  }
  Act const* const x = gathers ? x_ : tokens.rows.data_handle();
  Act* const out = y.data_handle();
  cublas::plan_groups<1024><<<1, 1024, 0, stream>>>(
      {tokens.expert_num_tokens.data_handle(), capacity, num_local_, hidden_, intermediate_, weights_.w13.rows,
       static_cast<std::int64_t>(sizeof(Act)), reinterpret_cast<char const*>(x), reinterpret_cast<char*>(gate_up_),
       reinterpret_cast<char*>(inter_), reinterpret_cast<char*>(out), reinterpret_cast<char const*>(weights_.w13.codes.data_handle()),
       reinterpret_cast<char const*>(weights_.w2.codes.data_handle()), counts_, offsets_, pointers_});
  check_launch("plan_groups");
  cublas::BlockRows const valid{.counts = counts_, .capacity = capacity, .rows = num_local_ * capacity};
  if (gathers) {
    cublas::GatherBlocksArgs<Act> const args{
        .blocks = valid, .gather = tokens.gather.data_handle(), .x = tokens.rows.data_handle(), .hidden = hidden_, .to = x_};
    cublas::gather_blocks<<<cublas::blocks_for(32 * valid.rows), cublas::kThreads, 0, stream>>>(args);
    check_launch("gather_blocks");
  }
  multiply(capacity, x, out, stream);
  if (weights_.w2.has_bias()) {
    cublas::add_bias<<<cublas::blocks_for(valid.rows * hidden_), cublas::kThreads, 0, stream>>>(valid, weights_.w2.bias.data_handle(),
                                                                                                hidden_, out);
    check_launch("add_bias");
  }
}

}  // namespace moe::experts
