// SPDX-License-Identifier: Apache-2.0
// runner/host/primitives.hpp: products and functions of rows in the host space. Products of few rows and all per-row products are inner
// products; the others are oneDNN's.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "moe/activation/activation.hpp"
#include "moe/core/error.hpp"
#include "moe/core/host_pool.hpp"
#include "moe/experts/onednn.hpp"
#include "moe/routing/zero_experts.hpp"
#include "moe/runner/primitives.hpp"

namespace moe::runner {

namespace detail {

/// Σ term(i) in float32 with 16 partial sums, as experts::detail::dot().
template <class Term>
float lane_sum(std::int64_t n, Term const& term) {
  constexpr std::int64_t kLanes = 16;
  float lanes[kLanes] = {};  // NOLINT(modernize-avoid-c-arrays)
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t j = 0; j < kLanes; ++j) lanes[j] += term(i + j);
  }
  for (std::int64_t j = 0; i + j < n; ++j) lanes[j] += term(i + j);
  for (std::int64_t step = kLanes / 2; step > 0; step /= 2) {
    for (std::int64_t j = 0; j < step; ++j) lanes[j] += lanes[j + step];
  }
  return lanes[0];
}

template <class A, class B>
float dot(A const* a, B const* b, std::int64_t n) {
  if constexpr (std::is_same_v<A, float> && std::is_same_v<B, float>) {
    return experts::detail::dot(a, b, n);
  } else {
    return lane_sum(n, [&](std::int64_t i) { return to_float(a[i]) * to_float(b[i]); });
  }
}

template <class T>
void store(T& to, float value) {
  to = from_float<T>(value);
}

/// f(t) for every row, on all cores if there is work for them. `work`: multiplications of one row.
template <class F>
void each_row(std::int64_t rows, std::int64_t work, F const& f) {
  HostPool::instance().for_each(rows, 1, rows * work >= 1 << 16 ? host_threads() : 1, [&](std::int64_t t, int) { f(t); });
}

}  // namespace detail

template <class Weight, class Act, class Out>
class Linear<space::host, Weight, Act, Out> {
 public:
  Linear(Rows<Weight const> weight, float const* bias, Sums sums, std::int64_t max_rows, Arena<space::host>& arena,
         WeightReads /*reads*/ = WeightReads::once)
      : weight_(weight), bias_(bias), sums_(sums) {
    moe::detail::check_rows("linear: weights", weight);
    std::int64_t const n = weight.extent(0);
    std::int64_t const k = weight.extent(1);
    HostPool::instance().ensure(host_threads());
    if (sums == Sums::per_row) return;
    if constexpr (!std::is_same_v<Weight, float>) {
      wide_ = arena.take<float>(n * k);
      for (std::int64_t i = 0; i < n; ++i) {
        for (std::int64_t j = 0; j < k; ++j) wide_[i * k + j] = to_float(weight(i, j));
      }
    }
    if constexpr (!std::is_same_v<Act, float>) x_ = arena.take<float>(max_rows * k);
    if constexpr (!std::is_same_v<Out, float>) y_ = arena.take<float>(max_rows * n);
  }

  void apply(Rows<Act const> x, Rows<Out> y, HostStream) const {
    if (x.extent(0) == 0) return;
    if (sums_ == Sums::per_row) {
      apply_by_row(x, y);
    } else {
      apply_blocked(x, y);
    }
  }

 private:
  void apply_by_row(Rows<Act const> x, Rows<Out> y) const {
    std::int64_t const n = weight_.extent(0);
    std::int64_t const k = weight_.extent(1);
    detail::each_row(x.extent(0), n * k, [&](std::int64_t t) {
      for (std::int64_t i = 0; i < n; ++i) {
        float const sum = detail::dot(row_ptr(weight_, i), row_ptr(x, t), k);
        detail::store(y(t, i), bias_ == nullptr ? sum : sum + bias_[i]);
      }
    });
  }
  void apply_blocked(Rows<Act const> x, Rows<Out> y) const {
    std::int64_t const m = x.extent(0);
    std::int64_t const n = weight_.extent(0);
    std::int64_t const k = weight_.extent(1);
    float const* a = x_;
    std::int64_t lda = k;
    if constexpr (std::is_same_v<Act, float>) {
      a = x.data_handle();
      lda = x.stride(0);
    } else {
      for (std::int64_t t = 0; t < m; ++t) std::transform(row_ptr(x, t), row_ptr(x, t) + k, x_ + t * k, [](Act v) { return to_float(v); });
    }
    float const* w = wide_;
    std::int64_t ldw = k;
    if constexpr (std::is_same_v<Weight, float>) {
      w = weight_.data_handle();
      ldw = weight_.stride(0);
    }
    float* c = y_;
    std::int64_t ldc = n;
    if constexpr (std::is_same_v<Out, float>) {
      c = y.data_handle();
      ldc = y.stride(0);
    }
    std::atomic<int> status{dnnl_success};
    experts::detail::gemm_nt(status, m, n, k, a, lda, w, ldw, c, ldc);
    if (status != dnnl_success) throw Error(ErrorCode::internal, text("oneDNN: sgemm failed with status ", status.load()));
    for (std::int64_t t = 0; t < m && (c == y_ || bias_ != nullptr); ++t) {
      for (std::int64_t i = 0; i < n; ++i) detail::store(y(t, i), bias_ == nullptr ? c[t * ldc + i] : c[t * ldc + i] + bias_[i]);
    }
  }

