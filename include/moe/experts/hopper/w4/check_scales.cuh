// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/check_scales.cuh: finds, on the device, a scale, zero point or code of stored weights that cannot be packed, and
// refuses it with its value.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "moe/core/error.hpp"
#include "moe/experts/hopper/w4/pack.cuh"
#include "moe/quantization/format/weight_scales.hpp"

namespace moe::hopper::w4 {

inline constexpr unsigned long long kNoScale = ~0ULL;

/// The type of a stored scale (W4Weights).
template <W4Scheme S>
using StoredScale =
    std::conditional_t<scales_codes(S), std::uint8_t, std::conditional_t<has_zero_points(S), moe::quantization::ScaleZero, float>>;

/// What find_bad_scale() looks at: the scales of one matrix of every expert. In nvfp4 an expert's float32 scale is the one behind its
/// others.
template <W4Scheme S>
struct StoredScales {
  unsigned char const* data;
  long long count;  ///< of one expert

  MOE_HD constexpr long long entries() const { return count + (S == W4Scheme::nvfp4 ? 1 : 0); }
  MOE_HD constexpr bool is_global(long long i) const { return S == W4Scheme::nvfp4 && i == count; }
  MOE_HD constexpr long long offset(long long expert, long long i) const {
    if (S != W4Scheme::nvfp4) return (expert * count + i) * static_cast<long long>(sizeof(StoredScale<S>));
    long long const bytes = (count + 3) / 4 * 4;
    return expert * (bytes + 4) + (is_global(i) ? bytes : i);
  }
};

/// What the codes of a scheme are, for the largest of them.
constexpr DType code_type(W4Scheme s) {
  return is_e2m1(s) ? DType::e2m1 : is_e4m3(s) ? DType::e4m3 : s == W4Scheme::int8 ? DType::i8 : DType::u4;
}

/// Whether every code is a finite number under a scale; a zero point is an integer of 0 to 15.
template <W4Scheme S>
MOE_HD inline bool can_be_packed(StoredScale<S> const& scale) {
  using moe::quantization::is_packable;
  if constexpr (has_exponents(S)) {
    return scale <= moe::quantization::largest_exponent(code_type(S));
  } else if constexpr (S == W4Scheme::nvfp4) {
    return (scale & 0x7F) != 0x7F;
  } else if constexpr (has_zero_points(S)) {
    return is_packable(scale, DType::u4) && scale.zero == static_cast<float>(static_cast<int>(scale.zero));
  } else {
    return is_packable(scale, code_type(S));
  }
}

/// Grid (any, experts). *first, kNoScale before, becomes the least expert · entries() + i of a scale that cannot be packed.
template <W4Scheme S>
__global__ void find_bad_scale(StoredScales<S> const scales, unsigned long long* first) {
  long long const expert = blockIdx.y;
  long long const step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < scales.entries(); i += step) {
    unsigned char const* const at = scales.data + scales.offset(expert, i);
    bool const good = scales.is_global(i) ? moe::quantization::is_packable_global(*reinterpret_cast<float const*>(at))
                                          : can_be_packed<S>(*reinterpret_cast<StoredScale<S> const*>(at));
    if (!good) atomicMin(first, static_cast<unsigned long long>(expert * scales.entries() + i));
  }
}

/// What is wrong with a scale whose bytes are at `stored`.
template <W4Scheme S>
inline std::string scale_fault(unsigned char const* stored, bool global) {
  auto const number = [stored](std::size_t at) {
    float v = 0.0F;
    std::memcpy(&v, stored + at, sizeof(v));
    return v;
  };
  if (global) return text("is ", number(0), ", it must be positive, and 2688 times it finite");
  if constexpr (has_exponents(S)) {
    constexpr int kMost = moe::quantization::largest_exponent(code_type(S));
    return text("is byte ", int{stored[0]}, ", at most ", kMost, " gives finite weights");
  } else if constexpr (S == W4Scheme::nvfp4) {
    return text("is byte ", int{stored[0]}, ", which is not a number");
  } else if constexpr (has_zero_points(S)) {
    return text("is ", number(0), " with zero point ", number(4), ", 15 times it must be finite, and its zero point an integer of 0 to 15");
  } else {
    return text("is ", number(0), ", ", moe::quantization::largest_code(code_type(S)), " times it must be finite");
  }
}

