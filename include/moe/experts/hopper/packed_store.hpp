// SPDX-License-Identifier: Apache-2.0
// experts/hopper/packed_store.hpp: the weights of one rank's experts as the policies hopper_w4a16, hopper_w8a16 and hopper_w4a8 compute
// with them: packed expert by expert, so that the device holds bricks and never all codes. Plain host C++.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "moe/core/array.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/error.hpp"
#include "moe/core/space.hpp"
#include "moe/core/tokens.hpp"
#include "moe/experts/common/quantised_matrix.hpp"
#include "moe/experts/hopper/common/problem.hpp"
#include "moe/experts/hopper/w4/packed_experts.hpp"
#include "moe/experts/hopper/w4/problem.hpp"

namespace moe::experts::detail {

/// Where the part of an expert's matrix that begins with that feature lies in the expert: behind what the features before it take.
template <class Layer>
constexpr hopper::W4ExpertSizes part_place(hopper::LocalShape s, hopper::W4Scheme scheme, bool gated, bool down, int first) {
  int& features = down ? s.hidden : s.intermediate;
  features = 0;
  hopper::W4ExpertSizes const none = Layer::expert_sizes(s, scheme, gated);  // a factor of the whole matrix is there, too
  features = first;
  hopper::W4ExpertSizes out = Layer::expert_sizes(s, scheme, gated);
  for (int i = 0; i < 2; ++i) {
    out.bricks[i] -= none.bricks[i];
    out.factors[i] -= none.factors[i];
  }
  return out;
}

/// As WeightStore in device memory, for the experts of `Storages` alone (HopperW4A16::Store<Config, Quant>, …). Layers read its memory
/// where it lies, and several may. Besides bricks it takes staging_bytes() of device memory for codes and scales while experts are packed
/// and until each was once: one expert in 32, of few experts a part of one matrix.
template <class Storages, class Config, class Quant, class SpaceT = space::cuda>
class PackedStore {
  using Storage = typename Storages::template Of<Quant>;
  using Layer = typename Storages::Layer;

 public:
  using Space = SpaceT;
  using Code = typename Quant::template WeightCode<typename Config::Weight>;
  using Scale = typename Quant::WeightScale;
  /// Codes and scales of experts in host memory, one expert after the other, as WeightStore has them.
  struct Arrays {
    Code const* w13 = nullptr;
    Code const* w2 = nullptr;
    Scale const* w13_scales = nullptr;
    Scale const* w2_scales = nullptr;
  };
  /// Elements of these arrays of one expert.
  struct Counts {
    std::int64_t w13 = 0, w2 = 0, w13_scales = 0, w2_scales = 0;
  };

  /// As WeightStore; E_CONFIG too for sizes that the experts do not compute.
  PackedStore(std::int64_t num_local, std::int64_t hidden, std::int64_t intermediate, bool gated, Quant const& quant = {})
      : quant_(checked_quantization<Config>(quant, hidden, intermediate)),
        gated_(gated),
        sizes_(checked_sizes(num_local, hidden, intermediate)),
        each_(Layer::expert_sizes(sizes_, Storage::kScheme, gated)),
        w13_(num_local, (gated ? 2 : 1) * intermediate, hidden, each_, 0),
        w2_(num_local, hidden, intermediate, each_, 1),
        is_set_(static_cast<std::size_t>(num_local), false) {}

