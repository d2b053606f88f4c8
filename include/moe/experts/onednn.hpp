// SPDX-License-Identifier: Apache-2.0
// experts/onednn.hpp: the fast host experts: float32 matrix products by oneDNN over all cores (HostPool). Weights of any storage are
// widened block by block into a cache-resident scratch right before their product, so that memory delivers only their stored bytes. The
// widening itself costs time (docs/log/host.md).
//
// Work is divided so that no two threads write the same place and every sum has one order, whatever the thread count:
//   first product + activation: tasks (expert, block of intermediate columns);
//   second product + weighted sum: tasks (block of hidden columns), experts in ascending order within a task;
//   with a norm of the experts' outputs: the second product of all slots, their norms, the weighted sum in the same order.
#pragma once

#include <dnnl.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "moe/core/buffer.hpp"
#include "moe/core/host_pool.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/experts/common/any_composition.hpp"
#include "moe/experts/common/check_rows.hpp"
#include "moe/experts/common/host_products.hpp"
#include "moe/experts/common/host_rows.hpp"
#include "moe/experts/common/output_norm.hpp"
#include "moe/experts/weights.hpp"
#include "moe/quantization/format/facts.hpp"

namespace moe::experts {

struct OneDnn : AnyComposition {
  static constexpr char const* kName = "onednn";
  using Space = space::host;
  static constexpr bool kNormalisesOutput = true;
  struct Params {
    int num_threads = 0;  ///< 0: omp_get_max_threads(). Threads wait in HostPool; OMP_WAIT_POLICY is ignored
  };

  template <class Config, class Quant, ActivationFormat Format>
  class Kernel;
};

namespace detail {

/// The rows of every local expert: slots [offset[e], offset[e + 1]) of the sorted list, in slot order. Host memory.
struct SlotList {
  std::int64_t* offset;  ///< [L + 1]
  std::int32_t* token;   ///< [slots] row of the token
  float* weight;         ///< [slots] its router weight
};

/// Up to this many rows a product only streams the weights, and oneDNN's packing of them costs more than the arithmetic
/// (docs/log/host.md).
inline constexpr std::int64_t kDotRows = 8;

/// While this object lives, OpenMP, which oneDNN uses, runs on one thread when called from this thread. Other threads' settings do not
/// change.
class OneOpenMpThread {
 public:
  OneOpenMpThread() { omp_set_num_threads(1); }
  OneOpenMpThread(OneOpenMpThread const&) = delete;
  OneOpenMpThread& operator=(OneOpenMpThread const&) = delete;
  ~OneOpenMpThread() { omp_set_num_threads(before_); }

 private:
  int before_ = omp_get_max_threads();
};

/// C [m, n] (row stride ldc) = A [m, k] · B [n, k]ᵀ, float32, by oneDNN on this thread alone. A failure is stored in `status`, because no
/// exception may leave HostPool's loops.
inline void gemm_nt(std::atomic<int>& status, std::int64_t m, std::int64_t n, std::int64_t k, float const* a, std::int64_t lda,
                    float const* b, std::int64_t ldb, float* c, std::int64_t ldc) {
  if (m <= kDotRows) {
    dot_products(m, n, k, a, lda, b, ldb, c, ldc, Resident::memory);
    return;
  }
  OneOpenMpThread const alone;
  dnnl_status_t const result = dnnl_sgemm('N', 'T', m, n, k, 1.0F, a, lda, b, ldb, 0.0F, c, ldc);
  if (result != dnnl_success) {
    status.store(result, std::memory_order_relaxed);
  }
}

}  // namespace detail

template <class Config, class Quant, ActivationFormat Format>
class OneDnn::Kernel {
 public:
  using Output = float;
  using Weights = WeightsOf<Config, Quant>;
  using Act = typename Config::Act;
  using Weight = typename Config::Weight;