  Rows<Weight const> weight_;
  float const* bias_;
  Sums sums_;
  float* wide_ = nullptr;  // [N, K], unless the weights are float
  float* x_ = nullptr;     // [max_rows, K], unless the rows are float
  float* y_ = nullptr;     // [max_rows, N], unless the results are float
};

template <>
struct RowKernels<space::host> {
  template <class X, class Y>
  static void rms_norm(Rows<X const> x, float const* weight, float eps, float scale, Rows<Y> y, HostStream) {
    std::int64_t const width = x.extent(1);
    for (std::int64_t t = 0; t < x.extent(0); ++t) {
      X const* const from = row_ptr(x, t);
      Y* const to = row_ptr(y, t);
      float const r = 1.0F / std::sqrt(detail::dot(from, from, width) / static_cast<float>(width) + eps);
      for (std::int64_t i = 0; i < width; ++i) {
        detail::store(to[i], to_float(from[i]) * r * (weight == nullptr ? scale : weight[i] * scale));
      }
    }
  }

  template <class X>
  static void gelu(Rows<X> x, HostStream) {
    for (std::int64_t t = 0; t < x.extent(0); ++t) {
      for (std::int64_t i = 0; i < x.extent(1); ++i) detail::store(x(t, i), activation::detail::gelu(to_float(x(t, i))));
    }
  }

  template <class X>
  static void sigmoid_gate(Rows<X const> x, float const* v, Rows<float> y, HostStream) {
    for (std::int64_t t = 0; t < x.extent(0); ++t) {
      std::fill_n(row_ptr(y, t), y.extent(1), activation::detail::sigmoid(detail::dot(v, row_ptr(x, t), x.extent(1))));
    }
  }

  template <class Quant, class X>
  static void quantize(Quant const& quant, Rows<X const> x, Rows<typename Quant::template Payload<X>> q, Rows<typename Quant::Scale> s,
                       HostStream) {
    for (std::int64_t t = 0; t < x.extent(0); ++t) {
      quant.template quantize_row<X>(row_ptr(x, t), x.extent(1), row_ptr(q, t), row_ptr(s, t));
    }
  }

  template <class X>
  static void copy_columns(Rows<X const> from, Rows<X> to, HostStream) {
    std::int64_t const both = std::min(from.extent(1), to.extent(1));
    for (std::int64_t t = 0; t < from.extent(0); ++t) {
      std::copy_n(row_ptr(from, t), both, row_ptr(to, t));
      std::fill_n(row_ptr(to, t) + both, to.extent(1) - both, X{});
    }
  }

  template <class X, class S>
  static void finish(FinishRows<X, S> const& f, HostStream) {
    std::int64_t const width = f.routed.extent(1);
    bool const has_shared = f.shared.extent(0) > 0;
    detail::each_row(f.routed.extent(0), width, [&](std::int64_t t) {
      X const* const routed = row_ptr(f.routed, t);
      X* const out = row_ptr(f.output, t);
      S const* const shared = has_shared ? row_ptr(f.shared, t) : nullptr;
      float z = 0.0F;
      if (f.ids.extent(0) > 0) {
        z = f.zero_scale * routing::zero_expert_factor(f.num_experts, f.zero_kind, f.topk, row_ptr(f.ids, t), row_ptr(f.weights, t));
      }
      auto sum = [&](std::int64_t i) {
        float v = to_float(routed[i]);
        if (z != 0.0F) v += z * to_float(row_ptr(f.x, t)[i]);  // 0 x NaN adds nothing
        v *= f.scale;
        if (shared != nullptr) v = f.factor * (v + f.shared_scale * to_float(shared[i]));
        return f.bias == nullptr ? v : v + f.bias[i];
      };
      if (!f.normalise) {
        for (std::int64_t i = 0; i < width; ++i) detail::store(out[i], sum(i));
        return;
      }
      float const mean = detail::lane_sum(width, [&](std::int64_t i) { return sum(i) * sum(i); }) / static_cast<float>(width);
      float const r = 1.0F / std::sqrt(mean + f.eps);
      for (std::int64_t i = 0; i < width; ++i) detail::store(out[i], sum(i) * r * (f.norm == nullptr ? 1.0F : f.norm[i]));
    });
  }
};

}  // namespace moe::runner