  /// Quantises, checks and packs one expert. Host pointers, errors of scales as WeightStore::set_expert().
  template <class T>
  void set_expert(std::int64_t local, T const* w13, T const* w2) {
    check_range(local, 1);
    expect_source("w13", w13, w13_.rows * w13_.cols);
    expect_source("w2", w2, w2_.rows * w2_.cols);
    QuantisedMatrix<Code, Scale> up, down;
    quantise_expert<Config>(quant_, "w13", local, w13, w13_.rows, w13_.cols, up);
    quantise_expert<Config>(quant_, "w2", local, w2, w2_.rows, w2_.cols, down);
    pack(local, 1, {up.codes.data(), down.codes.data(), up.scales.data(), down.scales.data()});
  }
  /// Packs `count` experts from local expert `first` on, on the default stream, and waits for it. A layer may use the experts, but not run
  /// meanwhile. E_ARG for a null pointer; E_UNSUPPORTED, with matrix, expert and position, for a code or scale that cannot be packed:
  /// experts of the call may have been packed then, and those that were not whole are not set.
  void pack(std::int64_t first, std::int64_t count, Arrays const& from) {
    check_range(first, count);
    Counts const n = counts();
    expect_source("w13", from.w13, n.w13);
    expect_source("w2", from.w2, n.w2);
    expect_source("scales of w13", from.w13_scales, n.w13_scales);
    expect_source("scales of w2", from.w2_scales, n.w2_scales);
    hopper::W4Staging const plan = staging_plan();
    if (staging_.size() == 0) staging_ = Buffer<std::byte, Space>(plan.bytes);
    for (std::int64_t l = 0; l < count; l += plan.experts) {
      auto const experts = static_cast<int>(std::min(plan.experts, count - l));
      std::fill_n(is_set_.begin() + first + l, experts, false);
      hopper::W4StagedMatrix m{.experts = experts, .first_expert = static_cast<int>(first + l)};
      m.group = Storage::group(w13_.cols);
      pack_matrix(m, plan, from.w13 + l * n.w13, from.w13_scales + l * n.w13_scales);
      m.down = true;
      m.group = Storage::group(w2_.cols);
      pack_matrix(m, plan, from.w2 + l * n.w2, from.w2_scales + l * n.w2_scales);
      std::fill_n(is_set_.begin() + first + l, experts, true);
    }
    if (first_unset() < 0) staging_ = Buffer<std::byte, Space>();
  }
  /// Biases of one expert: b13 [rows13], b2 [hidden] on the host. All experts have biases or none has.
  void set_bias(std::int64_t local, float const* b13, float const* b2) {
    check_range(local, 1);
    expect_source("b13", b13, w13_.rows);
    expect_source("b2", b2, w2_.rows);
    store_bias(w13_, local, b13);
    store_bias(w2_, local, b2);
  }
  /// As WeightStore::set_norm().
  void set_norm(float const* scale, float eps) {
    expect_source("norm", scale, w2_.rows);
    norm_ = Buffer<float, Space>(w2_.rows);
    norm_eps_ = eps;
    norm_.copy_from_host(scale);
  }
  /// As WeightStore::visit_tensors(): bricks, factors, biases. An expert's bytes mean the same in every place, so moved experts need no
  /// packing.
  template <class Visit>
  void visit_tensors(Visit&& visit) {
    is_set_.assign(is_set_.size(), true);
    std::int64_t const n = num_local();
    visit("w13", make_rows(w13_.bricks.data(), n, each_.bricks[0]));
    visit("w2", make_rows(w2_.bricks.data(), n, each_.bricks[1]));
    visit("w13_factor", make_rows(w13_.factors.data(), n, each_.factors[0]));
    visit("w2_factor", make_rows(w2_.factors.data(), n, each_.factors[1]));
    if (w13_.bias.size() > 0) {
      visit("w13_bias", make_rows(w13_.bias.data(), n, w13_.rows));
      visit("w2_bias", make_rows(w2_.bias.data(), n, w2_.rows));
    }
  }
  std::int64_t num_local() const { return static_cast<std::int64_t>(is_set_.size()); }
  Quant const& quantization() const { return quant_; }
  Counts counts() const { return {w13_.rows * w13_.code_cols, w2_.rows * w2_.code_cols, w13_.scale_count, w2_.scale_count}; }
  /// Bytes of bricks and factors.
  std::size_t bytes() const { return static_cast<std::size_t>(num_local() * each_.bytes()); }
  /// Bytes that packing takes besides them: the codes and scales of some experts' larger matrix, or of its parts.
  std::int64_t staging_bytes() const { return staging_plan().bytes; }