  /// max_rows: rows (standard) or rows per expert (batched) that apply() gets at most. Weights are borrowed.
  Kernel(Shape<Config> const& shape, Weights const& weights, std::int64_t max_rows, Quant const& quant,
         typename Config::Activation const& activation, Params const& params, Arena<space::host>& arena)
      : shape_(shape),
        weights_(weights),
        max_rows_(max_rows),
        quant_(quant),
        activation_(activation),
        threads_(params.num_threads > 0 ? params.num_threads : omp_get_max_threads()),
        num_local_(weights.w13.codes.extent(0)),
        block13_(detail::block_columns(shape.hidden(), shape.intermediate())),
        block2_(detail::block_columns(shape.intermediate(), shape.hidden())) {
    check_weights<Quant>(weights, shape.hidden(), shape.intermediate(), activation.gated());
    check_scales<Quant>(weights);
    HostPool::instance().ensure(threads_);
    max_slots_ = max_rows * (Format == ActivationFormat::standard ? shape.topk() : num_local_);
    x_ = arena.template take<float>(max_slots_ * shape.hidden());
    h_ = arena.template take<float>(max_slots_ * shape.intermediate());
    slots_ = {arena.template take<std::int64_t>(num_local_ + 1), arena.template take<std::int32_t>(max_slots_),
              arena.template take<float>(max_slots_)};
    cursor_ = arena.template take<std::int64_t>(num_local_);
    std::int64_t const widened = std::max(2 * block13_ * shape.hidden(), block2_ * shape.intermediate());
    std::int64_t const product = std::max(2 * block13_, block2_);
    per_thread_ = widened + kPanel * product;
    scratch_ = arena.template take<float>(threads_ * per_thread_);
    product_offset_ = widened;
    codes_ = arena.template take<typename Quant::template Payload<float>>(threads_ * Quant::payload_cols(shape.intermediate()));
    scales_ = arena.template take<typename Quant::Scale>(threads_ * Quant::scale_cols(shape.intermediate()));
  }

  /// y[r] = Σ_j w_j FFN_{id_j}(x_r) over the slots with a local expert, summed in ascending local expert order; rows without one become
  /// 0. y [R, H] float32.
  void apply(StandardTokensOf<Config, Quant> const& tokens, Rows<float> y, HostStream) const {
    std::int64_t const rows = tokens.rows.extent(0);
    detail::check_rows(rows, y.extent(0), max_rows_);
    sort_slots(tokens.topk_ids, tokens.topk_weights);
    std::int64_t const slots = slots_.offset[num_local_];
    bool const on_input = shape_.weight_on_input();
    each(slots, kSlotGrain, [&](std::int64_t s, int) {
      std::int64_t const r = slots_.token[s];
      float* x = x_ + s * shape_.hidden();
      quant_.template dequantize_row<Act>(row_ptr(tokens.rows, r), row_ptr(tokens.scales, r), shape_.hidden(), x);
      if (on_input) {
        for (std::int64_t i = 0; i < shape_.hidden(); ++i) {
          x[i] *= slots_.weight[s];
        }
      }
    });
    first_product();
    auto const clear = [&](std::int64_t column, std::int64_t width) {
      for (std::int64_t r = 0; r < rows; ++r) {
        std::fill_n(row_ptr(y, r) + column, width, 0.0F);
      }
    };
    auto const add = [&](std::int64_t slot, std::int64_t column, std::int64_t width, float const* product) {
      float const w = on_input ? 1.0F : slots_.weight[slot];
      float* out = row_ptr(y, slots_.token[slot]) + column;
      for (std::int64_t i = 0; i < width; ++i) {
        out[i] += w * product[i];
      }
    };
    if constexpr (kExpertNorm<Config> != ExpertNorm::none) {
      if (weights_.norm.given()) {
        normalised_outputs([&](std::int64_t s) { return x_ + s * shape_.hidden(); });  // the first product has read the inputs
        std::int64_t const hidden = shape_.hidden();
        each((hidden + block2_ - 1) / block2_, 1, [&](std::int64_t task, int) {
          std::int64_t const column = task * block2_, width = std::min(block2_, hidden - column);
          clear(column, width);
          for (std::int64_t s = 0; s < slots; ++s) add(s, column, width, x_ + s * hidden + column);
        });
        return;
      }
    }
    second_product(clear, add);
  }

