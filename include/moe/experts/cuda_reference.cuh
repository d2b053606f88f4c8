// SPDX-License-Identifier: Apache-2.0
// experts/cuda_reference.cuh: the kernels of CudaReference: one warp per dot product, not optimised.
#pragma once

#include <algorithm>

#include "moe/experts/common/check_rows.hpp"
#include "moe/experts/cuda_reference.hpp"

namespace moe::fix {
[[gnu::used]] inline void include_moe_experts_cuda_reference_cuh_or_link_a_model_library() {}
}  // namespace moe::fix

namespace moe::experts::detail {

inline constexpr int kWarps = 8;  ///< per thread block
inline unsigned reference_blocks(std::int64_t warps) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((warps + kWarps - 1) / kWarps, 1, 1 << 20));
}

/// Where the slots of a batch are. Standard: slot = row * k + j. Batched: slot = e * capacity + i, and i < count[e] is valid.
struct SlotTable {
  std::int32_t const* ids;  // [R, k] or null
  std::int64_t ids_stride;
  float const* weights;  // [R, k] or null
  std::int64_t weights_stride;
  std::int32_t const* counts;    // [L] or null
  std::int32_t const* num_rows;  // valid rows, or null: all
  std::int64_t slots;
  std::int64_t per_row;                  // k, or the capacity C
  std::int32_t const* gather = nullptr;  // batched: [L * C] rows of x, or null: slot i is row i

  __device__ int expert(std::int64_t slot) const {
    if (counts != nullptr) {
      return slot % per_row < counts[slot / per_row] ? static_cast<int>(slot / per_row) : kNoExpert;
    }
    std::int64_t const r = slot / per_row;
    if (num_rows != nullptr && r >= *num_rows) {
      return kNoExpert;
    }
    return ids[r * ids_stride + slot % per_row];
  }
  __device__ std::int64_t input_row(std::int64_t slot) const { return counts != nullptr ? slot : slot / per_row; }
  __device__ float weight(std::int64_t slot) const { return weights[slot / per_row * weights_stride + slot % per_row]; }
};

/// a · b, the same on every lane; one fixed order for a given n.
__device__ inline float warp_dot(float const* a, float const* b, std::int64_t n, int lane) {
  float sum = 0.0F;
  for (std::int64_t i = lane; i < n; i += 32) {
    sum = fmaf(a[i], b[i], sum);
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffU, sum, offset);
  }
  return sum;
}

template <class Weight, class Quant, class Matrix>
__global__ void widen_matrix(Quant quant, Matrix m, std::int64_t experts, float* out) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < experts * m.rows;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    std::int64_t const e = i / m.rows;
    quant.template dequantize_weight_row<Weight>(row_ptr(m.codes, e, 0), row_ptr(m.scales, e), m.rows, m.cols, i % m.rows,
                                                 out + i * m.cols);
  }
}

template <class Act, class Quant>
__global__ void widen_rows(Quant quant, typename Quant::template Payload<Act> const* rows, std::int64_t stride,
                           typename Quant::Scale const* scales, std::int64_t scale_stride, std::int64_t count, std::int64_t hidden,
                           SlotTable table, float* out) {
  for (std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; r < count;
       r += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    if (table.counts != nullptr && table.expert(r) < 0) {
      continue;
    }
    std::int64_t const from = table.gather != nullptr ? table.gather[r] : r;
    quant.template dequantize_row<Act>(rows + from * stride, scales + from * scale_stride, hidden, out + r * hidden);
  }
}

/// h[slot, i] = act(gate, up): one warp per (slot, i).
template <class Activation>
__global__ void first_product(Activation activation, SlotTable table, float const* x, float const* w13, float const* bias,
                              std::int64_t hidden, std::int64_t width, bool on_input, float* h) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  std::int64_t const rows13 = (activation.gated() ? 2 : 1) * width;
  for (std::int64_t task = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; task < table.slots * width;
       task += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    std::int64_t const slot = task / width;
    std::int64_t const i = task % width;
    int const e = table.expert(slot);
    if (e < 0) {
      continue;
    }
    float const* input = x + table.input_row(slot) * hidden;
    float const* w = w13 + (e * rows13 + i) * hidden;
    float const scale = on_input ? table.weight(slot) : 1.0F;
    float gate = scale * warp_dot(w, input, hidden, lane);
    float up = activation.gated() ? scale * warp_dot(w + width * hidden, input, hidden, lane) : 0.0F;
    if (bias != nullptr) {
      gate += bias[e * rows13 + i];
      if (activation.gated()) {
        up += bias[e * rows13 + width + i];
      }
    }
    if (lane == 0) {
      h[slot * width + i] = activation(gate, up);
    }
  }
}

template <class Quant>
__global__ void requantize_rows(Quant quant, SlotTable table, std::int64_t width, float* h, typename Quant::template Payload<float>* codes,
                                typename Quant::Scale* scales) {
  for (std::int64_t s = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; s < table.slots;
       s += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    if (table.expert(s) < 0) {
      continue;
    }
    auto* q = codes + s * Quant::payload_cols(width);
    auto* scale = scales + s * Quant::scale_cols(width);
    quant.template quantize_row<float>(h + s * width, width, q, scale);
    quant.template dequantize_row<float>(q, scale, width, h + s * width);
  }
}

