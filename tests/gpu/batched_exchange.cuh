// SPDX-License-Identifier: Apache-2.0
// tests/gpu/batched_exchange.cuh: the kernels of BatchedExchange.
#pragma once

#include "batched_exchange.hpp"

namespace moe_test {

namespace kernels {

/// One block: the rows of each expert in slot order, quantised.
template <class Quant, class Act>
__global__ void pack(Quant quant, Act const* x, std::int32_t const* ids, int rows, int topk, int experts, int capacity, int hidden,
                     typename Quant::template Payload<Act>* batches, typename Quant::Scale* scales, std::int32_t* counts,
                     std::int32_t* positions, std::int32_t* gather) {
  auto const quantize = [&](int token, long long to) {
    quant.template quantize_row<Act>(x + static_cast<long long>(token) * hidden, hidden, batches + to * Quant::payload_cols(hidden),
                                     scales + to * Quant::scale_cols(hidden));
  };
  for (int token = threadIdx.x; gather != nullptr && token < rows; token += blockDim.x) quantize(token, token);
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    int count = 0;
    for (int slot = 0; slot < rows * topk; ++slot) {
      if (ids[slot] != e) continue;
      long long const at = static_cast<long long>(e) * capacity + count++;
      if (gather == nullptr) {
        quantize(slot / topk, at);
      } else {
        gather[at] = slot / topk;
      }
      positions[slot] = static_cast<std::int32_t>(at);
    }
    counts[e] = count;
  }
}

template <class Partial, class Act>
__global__ void reduce(Partial const* y, std::int32_t const* ids, float const* weights, std::int32_t const* positions, int rows, int topk,
                       int experts, int hidden, Act* out) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < rows * hidden; i += gridDim.x * blockDim.x) {
    float sum = 0;
    for (int slot = i / hidden * topk; slot < (i / hidden + 1) * topk; ++slot) {
      if (static_cast<unsigned>(ids[slot]) >= static_cast<unsigned>(experts)) continue;
      sum += weights[slot] * moe::to_float(y[static_cast<long long>(positions[slot]) * hidden + i % hidden]);
    }
    out[i] = moe::from_float<Act>(sum);
  }
}

}  // namespace kernels

template <class Config, class Quant, class Partial, bool Gathers>
void BatchedExchange<Config, Quant, Partial, Gathers>::launch_pack(Act const* x, cudaStream_t stream) {
  kernels::pack<Quant, Act><<<1, 128, 0, stream>>>(quant_, x, ids_, rows_, topk_, experts_, static_cast<int>(capacity_), hidden_, batches_,
                                                   scales_, counts_, positions_, gather_);
  moe::check_cuda(cudaGetLastError(), "pack");
}
template <class Config, class Quant, class Partial, bool Gathers>
void BatchedExchange<Config, Quant, Partial, Gathers>::launch_reduce(Act* out, cudaStream_t stream) {
  kernels::reduce<<<64, 256, 0, stream>>>(partial_, ids_, weights_, positions_, rows_, topk_, experts_, hidden_, out);
  moe::check_cuda(cudaGetLastError(), "reduce");
}

}  // namespace moe_test
