// SPDX-License-Identifier: Apache-2.0
// experts/cublas_grouped.cuh: the kernels around cuBLAS's grouped products, and the launches.
#pragma once

#include <algorithm>
#include <limits>

#include "moe/experts/common/check_rows.hpp"
#include "moe/experts/cublas_grouped.hpp"
#include "moe/experts/cublas_grouped/products.hpp"

namespace moe::fix {
[[gnu::used]] inline void include_moe_experts_cublas_grouped_cuh_or_link_a_model_library() {}
}  // namespace moe::fix

namespace moe::experts::cublas {

inline constexpr int kThreads = 256;
inline unsigned blocks_for(std::int64_t threads) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((threads + kThreads - 1) / kThreads, 1, 1 << 20));
}

/// The slots of a standard batch; rows from *num_rows on have none.
struct Slots {
  std::int32_t const* ids;  // [R, k]
  std::int64_t ids_stride;
  float const* weights;  // [R, k]
  std::int64_t weights_stride;
  std::int32_t const* num_rows;
  std::int64_t rows;
  std::int64_t topk;
  std::int64_t num_local;

  __device__ int expert(std::int64_t slot) const {
    std::int64_t const row = slot / topk;
    if (num_rows != nullptr && row >= *num_rows) return kNoExpert;
    int const id = ids[row * ids_stride + slot % topk];
    return id >= 0 && id < num_local ? id : kNoExpert;
  }
  __device__ float weight(std::int64_t slot) const { return weights[slot / topk * weights_stride + slot % topk]; }
};

/// One block per expert: the positions of its slots among them, in slot order, and their number.
template <int Threads>
__global__ void __launch_bounds__(Threads) position_slots(Slots slots, std::int32_t* positions, std::int32_t* counts) {
  static_assert(Threads == 1024, "as many warps as a warp has lanes");
  __shared__ int warp_sums[32];
  int const expert = static_cast<int>(blockIdx.x);
  int const lane = static_cast<int>(threadIdx.x) & 31;
  int const warp = static_cast<int>(threadIdx.x) >> 5;
  int before = 0;
  for (std::int64_t base = 0; base < slots.rows * slots.topk; base += Threads) {
    std::int64_t const slot = base + threadIdx.x;
    bool const mine = slot < slots.rows * slots.topk && slots.expert(slot) == expert;
    unsigned const votes = __ballot_sync(0xFFFFFFFFU, mine);
    if (lane == 0) warp_sums[warp] = __popc(votes);
    __syncthreads();
    int const sum = warp_sums[lane];
    int const earlier = static_cast<int>(__reduce_add_sync(0xFFFFFFFFU, lane < warp ? static_cast<unsigned>(sum) : 0U));
    if (mine) positions[slot] = before + earlier + __popc(votes & ((1U << lane) - 1U));
    before += static_cast<int>(__reduce_add_sync(0xFFFFFFFFU, static_cast<unsigned>(sum)));
    __syncthreads();
  }
  if (threadIdx.x == 0) counts[expert] = before;
}

/// The inputs of the group list. Element sizes are of one element type.
struct PlanArgs {
  std::int32_t const* given;  // [L] counts of a batched call, or null
  std::int64_t capacity;      // batched or fixed groups: rows of a block; else 0
  std::int64_t num_local;
  std::int64_t hidden, intermediate, rows13;
  std::int64_t element;  // bytes
  char const* x;
  char* gate_up;
  char* inter;
  char* y;
  char const* w13;
  char const* w2;
  std::int32_t* counts;
  std::int64_t* offsets;
  void const** pointers;  // [6, L]: w13, x, gate_up, w2, inter, y of each expert with rows, in expert order
};

