// SPDX-License-Identifier: Apache-2.0
// io/expert_reader.hpp: reads single routed experts of one layer, from every layout that checkpoints use, into one canonical layout.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/core/types.hpp"
#include "moe/io/common_rows.hpp"
#include "moe/io/expert_layout.hpp"
#include "moe/io/layer_description.hpp"
#include "moe/io/linear_reader.hpp"
#include "moe/io/one_line.hpp"
#include "moe/io/tensor_store.hpp"

namespace moe::io {

/// Reads the routed experts of one layer one at a time. For any layout of the file, w13 is returned as [2I, H] with the gate's rows first
/// ([I, H] without a gate) and w2 as [H, I], both [out, in]. Only the bytes of the requested experts are read.
class ExpertReader {
 public:
  /// `root` is the prefix of the block's tensors ("model.layers.3.mlp."), `layer` its number for errors. Throws E_ARG if the layout
  /// cannot be recognised, shapes are wrong, or the file has experts beyond num_experts.
  ExpertReader(TensorStore const& store, LayerDescription const& d, std::string root, std::int64_t layer)
      : store_(store), d_(d), root_(std::move(root)), layer_(layer) {
    find_layout();
  }

  WeightLayout layout() const { return layout_; }

  /// Throws as read() does if the weights of expert e are missing or have a wrong shape. Reads no data: for checks before allocation.
  void check_shapes(int e) const {
    check(e);
    if (layout_ == WeightLayout::common_rows) return detail::check_common_rows(store_, root_, d_, e);
    if (layout_ != WeightLayout::per_expert) return;  // find_layout() checked all experts
    std::int64_t const i = d_.intermediate, h = d_.expert_hidden();
    auto const shard = [&](std::string_view which, std::int64_t n, std::int64_t k) {
      if (!check_linear(store_, expert_base(e) + std::string(which), n, k)) fail_missing(e, which);
    };
    if (!names_.gate.empty()) shard(names_.gate, i, h);
    shard(names_.up, i, h);
    shard(names_.down, h, i);
  }

  /// Expert e: w13 [w13_rows, H], w2 [H, I]. Throws E_ARG "missing expert weights: layer, expert, shard" naming what is absent.
  template <class T>
  void read(int e, T* w13, T* w2) const {
    check(e);
    switch (layout_) {
      case WeightLayout::per_expert: return read_per_expert(e, w13, w2);
      case WeightLayout::stacked: return read_stacked(e, w13, w2);
      case WeightLayout::common_rows: return detail::read_common_rows(store_, root_, d_, e, w13, w2);
      default: return mxfp4_ ? read_mxfp4(e, w13, w2) : read_fused(e, w13, w2);
    }
  }
  /// The matrices of expert e, for readers of the stored form; none if they are stored transposed or in common with other experts.
  std::vector<StoredMatrix> matrices(int e) const {
    check(e);
    std::int64_t const i = d_.intermediate, h = d_.expert_hidden(), n = d_.w13_rows(), stack = d_.router.num_experts;
    auto const named = [&](std::string_view which) { return expert_base(e) + std::string(which); };
    std::vector<StoredMatrix> out;
    if (layout_ == WeightLayout::per_expert) {
      if (!names_.gate.empty()) out.push_back({named(names_.gate), false, 0, i, h});
      out.push_back({named(names_.up), false, names_.gate.empty() ? 0 : i, i, h});
      out.push_back({named(names_.down), true, 0, h, i});
    } else if (layout_ == WeightLayout::fused_apart) {
      out.push_back({gate_up_base_, false, 0, i, h, e, stack});
      out.push_back({root_ + "up_proj", false, i, i, h, e, stack});
      out.push_back({down_base_, true, 0, h, i, e, stack});
    } else if (mxfp4_) {
      out.push_back({root_ + "experts.gate_up_proj", false, 0, n, h, e, stack, layout_ == WeightLayout::fused_transposed_interleaved});
      out.push_back({root_ + "experts.down_proj", true, 0, h, i, e, stack});
    } else if (layout_ == WeightLayout::fused || layout_ == WeightLayout::fused_interleaved) {
      out.push_back({gate_up_base_, false, 0, n, h, e, stack, layout_ == WeightLayout::fused_interleaved});
      out.push_back({down_base_, true, 0, h, i, e, stack});
    }
    return with_all_rows(std::move(out));
  }
  /// Biases of expert e: b13 [w13_rows], b2 [H]. Only if the description says that experts have biases.
  void read_bias(int e, float* b13, float* b2) const {
    check(e);
    std::int64_t const i = d_.intermediate;
    if (layout_ == WeightLayout::common_rows) return detail::read_common_bias(store_, root_, d_, e, b13, b2);
    if (layout_ == WeightLayout::per_expert) {
      std::string const base = expert_base(e);
      bias_row(base + std::string(names_.down) + ".bias", 0, 1, d_.expert_hidden(), b2);
      if (!names_.gate.empty()) bias_row(base + std::string(names_.gate) + ".bias", 0, 1, i, b13);
      bias_row(base + std::string(names_.up) + ".bias", 0, 1, i, names_.gate.empty() ? b13 : b13 + i);
      return;
    }
    std::vector<float> b(detail::at(d_.w13_rows()));
    bias_row(root_ + "experts.gate_up_proj_bias", e, d_.router.num_experts, d_.w13_rows(), b.data());
    if (layout_ == WeightLayout::fused_transposed_interleaved) detail::deinterleave_rows(b.data(), d_.w13_rows(), 1);
    std::ranges::copy(b, b13);
    bias_row(root_ + "experts.down_proj_bias", e, d_.router.num_experts, d_.expert_hidden(), b2);
  }

