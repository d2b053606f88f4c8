// SPDX-License-Identifier: Apache-2.0
// experts/reference.hpp: the experts exactly as defined, on the host: any quantisation (by dequantising), any activation, both formats. The
// reference for tests of every other experts kernel. Sum over k in j order, accumulation in `Accumulate` (float or double).
#pragma once

#include <cstdint>

#include "moe/core/buffer.hpp"
#include "moe/core/host_pool.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/experts/common/activated_row.hpp"
#include "moe/experts/common/any_composition.hpp"
#include "moe/experts/common/check_rows.hpp"
#include "moe/experts/common/host_rows.hpp"
#include "moe/experts/common/output_norm.hpp"
#include "moe/experts/weights.hpp"

namespace moe::experts {

template <class Accumulate = float>
struct Reference : AnyComposition {
  static constexpr char const* kName = "reference";
  using Space = space::host;
  static constexpr bool kBatchInvariant = true;
  static constexpr bool kNormalisesOutput = true;
  struct Params {};

  template <class Config, class Quant, ActivationFormat Format>
  class Kernel {
   public:
    using Output = float;
    using Weights = WeightsOf<Config, Quant>;

    /// max_rows: rows (standard) or rows per expert (batched) that apply() gets at most. Weights are borrowed.
    Kernel(Shape<Config> const& shape, Weights const& weights, std::int64_t max_rows, Quant const& quant,
           typename Config::Activation const& activation, Params const&, Arena<space::host>& arena)
        : shape_(shape), weights_(weights), max_rows_(max_rows), quant_(quant), activation_(activation), threads_(host_threads()) {
      check_weights<Quant>(weights, shape.hidden(), shape.intermediate(), activation.gated());
      check_scales<Quant>(weights);
      HostPool::instance().ensure(threads_);
      per_thread_ = 3 * shape.hidden() + 4 * shape.intermediate();
      scratch_ = arena.template take<float>(threads_ * per_thread_);
      codes_ = arena.template take<typename Quant::template Payload<float>>(threads_ * Quant::payload_cols(shape.intermediate()));
      scales_ = arena.template take<typename Quant::Scale>(threads_ * Quant::scale_cols(shape.intermediate()));
    }

    /// y[r] = Σ_j w_j FFN_{id_j}(x_r) over the slots with a local expert; rows without one become 0. y [R, H] float32.
    void apply(StandardTokensOf<Config, Quant> const& tokens, Rows<float> y, HostStream) const {
      detail::check_rows(tokens.rows.extent(0), y.extent(0), max_rows_);
      std::int64_t const rows = tokens.rows.extent(0);
      std::int64_t const k = tokens.topk_ids.extent(1);
      HostPool::instance().for_each(rows, 1, threads(rows * k), [&](std::int64_t r, int worker) {
        Scratch const s = scratch(worker);
        float* out = row_ptr(y, r);
        for (std::int64_t h = 0; h < shape_.hidden(); ++h) {
          out[h] = 0.0F;
        }
        quant_.template dequantize_row<typename Config::Act>(row_ptr(tokens.rows, r), row_ptr(tokens.scales, r), shape_.hidden(), s.x);
        for (std::int64_t j = 0; j < k; ++j) {
          std::int32_t const e = row_ptr(tokens.topk_ids, r)[j];
          if (e < 0) {
            continue;
          }
          float const w = row_ptr(tokens.topk_weights, r)[j];
          bool const on_input = shape_.weight_on_input();
          feed_forward(e, s, on_input ? w : 1.0F);
          for (std::int64_t h = 0; h < shape_.hidden(); ++h) {
            out[h] += on_input ? s.out[h] : w * s.out[h];
          }
        }
      });
    }