/// One block: first row of each expert, and the operands of the experts that have rows.
template <int Threads>
__global__ void __launch_bounds__(Threads) plan_groups(PlanArgs a) {
  if (a.given != nullptr) {
    for (std::int64_t e = threadIdx.x; e < a.num_local; e += blockDim.x) {
      a.counts[e] = min(max(a.given[e], 0), static_cast<std::int32_t>(a.capacity));
    }
    __syncthreads();
  }
  for (std::int64_t e = threadIdx.x; e < a.num_local; e += blockDim.x) {
    std::int64_t offset = 0;
    std::int64_t group = 0;
    for (std::int64_t other = 0; other < e; ++other) {
      int const count = a.counts[other];
      offset += count;
      group += count > 0 ? 1 : 0;
    }
    if (a.capacity > 0) offset = e * a.capacity;
    a.offsets[e] = offset;
    if (a.counts[e] == 0) continue;
    a.pointers[group] = a.w13 + e * a.rows13 * a.hidden * a.element;
    a.pointers[a.num_local + group] = a.x + offset * a.hidden * a.element;
    a.pointers[2 * a.num_local + group] = a.gate_up + offset * a.rows13 * a.element;
    a.pointers[3 * a.num_local + group] = a.w2 + e * a.hidden * a.intermediate * a.element;
    a.pointers[4 * a.num_local + group] = a.inter + offset * a.intermediate * a.element;
    a.pointers[5 * a.num_local + group] = a.y + offset * a.hidden * a.element;
  }
}

/// One warp per slot: copies its row of x to its position.
template <class T>
__global__ void gather_rows(Slots slots, T const* x, std::int64_t stride, std::int64_t hidden, std::int64_t const* offsets,
                            std::int32_t const* positions, T* to, std::int32_t* row_expert, float* row_weight) {
  int const lane = static_cast<int>(threadIdx.x) & 31;
  std::int64_t const warps = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32);
  bool const wide = reinterpret_cast<std::uintptr_t>(x) % 16 == 0 && stride * sizeof(T) % 16 == 0 && hidden * sizeof(T) % 16 == 0;
  for (std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; slot < slots.rows * slots.topk;
       slot += warps) {
    int const expert = slots.expert(slot);
    if (expert < 0) continue;
    std::int64_t const row = offsets[expert] + positions[slot];
    T const* const from = x + slot / slots.topk * stride;
    if (wide) {
      std::int64_t const words = hidden * static_cast<std::int64_t>(sizeof(T)) / 16;
      for (std::int64_t i = lane; i < words; i += 32) {
        reinterpret_cast<uint4*>(to + row * hidden)[i] = reinterpret_cast<uint4 const*>(from)[i];
      }
    } else {
      for (std::int64_t i = lane; i < hidden; i += 32) to[row * hidden + i] = from[i];
    }
    if (lane == 0) {
      row_expert[row] = expert;
      row_weight[row] = slots.weight(slot);
    }
  }
}

/// One warp per row of a batch: to[e, i] = x[gather[e, i]] for the valid rows of each block.
template <class T>
__global__ void gather_blocks(std::int32_t const* gather, std::int32_t const* counts, std::int64_t capacity, std::int64_t rows, T const* x,
                              std::int64_t hidden, T* to) {
  int const lane = static_cast<int>(threadIdx.x) & 31;
  std::int64_t const warps = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32);
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; row < rows; row += warps) {
    if (row % capacity >= counts[row / capacity]) continue;
    T const* const from = x + gather[row] * hidden;
    for (std::int64_t i = lane; i < hidden; i += 32) to[row * hidden + i] = from[i];
  }
}

/// inter[r, i] = act(gate + bias, up + bias), products scaled by the row's weight first if `weights` is given. Rows: [0, rows), or with
/// a capacity the first counts[e] of each block.
template <class T, class Activation>
__global__ void activate_rows(Activation activation, T const* gate_up, float const* bias, float const* weights,
                              std::int32_t const* row_expert, std::int32_t const* counts, std::int64_t capacity, std::int64_t rows,
                              std::int64_t width, T* inter) {
  bool const gated = activation.gated();
  std::int64_t const rows13 = gated ? 2 * width : width;
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t task = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; task < rows * width; task += step) {
    std::int64_t const row = task / width;
    std::int64_t const i = task - row * width;
    if (capacity > 0 && row % capacity >= counts[row / capacity]) continue;
    std::int64_t const expert = capacity > 0 ? row / capacity : row_expert[row];
    float const scale = weights != nullptr ? weights[row] : 1.0F;
    float gate = scale * to_float(gate_up[row * rows13 + i]);
    float up = gated ? scale * to_float(gate_up[row * rows13 + width + i]) : 0.0F;
    if (bias != nullptr) {
      gate += bias[expert * rows13 + i];
      if (gated) up += bias[expert * rows13 + width + i];
    }
    inter[task] = from_float<T>(activation(gate, up));
  }
}

