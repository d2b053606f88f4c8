// SPDX-License-Identifier: Apache-2.0
// runner/device/row_kernels.hpp: what a block does with its rows on the device besides products: norms, gates, copies, and the one pass
// that finishes the output. Plain host C++; the definitions are in row_kernels.cuh. All enqueue, can be captured and are deterministic.
#pragma once

#include <cuda_runtime_api.h>

#include "moe/core/cuda_space.hpp"
#include "moe/runner/primitives.hpp"

namespace moe::runner {

template <>
struct RowKernels<space::cuda> {
  /// y = x / sqrt(mean(x²) + eps) · (weight · scale), float32 inside; weight [H] or null; y may be x.
  template <class X, class Y>
  static void rms_norm(Rows<X const> x, float const* weight, float eps, float scale, Rows<Y> y, cudaStream_t stream);
  /// x = gelu(x), the exact one, in place.
  template <class X>
  static void gelu(Rows<X> x, cudaStream_t stream);
  /// out[t, *] = sigmoid(v · x_t), v [H].
  template <class X>
  static void sigmoid_gate(Rows<X const> x, float const* v, Rows<float> out, cudaStream_t stream);
  /// q [M, payload_cols(H)], s [M, scale_cols(H)]: the rows by the rule of a scheme.
  template <class Quant, class X>
  static void quantize(Quant const& quant, Rows<X const> x, Rows<typename Quant::template Payload<X>> q, Rows<typename Quant::Scale> s,
                       cudaStream_t stream);
  /// to = from; columns that `from` lacks become zero, those that `to` lacks are dropped. E_ARG for another number of rows.
  template <class X>
  static void copy_columns(Rows<X const> from, Rows<X> to, cudaStream_t stream);
  /// FinishRows says what; the routed output is read once. E_ARG for sizes that do not fit; E_UNSUPPORTED for a norm of rows that exceed
  /// the shared memory of a block.
  template <class X, class S>
  static void finish(FinishRows<X, S> const& f, cudaStream_t stream);
};

}  // namespace moe::runner
