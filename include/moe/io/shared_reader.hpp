// SPDX-License-Identifier: Apache-2.0
// io/shared_reader.hpp: reads the shared experts of one layer, from every layout that checkpoints use, into one canonical layout.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/io/expert_layout.hpp"
#include "moe/io/expert_reader.hpp"
#include "moe/io/host_layer_weights.hpp"
#include "moe/io/layer_description.hpp"
#include "moe/io/linear_reader.hpp"
#include "moe/io/one_line.hpp"
#include "moe/io/partition.hpp"
#include "moe/io/tensor_store.hpp"

namespace moe::io {

/// Reads the shared experts of one layer. The store and the description must outlive it.
class SharedReader {
 public:
  /// `layer_prefix` is the prefix of the layer's tensors ("model.layers.3."), `root` that of the block's; `layer` its number for errors.
  SharedReader(TensorStore const& store, LayerDescription const& d, std::string const& layer_prefix, std::string const& root,
               std::int64_t layer)
      : store_(store), d_(d), root_(root), layer_(layer) {
    prefixes_ = {root + "shared_experts.", root + "shared_expert.", root + "shared_mlp.", layer_prefix + "shared_mlp.",
                 layer_prefix + "share_expert."};
  }

  /// E_CONFIG if the file has shared experts that the description lacks: without them the layer would compute something else.
  void refuse_any() const {
    for (std::string const& prefix : prefixes_) {
      auto const found = store_.names(prefix);
      if (!found.empty()) {
        throw Error(ErrorCode::config, one_line("layer ", layer_, ": the configuration has no shared experts, but '", store_.label(),
                                                "' holds '", found.front(), "'"));
      }
    }
  }
  /// The parts of the shared experts that a rank needs. E_ARG on a missing tensor or a wrong shape.
  template <class T>
  void load(SharedWeights<T>& s, LoadOptions const& options) const {
    bool const gated = d_.shared.activation.gated();
    bool const separate = d_.shared.gate == SharedGate::routing_weight;
    std::int64_t const h = d_.hidden;
    s.count = separate ? d_.shared.count : 1;
    std::int64_t const full = d_.shared.intermediate / s.count;
    auto const [tp_rank, tp_size] = options.shared_split();
    s.intermediate = full / tp_size;
    std::int64_t const rows = (gated ? 2 : 1) * s.intermediate, first = s.intermediate * tp_rank;
    auto const require = [&](bool found, std::int64_t i) {
      if (found) return;
      throw Error(ErrorCode::argument, one_line("missing expert weights: layer ", layer_, ", shared expert ", i, " ('", root_,
                                                "shared_experts.*' in '", store_.label(), "')"));
    };
    require(check_shared(separate, full), 0);  // before allocating the sizes that the configuration states
    if (d_.shared.gate == SharedGate::sigmoid) s.gate = gate(h);
    if (!options.shared_matrices) return;
    s.w13.resize(detail::at(s.count * rows * h));
    s.w2.resize(detail::at(s.count * h * s.intermediate));
    std::vector<T> full13(detail::at((gated ? 2 : 1) * full * h)), full2(detail::at(h * full));
    for (std::int64_t i = 0; i < s.count; ++i) {
      require(read_shared(separate ? i : -1, full, full13.data(), full2.data()), i);
      detail::cut(full13, full2, h, full, s.intermediate, first, gated, s.w13.data() + i * rows * h, s.w2.data() + i * h * s.intermediate);
    }
  }

  /// The matrices of the shared experts as they are stored, those of one wide expert. None if the file lacks them (load() says so), or if
  /// each expert has a routing weight: those are stacked tensors, which are not quantised. E_ARG on a wrong shape.
  std::vector<StoredMatrix> matrices() const {
    std::vector<StoredMatrix> out;
    std::int64_t const width = d_.shared.intermediate;
    if (d_.shared.count == 0 || d_.shared.gate == SharedGate::routing_weight || !check_shared(false, width)) return out;
    for (SharedPart const& p : shared_parts(false, width)) {
      out.push_back({.base = p.base, .down = p.down, .row = p.row, .rows = p.n, .cols = p.k});
    }
    return with_all_rows(std::move(out));
  }