 private:
  void check(int e) const {
    if (e < 0 || e >= d_.router.num_experts) {
      throw Error(ErrorCode::argument, one_line("expert ", e, " is out of range [0, ", d_.router.num_experts, ")"));
    }
  }
  [[noreturn]] void fail_missing(int e, std::string_view shard) const {
    throw Error(ErrorCode::argument, one_line("missing expert weights: layer ", layer_, ", expert ", e, ", shard ", shard, " ('",
                                              shard_name(e, shard), "' in '", store_.label(), "')"));
  }
  std::string shard_name(int e, std::string_view shard) const { return text(expert_base(e), shard, ".weight"); }
  std::string expert_base(int e) const { return text(root_, "experts.", infix_, first_ + e, '.'); }
  /// A tensor's name without ".weight".
  static std::string base_of(std::string tensor) {
    if (tensor.ends_with(".weight")) tensor.resize(tensor.size() - 7);
    return tensor;
  }

  // Recognition

  void find_layout() {
    bool const explicit_fused = d_.layout == WeightLayout::fused || d_.layout == WeightLayout::fused_transposed ||
                                d_.layout == WeightLayout::fused_transposed_interleaved;
    if (d_.layout == WeightLayout::common_rows) {
      layout_ = WeightLayout::common_rows;
      detail::refuse_more_common_rows(store_, root_, d_);
      return;
    }
    if (d_.layout == WeightLayout::stacked) {
      layout_ = WeightLayout::stacked;
      for (char const* which : {"w1", "v1", "w2"}) {
        auto const t = store_.find(text(root_, "experts.mlp.", which));
        if (!t)
          throw Error(ErrorCode::argument, one_line("missing expert weights: layer ", layer_, ", all experts, shard ", which, " ('", root_,
                                                    "experts.mlp.", which, "' in '", store_.label(), "')"));
        require_shape(*t, {d_.router.num_experts * d_.intermediate, d_.hidden});
      }
      return;
    }
    if (d_.layout != WeightLayout::per_expert && (find_fused() || find_apart())) return;
    if (!explicit_fused || d_.layout == WeightLayout::fused_transposed) {  // quantised Llama-4 releases store single experts
      if (find_per_expert()) return;
    }
    throw Error(ErrorCode::argument,
                one_line("missing expert weights: layer ", layer_, ", no expert tensors under '", root_, "' in '", store_.label(), "'"));
  }

