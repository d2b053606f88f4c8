// SPDX-License-Identifier: Apache-2.0
// bench/random_experts.cuh: random routed and shared experts on the device.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "moe/core/cuda_space.hpp"
#include "moe/experts/weights.hpp"
#include "tests/gpu/hopper_reference.cuh"

namespace moe_bench {

/// The weights of `local` experts on the device: bf16, or fp8 codes with a positive scale for every block. Values of w13 have the deviation
/// 1/√H, those of w2 1/√I, so that a layer keeps the size of its rows. The seed decides all values.
template <class Quant>
class RandomExperts {
 public:
  static constexpr bool kFp8 = Quant::kQuantizesActivations;
  using Code = typename Quant::template WeightCode<moe::bf16>;
  using Scale = typename Quant::WeightScale;

  RandomExperts(std::int64_t hidden, std::int64_t intermediate, int local, std::uint64_t seed)
      : hidden_(hidden), intermediate_(intermediate), local_(local) {
    std::int64_t const rows13 = 2 * intermediate;
    w13_ = moe_test::TypedMemory<Code>(static_cast<std::size_t>(local * rows13 * hidden));
    w2_ = moe_test::TypedMemory<Code>(static_cast<std::size_t>(local * hidden * intermediate));
    float const in = 1.0F / std::sqrt(static_cast<float>(hidden));
    float const mid = 1.0F / std::sqrt(static_cast<float>(intermediate));
    fill(w13_, seed + 1, kFp8 ? kCodeSigma : in);
    fill(w2_, seed + 2, kFp8 ? kCodeSigma : mid);
    if constexpr (kFp8) {
      s13_ = moe_test::TypedMemory<float>(static_cast<std::size_t>(local * Quant::weight_scale_count(rows13, hidden)));
      s2_ = moe_test::TypedMemory<float>(static_cast<std::size_t>(local * Quant::weight_scale_count(hidden, intermediate)));
      fill_scales(s13_, seed + 3, in);
      fill_scales(s2_, seed + 4, mid);
    }
    moe::check_cuda(cudaDeviceSynchronize(), "weights");
  }

  template <class Config>
  moe::WeightsOf<Config, Quant> view() const {
    return {matrix(w13_, s13_, 2 * intermediate_, hidden_), matrix(w2_, s2_, hidden_, intermediate_)};
  }
  int local() const { return local_; }
  Code const* w13() const { return w13_.data(); }
  Code const* w2() const { return w2_.data(); }
  float const* s13() const { return s13_.data(); }  ///< null without scales
  float const* s2() const { return s2_.data(); }

 private:
  static constexpr float kCodeSigma = 100.0F;

  static void fill(moe_test::TypedMemory<Code> const& to, std::uint64_t seed, float sigma) {
    using T = std::conditional_t<kFp8, __nv_fp8_e4m3, __nv_bfloat16>;
    static_assert(sizeof(T) == sizeof(Code));
    moe_test::fill_normal<<<2048, 256>>>(reinterpret_cast<T*>(to.data()), static_cast<long long>(to.size()), seed, sigma);
  }
  static void fill_scales(moe_test::TypedMemory<float> const& to, std::uint64_t seed, float sigma) {
    float const scale = sigma / kCodeSigma;
    moe_test::fill_positive<<<256, 256>>>(to.data(), static_cast<long long>(to.size()), seed, 0.5F * scale, 1.5F * scale);
  }
  moe::ExpertMatrix<Code, Scale> matrix(moe_test::TypedMemory<Code> const& codes, moe_test::TypedMemory<float> const& scales,
                                        std::int64_t rows, std::int64_t cols) const {
    moe::ExpertMatrix<Code, Scale> m{};
    m.codes = moe::make_blocks(static_cast<Code const*>(codes.data()), local_, rows, cols);
    if constexpr (kFp8) m.scales = moe::make_rows(static_cast<Scale const*>(scales.data()), local_, Quant::weight_scale_count(rows, cols));
    m.rows = rows;
    m.cols = cols;
    return m;
  }

  std::int64_t hidden_, intermediate_;
  int local_;
  moe_test::TypedMemory<Code> w13_, w2_;
  moe_test::TypedMemory<float> s13_, s2_;
};

/// The bf16 weights of one shared expert, for the Params of runner::shared::Dense.
class RandomShared {
 public:
  RandomShared(std::int64_t hidden, std::int64_t intermediate, std::uint64_t seed)
      : hidden_(hidden),
        intermediate_(intermediate),
        w13_(static_cast<std::size_t>(2 * intermediate * hidden)),
        w2_(static_cast<std::size_t>(hidden * intermediate)) {
    float const in = 1.0F / std::sqrt(static_cast<float>(hidden));
    float const mid = 1.0F / std::sqrt(static_cast<float>(intermediate));
    moe_test::fill_normal<<<2048, 256>>>(w13_.data(), static_cast<long long>(w13_.size()), seed, in);
    moe_test::fill_normal<<<2048, 256>>>(w2_.data(), static_cast<long long>(w2_.size()), seed + 1, mid);
    moe::check_cuda(cudaDeviceSynchronize(), "weights");
  }

  template <class Params>
  void set(Params& p) const {
    p.count = 1;
    p.intermediate = intermediate_;
    p.weights.w13 = {moe::make_blocks(code(w13_), 1, 2 * intermediate_, hidden_), {}, {}, 2 * intermediate_, hidden_};
    p.weights.w2 = {moe::make_blocks(code(w2_), 1, hidden_, intermediate_), {}, {}, hidden_, intermediate_};
  }

 private:
  static moe::bf16 const* code(moe_test::TypedMemory<__nv_bfloat16> const& a) { return reinterpret_cast<moe::bf16 const*>(a.data()); }

  std::int64_t hidden_, intermediate_;
  moe_test::TypedMemory<__nv_bfloat16> w13_, w2_;
};

}  // namespace moe_bench
