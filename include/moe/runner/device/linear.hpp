// SPDX-License-Identifier: Apache-2.0
// runner/device/linear.hpp: linear layers of a block on the device: gates, projections, shared experts. Plain host C++; apply() is defined
// in linear.cuh, the constructor there too.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "moe/core/buffer.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/runner/primitives.hpp"

namespace moe::runner {

namespace device {

template <class In, class Out>
class BlasLtProduct;

}  // namespace device

/// y [M, N] = x [M, K] · wᵀ (+ bias), summed in float32. Weights of the rows' type: cuBLASLt, for Sums::per_row with one algorithm for any
/// number of rows; a gate with Sums::blocked and few rows in the library's kernel. Weights of another type (a float32 gate of a bf16
/// model) have exact products and float32 sums, and every row is summed alike, in one of two ways that the constructor chooses by the
/// weights' values:
///   each is a value of Act: a copy in Act through cuBLASLt with one algorithm. Products are exact, sums are float32
///   otherwise: the library's kernel, which reads the rows as they are
template <class Weight, class Act, class Out>
class Linear<space::cuda, Weight, Act, Out> {
 public:
  /// w [N, K] and bias [N] (or null) on the device, borrowed. E_CAPACITY for a size above 2^31 - 1; E_UNSUPPORTED without an algorithm.
  /// reads: every_call keeps float32 weights beside narrower rows in the library's kernel; else they must have their values now.
  Linear(Rows<Weight const> w, float const* bias, Sums sums, std::int64_t max_rows, Arena<space::cuda>& arena,
         WeightReads reads = WeightReads::once);

  /// Enqueues; capturable; no allocation. x [M, K], y [M, N] on the device, M at most max_rows. E_ARG for other sizes, and over a copy of
  /// the weights for rows that do not begin at multiples of 16 bytes.
  void apply(Rows<Act const> x, Rows<Out> y, cudaStream_t stream) const;

  /// How float32 weights are multiplied beside narrower rows, and why, in words. Empty for others.
  std::string const& choice() const { return choice_; }
  /// The weights, if there is a copy in Act: their owner may free them. Else null.
  void const* unread_weight() const { return unread_; }

 private:
  /// Whether cuBLASLt can run it: one type of operands, whose results it writes in that type or in float32.
  static constexpr bool kBlas = std::is_same_v<Weight, Act> && (std::is_same_v<Out, float> || std::is_same_v<Out, Act>);
  /// Whether it can with a copy of the weights in Act.
  static constexpr bool kNarrows =
      !kBlas && std::is_same_v<Weight, float> && !std::is_same_v<Act, float> && (std::is_same_v<Out, float> || std::is_same_v<Out, Act>);

  Rows<Weight const> w_;  // no values where there is a copy
  float const* bias_;
  Sums sums_;
  std::int64_t max_rows_;
  std::shared_ptr<device::BlasLtProduct<Act, Out>> product_;  // null: the library's kernel
  std::string choice_;
  void const* unread_ = nullptr;
};

}  // namespace moe::runner