  bool find_fused() {
    if (store_.contains(root_ + "experts.gate_up_proj_blocks")) return find_mxfp4();
    constexpr std::array<std::array<std::string_view, 2>, 6> kNames{{{"experts.gate_up_proj", "experts.down_proj"},
                                                                     {"experts.gate_up_proj.weight", "experts.down_proj.weight"},
                                                                     {"input_linear.weight", "output_linear.weight"},
                                                                     {"experts.fc1.weight", "experts.fc2.weight"},
                                                                     {"experts.w13_weight", "experts.w2_weight"},
                                                                     {"experts.up_proj", "experts.down_proj"}}};
    for (auto const& [up, down] : kNames) {
      bool const gateless = up == "experts.up_proj";
      if (gateless == d_.activation.gated() || !store_.contains(root_ + std::string(up))) continue;
      gate_up_ = store_.at(root_ + std::string(up));
      down_ = store_.find(root_ + std::string(down));
      gate_up_base_ = base_of(root_ + std::string(up));
      down_base_ = base_of(root_ + std::string(down));
      if (!down_) {
        throw Error(ErrorCode::argument, one_line("missing expert weights: layer ", layer_, ", all experts, shard ", down, " ('", root_,
                                                  down, "' in '", store_.label(), "')"));
      }
      if (up == "experts.w13_weight") {
        set_interleaved_rows();
      } else {
        choose_orientation();
      }
      return true;
    }
    return false;
  }
  void set_interleaved_rows() {
    std::int64_t const e = d_.router.num_experts;
    require_shape(*gate_up_, {e, d_.w13_rows(), d_.expert_hidden()});
    require_shape(*down_, {e, d_.expert_hidden(), d_.intermediate});
    layout_ = WeightLayout::fused_interleaved;
  }
  /// Stacked projections beside the router: gate_ and up_ [E, I, H].
  bool find_apart() {
    if (!d_.activation.gated() || !store_.contains(root_ + "gate_proj.weight")) return false;
    std::int64_t const e = d_.router.num_experts, h = d_.expert_hidden(), i = d_.intermediate;
    gate_up_ = store_.at(root_ + "gate_proj.weight");
    if (gate_up_->shape().size() != 3) return false;  // a dense network's
    auto const shard = [&](char const* which) {
      auto t = store_.find(root_ + which);
      if (!t) {
        throw Error(ErrorCode::argument, one_line("missing expert weights: layer ", layer_, ", all experts, shard ", which, " ('", root_,
                                                  which, "' in '", store_.label(), "')"));
      }
      return t;
    };
    up_ = shard("up_proj.weight");
    down_ = shard("down_proj.weight");
    require_shape(*gate_up_, {e, i, h});
    require_shape(*up_, {e, i, h});
    require_shape(*down_, {e, h, i});
    gate_up_base_ = root_ + "gate_proj";
    down_base_ = root_ + "down_proj";
    layout_ = WeightLayout::fused_apart;
    return true;
  }
  void choose_orientation() {
    std::int64_t const e = d_.router.num_experts, n = d_.w13_rows(), h = d_.expert_hidden(), i = d_.intermediate;
    auto const is = [](StoredTensor const& t, std::initializer_list<std::int64_t> s) { return std::ranges::equal(t.shape(), s); };
    if (d_.layout == WeightLayout::automatic) {
      // Both shapes are needed: one alone is ambiguous where 2I = H or I = H, the pair never is.
      if (is(*gate_up_, {e, n, h}) && is(*down_, {e, h, i})) {
        layout_ = WeightLayout::fused;
      } else if (is(*gate_up_, {e, h, n}) && is(*down_, {e, i, h})) {
        layout_ = WeightLayout::fused_transposed;
      } else {
        throw Error(ErrorCode::argument, one_line(gate_up_->where(), " and ", down_->where(), ": shapes ", gate_up_->info->shape_text(),
                                                  " and ", down_->info->shape_text(), ", expected [", e, ", ", n, ", ", h, "] and [", e,
                                                  ", ", h, ", ", i, "] or both transposed"));
      }
      return;
    }
    layout_ = d_.layout;
    if (layout_ == WeightLayout::fused) {
      require_shape(*gate_up_, {e, n, h});
      require_shape(*down_, {e, h, i});
    } else {
      require_shape(*gate_up_, {e, h, n});
      require_shape(*down_, {e, i, h});
    }
  }
  bool find_mxfp4() {
    std::int64_t const e = d_.router.num_experts, n = d_.w13_rows(), h = d_.expert_hidden(), i = d_.intermediate;
    if (h % 32 != 0 || i % 32 != 0)
      throw Error(ErrorCode::argument, one_line("mxfp4 weights need widths that are multiples of 32, are ", h, " and ", i));
    gate_up_ = store_.at(root_ + "experts.gate_up_proj_blocks");
    gate_up_scales_ = store_.at(root_ + "experts.gate_up_proj_scales");
    down_ = store_.at(root_ + "experts.down_proj_blocks");
    down_scales_ = store_.at(root_ + "experts.down_proj_scales");
    require_shape(*gate_up_, {e, n, h / 32, 16});
    require_shape(*gate_up_scales_, {e, n, h / 32});
    require_shape(*down_, {e, h, i / 32, 16});
    require_shape(*down_scales_, {e, h, i / 32});
    d_.quantization.require({false, 4, 32}, h, gate_up_->where());
    mxfp4_ = true;
    layout_ = d_.layout == WeightLayout::automatic ? WeightLayout::fused_transposed_interleaved : d_.layout;
    return true;
  }