/// y[r] = Σ_j w_j (out[row of slot j] + bias), in slot order; every row is written.
template <class T>
__global__ void sum_slots(Slots slots, T const* out, float const* bias, std::int64_t const* offsets, std::int32_t const* positions,
                          std::int64_t hidden, bool weighted, T* y, std::int64_t stride) {
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t task = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; task < slots.rows * hidden; task += step) {
    std::int64_t const r = task / hidden;
    std::int64_t const c = task - r * hidden;
    float sum = 0.0F;
    for (std::int64_t slot = r * slots.topk; slot < (r + 1) * slots.topk; ++slot) {
      int const expert = slots.expert(slot);
      if (expert < 0) continue;
      float v = to_float(out[(offsets[expert] + positions[slot]) * hidden + c]);
      if (bias != nullptr) v += bias[expert * hidden + c];
      sum += weighted ? slots.weight(slot) * v : v;
    }
    y[r * stride + c] = from_float<T>(sum);
  }
}

/// y[e, i] += bias[e] for the valid rows of each block.
template <class T>
__global__ void add_bias(float const* bias, std::int32_t const* counts, std::int64_t capacity, std::int64_t rows, std::int64_t hidden,
                         T* y) {
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t task = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; task < rows * hidden; task += step) {
    std::int64_t const row = task / hidden;
    if (row % capacity >= counts[row / capacity]) continue;
    y[task] = from_float<T>(to_float(y[task]) + bias[row / capacity * hidden + (task - row * hidden)]);
  }
}

}  // namespace moe::experts::cublas

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
  bool const blocks = capacity > 0;
  std::int64_t const tasks = (blocks ? num_local_ * capacity : rows) * intermediate_;
  cublas::activate_rows<<<cublas::blocks_for(tasks), cublas::kThreads, 0, stream>>>(
      activation_, gate_up_, bias, weight_on_input_ ? row_weight_ : nullptr, row_expert_, counts_, capacity,
      blocks ? num_local_ * capacity : rows, intermediate_, inter_);
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
  cublas::Slots const slots{tokens.topk_ids.data_handle(),
                            tokens.topk_ids.stride(0),
                            tokens.topk_weights.data_handle(),
                            tokens.topk_weights.stride(0),
                            tokens.num_rows,
                            rows,
                            topk_,
                            num_local_};
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
    cublas::gather_rows<<<cublas::blocks_for(32 * rows * topk_), cublas::kThreads, 0, stream>>>(
        slots, tokens.rows.data_handle(), tokens.rows.stride(0), hidden_, offsets_, positions_, x_, row_expert_, row_weight_);
    check_launch("gather_rows");
    multiply(capacity, x_, out_, stream);
  }
  float const* const bias = weights_.w2.has_bias() ? weights_.w2.bias.data_handle() : nullptr;
  cublas::sum_slots<<<cublas::blocks_for(rows * hidden_), cublas::kThreads, 0, stream>>>(slots, out_, bias, offsets_, positions_, hidden_,
                                                                                         !weight_on_input_, y.data_handle(), y.stride(0));
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
  if (gathers) {
    std::int64_t const rows = num_local_ * capacity;
    cublas::gather_blocks<<<cublas::blocks_for(32 * rows), cublas::kThreads, 0, stream>>>(tokens.gather.data_handle(), counts_, capacity,
                                                                                          rows, tokens.rows.data_handle(), hidden_, x_);
    check_launch("gather_blocks");
  }
  multiply(capacity, x, out, stream);
  if (weights_.w2.has_bias()) {
    std::int64_t const rows = num_local_ * capacity;
    cublas::add_bias<<<cublas::blocks_for(rows * hidden_), cublas::kThreads, 0, stream>>>(weights_.w2.bias.data_handle(), counts_, capacity,
                                                                                          rows, hidden_, out);
    check_launch("add_bias");
  }
}

}  // namespace moe::experts
