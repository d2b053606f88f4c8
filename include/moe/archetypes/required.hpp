// SPDX-License-Identifier: Apache-2.0
// archetypes/required.hpp: the smallest type that models each concept of core/contract/. Template parameters are the facts that the
// composition rules check, so that a test can break exactly one rule.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "moe/activation/activation.hpp"
#include "moe/comm/self.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/contract/check.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/tokens.hpp"
#include "moe/core/types.hpp"
#include "moe/parallel/placement.hpp"
#include "moe/routing/row/route_args.hpp"

namespace moe::archetypes {

/// A layer of 64 × 32, 4 experts, top 2.
struct Tiny : LayerDefaults {
  static constexpr int hidden = 64;
  static constexpr int intermediate = 32;
  static constexpr int num_experts = 4;
  static constexpr int topk = 2;
  using Activation = activation::Silu;
};

/// The product of gate and up.
struct ArchetypeActivation {
  static constexpr char const* kName = "archetype_activation";
  MOE_HD constexpr bool gated() const { return true; }  ///< false: one value, `up` is ignored
  MOE_HD float operator()(float gate, float up) const { return gate * up; }
};

/// Sends row t to experts t, t + 1, …, each with weight 1/k.
template <bool WeightOnInput = false>
struct ArchetypeRouter {
  static constexpr char const* kName = "archetype_router";
  static constexpr bool kWeightOnInput = WeightOnInput;
  struct Params {
    int num_experts = 4;
    int topk = 2;
  };
  explicit ArchetypeRouter(Params const& p) : params(p) {}
  int num_experts() const { return params.num_experts; }
  int topk() const { return params.topk; }
  int num_logits() const { return params.num_experts; }
  int num_slots() const { return params.topk; }
  template <class L>
  void select(routing::RouteArgs<L> const& a) const {
    for (std::int64_t t = 0; t < a.topk_ids.extent(0); ++t) {
      for (int j = 0; j < params.topk; ++j) {
        a.topk_ids(t, j) = static_cast<std::int32_t>((t + j) % params.num_experts);
        a.topk_weights(t, j) = 1.0F / static_cast<float>(params.topk);
      }
    }
  }
  Params params;
};

/// Stores everything as it is; Multiple is the group that a shape must be divisible by. MOE_HD: kernels of the device call it, too.
template <int Multiple = 1>
struct ArchetypeQuantization {
  static constexpr char const* kName = "archetype_quantization";
  template <class Act>
  using Payload = Act;
  using Scale = float;
  template <class Act>
  using WeightCode = Act;
  using WeightScale = float;
  MOE_HD static constexpr std::int64_t payload_cols(std::int64_t n) { return n; }
  MOE_HD static constexpr std::int64_t scale_cols(std::int64_t) { return 0; }
  MOE_HD static constexpr std::int64_t weight_code_cols(std::int64_t n) { return n; }
  MOE_HD static constexpr std::int64_t weight_scale_count(std::int64_t, std::int64_t) { return 0; }
  static constexpr bool supports(std::int64_t hidden, std::int64_t intermediate) {
    return (hidden < 0 || hidden % Multiple == 0) && (intermediate < 0 || intermediate % Multiple == 0);
  }
  template <class Act>
  MOE_HD void quantize_row(Act const* x, std::int64_t n, Act* q, float*) const {
    for (std::int64_t i = 0; i < n; ++i) {
      q[i] = x[i];
    }
  }
  template <class Act>
  MOE_HD void dequantize_row(Act const* q, float const*, std::int64_t n, float* out) const {
    for (std::int64_t i = 0; i < n; ++i) {
      out[i] = to_float(q[i]);
    }
  }
  template <class Act>
  void quantize_weight(float const* w, std::int64_t rows, std::int64_t cols, Act* codes, float*) const {
    for (std::int64_t i = 0; i < rows * cols; ++i) {
      codes[i] = from_float<Act>(w[i]);
    }
  }
  template <class Act>
  MOE_HD void dequantize_weight_row(Act const* codes, float const*, std::int64_t, std::int64_t cols, std::int64_t r, float* out) const {
    for (std::int64_t c = 0; c < cols; ++c) {
      out[c] = to_float(codes[r * cols + c]);
    }
  }
};

/// One rank in host memory: what it sends comes back to it.
struct ArchetypeCommunicator {
  static constexpr char const* kName = "archetype_communicator";
  using Space = space::host;
  int rank() const { return 0; }
  int size() const { return 1; }
  void all_gather(void const* in, std::int64_t n, void* out, HostStream) { copy(in, 0, out, 0, n); }
  void all_gather_v(void const* in, std::int64_t n, void* out, std::int64_t const*, std::int64_t const* offsets, HostStream) {
    copy(in, 0, out, offsets[0], n);
  }
  void all_to_all_v(void const* in, std::int64_t const* in_counts, std::int64_t const* in_offsets, void* out, std::int64_t const*,
                    std::int64_t const* out_offsets, HostStream) {
    copy(in, in_offsets[0], out, out_offsets[0], in_counts[0]);
  }
  void broadcast(void*, std::int64_t, int, HostStream) {}
  void barrier(HostStream) {}
  void all_reduce(float const* in, std::int64_t n, float* out, HostStream) { copy(in, 0, out, 0, n * kFloat); }
  void reduce_scatter_v(float const* in, std::int64_t const* counts, std::int64_t const* offsets, float* out, HostStream) {
    copy(in, offsets[0] * kFloat, out, 0, counts[0] * kFloat);
  }