  /// y[e][i] = FFN_e(x_i) for the valid rows of each block, unweighted. y [L, C, H] float32; other rows are left as they are.
  void apply(BatchedTokensOf<Config, Quant> const& tokens, Blocks<float> y, HostStream) const {
    detail::check_rows(tokens.rows.extent(1), y.extent(1), max_rows_);
    slots_.offset[0] = 0;
    for (std::int64_t e = 0; e < num_local_; ++e) {
      slots_.offset[e + 1] = slots_.offset[e] + tokens.expert_num_tokens(e);
    }
    each(num_local_, 1, [&](std::int64_t e, int) {
      for (std::int64_t i = 0; i < tokens.expert_num_tokens(e); ++i) {
        std::int64_t const s = slots_.offset[e] + i;
        slots_.token[s] = static_cast<std::int32_t>(e);
        quant_.template dequantize_row<Act>(row_ptr(tokens.rows, e, i), row_ptr(tokens.scales, e, i), shape_.hidden(),
                                            x_ + s * shape_.hidden());
      }
    });
    first_product();
    auto const row_of = [&](std::int64_t slot) { return row_ptr(y, slots_.token[slot], slot - slots_.offset[slots_.token[slot]]); };
    if constexpr (kExpertNorm<Config> != ExpertNorm::none) {
      if (weights_.norm.given()) return normalised_outputs(row_of);
    }
    outputs(row_of);
  }

 private:
  static constexpr std::int64_t kSerialWork = std::int64_t{1} << 17;  ///< elements of w2 times slots: some 50 us of one core
  static constexpr std::int64_t kSlotGrain = 8;                       ///< rows that a thread widens or quantises at a time
  static constexpr std::int64_t kFewColumns = 4;                      ///< that are widened at a time for few rows
  static constexpr std::int64_t kPanel = 64;  ///< rows per product: the result panel stays in cache with the widened weights

  /// f(i, worker) over i in [0, n), on one thread if the call is so small that waking others would take longer.
  template <class F>
  void each(std::int64_t n, std::int64_t grain, F const& f) const {
    std::int64_t const work = slots_.offset[num_local_] * shape_.hidden() * shape_.intermediate();
    HostPool::instance().for_each(n, grain, work < kSerialWork ? 1 : threads_, f);
  }
  static void check_status(int status) {
    if (status != dnnl_success) {
      throw Error(ErrorCode::internal, text("oneDNN: sgemm failed with status ", status));
    }
  }

  /// Counting sort of the slots by local expert, stable in slot order.
  void sort_slots(Rows<std::int32_t const> ids, Rows<float const> weights) const {
    std::fill_n(slots_.offset, num_local_ + 1, 0);
    for (std::int64_t r = 0; r < ids.extent(0); ++r) {
      for (std::int64_t j = 0; j < ids.extent(1); ++j) {
        std::int32_t const e = ids(r, j);
        if (e >= 0) {
          ++slots_.offset[e + 1];
        }
      }
    }
    for (std::int64_t e = 0; e < num_local_; ++e) {
      slots_.offset[e + 1] += slots_.offset[e];
      cursor_[e] = slots_.offset[e];
    }
    for (std::int64_t r = 0; r < ids.extent(0); ++r) {
      for (std::int64_t j = 0; j < ids.extent(1); ++j) {
        std::int32_t const e = ids(r, j);
        if (e < 0) {
          continue;
        }
        std::int64_t const s = cursor_[e]++;
        slots_.token[s] = static_cast<std::int32_t>(r);
        slots_.weight[s] = weights(r, j);
      }
    }
  }