/// *first, kNoScale before, becomes the least place of a code of e4m3 that is not a number.
static __global__ void find_nan_code(std::uint8_t const* codes, long long count, unsigned long long* first) {
  long long const step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    if ((codes[i] & 0x7F) == 0x7F) atomicMin(first, static_cast<unsigned long long>(i));
  }
}
/// One matrix of some experts, to be checked. `first`: device memory for one number.
struct CheckedMatrix {
  char const* policy;
  char const* name;
  void const* codes;
  void const* scales;
  long long rows;
  int cols;
  int group;
  int experts;
  int first_expert;  ///< of the layer, for messages
  unsigned long long* first;
  W4Part part{};  ///< what of the matrix this is, for messages

  /// Waits for the device: the least place that `find`, which is enqueued, writes; kNoScale if none.
  template <class Find>
  unsigned long long found(char const* kernel, Find const& find) const {
    check_cuda(cudaMemset(first, 0xFF, sizeof(*first)), "cudaMemset");
    find();
    check_cuda(cudaGetLastError(), kernel);
    unsigned long long place = kNoScale;
    check_cuda(cudaMemcpy(&place, first, sizeof(place), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return place;
  }
};

/// E_UNSUPPORTED for the first code of e4m3 that is not a number: converted in registers it would be 480 or -480.
template <W4Scheme S>
inline void check_codes(CheckedMatrix const& m) {
  if constexpr (is_e4m3(S)) {
    long long const of_expert = m.rows * m.cols;
    auto const found = m.found(
        "find_nan_code", [&] { find_nan_code<<<1024, 256>>>(static_cast<std::uint8_t const*>(m.codes), m.experts * of_expert, m.first); });
    if (found == kNoScale) return;
    auto const at = static_cast<long long>(found);
    throw Error(ErrorCode::unsupported,
                text(m.policy, ": ", m.name, " in ", name(S), ": weight ", m.part.whole_place(at % of_expert, m.cols), " of expert ",
                     m.first_expert + at / of_expert, " is not a number"));
  }
}
/// E_UNSUPPORTED for the first scale that cannot be packed.
template <W4Scheme S>
inline void check_scales(CheckedMatrix const& m) {
  long long const groups = m.cols / (scales_rows(S) ? m.cols : m.group);
  StoredScales<S> const scales{static_cast<unsigned char const*>(m.scales), m.rows * groups};
  auto const found =
      m.found("find_bad_scale", [&] { find_bad_scale<S><<<dim3(32, static_cast<unsigned>(m.experts)), 256>>>(scales, m.first); });
  if (found == kNoScale) return;
  long long const expert = static_cast<long long>(found) / scales.entries();
  long long const i = static_cast<long long>(found) % scales.entries();
  bool const global = scales.is_global(i);
  unsigned char stored[8] = {};
  check_cuda(
      cudaMemcpy(stored, scales.data + scales.offset(expert, i), global ? sizeof(float) : sizeof(StoredScale<S>), cudaMemcpyDeviceToHost),
      "cudaMemcpy");
  throw Error(ErrorCode::unsupported,
              text(m.policy, ": ", m.name, " in ", name(S), ": ", global ? "the scale" : text("scale ", m.part.whole_place(i, groups)),
                   " of expert ", m.first_expert + expert, " ", scale_fault<S>(stored, global)));
}

/// E_UNSUPPORTED, in the name of `policy`, for the first code or scale of the weights that cannot be packed. `first`: device memory for one
/// number. Waits for the device.
template <W4Scheme S>
inline void check_scales(char const* policy, LocalShape const& shape, W4Weights const& weights, bool gated, unsigned long long* first) {
  long long const rows13 = (gated ? 2LL : 1LL) * shape.intermediate;
  CheckedMatrix const w13{policy, "w13", weights.w13, weights.w13_scales, rows13, shape.hidden, weights.w13_group, shape.num_experts,
                          0,      first};
  CheckedMatrix const w2{policy, "w2", weights.w2, weights.w2_scales, shape.hidden, shape.intermediate, weights.w2_group, shape.num_experts,
                         0,      first};
  check_codes<S>(w13);
  check_codes<S>(w2);
  check_scales<S>(w13);
  check_scales<S>(w2);
}
/// The same of one matrix that is packed outside of a layer.
template <W4Scheme S>
inline void check_staged(char const* policy, LocalShape const& shape, W4StagedMatrix const& m, bool gated) {
  CheckedMatrix const matrix{policy,
                             m.down ? "w2" : "w13",
                             m.codes,
                             m.scales,
                             m.down ? shape.hidden : (gated ? 2LL : 1LL) * shape.intermediate,
                             m.down ? shape.intermediate : shape.hidden,
                             m.group,
                             m.experts,
                             m.first_expert,
                             static_cast<unsigned long long*>(m.scratch),
                             m.part};
  check_codes<S>(matrix);
  check_scales<S>(matrix);
}

}  // namespace moe::hopper::w4
