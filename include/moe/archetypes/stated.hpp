// SPDX-License-Identifier: Apache-2.0
// archetypes/stated.hpp: the archetypes with the optional members that layers, runners and tools read through core/contract/facts.hpp,
// exchange.hpp, params.hpp and communicator.hpp. A layer over them computes the same without any of these members.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "moe/archetypes/required.hpp"
#include "moe/core/types.hpp"
#include "moe/parallel/backend_facts.hpp"
#include "moe/quantization/format/granularity.hpp"
#include "moe/quantization/support_level.hpp"
#include "moe/routing/row/router_config.hpp"
#include "moe/routing/row/row_router.hpp"

namespace moe::archetypes {

/// An activation whose type fixes its kind. Kernels written for kinds compute the formula of kKind with these constants.
struct StatedActivation {
  static constexpr char const* kName = "stated_activation";
  static constexpr activation::Kind kKind = activation::Kind::silu;
  activation::Constants constants{};
  MOE_HD constexpr bool gated() const { return activation::gated(kKind); }
  MOE_HD float operator()(float gate, float up) const { return activation::apply(kKind, constants, gate, up); }
};
/// The same with a kind that is chosen at run time.
struct ChosenActivation {
  static constexpr char const* kName = "chosen_activation";
  activation::Kind kind = activation::Kind::silu;
  activation::Constants constants{};
  MOE_HD constexpr bool gated() const { return activation::gated(kind); }
  MOE_HD float operator()(float gate, float up) const { return activation::apply(kind, constants, gate, up); }
};

struct StatedRouter : ArchetypeRouter<> {
  static constexpr bool kSelects = true;
  using Params = routing::RouterConfig;  ///< any struct with some of its members
  explicit StatedRouter(Params const& p) : ArchetypeRouter({p.num_experts, p.topk}), config_(p) {}
  routing::RouterConfig const& config() const { return config_; }
  routing::RouterConfig resolved() const { return config_; }

 private:
  routing::RouterConfig config_;
};

/// A router that chooses row by row as its Config says: the base class has select() for either space.
class StatedRowRouter : public routing::RowRouter<routing::RouterConfig> {
 public:
  static constexpr char const* kName = "stated_row_router";
  using Params = Config;
  explicit StatedRowRouter(Params const& p) : RowRouter(p) {}
};

struct StatedQuantization : ArchetypeQuantization<> {
  static constexpr int kShapeMultiple = 1;
  // The format, for kernels and readers that are written for formats (quantization/format/facts.hpp): neither rows nor weights have codes.
  static constexpr bool kQuantizesActivations = false;
  static constexpr auto kActGranularity = quantization::ScaleGranularity::none, kWeightGranularity = quantization::ScaleGranularity::none;
  static constexpr DType kPayloadDType = DType::bf16, kWeightDType = DType::bf16;  ///< nominal: those of the activations and weights
  static constexpr int kActGroup = 0, kWeightPack = 1, kWeightGroupRows = 0, kWeightGroupCols = 0;
  struct {
    float scale = 1.0F;
  } params;
  struct {
    float global_scale = 1.0F;
    float amax_upper_bound = std::numeric_limits<float>::max();
  } act;
  /// The codec of the weights. Those of the library: quantization/format/codecs.hpp.
  struct WeightCodec {};
  /// Row: anything with operator[].
  template <class Act, class Row>
  void quantize_row(Row const& x, std::int64_t n, Act* q, float*) const {
    for (std::int64_t i = 0; i < n; ++i) {
      q[i] = x[i];
    }
  }
};

/// What a stated exchange tells experts that run beside its transfers; one of the library has comm::Arrivals and comm::Completions.
struct StatedArrivals {};
struct StatedCompletions {};

/// Exchange and kernel are defined outside of their policies, because nvcc's host pass confuses a member template with the one of that name
/// in a base of the policy.
template <class Params, class Config, class Quant, class Partial>
class StatedExchange : public ArchetypeBackend<>::Exchange<Config, Quant, Partial> {
  using Base = ArchetypeBackend<>::Exchange<Config, Quant, Partial>;
  using Routed = RoutedTokens<typename Config::Act, Config::hidden>;
  using Output = Rows<typename Config::Act, Config::hidden>;