 private:
  static constexpr std::int64_t kFloat = sizeof(float);
  static void copy(void const* in, std::int64_t from, void* out, std::int64_t to, std::int64_t bytes) {
    if (bytes > 0)
      std::memmove(static_cast<std::byte*>(out) + to, static_cast<std::byte const*>(in) + from, static_cast<std::size_t>(bytes));
  }
};

/// One rank's part, in host memory. archetypes/window.hpp has one for the library's exchanges.
class ArchetypeWindow {
 public:
  using Space = space::host;
  explicit ArchetypeWindow(std::int64_t bytes) : part_(static_cast<std::size_t>(bytes)) {}
  int rank() const { return 0; }
  int size() const { return 1; }
  void* peer(int /*rank*/, std::int64_t offset) const { return part_.data() + offset; }
  std::int64_t bytes() const { return static_cast<std::int64_t>(part_.size()); }

 private:
  mutable std::vector<std::byte> part_;
};

/// One rank, nothing moves.
template <ActivationFormat Format = ActivationFormat::standard, TopKReduction Reduction = TopKReduction::experts, bool Carries = true>
struct ArchetypeBackend {
  static constexpr char const* kName = "archetype_backend";
  using Space = space::host;
  using Comm = comm::Self<>;
  static constexpr ActivationFormat kFormat = Format;
  static constexpr TopKReduction kReduction = Reduction;
  struct Params {};
  template <class Quant>
  static constexpr bool carries() {
    return Carries;
  }
  template <class Config, class Quant, class Partial>
  class Exchange {
   public:
    using Space = space::host;
    Exchange(Comm&, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const&, Quant const&, Params const&,
             Arena<Space>& arena)
        : hidden_(shape.hidden()), max_tokens_(max_tokens), y_(arena.template take<Partial>(max_tokens * hidden_)) {}
    std::int64_t max_rows() const { return max_tokens_; }
    StandardTokensOf<Config, Quant> prepare(RoutedTokens<typename Config::Act, Config::hidden> const& in, HostStream) {
      rows_ = in.hidden.extent(0);
      return {make_rows(in.hidden.data_handle(), rows_, hidden_), make_rows(static_cast<float const*>(nullptr), rows_, 0), in.topk_ids,
              in.topk_weights};
    }
    Rows<Partial> expert_output() { return make_rows(y_, rows_, hidden_); }
    void finalize(Rows<typename Config::Act, Config::hidden> out, HostStream) {
      for (std::int64_t i = 0; i < rows_ * hidden_; ++i) {
        out.data_handle()[i] = from_float<typename Config::Act>(y_[i]);
      }
    }
    void abandon(HostStream) { ++abandoned; }
    int abandoned = 0;