/// Standard: y[r, c] = Σ_j w_j (W2 h)[c]; batched: y[slot, c] = (W2 h)[c] for valid slots. One warp per (row, c).
template <class Out>
__global__ void second_product(SlotTable table, float const* h, float const* w2, float const* bias, std::int64_t width, std::int64_t hidden,
                               std::int64_t rows, bool on_input, Out* y, std::int64_t stride) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  std::int64_t const per_row = table.counts != nullptr ? 1 : table.per_row;
  for (std::int64_t task = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; task < rows * hidden;
       task += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    std::int64_t const r = task / hidden;
    std::int64_t const c = task % hidden;
    if (table.counts != nullptr && table.expert(r) < 0) {
      continue;
    }
    float sum = 0.0F;
    for (std::int64_t slot = r * per_row; slot < (r + 1) * per_row; ++slot) {
      int const e = table.expert(slot);
      if (e < 0) {
        continue;
      }
      float v = warp_dot(w2 + (e * hidden + c) * width, h + slot * width, width, lane);
      if (bias != nullptr) {
        v += bias[e * hidden + c];
      }
      sum += table.counts != nullptr || on_input ? v : table.weight(slot) * v;
    }
    if (lane == 0) {
      y[r * stride + c] = sum;
    }
  }
}

/// z[slot] = s·v / sqrt(mean((s·v)²) + eps) with v = W2 h[slot], for slots with an expert. One thread block per slot; the squares are
/// summed in double, as on the host.
template <class Out>
__global__ void normalised_product(SlotTable table, float const* h, float const* w2, float const* bias, std::int64_t width,
                                   std::int64_t hidden, float const* scale, float eps, Out* z) {
  __shared__ double sums[kWarps];
  int const lane = static_cast<int>(threadIdx.x % 32);
  int const warp = static_cast<int>(threadIdx.x / 32);
  for (std::int64_t slot = blockIdx.x; slot < table.slots; slot += gridDim.x) {
    int const e = table.expert(slot);
    if (e < 0) {  // for all threads of the block
      continue;
    }
    double squares = 0.0;
    for (std::int64_t c = warp; c < hidden; c += kWarps) {
      float v = warp_dot(w2 + (e * hidden + c) * width, h + slot * width, width, lane);
      if (bias != nullptr) {
        v += bias[e * hidden + c];
      }
      v *= scale[c];
      squares += static_cast<double>(v) * static_cast<double>(v);
      if (lane == 0) {
        z[slot * hidden + c] = v;
      }
    }

    __syncthreads();  // the sums of the slot before were read by all
    if (lane == 0) {
      sums[warp] = squares;
    }
    __syncthreads();  // z[slot] and its sums are complete
    double total = 0.0;
    for (double const sum : sums) {
      total += sum;
    }
    auto const factor = static_cast<float>(1.0 / sqrt(total / static_cast<double>(hidden) + static_cast<double>(eps)));
    for (std::int64_t c = threadIdx.x; c < hidden; c += blockDim.x) {
      z[slot * hidden + c] *= factor;
    }
  }
}

/// y[r, c] = Σ_j w_j z[slot_j, c], in j order. One thread per (r, c).
template <class Out>
__global__ void sum_slots(SlotTable table, Out const* z, std::int64_t hidden, std::int64_t rows, bool on_input, Out* y,
                          std::int64_t stride) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * hidden;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    std::int64_t const r = i / hidden;
    float sum = 0.0F;
    for (std::int64_t slot = r * table.per_row; slot < (r + 1) * table.per_row; ++slot) {
      if (table.expert(slot) >= 0) {
        sum += (on_input ? 1.0F : table.weight(slot)) * z[slot * hidden + i % hidden];
      }
    }
    y[r * stride + i % hidden] = sum;
  }
}

/// The second product and the norm of its outputs. z: [slots, hidden] scratch of a standard batch; a batched call normalises in y, whose
/// rows are contiguous.
template <class Weights>
void launch_normalised(Weights const& weights, SlotTable const& table, std::int64_t rows, std::int64_t hidden, std::int64_t width,
                       bool on_input, float const* w2, float const* h, float* z, float* y, std::int64_t y_stride, cudaStream_t stream) {
  constexpr int kThreads = 32 * kWarps;
  float const* b2 = weights.w2.has_bias() ? weights.w2.bias.data_handle() : nullptr;
  normalised_product<<<reference_blocks(table.slots * kWarps), kThreads, 0, stream>>>(
      table, h, w2, b2, width, hidden, weights.norm.scale.data_handle(), weights.norm.eps, table.counts != nullptr ? y : z);
  check_launch("normalised_product");
  if (table.counts == nullptr) {
    sum_slots<<<reference_blocks(rows * hidden / 32), kThreads, 0, stream>>>(table, z, hidden, rows, on_input, y, y_stride);
    check_launch("sum_slots");
  }
}

}  // namespace moe::experts::detail