 public:
  static constexpr bool kTakesRowCount = false;
  static constexpr bool kArrives = false;
  static constexpr bool kCompletes = false;
  StatedExchange(comm::Self<>& comm, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement,
                 Quant const& quant, Params const&, Arena<space::host>& arena)
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
  /// This rank's part of the window that it maps: of none, 0 bytes.
  struct Mapped {
    std::int64_t bytes() const { return 0; }
  };
  Mapped window() const { return {}; }
  /// With kArrives: prepare() that may end before the rows have come.
  StandardTokensOf<Config, Quant> prepare_arriving(Routed const& in, HostStream stream) { return this->prepare(in, stream); }
  /// With kArrives: counts of the rows that have come, in device memory (comm::Arrivals).
  StatedArrivals arrivals() const { return {}; }
  /// With kCompletes: words of the columns that are complete, in the windows of all ranks (comm::Completions).
  StatedCompletions completions() { return {}; }
  bool over() const { return over_; }
  void end() noexcept { over_ = true; }

 private:
  Routed sent_{};
  bool over_ = false;
};

struct StatedBackend : ArchetypeBackend<> {
  static constexpr BackendFacts kFacts{.name = kName, .transport = Transport::local};
  using Needs = std::tuple<>;  ///< NeedsCommunicator<Comm> or NeedsWindow<Window>, if its exchange uses them
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
  using Exchange = StatedExchange<Params, Config, Quant, Partial>;
};

template <class Params, class Config, class Quant, ActivationFormat Format>
class StatedKernel : public ArchetypeExperts<>::Kernel<Config, Quant, Format> {
  using Base = ArchetypeExperts<>::Kernel<Config, Quant, Format>;

 public:
  static constexpr bool kSkipsForeignIds = false;
  using RowsAsTheyAre = Quant;
  StatedKernel(Shape<Config> const& shape, WeightsOf<Config, Quant> const& weights, std::int64_t max_rows, Quant const& quant,
               typename Config::Activation const& activation, Params const&, Arena<space::host>& arena)
      : Base(shape, weights, max_rows, quant, activation, {}, arena) {}
  void apply(StandardTokensOf<Config, Quant> const& tokens, Rows<float> y, HostStream stream) const {
    static_cast<Base const&>(*this).apply(tokens, y, stream);
  }
  /// For an exchange with kArrives: the rows are on their way when the experts start.
  void apply(StandardTokensOf<Config, Quant> const& tokens, Rows<float> y, StatedArrivals const&, HostStream stream) const {
    this->apply(tokens, y, stream);
  }
  /// For an exchange with kCompletes: its combine reads each block of columns once the experts have told it.
  void apply(StandardTokensOf<Config, Quant> const& tokens, Rows<float> y, StatedCompletions const&, HostStream stream) const {
    this->apply(tokens, y, stream);
  }
  /// For an exchange with both.
  void apply(StandardTokensOf<Config, Quant> const& tokens, Rows<float> y, StatedArrivals const&, StatedCompletions const&,
             HostStream stream) const {
    this->apply(tokens, y, stream);
  }
  void weights_changed(HostStream) {}
  bool capturable() const { return true; }
  std::string tuning() const { return "one tile"; }
};

struct StatedExperts : ArchetypeExperts<> {
  struct Params {
    int num_threads = 0;
    int workers = 0;
    int expected_rows = 0;
    std::shared_ptr<void> workspace{};
  };
  static constexpr bool takes(activation::Kind, bool /*weight_on_input*/) { return true; }
  /// Experts of the CUDA space say how they compute a scheme on a GPU.
  template <class Quant>
  static constexpr quantization::Support support_on(int /*sm*/) {
    return quantization::Support::none;
  }
  template <class Config, class Quant, ActivationFormat Format>
  using Kernel = StatedKernel<Params, Config, Quant, Format>;
};

/// A second transfer beside other calls, and groups, which only exchanges of the device read.
struct StatedCommunicator : ArchetypeCommunicator {
  static bool allows_threads() { return true; }
  struct Transfer {
    explicit Transfer(StatedCommunicator const&) {}
  };
  void start_all_to_all_v(Transfer&, void const* in, std::int64_t const* in_counts, std::int64_t const* in_offsets, void* out,
                          std::int64_t const* out_counts, std::int64_t const* out_offsets) {
    all_to_all_v(in, in_counts, in_offsets, out, out_counts, out_offsets, {});
  }
  void finish(Transfer&) {}
  struct Group {
    explicit Group(StatedCommunicator&) {}
    void send(void const*, std::int64_t, int, HostStream) {}
    void receive(void*, std::int64_t, int, HostStream) {}
    void end() {}
  };
  void set_phase(char const*) {}
  void all_gather_host(void const* in, std::int64_t bytes, void* all) { all_gather(in, bytes, all, {}); }
  void reserve_reduction(std::int64_t) {}
  std::vector<std::uint64_t> waited_ns() const { return {}; }
  bool failed() const { return failed_; }
  void begin_abort() noexcept { failed_ = true; }
  int ended_rank() const { return failed_ ? 0 : -1; }

 private:
  std::atomic<bool> failed_ = false;
};

}  // namespace moe::archetypes