 private:
  std::vector<float> gate(std::int64_t h) const {
    std::string const base = root_ + "shared_expert_gate";
    if (!check_linear(store_, base, 1, h)) {
      throw Error(ErrorCode::argument, one_line("layer ", layer_, ": tensor '", base, ".weight' is missing in '", store_.label(), "'"));
    }
    std::vector<float> out(detail::at(h));
    read_linear(store_, base, 1, h, d_.quantization, out.data());
    return out;
  }
  /// A weight [n, k] of a shared expert: which matrix it goes into, and at which row.
  struct SharedPart {
    std::string base;
    std::int64_t n, k;
    bool down;
    std::int64_t row;
    bool interleaved = false;  ///< its rows are gate, up, gate, up, …
  };
  /// The weights of one shared expert of `width`, under the names in the file; empty if it has none. `stacked`: all of them are
  /// tensors [S, n, k].
  std::vector<SharedPart> shared_parts(bool stacked, std::int64_t width) const {
    std::int64_t const h = d_.hidden;
    bool const gated = d_.shared.activation.gated();
    for (std::string const& base : prefixes_) {
      if (stacked) {
        if (store_.contains(base + "shared_w13_weight")) {  // Inkling
          return {{base + "shared_w13_weight", 2 * width, h, false, 0, true}, {base + "shared_w2_weight", h, width, true, 0}};
        }
        if (!store_.contains(base + "gate_proj")) continue;
        return {
            {base + "gate_proj", width, h, false, 0}, {base + "up_proj", width, h, false, width}, {base + "down_proj", h, width, true, 0}};
      }
      std::pair<char const*, char const*> const fused[] = {{"gate_up_proj", "down_proj"}, {"input_linear", "output_linear"}};
      for (auto const& [up, down] : fused) {
        if (!gated || !has_linear(store_, base + up)) continue;
        return {{base + up, 2 * width, h, false, 0}, {base + down, h, width, true, 0}};
      }
      for (auto const& names : detail::kProjectionNames) {
        if (names.gate.empty() == gated || !has_linear(store_, base + std::string(names.up))) continue;
        if (gated && !has_linear(store_, base + std::string(names.gate))) continue;
        std::vector<SharedPart> parts;
        if (gated) parts.push_back({base + std::string(names.gate), width, h, false, 0});
        parts.push_back({base + std::string(names.up), width, h, false, gated ? width : 0});
        parts.push_back({base + std::string(names.down), h, width, true, 0});
        return parts;
      }
    }
    return {};
  }
  /// The shapes of all of them. False if one is not in the file.
  bool check_shared(bool stacked, std::int64_t width) const {
    std::vector<SharedPart> const parts = shared_parts(stacked, width);
    for (SharedPart const& p : parts) {
      if (stacked) {
        require_shape(store_.at(p.base), {d_.shared.count, p.n, p.k});
      } else if (!check_linear(store_, p.base, p.n, p.k)) {
        return false;
      }
    }
    return !parts.empty();
  }
  /// One shared expert, whole: number `index` of stacked tensors [S, I_s, H], or the only one (-1). False if it is not in the file.
  template <class T>
  bool read_shared(std::int64_t index, std::int64_t width, T* w13, T* w2) const {
    std::vector<SharedPart> const parts = shared_parts(index >= 0, width);
    for (SharedPart const& p : parts) {
      T* const out = p.down ? w2 : w13 + p.row * p.k;
      if (index >= 0) {
        StoredTensor const t = store_.at(p.base);
        t.file->read_elements(*t.info, index * p.n * p.k, p.n * p.k, out);
        if (p.interleaved) detail::deinterleave_rows(out, p.n, p.k);
      } else if (!read_linear(store_, p.base, p.n, p.k, d_.quantization, out)) {
        return false;
      }
    }
    return !parts.empty();
  }

  TensorStore const& store_;
  LayerDescription const& d_;
  std::string root_;
  std::int64_t layer_;
  std::array<std::string, 5> prefixes_;
};

}  // namespace moe::io