    /// y[e][i] = FFN_e(x_i) for the valid rows of each block, unweighted. y [L, C, H] float32; other rows are left as they are.
    void apply(BatchedTokensOf<Config, Quant> const& tokens, Blocks<float> y, HostStream) const {
      detail::check_rows(tokens.rows.extent(1), y.extent(1), max_rows_);
      for (std::int64_t e = 0; e < tokens.rows.extent(0); ++e) {
        std::int64_t const count = tokens.expert_num_tokens(e);
        HostPool::instance().for_each(count, 1, threads(count), [&](std::int64_t i, int worker) {
          Scratch const s = scratch(worker);
          quant_.template dequantize_row<typename Config::Act>(row_ptr(tokens.rows, e, i), row_ptr(tokens.scales, e, i), shape_.hidden(),
                                                               s.x);
          feed_forward(e, s, 1.0F);
          for (std::int64_t h = 0; h < shape_.hidden(); ++h) {
            row_ptr(y, e, i)[h] = s.out[h];
          }
        });
      }
    }

   private:
    /// One thread's working rows.
    struct Scratch {
      float* x;       // [H] the dequantised input
      float* out;     // [H]
      float* weight;  // [max(H, I)] one dequantised weight row
      float* h13;     // [2I]
      float* h;       // [I]
      typename Quant::template Payload<float>* codes;
      typename Quant::Scale* scales;
    };
    /// One thread for a call so small that waking others would take longer.
    int threads(std::int64_t slots) const { return slots * shape_.hidden() * shape_.intermediate() < (1 << 15) ? 1 : threads_; }
    Scratch scratch(std::int64_t t) const {
      std::int64_t const h = shape_.hidden();
      std::int64_t const i = shape_.intermediate();
      float* base = scratch_ + t * per_thread_;
      return {base,
              base + h,
              base + 2 * h,
              base + 3 * h + i,
              base + 3 * h + 3 * i,
              codes_ + t * Quant::payload_cols(i),
              scales_ + t * Quant::scale_cols(i)};
    }
    static Accumulate dot(float const* a, float const* b, std::int64_t n) {
      Accumulate sum = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        sum += static_cast<Accumulate>(a[i]) * static_cast<Accumulate>(b[i]);
      }
      return sum;
    }
    /// out = matrix_e · in (+ bias).
    template <class Matrix>
    void linear(Matrix const& m, std::int64_t e, float const* in, float in_scale, float* scratch_row, float* out) const {
      float const* bias = m.has_bias() ? row_ptr(m.bias, e) : nullptr;
      for (std::int64_t n = 0; n < m.rows; ++n) {
        float const* w = detail::weight_rows<typename Config::Weight>(quant_, m, e, n, 1, scratch_row);
        out[n] = static_cast<float>(static_cast<Accumulate>(in_scale) * dot(w, in, m.cols) +
                                    static_cast<Accumulate>(bias != nullptr ? bias[n] : 0.0F));
      }
    }
    /// s.out = W2_e · act(W13_e · (in_scale · s.x)), through the norm that the weights may have; the scale is linear up to the activation,
    /// so it multiplies the first product.
    void feed_forward(std::int64_t e, Scratch const& s, float in_scale) const {
      linear(weights_.w13, e, s.x, in_scale, s.weight, s.h13);
      std::int64_t const width = shape_.intermediate();
      ActivatedRow const row{activation_, static_cast<float const*>(s.h13), width, false};
      if constexpr (detail::kQuantizesComputedRows<Quant, decltype(row)>) {
        quant_.template quantize_row<float>(row, width, s.codes, s.scales);
        quant_.template dequantize_row<float>(s.codes, s.scales, width, s.h);
      } else {
        for (std::int64_t i = 0; i < width; ++i) {
          s.h[i] = row[i];
        }
        detail::requantize_row<Quant, typename Config::Act>(quant_, s.h, width, s.codes, s.scales);
      }
      linear(weights_.w2, e, s.h, 1.0F, s.weight, s.out);
      if constexpr (kExpertNorm<Config> != ExpertNorm::none) {
        if (weights_.norm.given()) detail::normalise_output(weights_.norm, s.out, shape_.hidden());
      }
    }

    Shape<Config> shape_;
    Weights weights_;
    std::int64_t max_rows_;
    Quant quant_;
    typename Config::Activation activation_;
    int threads_;
    std::int64_t per_thread_ = 0;
    float* scratch_ = nullptr;
    typename Quant::template Payload<float>* codes_ = nullptr;
    typename Quant::Scale* scales_ = nullptr;
  };
};

}  // namespace moe::experts