  /// Rows [first, first + count) of an expert's matrix: columns of a product.
  struct Columns {
    std::int64_t expert, first, count;
    float const* wide;  ///< as float32; null: to be widened as they are multiplied
  };
  /// These columns as float32 if they are that or an expert with `rows` rows multiplies them all at once, else null.
  template <class Matrix>
  float const* widened(Matrix const& m, std::int64_t e, std::int64_t first, std::int64_t count, std::int64_t rows, float* scratch) const {
    bool const later = rows <= detail::kDotRows && !detail::kPlainFloat<Quant, Weight>;
    return later ? nullptr : detail::weight_rows<Weight>(quant_, m, e, first, count, scratch);
  }
  /// product [rows, count] (row stride ldc) = x [rows, m.cols] · columnsᵀ. A few columns at a time stay in the nearest cache.
  template <class Matrix>
  void multiply(std::atomic<int>& status, Matrix const& m, Columns const& columns, float const* x, std::int64_t rows, float* product,
                std::int64_t ldc, float* scratch) const {
    if (columns.wide != nullptr) {
      detail::gemm_nt(status, rows, columns.count, m.cols, x, m.cols, columns.wide, m.cols, product, ldc);
      return;
    }
    for (std::int64_t i = 0; i < columns.count; i += kFewColumns) {
      std::int64_t const count = std::min(kFewColumns, columns.count - i);
      float const* wide = detail::weight_rows<Weight>(quant_, m, columns.expert, columns.first + i, count, scratch);
      detail::dot_products(rows, count, m.cols, x, m.cols, wide, m.cols, product + i, ldc, detail::Resident::cache);
    }
  }

  /// h[s] = requantised act(W13 x[s] + b13), all slots.
  void first_product() const {
    std::atomic<int> status{dnnl_success};
    std::int64_t const width = shape_.intermediate();
    std::int64_t const hidden = shape_.hidden();
    std::int64_t const blocks = (width + block13_ - 1) / block13_;
    bool const gated = activation_.gated();
    each(num_local_ * blocks, 1, [&](std::int64_t task, int worker) {
      std::int64_t const e = task / blocks;
      std::int64_t const first = task % blocks * block13_;
      std::int64_t const count = std::min(block13_, width - first);
      std::int64_t const begin = slots_.offset[e];
      std::int64_t const end = slots_.offset[e + 1];
      if (begin == end) {
        return;
      }
      float* scratch = scratch_ + worker * per_thread_;
      float* product = scratch + product_offset_;
      auto const& m = weights_.w13;
      float const* gate = widened(m, e, first, count, end - begin, scratch);
      float const* up = gated ? widened(m, e, width + first, count, end - begin, scratch + count * hidden) : nullptr;
      float const* bias = m.has_bias() ? row_ptr(m.bias, e) : nullptr;
      for (std::int64_t s = begin; s < end; s += kPanel) {
        std::int64_t const rows = std::min(kPanel, end - s);
        float const* x = x_ + s * hidden;
        multiply(status, m, {e, first, count, gate}, x, rows, product, 2 * count, scratch);
        if (gated) multiply(status, m, {e, width + first, count, up}, x, rows, product + count, 2 * count, scratch);
        for (std::int64_t r = 0; r < rows; ++r) {
          float* g = product + r * 2 * count;
          float* u = g + count;
          if (bias != nullptr) {
            for (std::int64_t i = 0; i < count; ++i) {
              g[i] += bias[first + i];
            }
            for (std::int64_t i = 0; i < count && gated; ++i) {
              u[i] += bias[width + first + i];
            }
          }
          float* out = h_ + (s + r) * width + first;
          for (std::int64_t i = 0; i < count; ++i) {
            out[i] = activation_(g[i], gated ? u[i] : 0.0F);
          }
        }
      }
    });
    check_status(status);
    if constexpr (facts::act_granularity<Quant>() != quantization::ScaleGranularity::none) {
      each(slots_.offset[num_local_], kSlotGrain, [&](std::int64_t s, int worker) {
        std::int64_t const t = worker;
        detail::requantize_row<Quant, Act>(quant_, h_ + s * width, width, codes_ + t * Quant::payload_cols(width),
                                           scales_ + t * Quant::scale_cols(width));
      });
    }
  }

