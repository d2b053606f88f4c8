// SPDX-License-Identifier: Apache-2.0
// models/shared_store.hpp: the shared experts of a checkpoint in the scheme in which it stores them, for the policies that compute them so:
// runner::shared::Separate with a quantisation, and runner::shared::Stored, which falls back to dense weights otherwise.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/core/space.hpp"
#include "moe/experts/weights.hpp"
#include "moe/io/expert_layout.hpp"
#include "moe/io/expert_loader.hpp"
#include "moe/io/layer_description.hpp"
#include "moe/io/layer_weights.hpp"
#include "moe/io/packed_experts.hpp"
#include "moe/io/shared_reader.hpp"
#include "moe/io/tensor_store.hpp"
#include "moe/models/experts_obstacle.hpp"
#include "moe/models/loaded_parts.hpp"
#include "moe/runner/shared_experts.hpp"

namespace moe::models {

namespace detail {

/// A loader of read_into() for one expert: the shared one, in its stored form.
template <class Quant, class Weight>
class SharedCodes {
 public:
  using Packed = io::PackedMatrixReader<Quant, Weight>;
  using Arrays = io::ExpertArrays<typename Packed::Code, typename Packed::Scale>;

  SharedCodes(io::TensorStore const& tensors, io::LayerDescription const& d, std::vector<io::StoredMatrix> const& matrices)
      : packed_(tensors, d.quantization), matrices_(matrices) {}

  /// Whether the file stores all of them as Quant does.
  bool fit() const {
    return !matrices_.empty() && std::ranges::all_of(matrices_, [&](io::StoredMatrix const& m) { return packed_.takes(m); });
  }
  template <class ArraysOf>
  void read_all(std::span<int const>, int, ArraysOf const& arrays, io::LoadProgress const&) const {
    Arrays const to = arrays(0);
    for (io::StoredMatrix const& m : matrices_) packed_.read(m, m.down ? to.w2 : to.w13, m.down ? to.w2_scales : to.w13_scales);
  }
  static constexpr std::int64_t expert_bytes() { return 0; }  // only progress asks for it

 private:
  Packed packed_;
  std::vector<io::StoredMatrix> const& matrices_;
};

}  // namespace detail

/// Nothing, for a policy without a scheme: the shared experts are read dequantised.
template <class Shared, class Space, class Act>
class SharedStore {
 public:
  /// Whether it has the weights; else they are read dequantised.
  static constexpr bool holds() { return false; }
  template <class Quant>
  void read(io::TensorStore const&, io::LayerLoader const&, Quant const&, bool) {}
  template <class Params>
  void set(Params&) const {}
};

template <class Shared, class Space, class Act>
  requires runner::shared::InAScheme<Shared>
class SharedStore<Shared, Space, Act> {
  using Quant = typename Shared::Quant;
  using Weight = typename Shared::Weight;
  using Policy = typename Shared::Policy;
  static constexpr bool kHasAnotherWay = requires(typename Shared::Params p) { p.stored; };

 public:
  bool holds() const { return store_.has_value(); }

  /// Reads the codes, if the file stores them as Quant does and the experts compute them; `wanted`: whether the caller wants that. Else,
  /// for a policy without another way, E_CONFIG with the reason. E_ARG for tensors that are damaged.
  void read(io::TensorStore const& tensors, io::LayerLoader const& loader, Quant const& quant, bool wanted) {
    io::LayerDescription const& d = loader.description();
    if (d.shared.count == 0) return;
    std::vector<io::StoredMatrix> const matrices = loader.shared().matrices();
    detail::SharedCodes<Quant, Weight> const codes(tensors, d, matrices);
    std::string why = obstacle(d);
    if (why.empty() && !codes.fit()) why = text("the checkpoint does not store them in ", Quant::kName);
    if (kHasAnotherWay && !wanted) why = "not asked for (shared_in_scheme)";
    if (!why.empty()) {
      if (!kHasAnotherWay) throw Error(ErrorCode::config, text("shared experts in ", Quant::kName, ": ", why));
      choice_ = text("dense, unquantised: ", why);
      return;
    }
    store_.emplace(1, d.hidden, d.shared.intermediate, d.shared.activation.gated(), quant);
    quant_ = quant;
    read_into<Space>(*store_, codes, std::array{0}, 1, {});
    choice_ = text(Quant::kName, " with ", Policy::kName, ", the checkpoint's codes");
  }

  /// What was read, into the parameters of the policy.
  void set(typename Shared::Params& p) const {
    if constexpr (kHasAnotherWay) p.choice = choice_;
    if (!store_) return;
    if constexpr (kHasAnotherWay) {
      p.stored = store_->view();
      p.scheme = quant_;
    } else {
      p.weights = store_->view();
      p.quantization = quant_;
    }
  }

 private:
  static std::string obstacle(io::LayerDescription const& d) {
    if (!io::PackedMatrixReader<Quant, Weight>::reads()) return text("no reader loads ", Quant::kName, " without dequantising");
    if (!Quant::supports(d.hidden, d.shared.intermediate)) {
      return text(Quant::kName, " does not take hidden ", d.hidden, " and intermediate ", d.shared.intermediate);
    }
    if constexpr (Space::kKind == SpaceKind::cuda) {
      return experts_obstacle<Policy, Quant, Act>({.architecture = PartMemory<Space>::architecture(),
                                                   .hidden = d.hidden,
                                                   .intermediate = d.shared.intermediate,
                                                   .activation = d.shared.activation.kind});
    } else {
      return {};
    }
  }

  Quant quant_{};
  std::string choice_;
  std::optional<experts::StoreFor<Policy, runner::shared::ConfigOf<Act, Weight>, Quant>> store_;
};

}  // namespace moe::models