  /// The view that a layer of these experts takes; valid as long as this object. A layer refuses it unless every expert was set before.
  ExpertWeights<Code, Scale> view() const {
    ExpertWeights<Code, Scale> v{view_of(w13_), view_of(w2_), first_unset(), {make_vector(norm_.data(), norm_.size()), norm_eps_}};
    v.packed = {Storages::kName, {w13_.place, w2_.place}, {w13_.factor_place, w2_.factor_place}};
    return v;
  }

 private:
  struct Matrix {
    Matrix(std::int64_t experts, std::int64_t rows_, std::int64_t cols_, hopper::W4ExpertSizes const& each, int which)
        : rows(rows_),
          cols(cols_),
          code_cols(Quant::weight_code_cols(cols_)),
          scale_count(Quant::weight_scale_count(rows_, cols_)),
          bricks(experts * each.bricks[which]),
          factors(experts * each.factors[which]),
          place(bricks.data()),
          factor_place(factors.data()) {}
    std::int64_t rows, cols, code_cols, scale_count;
    Buffer<std::uint8_t, Space> bricks;
    Buffer<float, Space> factors;
    Buffer<float, Space> bias;
    std::uint8_t* place;  // of the bricks: a view of a store that cannot change has it too
    float* factor_place;
  };

  static hopper::LocalShape checked_sizes(std::int64_t num_local, std::int64_t hidden, std::int64_t intermediate) {
    hopper::LocalShape const s{static_cast<int>(num_local), static_cast<int>(hidden), static_cast<int>(intermediate), 1};
    Layer::check_sizes(s, Storage::kScheme, Storage::group(hidden), Storage::group(intermediate));
    return s;
  }
  hopper::W4Staging staging_plan() const {
    std::int64_t codes = 0, scales = 0;  // bytes of an expert's larger matrix, or of its larger part
    for (bool down : {false, true}) {
      Matrix const& m = down ? w2_ : w13_;
      std::int64_t rows = m.rows, scale_count = m.scale_count;
      if (int const features = part_features(down); features > 0) {
        rows = (!down && gated_ ? 2 : 1) * std::int64_t{features};
        scale_count = Quant::weight_scale_count(rows, m.cols);
      }
      codes = std::max(codes, rows * m.code_cols * static_cast<std::int64_t>(sizeof(Code)));
      scales = std::max(scales, scale_count * static_cast<std::int64_t>(sizeof(Scale)));
    }
    return hopper::plan_w4_staging(num_local(), codes, scales);
  }
  /// Features of a part of a matrix that is packed in parts; 0: matrices are packed whole.
  int part_features(bool down) const {
    Matrix const& m = down ? w2_ : w13_;
    int const features = down ? sizes_.hidden : sizes_.intermediate;
    return hopper::part_features(num_local(), each_.bytes(), stored_bytes(m), features, !down && gated_);
  }
  static std::int64_t stored_bytes(Matrix const& m) {
    return m.rows * m.code_cols * static_cast<std::int64_t>(sizeof(Code)) + m.scale_count * static_cast<std::int64_t>(sizeof(Scale));
  }
  /// Copies one matrix of some experts to the staging memory and packs it.
  void pack_matrix(hopper::W4StagedMatrix m, hopper::W4Staging const& plan, Code const* codes, Scale const* scales) {
    Matrix const& matrix = m.down ? w2_ : w13_;
    std::byte* const to = staging_.data();
    m.codes = reinterpret_cast<std::uint8_t const*>(to);
    m.scales = to + plan.scales;
    m.scratch = to + plan.scratch;
    if (part_features(m.down) > 0) return pack_parts(m, codes, scales);
    copy(to, codes, m.experts * matrix.rows * matrix.code_cols);
    copy(to + plan.scales, scales, m.experts * matrix.scale_count);
    Layer::pack(sizes_, Storage::kScheme, gated_, m, place_of(m));
  }
  /// The same of one expert, in parts.
  void pack_parts(hopper::W4StagedMatrix m, Code const* codes, Scale const* scales) {
    Matrix const& matrix = m.down ? w2_ : w13_;
    constexpr bool kGlobal = Storage::kScheme == hopper::W4Scheme::nvfp4;  // a float32 scale behind the others
    std::int64_t const in_row = kGlobal ? matrix.cols / 16 : matrix.scale_count / matrix.rows;
    auto* const to_codes = reinterpret_cast<Code*>(staging_.data());
    auto* const to_scales = reinterpret_cast<Scale*>(const_cast<void*>(m.scales));
    if constexpr (hopper::has_exponents(Storage::kScheme)) m.largest = hopper::largest_exponent(scales, matrix.scale_count);
    int const whole = m.down ? sizes_.hidden : sizes_.intermediate, step = part_features(m.down);
    int const row_sets = !m.down && gated_ ? 2 : 1;  // gate rows and up rows
    for (int first = 0; first < whole; first += step) {
      int const count = std::min(step, whole - first);
      m.part = {first, count, whole};
      for (int set = 0; set < row_sets; ++set) {
        std::int64_t const from = m.part.whole_row(std::int64_t{set} * count), into = std::int64_t{set} * count;
        copy(to_codes + into * matrix.code_cols, codes + from * matrix.code_cols, count * matrix.code_cols);
        copy(to_scales + into * in_row, scales + from * in_row, count * in_row);
      }
      if constexpr (kGlobal) {
        copy(to_scales + Quant::weight_scale_count(row_sets * count, matrix.cols) - 4, scales + matrix.scale_count - 4, 4);
      }
      hopper::W4ExpertSizes const place = part_place<Layer>(sizes_, Storage::kScheme, gated_, m.down, first);
      Layer::pack(sizes_, Storage::kScheme, gated_, m, place_of(m).from(1, place));
    }
  }
  template <class T>
  static void copy(void* to, T const* from, std::int64_t count) {
    Memory<Space>::copy_from_host(to, from, static_cast<std::size_t>(count) * sizeof(T));
  }
  hopper::W4Packed place_of(hopper::W4StagedMatrix const& m) const {
    hopper::W4Packed const all{{w13_.place, w2_.place}, {w13_.factor_place, w2_.factor_place}};
    return all.from(m.first_expert, each_);
  }
  void store_bias(Matrix& m, std::int64_t local, float const* b) {
    if (m.bias.size() == 0) m.bias = Buffer<float, Space>(num_local() * m.rows);
    Memory<Space>::copy_from_host(m.bias.data() + local * m.rows, b, static_cast<std::size_t>(m.rows) * sizeof(float));
  }
  void check_range(std::int64_t first, std::int64_t count) const {
    if (first < 0 || count < 1 || first > num_local() - count) {
      throw Error(ErrorCode::argument,
                  text("expert weights: local expert ", first < 0 ? first : first + count - 1, " is out of range [0, ", num_local(), ")"));
    }
  }
  std::int64_t first_unset() const {
    auto const unset = std::find(is_set_.begin(), is_set_.end(), false);
    return unset == is_set_.end() ? -1 : unset - is_set_.begin();
  }
  ExpertMatrix<Code, Scale> view_of(Matrix const& m) const {
    return {make_blocks(static_cast<Code const*>(nullptr), num_local(), m.rows, m.code_cols),
            make_rows(static_cast<Scale const*>(nullptr), num_local(), m.scale_count),
            make_rows(m.bias.data(), m.bias.size() > 0 ? num_local() : 0, m.rows), m.rows, m.cols};
  }

  Quant quant_;
  bool gated_;
  hopper::LocalShape sizes_;
  hopper::W4ExpertSizes each_;
  Matrix w13_;
  Matrix w2_;
  Buffer<float, Space> norm_;  // [hidden], or empty
  float norm_eps_ = 0.0F;
  Buffer<std::byte, Space> staging_;
  std::vector<bool> is_set_;
};

}  // namespace moe::experts::detail