  /// row(slot) becomes W2 h[slot] + b2, all slots.
  template <class Row>
  void outputs(Row const& row) const {
    second_product([](std::int64_t, std::int64_t) {}, [&](std::int64_t slot, std::int64_t column, std::int64_t width,
                                                          float const* product) { std::copy_n(product, width, row(slot) + column); });
  }
  /// The same, through the norm of the experts' outputs.
  template <class Row>
  void normalised_outputs(Row const& row) const {
    outputs(row);
    each(slots_.offset[num_local_], kSlotGrain,
         [&](std::int64_t s, int) { detail::normalise_output(weights_.norm, row(s), shape_.hidden()); });
  }

  /// For every block of hidden columns: clear(column, width), then emit(slot, column, width, W2 h[slot] + b2) in ascending slot order.
  template <class Clear, class Emit>
  void second_product(Clear const& clear, Emit const& emit) const {
    std::atomic<int> status{dnnl_success};
    std::int64_t const width = shape_.intermediate();
    std::int64_t const hidden = shape_.hidden();
    // Inner products are as fast over fewer columns, and more threads find a task; oneDNN's are not.
    bool const few = slots_.offset[num_local_] <= detail::kDotRows * num_local_;
    std::int64_t const block = few ? detail::shared_columns(hidden, block2_) : block2_;
    std::int64_t const blocks = (hidden + block - 1) / block;
    each(blocks, 1, [&](std::int64_t task, int worker) {
      std::int64_t const first = task * block;
      std::int64_t const count = std::min(block, hidden - first);
      float* scratch = scratch_ + worker * per_thread_;
      float* product = scratch + product_offset_;
      clear(first, count);
      for (std::int64_t e = 0; e < num_local_; ++e) {
        if (slots_.offset[e] == slots_.offset[e + 1]) {
          continue;
        }
        auto const& m = weights_.w2;
        float const* w = widened(m, e, first, count, slots_.offset[e + 1] - slots_.offset[e], scratch);
        float const* bias = m.has_bias() ? row_ptr(m.bias, e) + first : nullptr;
        for (std::int64_t s = slots_.offset[e]; s < slots_.offset[e + 1]; s += kPanel) {
          std::int64_t const rows = std::min(kPanel, slots_.offset[e + 1] - s);
          multiply(status, m, {e, first, count, w}, h_ + s * width, rows, product, count, scratch);
          for (std::int64_t r = 0; r < rows; ++r) {
            if (bias != nullptr) {
              for (std::int64_t i = 0; i < count; ++i) {
                product[r * count + i] += bias[i];
              }
            }
            emit(s + r, first, count, product + r * count);
          }
        }
      }
    });
    check_status(status);
  }

  Shape<Config> shape_;
  Weights weights_;
  std::int64_t max_rows_;
  Quant quant_;
  typename Config::Activation activation_;
  int threads_;
  std::int64_t num_local_;
  std::int64_t block13_;
  std::int64_t block2_;
  std::int64_t max_slots_ = 0;
  std::int64_t per_thread_ = 0;
  std::int64_t product_offset_ = 0;
  float* x_ = nullptr;
  float* h_ = nullptr;
  detail::SlotList slots_{};
  std::int64_t* cursor_ = nullptr;
  float* scratch_ = nullptr;
  typename Quant::template Payload<float>* codes_ = nullptr;
  typename Quant::Scale* scales_ = nullptr;
};

}  // namespace moe::experts