   private:
    std::int64_t hidden_;
    std::int64_t max_tokens_;
    Partial* y_;
    std::int64_t rows_ = 0;
  };
};

/// The facts of an experts kernel, one by one.
struct ExpertsFacts {
  static constexpr bool kOnDevice = false;
  static constexpr ActivationFormat kReads = ActivationFormat::standard;
  static constexpr bool kQuantization = true;
  static constexpr bool kActivation = true;
  static constexpr bool kElement = true;
  static constexpr int kTile = 1;
  static constexpr int kSharedMemory = 0;
  static constexpr bool kBatchInvariant = false;
  static constexpr bool kNormalisesOutput = false;
  static constexpr bool kRoutesInside = false;
  static constexpr bool kRouter = true;
};

/// Experts whose FFN is the identity: y = Σ w x over the slots with an expert.
template <class Facts = ExpertsFacts>
struct ArchetypeExperts {
  static constexpr char const* kName = "archetype_experts";
  using Space = std::conditional_t<Facts::kOnDevice, space::cuda, space::host>;
  static constexpr int kSharedMemoryLimit = 227 * 1024;
  static constexpr bool kBatchInvariant = Facts::kBatchInvariant;
  static constexpr bool kNormalisesOutput = Facts::kNormalisesOutput;
  static constexpr bool kRoutesInside = Facts::kRoutesInside;
  struct Params {};
  template <class Router>
  static constexpr bool supports_router() {
    return Facts::kRouter;
  }
  static constexpr bool reads(ActivationFormat f) { return f == Facts::kReads; }
  static constexpr TopKReduction reduction(ActivationFormat) { return TopKReduction::experts; }
  template <class Act, class Weight>
  static constexpr bool supports_element() {
    return Facts::kElement;
  }
  template <class A>
  static constexpr bool supports_activation() {
    return Facts::kActivation;
  }
  template <class Q>
  static constexpr bool supports_quantization() {
    return Facts::kQuantization;
  }
  template <class Config, class Quant>
  static constexpr bool fits_shape() {
    return moe::detail::fits(Config::hidden, Facts::kTile) && moe::detail::fits(Config::intermediate, Facts::kTile);
  }
  template <class Config, class Quant>
  static constexpr int shared_memory_bytes() {
    return Facts::kSharedMemory;
  }
  template <class Config, class Quant, ActivationFormat Format>
  class Kernel {
   public:
    using Output = float;
    Kernel(Shape<Config> const& shape, WeightsOf<Config, Quant> const&, std::int64_t, Quant const&, typename Config::Activation const&,
           Params const&, Arena<Space>&)
        : hidden_(shape.hidden()) {}
    /// Of experts that route inside. The identity needs no router: its weights are the logits.
    template <class Router>
    void route_with(Router const&) {}
    void apply(StandardTokensOf<Config, Quant> const& tokens, Rows<float> y, Stream<Space>) const {
      for (std::int64_t r = 0; r < y.extent(0); ++r) {
        for (std::int64_t h = 0; h < hidden_; ++h) {
          y(r, h) = 0.0F;
        }
        for (std::int64_t j = 0; j < tokens.topk_ids.extent(1); ++j) {
          if (tokens.topk_ids(r, j) < 0) {
            continue;
          }
          for (std::int64_t h = 0; h < hidden_; ++h) {
            y(r, h) += tokens.topk_weights(r, j) * to_float(tokens.rows(r, h));
          }
        }
      }
    }

   private:
    std::int64_t hidden_;
  };
};

}  // namespace moe::archetypes
