// SPDX-License-Identifier: Apache-2.0
// experts/weights.hpp: owning storage for the weights of one rank's experts, quantised expert by expert from float32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "moe/core/buffer.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/core/error.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/experts/common/check_weights.hpp"
#include "moe/experts/common/quantised_matrix.hpp"

namespace moe::experts {

/// The expert weights of one rank in the memory of `Space`, in the storage of `Quant`. Bias arrays are float32.
template <class Config, class Quant, class SpaceT = space::host>
class WeightStore {
 public:
  using Space = SpaceT;
  using Code = typename Quant::template WeightCode<typename Config::Weight>;
  using Scale = typename Quant::WeightScale;

  /// num_local experts with w13 [rows13, hidden] and w2 [hidden, intermediate]; rows13 is 2I if gated, else I. E_CONFIG for sizes other
  /// than those that Config fixes, or that the quantisation cannot take.
  WeightStore(std::int64_t num_local, std::int64_t hidden, std::int64_t intermediate, bool gated, Quant const& quant = {})
      : quant_(detail::checked_quantization<Config>(quant, hidden, intermediate)),
        num_local_(num_local),
        w13_(num_local, (gated ? 2 : 1) * intermediate, hidden),
        w2_(num_local, hidden, intermediate),
        is_set_(static_cast<std::size_t>(num_local), false) {}

  /// Quantises and stores one expert. Host pointers: w13 [rows13, hidden], w2 [hidden, intermediate], row-major, gate rows first. E_ARG,
  /// with the expert and the scale, where a scale of the scheme is not a number or too large for its codes.
  template <class T>
  void set_expert(std::int64_t local, T const* w13, T const* w2) {
    check(local);
    detail::expect_source("w13", w13, w13_.rows * w13_.cols);
    detail::expect_source("w2", w2, w2_.rows * w2_.cols);
    store("w13", w13_, local, w13);
    store("w2", w2_, local, w2);
    is_set_[static_cast<std::size_t>(local)] = true;
  }
  /// Biases of one expert: b13 [rows13], b2 [hidden]. All experts have biases or none has.
  void set_bias(std::int64_t local, float const* b13, float const* b2) {
    check(local);
    detail::expect_source("b13", b13, w13_.rows);
    detail::expect_source("b2", b2, w2_.rows);
    store_bias(w13_, local, b13);
    store_bias(w2_, local, b2);
  }
  /// The norm of every expert's output, scale [hidden] on the host. A layer takes it if Config::expert_norm says so.
  void set_norm(float const* scale, float eps) {
    detail::expect_source("norm", scale, w2_.rows);
    norm_ = Buffer<float, Space>(w2_.rows);
    norm_eps_ = eps;
    Memory<Space>::copy_from_host(norm_.data(), scale, static_cast<std::size_t>(w2_.rows) * sizeof(float));
  }
  /// Calls visit(name, view) for every array that holds a part of each expert, codes first, then scales, then biases: [L, …] views of this
  /// object's memory, one expert after the other. For moving experts between ranks; all experts then count as set.
  template <class Visit>
  void visit_tensors(Visit&& visit) {
    is_set_.assign(is_set_.size(), true);
    visit("w13", make_blocks(w13_.codes.data(), num_local_, w13_.rows, w13_.code_cols));
    visit("w2", make_blocks(w2_.codes.data(), num_local_, w2_.rows, w2_.code_cols));
    visit("w13_scale", make_rows(w13_.scales.data(), num_local_, w13_.scale_count));
    visit("w2_scale", make_rows(w2_.scales.data(), num_local_, w2_.scale_count));
    if (w13_.bias.size() > 0) {
      visit("w13_bias", make_rows(w13_.bias.data(), num_local_, w13_.rows));
      visit("w2_bias", make_rows(w2_.bias.data(), num_local_, w2_.rows));
    }
  }
  std::int64_t num_local() const { return num_local_; }
  Quant const& quantization() const { return quant_; }
  /// Bytes of codes and scales.
  std::size_t bytes() const { return w13_.codes.bytes() + w13_.scales.bytes() + w2_.codes.bytes() + w2_.scales.bytes(); }

  /// The view that a composition takes; valid as long as this object. A layer refuses it unless every expert was set before.
  ExpertWeights<Code, Scale> view() const {
    auto const unset = std::find(is_set_.begin(), is_set_.end(), false);
    return {view_of(w13_),
            view_of(w2_),
            unset == is_set_.end() ? -1 : unset - is_set_.begin(),
            {make_vector(norm_.data(), norm_.size()), norm_eps_}};
  }

 private:
  struct Matrix {
    Matrix(std::int64_t experts, std::int64_t rows_, std::int64_t cols_)
        : rows(rows_),
          cols(cols_),
          code_cols(Quant::weight_code_cols(cols_)),
          scale_count(Quant::weight_scale_count(rows_, cols_)),
          codes(experts * rows_ * code_cols),
          scales(experts * scale_count) {}
    std::int64_t rows, cols, code_cols, scale_count;
    Buffer<Code, Space> codes;
    Buffer<Scale, Space> scales;
    Buffer<float, Space> bias;
  };

  template <class T>
  void store(char const* name, Matrix& m, std::int64_t local, T const* w) {
    detail::quantise_expert<Config>(quant_, name, local, w, m.rows, m.cols, quantised_);
    auto const& [wide, codes, scales] = quantised_;
    Memory<Space>::copy_from_host(m.codes.data() + local * m.rows * m.code_cols, codes.data(), codes.size() * sizeof(Code));
    if (m.scale_count > 0) {
      Memory<Space>::copy_from_host(m.scales.data() + local * m.scale_count, scales.data(), scales.size() * sizeof(Scale));
    }
  }
  void store_bias(Matrix& m, std::int64_t local, float const* b) {
    if (m.bias.size() == 0) {
      m.bias = Buffer<float, Space>(num_local_ * m.rows);
    }
    Memory<Space>::copy_from_host(m.bias.data() + local * m.rows, b, static_cast<std::size_t>(m.rows) * sizeof(float));
  }
  void check(std::int64_t local) const {
    if (local < 0 || local >= num_local_) {
      throw Error(ErrorCode::argument, text("expert weights: local expert ", local, " is out of range [0, ", num_local_, ")"));
    }
  }
  ExpertMatrix<Code, Scale> view_of(Matrix const& m) const {
    return {make_blocks(m.codes.data(), num_local_, m.rows, m.code_cols), make_rows(m.scales.data(), num_local_, m.scale_count),
            make_rows(m.bias.data(), m.bias.size() > 0 ? num_local_ : 0, m.rows), m.rows, m.cols};
  }

  Quant quant_;
  std::int64_t num_local_;
  Matrix w13_;
  Matrix w2_;
  Buffer<float, Space> norm_;  // [hidden], or empty
  float norm_eps_ = 0.0F;
  std::vector<bool> is_set_;
  detail::QuantisedMatrix<Code, Scale> quantised_;
};

namespace detail {

template <class Experts, class Config, class Quant, class Space>
struct StoreOf {
  using type = WeightStore<Config, Quant, Space>;
};
template <class Experts, class Config, class Quant, class Space>
  requires requires { typename Experts::template Store<Config, Quant>; }
struct StoreOf<Experts, Config, Quant, Space> {
  using type = typename Experts::template Store<Config, Quant>;
};

}  // namespace detail

/// What owns the weights of these experts: WeightStore, or the experts' own store where they compute from another layout (Store).
template <class Experts, class Config, class Quant>
using StoreFor = typename detail::StoreOf<Experts, Config, Quant, typename Experts::Space>::type;

}  // namespace moe::experts
