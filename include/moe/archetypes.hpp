// SPDX-License-Identifier: Apache-2.0
// archetypes.hpp: the smallest type that models each concept of core/contract/concepts.hpp, to start a policy of your own from. Template
// parameters are the facts that the composition rules judge, so that a test can break exactly one rule.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "moe/activation/activation.hpp"
#include "moe/comm/self.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/parallel/backend_facts.hpp"
#include "moe/routing/row/route_args.hpp"
#include "moe/routing/row/router_config.hpp"

namespace moe::archetypes {

/// A layer of 64 × 32, 4 experts, top 2.
struct Tiny : LayerDefaults {
  static constexpr int hidden = 64;
  static constexpr int intermediate = 32;
  static constexpr int num_experts = 4;
  static constexpr int topk = 2;
  using Activation = activation::Silu;
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

/// Stores everything as it is; Multiple is the group that a shape must be divisible by.
template <int Multiple = 1>
struct ArchetypeQuantization {
  static constexpr char const* kName = "archetype_quantization";
  template <class Act>
  using Payload = Act;
  using Scale = float;
  template <class Act>
  using WeightCode = Act;
  using WeightScale = float;
  static constexpr std::int64_t payload_cols(std::int64_t n) { return n; }
  static constexpr std::int64_t scale_cols(std::int64_t) { return 0; }
  static constexpr std::int64_t weight_code_cols(std::int64_t n) { return n; }
  static constexpr std::int64_t weight_scale_count(std::int64_t, std::int64_t) { return 0; }
  static constexpr bool supports(std::int64_t hidden, std::int64_t intermediate) {
    return (hidden < 0 || hidden % Multiple == 0) && (intermediate < 0 || intermediate % Multiple == 0);
  }
  template <class Act>
  void quantize_row(Act const* x, std::int64_t n, Act* q, float*) const {
    for (std::int64_t i = 0; i < n; ++i) {
      q[i] = x[i];
    }
  }
  template <class Act>
  void dequantize_row(Act const* q, float const*, std::int64_t n, float* out) const {
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
  void dequantize_weight_row(Act const* codes, float const*, std::int64_t, std::int64_t cols, std::int64_t r, float* out) const {
    for (std::int64_t c = 0; c < cols; ++c) {
      out[c] = to_float(codes[r * cols + c]);
    }
  }
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

// ---- The same with optional members that layers, runners and tools read (core/contract/facts.hpp, params.hpp, communicator.hpp). Each
// says what holds without it, so a policy may leave out any of them.

struct StatedRouter : ArchetypeRouter<> {
  static constexpr bool kSelects = true;
  using Params = routing::RouterConfig;  ///< any struct with some of its members
  explicit StatedRouter(Params const& p) : ArchetypeRouter({p.num_experts, p.topk}), config_(p) {}
  routing::RouterConfig const& config() const { return config_; }
  routing::RouterConfig resolved() const { return config_; }

 private:
  routing::RouterConfig config_;
};

struct StatedQuantization : ArchetypeQuantization<> {
  static constexpr int kShapeMultiple = 1;
  struct {
    float scale = 1.0F;
  } params;
  struct {
    float global_scale = 1.0F;
  } act;
  /// Row: anything with operator[].
  template <class Act, class Row>
  void quantize_row(Row const& x, std::int64_t n, Act* q, float*) const {
    for (std::int64_t i = 0; i < n; ++i) {
      q[i] = x[i];
    }
  }
};

struct StatedBackend : ArchetypeBackend<> {
  static constexpr BackendFacts kFacts{.name = kName, .transport = Transport::local};
  static constexpr bool kRowsStay = false;
  static constexpr bool kBatchInvariant = true;
  struct Params {
    bool deduplicate = false;
    std::optional<int> expert_rank{};
  };
  template <class Act>
  static constexpr bool carries_element() {
    return true;
  }
  template <class Output>
  static constexpr bool returns_element() {
    return true;
  }
  template <class Config, class Quant, class Partial>
  class Exchange : public ArchetypeBackend<>::Exchange<Config, Quant, Partial> {
    using Base = ArchetypeBackend<>::Exchange<Config, Quant, Partial>;
    using Routed = RoutedTokens<typename Config::Act, Config::hidden>;
    using Output = Rows<typename Config::Act, Config::hidden>;

   public:
    static constexpr bool kTakesRowCount = false;
    static constexpr bool kArrives = false;
    Exchange(Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement, Quant const& quant,
             Params const&, Arena<space::host>& arena)
        : Base(comm, shape, max_tokens, placement, quant, {}, arena) {}
    using Base::expert_output;
    Rows<Partial> expert_output(Output) { return this->expert_output(); }
    void prepare_send(Routed const& in, HostStream) { sent_ = in; }
    StandardTokensOf<Config, Quant> prepare_receive(HostStream stream) { return this->prepare(sent_, stream); }
    void finalize_send(HostStream) {}
    void finalize_receive(Output out, HostStream stream) { this->finalize(out, stream); }
    void wait(HostStream) {}
    void check() {}
    bool capturable() const { return true; }
    std::vector<std::uint64_t> waited_ns() const { return {}; }
    bool over() const { return over_; }
    void end() noexcept { over_ = true; }

   private:
    Routed sent_{};
    bool over_ = false;
  };
};

struct StatedExperts : ArchetypeExperts<> {
  struct Params {
    int num_threads = 0;
    int workers = 0;
    int expected_rows = 0;
    std::shared_ptr<void> workspace{};
  };
  static constexpr bool takes(activation::Kind, bool /*weight_on_input*/) { return true; }
  template <class Config, class Quant, ActivationFormat Format>
  class Kernel : public ArchetypeExperts<>::Kernel<Config, Quant, Format> {
    using Base = ArchetypeExperts<>::Kernel<Config, Quant, Format>;

   public:
    static constexpr bool kSkipsForeignIds = false;
    using RowsAsTheyAre = Quant;
    Kernel(Shape<Config> const& shape, WeightsOf<Config, Quant> const& weights, std::int64_t max_rows, Quant const& quant,
           typename Config::Activation const& activation, Params const&, Arena<space::host>& arena)
        : Base(shape, weights, max_rows, quant, activation, {}, arena) {}
    void weights_changed(HostStream) {}
    bool capturable() const { return true; }
    std::string tuning() const { return "one tile"; }
  };
};

struct StatedCommunicator : comm::Self<> {
  static bool allows_threads() { return true; }
  void set_phase(char const*) {}
  void all_gather_host(void const* in, std::int64_t bytes, void* all) { all_gather(in, bytes, all, {}); }
  void reserve_reduction(std::int64_t) {}
  std::vector<std::uint64_t> waited_ns() const { return {}; }
  bool failed() const { return failed_; }
  void begin_abort() noexcept { failed_ = true; }

 private:
  std::atomic<bool> failed_ = false;
};

}  // namespace moe::archetypes
