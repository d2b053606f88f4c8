// SPDX-License-Identifier: Apache-2.0
// io/expert_loader.hpp: reads a rank's experts into the arrays of its weights, in the stored form where the quantisation is that of the
// checkpoint.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "moe/core/array.hpp"
#include "moe/core/error.hpp"
#include "moe/core/host_pool.hpp"
#include "moe/io/expert_reader.hpp"
#include "moe/io/layer_description.hpp"
#include "moe/io/one_line.hpp"
#include "moe/io/packed_experts.hpp"
#include "moe/io/tensor_store.hpp"
#include "moe/quantization/format/facts.hpp"
#include "moe/quantization/format/scale_fault.hpp"
#include "moe/quantization/format/weight_scales.hpp"

namespace moe::io {

/// Host memory of one expert's codes and scales.
template <class Code, class Scale>
struct ExpertArrays {
  Code* w13 = nullptr;
  Code* w2 = nullptr;
  Scale* w13_scales = nullptr;
  Scale* w2_scales = nullptr;
};

/// Called with the bytes of tensor data that were read and that will be; by one thread at a time.
using LoadProgress = std::function<void(std::int64_t done, std::int64_t total)>;

/// Reads experts of one layer as `Quant` stores them: the checkpoint's codes where it stores this form; unquantised weights are quantised;
/// quantised weights become `Weight` where Quant is unquantised. Any other pair is refused.
template <class Quant, class Weight>
class ExpertLoader {
 public:
  using Packed = PackedMatrixReader<Quant, Weight>;
  using Arrays = ExpertArrays<typename Packed::Code, typename Packed::Scale>;
  static constexpr bool kUnquantised = facts::weight_granularity<Quant>() == quantization::ScaleGranularity::none;

  /// `reader` is that of the layer `d` describes. E_CONFIG for a stored form that does not become Quant's.
  ExpertLoader(TensorStore const& store, LayerDescription const& d, ExpertReader const& reader, Quant const& quant)
      : reader_(reader), d_(d), quant_(quant), packed_(store, d.quantization), direct_(copies_codes(store)) {}

  /// Whether codes are copied as they are stored.
  bool direct() const { return direct_; }
  /// Whether the layer's experts are stored as Quant, which is a scheme: no weight is rounded a second time. E_ARG, E_CONFIG for tensors
  /// that cannot be read.
  static bool stores(TensorStore const& store, LayerDescription const& d, ExpertReader const& reader) {
    if constexpr (kUnquantised) return false;
    std::vector<StoredMatrix> const matrices = reader.matrices(0);
    if (!matrices.empty()) reader.check_shapes(0);
    Packed const packed(store, d.quantization);
    return !matrices.empty() && std::ranges::all_of(matrices, [&](StoredMatrix const& m) { return packed.holds(m); });
  }

  /// Expert e, into host memory. Safe to call from several threads.
  void read(int e, Arrays const& to) const {
    reader_.check_shapes(e);
    if (direct_) {
      for (StoredMatrix const& m : reader_.matrices(e)) {
        packed_.require_taken(m);
        packed_.read(m, m.down ? to.w2 : to.w13, m.down ? to.w2_scales : to.w13_scales);
      }
      return;
    }
    std::int64_t const rows = d_.w13_rows(), h = d_.expert_hidden(), i = d_.intermediate;
    if constexpr (kUnquantised) {
      reader_.read(e, to.w13, to.w2);
    } else {
      std::vector<float> w13(detail::at(rows * h)), w2(detail::at(h * i));
      reader_.read(e, w13.data(), w2.data());
      quant_.template quantize_weight<Weight>(w13.data(), rows, h, to.w13, to.w13_scales);
      quant_.template quantize_weight<Weight>(w2.data(), h, i, to.w2, to.w2_scales);
      auto const check_scales = [&](bool down, auto const* scales, std::int64_t n, std::int64_t k) {
        std::int64_t const bad = quantization::first_unpackable_scale<Quant>(scales, n, k);
        if (bad < 0) return;
        std::string where = text("expert ", e);
        for (StoredMatrix const& m : reader_.matrices(e)) {
          if (m.down == down) where = m.base;
        }
        throw Error(ErrorCode::argument,
                    one_line("'", where, "' as ", Quant::kName, ": ", quantization::scale_fault<Quant>(scales, bad, n, k)));
      };
      check_scales(false, to.w13_scales, rows, h);
      check_scales(true, to.w2_scales, h, i);
    }
  }

  /// All of `experts`, by up to `threads` threads; arrays(local) gives the memory of each.
  template <class ArraysOf>
  void read_all(std::span<int const> experts, int threads, ArraysOf const& arrays, LoadProgress const& progress) const {
    auto const count = static_cast<std::int64_t>(experts.size());
    std::int64_t const bytes = expert_bytes();
    std::mutex mutex;
    std::exception_ptr error;  // no exception may leave the pool's loop
    std::atomic<bool> failed{false};
    std::int64_t done = 0;
    HostPool::instance().ensure(threads);
    HostPool::instance().for_each(count, 1, threads, [&](std::int64_t local, int) {
      if (failed) return;
      try {
        read(experts[detail::at(local)], arrays(local));
        std::lock_guard const lock(mutex);
        done += bytes;
        if (progress) progress(done, count * bytes);
      } catch (...) {
        std::lock_guard const lock(mutex);
        if (!error) error = std::current_exception();
        failed = true;
      }
    });
    if (error) std::rethrow_exception(error);
  }

  /// Bytes of one expert's codes and scales.
  std::int64_t expert_bytes() const {
    std::int64_t const rows = d_.w13_rows(), h = d_.expert_hidden(), i = d_.intermediate;
    auto const matrix = [](std::int64_t n, std::int64_t k) {
      return n * Quant::weight_code_cols(k) * static_cast<std::int64_t>(sizeof(typename Packed::Code)) +
             Quant::weight_scale_count(n, k) * static_cast<std::int64_t>(sizeof(typename Packed::Scale));
    };
    return matrix(rows, h) + matrix(h, i);
  }

 private:
  bool copies_codes(TensorStore const& store) const {
    std::vector<StoredMatrix> const matrices = reader_.matrices(0);
    reader_.check_shapes(0);
    bool const all = !matrices.empty() && std::ranges::all_of(matrices, [&](StoredMatrix const& m) { return packed_.takes(m); });
    if (all || kUnquantised) return all;
    if (!matrices.empty()) {
      auto const stored = detail::find_codes(store, matrices[0]);
      if (stored.form != StoredForm::floats) {
        throw Error(ErrorCode::config, one_line(stored.codes.where(), ": the checkpoint stores ", name(stored.form),
                                                ", which does not become ", Quant::kName, " without a second rounding"));
      }
    }
    return false;
  }

  ExpertReader const& reader_;
  LayerDescription const& d_;
  Quant const& quant_;
  Packed packed_;
  bool direct_;
};

}  // namespace moe::io