  bool find_per_expert() {
    std::string const prefix = root_ + "experts.";
    std::set<std::string_view> projections;
    std::int64_t last = -1;
    for (std::string_view full : store_.names(prefix)) {
      std::string_view rest = full.substr(prefix.size());
      bool const has_infix = rest.starts_with("expert_");
      if (has_infix) rest.remove_prefix(7);
      std::int64_t e = 0;
      auto const [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), e);
      if (error != std::errc() || e < 0 || end == rest.data() + rest.size() || *end != '.') continue;
      infix_ = has_infix ? "expert_" : "";
      last = std::max(last, e);
      rest.remove_prefix(static_cast<std::size_t>(end - rest.data()) + 1);
      projections.insert(rest.substr(0, rest.find('.')));
    }
    if (last < 0) return false;
    // LongCat-Flash writes gate and up weights, never used, for its zero experts too.
    std::int64_t bound = d_.router.num_experts + d_.router.num_zero_experts;
    if (detail::in_one_list(d_, root_)) {
      if (d_.tokens == Tokens::image) first_ = bound;
      bound *= 2;
    }
    if (last >= bound) {
      throw Error(ErrorCode::argument, one_line("unexpected expert weights: layer ", layer_, ", expert ", last, " ('", prefix, infix_, last,
                                                ".*' in '", store_.label(), "') is out of range [0, ", bound, ")"));
    }
    for (auto const& names : detail::kProjectionNames) {
      if (names.gate.empty() == d_.activation.gated()) continue;
      if (projections.contains(names.gate) || projections.contains(names.up) || projections.contains(names.down)) {
        names_ = names;
        layout_ = WeightLayout::per_expert;
        return true;
      }
    }
    std::string list;
    for (std::string_view p : projections) list += (list.empty() ? "" : ", ") + std::string(p);
    throw Error(ErrorCode::argument,
                one_line("layer ", layer_, ": the expert projections under '", prefix, "' (", list, ") are not known"));
  }

  // Reading