namespace moe::experts {

template <class Config, class Quant, ActivationFormat Format>
void CudaReference::Kernel<Config, Quant, Format>::weights_changed(cudaStream_t stream) {
  using Weight = typename Config::Weight;
  auto widen = [&](auto const& m, float* out) {
    if (num_local_ == 0) {
      return;
    }
    detail::widen_matrix<Weight>
        <<<detail::reference_blocks(num_local_ * m.rows), 32 * detail::kWarps, 0, stream>>>(quant_, m, num_local_, out);
    check_launch("widen_matrix");
  };
  widen(weights_.w13, w13_);
  widen(weights_.w2, w2_);
}

namespace detail {

/// The launches that both formats share; `rows` are rows of y. Norms: whether the weights may have a norm; z: its scratch, [slots, hidden],
/// standard format only.
template <class Act, bool Norms, class Quant, class Activation, class Weights, class Payload, class Scale>
void launch_reference(Quant const& quant, Activation const& activation, Weights const& weights, SlotTable const& table,
                      Payload const* rows_in, std::int64_t row_stride, Scale const* scales_in, std::int64_t scale_stride, std::int64_t rows,
                      std::int64_t hidden, std::int64_t width, bool on_input, float const* w13, float const* w2, float* x, float* h,
                      typename Quant::template Payload<float>* codes, Scale* scales, float* z, float* y, std::int64_t y_stride,
                      cudaStream_t stream) {
  if (rows == 0) {
    return;
  }
  constexpr int kThreads = 32 * kWarps;
  float const* b13 = weights.w13.has_bias() ? weights.w13.bias.data_handle() : nullptr;
  float const* b2 = weights.w2.has_bias() ? weights.w2.bias.data_handle() : nullptr;
  widen_rows<Act>
      <<<reference_blocks(rows), kThreads, 0, stream>>>(quant, rows_in, row_stride, scales_in, scale_stride, rows, hidden, table, x);
  check_launch("widen_rows");
  first_product<<<reference_blocks(table.slots * width), kThreads, 0, stream>>>(activation, table, x, w13, b13, hidden, width, on_input, h);
  check_launch("first_product");
  if constexpr (facts::act_granularity<Quant>() != quantization::ScaleGranularity::none) {
    requantize_rows<<<reference_blocks(table.slots), kThreads, 0, stream>>>(quant, table, width, h, codes, scales);
    check_launch("requantize_rows");
  }
  if constexpr (Norms) {
    if (weights.norm.given()) {
      return launch_normalised(weights, table, rows, hidden, width, on_input, w2, h, z, y, y_stride, stream);
    }
  }
  second_product<<<reference_blocks(rows * hidden), kThreads, 0, stream>>>(table, h, w2, b2, width, hidden, rows, on_input, y, y_stride);
  check_launch("second_product");
}

}  // namespace detail

template <class Config, class Quant, ActivationFormat Format>
void CudaReference::Kernel<Config, Quant, Format>::apply(StandardTokensOf<Config, Quant> const& tokens, Rows<float> y,
                                                         cudaStream_t stream) const {
  std::int64_t const rows = tokens.rows.extent(0);
  detail::check_rows(rows, y.extent(0), max_rows_);
  detail::SlotTable const table{tokens.topk_ids.data_handle(),
                                tokens.topk_ids.stride(0),
                                tokens.topk_weights.data_handle(),
                                tokens.topk_weights.stride(0),
                                nullptr,
                                tokens.num_rows,
                                rows * topk_,
                                topk_};
  detail::launch_reference<Act, kExpertNorm<Config> != ExpertNorm::none>(
      quant_, activation_, weights_, table, tokens.rows.data_handle(), tokens.rows.stride(0), tokens.scales.data_handle(),
      tokens.scales.stride(0), rows, hidden_, intermediate_, weight_on_input_, w13_, w2_, x_, h_, codes_, scales_, z_, y.data_handle(),
      y.stride(0), stream);
}

template <class Config, class Quant, ActivationFormat Format>
void CudaReference::Kernel<Config, Quant, Format>::apply(BatchedTokensOf<Config, Quant> const& tokens, Blocks<float> y,
                                                         cudaStream_t stream) const {
  std::int64_t const capacity = tokens.capacity();
  detail::check_rows(capacity, y.extent(1), max_rows_);
  std::int64_t const slots = num_local_ * capacity;
  std::int32_t const* const gather = tokens.gather.extent(0) > 0 ? tokens.gather.data_handle() : nullptr;
  detail::SlotTable const table{nullptr, 0, nullptr, 0, tokens.expert_num_tokens.data_handle(), nullptr, slots, capacity, gather};
  detail::launch_reference<Act, kExpertNorm<Config> != ExpertNorm::none>(
      quant_, activation_, weights_, table, tokens.rows.data_handle(), tokens.rows.extent(2), tokens.scales.data_handle(),
      tokens.scales.extent(2), slots, hidden_, intermediate_, false, w13_, w2_, x_, h_, codes_, scales_, z_, y.data_handle(), hidden_,
      stream);
}

}  // namespace moe::experts