  template <class T>
  void read_per_expert(int e, T* w13, T* w2) const {
    std::int64_t const i = d_.intermediate, h = d_.expert_hidden();
    auto const shard = [&](std::string_view which, std::int64_t n, std::int64_t k, T* out) {
      if (!read_linear(store_, expert_base(e) + std::string(which), n, k, d_.quantization, out)) fail_missing(e, which);
    };
    if (!names_.gate.empty()) shard(names_.gate, i, h, w13);
    shard(names_.up, i, h, names_.gate.empty() ? w13 : w13 + i * h);
    shard(names_.down, h, i, w2);
  }
  /// Matrix e [rows, cols] of a fused tensor [E, rows, cols], in its stored layout.
  template <class T>
  void read_slice(StoredTensor const& t, std::string const& base, int e, std::int64_t rows, std::int64_t cols, T* out) const {
    bool const transposed = layout_ == WeightLayout::fused_transposed || layout_ == WeightLayout::fused_transposed_interleaved;
    detail::MatrixPosition const position{.rows = rows, .cols = cols, .index = e, .stack = d_.router.num_experts};
    if (detail::read_scaled(store_, t, base, position, d_.quantization, transposed, out)) return;
    if (bits(t.info->dtype) < 16)
      throw Error(ErrorCode::unsupported, one_line(t.where(), ": fused weights of dtype ", name(t.info->dtype), " cannot be read"));
    t.file->read_elements(*t.info, e * rows * cols, rows * cols, out);
  }
  template <class T>
  void read_fused(int e, T* w13, T* w2) const {
    std::int64_t const n = d_.w13_rows(), i = d_.intermediate, h = d_.expert_hidden();
    if (layout_ == WeightLayout::fused_apart) {
      read_slice(*gate_up_, gate_up_base_, e, i, h, w13);
      read_slice(*up_, root_ + "up_proj", e, i, h, w13 + i * h);
      read_slice(*down_, down_base_, e, h, i, w2);
      return;
    }
    if (layout_ == WeightLayout::fused || layout_ == WeightLayout::fused_interleaved) {
      read_slice(*gate_up_, gate_up_base_, e, n, h, w13);
      if (layout_ == WeightLayout::fused_interleaved) detail::deinterleave_rows(w13, n, h);
      read_slice(*down_, down_base_, e, h, i, w2);
      return;
    }
    std::vector<T> buffer(detail::at(std::max(n, i) * h)), turned(detail::at(n * h));
    read_slice(*gate_up_, gate_up_base_, e, h, n, buffer.data());
    detail::transpose(buffer.data(), h, n, turned.data());
    if (layout_ == WeightLayout::fused_transposed_interleaved) detail::deinterleave_rows(turned.data(), n, h);
    std::ranges::copy(turned, w13);
    read_slice(*down_, down_base_, e, i, h, buffer.data());
    detail::transpose(buffer.data(), i, h, w2);
  }
  template <class T>
  void read_mxfp4(int e, T* w13, T* w2) const {
    std::int64_t const n = d_.w13_rows(), i = d_.intermediate, h = d_.expert_hidden();
    std::vector<float> buffer(detail::at(n * h));
    detail::read_mxfp4_rows(*gate_up_, *gate_up_scales_, e * n, n, h, buffer.data());
    if (layout_ == WeightLayout::fused_transposed_interleaved) detail::deinterleave_rows(buffer.data(), n, h);
    std::ranges::transform(buffer, w13, from_float<T>);
    buffer.resize(detail::at(h * i));
    detail::read_mxfp4_rows(*down_, *down_scales_, e * h, h, i, buffer.data());
    std::ranges::transform(buffer, w2, from_float<T>);
  }
  template <class T>
  void read_stacked(int e, T* w13, T* w2) const {
    std::int64_t const i = d_.intermediate, h = d_.hidden;
    auto const block = [&](char const* which, T* out) {
      StoredTensor const t = store_.at(text(root_, "experts.mlp.", which));
      t.file->read_elements(*t.info, e * i * h, i * h, out);
    };
    block("w1", w13);
    block("v1", w13 + i * h);
    std::vector<T> down(detail::at(i * h));
    block("w2", down.data());
    detail::transpose(down.data(), i, h, w2);
  }
  /// Row `row` of a bias [rows, n], or all of one expert's bias [n] if rows is 1.
  void bias_row(std::string const& tensor, std::int64_t row, std::int64_t rows, std::int64_t n, float* out) const {
    auto const t = store_.find(tensor);
    if (!t)
      throw Error(ErrorCode::argument, one_line("missing expert weights: layer ", layer_, ", expert ", row, ", shard bias ('", tensor,
                                                "' in '", store_.label(), "')"));
    if (rows == 1 && t->shape().size() == 1) {
      require_shape(*t, {n});
    } else {
      require_shape(*t, {rows, n});
    }
    t->file->read_elements(*t->info, row * n, n, out);
  }

  TensorStore const& store_;
  LayerDescription d_;
  std::string root_;
  std::int64_t layer_;
  WeightLayout layout_ = WeightLayout::automatic;
  std::string_view infix_;
  std::int64_t first_ = 0;  ///< number of expert 0 in the file
  detail::ProjectionNames names_{};
  std::optional<StoredTensor> gate_up_, up_, down_, gate_up_scales_, down_scales_;
  std::string gate_up_base_, down_base_;
  bool mxfp4_ = false;
};

}  // namespace moe::io
