// SPDX-License-Identifier: Apache-2.0
// runner/declaration.hpp: the class of runner/runner.hpp. Members that do work are defined in runner/construction.hpp, forward.hpp,
// validate.hpp and finish.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "moe/core/buffer.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/contract/monolithic.hpp"
#include "moe/core/rule.hpp"
#include "moe/layer/arguments.hpp"
#include "moe/layer/options.hpp"
#include "moe/layer/weight_move.hpp"
#include "moe/runner/chunking.hpp"
#include "moe/runner/dual_batch.hpp"
#include "moe/runner/gate.hpp"
#include "moe/runner/output.hpp"
#include "moe/runner/parallel.hpp"
#include "moe/runner/parts.hpp"
#include "moe/runner/primitives.hpp"
#include "moe/runner/routing_source.hpp"
#include "moe/runner/shared_experts.hpp"
#include "moe/runner/transform.hpp"

namespace moe {

namespace rules {
MOE_RULE(RunnerTakesLogits,
         "moe: the runner has its gate outside, and forward() was called without logits. "
         "Fix: forward(hidden, logits, output), or set Gate of its parts (docs/errors.md#runner-logits)");
MOE_RULE(RunnerComputesLogits,
         "moe: the runner has its gate inside, and forward() was called with logits. "
         "Fix: forward(hidden, output), or Gate = runner::gate::Outside (docs/errors.md#runner-logits)");
}  // namespace rules

/// y = norm?( s (c out(Σ_e w_e FFN_e(in(x)) + zero experts) + shared(x)) + bias ) on one rank. LayerT: a ModularKernel. PartsT: which of
/// the rest there is, RunnerDefaults or a struct that inherits it. The space is the layer's. Immovable, as its layer.
template <class LayerT, class PartsT = RunnerDefaults>
class Runner {
 public:
  using Layer = LayerT;
  using Parts = PartsT;
  using Space = typename Layer::Space;
  using Act = typename Layer::Act;
  using Comm = typename Layer::Comm;

  struct Params {
    typename Layer::Params layer;    ///< its max_tokens_per_rank is the most rows of a forward(), or of a chunk, on any rank
    std::int64_t hidden = 0;         ///< H, width of input and output; 0: expert_hidden
    std::int64_t expert_hidden = 0;  ///< H', width of the routed path; 0: the layer's hidden. A layer that is wider gets zeros
    typename Parts::Gate::Params gate{};
    typename Parts::Input::Params input{};
    typename Parts::Output::Params output{};
    typename Parts::Shared::Params shared{};
    /// An asynchronous backend's exchange is under way while the shared experts run, unless they have a side stream: the same bits. false:
    /// they run before the layer.
    bool overlap_shared = true;
    typename Parts::Scaling::Params scaling{};
    typename Parts::End::Params end{};
    typename Parts::Chunking::Params chunking{};
    typename Parts::DualBatch::Params dual_batch{};
    typename Parts::Parallel::Params parallel{};
  };

  /// Collective over `comm`. Allocates all memory that the runner ever uses. All weights are borrowed. Throws as the layer does.
  Runner(Comm& comm, typename Layer::Weights const& experts, Params const& p);
  /// Other arguments, or these in another order: one error, which says what is wrong.
  template <class CommArg, class WeightsArg>
    requires(!detail::kConstructs<Comm, typename Layer::Weights, CommArg, WeightsArg>)
  Runner(CommArg&&, WeightsArg&&, Params const& p)  // Fix: if no constructor takes the braces, Runner::Params const p{...}; names the field
      : Runner(detail::refused_argument<detail::ConstructorArguments<Comm, typename Layer::Weights, CommArg, WeightsArg>, Comm>(),
               detail::refused_argument<detail::NoArguments, typename Layer::Weights>(), p) {}
  ~Runner();
  Runner(Runner&&) = delete;  // immovable, as its layer. Fix: keep it in std::optional or std::unique_ptr
  Runner& operator=(Runner&&) = delete;

  /// Collective. hidden [M, H] → output [M, H], which may be hidden, the same rows, and may not overlap it otherwise, nor another
  /// array of the call (E_ARG), nor weights. Enqueues on `stream` (host space: returns when done). No allocation.
  /// Throws before any work if an argument is wrong (E_ARG, E_CAPACITY) or while the layer's weights are replaced (E_STATE); the other
  /// ranks then get E_PEER. Options as the layer's, but for shared_weights, which is the runner's; output rows of padding are undefined.
  /// With a gate inside.
  template <class Probe = NoProbe>
  void forward(Rows<Act const> hidden, Rows<Act> output, ForwardOptions const& options = {}, Stream<Space> stream = {},
               Probe&& probe = {}) {
    if constexpr (Parts::Gate::kInside) {
      run(hidden, InnerLogits{gate_, stream}, output, options, stream, probe);
    } else {
      [[maybe_unused]] typename rules::RunnerTakesLogits::template Broken<typename Parts::Gate> const error;
    }
  }
  /// The same with the gate outside: logits [M, num_logits], float, bf16 or f16.
  template <class Logit, class Probe = NoProbe>
  void forward(Rows<Act const> hidden, Rows<Logit> logits, Rows<Act> output, ForwardOptions const& options = {}, Stream<Space> stream = {},
               Probe&& probe = {}) {
    if constexpr (!Parts::Gate::kInside) {
      run(hidden, OuterLogits<Logit>{logits, zeros_, layer_.router().num_logits()}, output, options, stream, probe);
    } else {
      [[maybe_unused]] typename rules::RunnerComputesLogits::template Broken<typename Parts::Gate> const error;
    }
  }
  /// As forward(), with routing that the caller did, with or without a gate inside: gate and router are skipped. topk_ids [M, k] int32 or
  /// int64: logical experts, E and above zero experts, kNoExpert (-1) for none, each at most once in a row; topk_weights [M, k] float, read
  /// where there is an expert, and not scaled by the router's factor. Both in the runner's space. Given the routing of forward(): its bits.
  /// Host space: E_ARG names the first invalid slot of a valid row, and nothing was done. CUDA space: kernels check the slots; an invalid
  /// one counts as no expert, and check() throws its E_ARG, with its row in its pass. E_ARG if `options` has token_ids. E_UNSUPPORTED if
  /// the router weights shared experts (Gate::routing_weight, or fused ones). Does not compile if the experts route inside.
  template <class IdsArg, class WeightsArg, class Probe = NoProbe>
  void forward_routed(Rows<Act const> hidden, IdsArg const& topk_ids, WeightsArg const& topk_weights, Rows<Act> output,
                      ForwardOptions const& options = {}, Stream<Space> stream = {}, Probe&& probe = {}) {
    using Broken = detail::FirstBrokenArgument<std::tuple<detail::Verdict<rules::MonolithicTakesNoRouting, !is_monolithic(), LayerT>>,
                                               detail::RoutingArguments<IdsArg, WeightsArg>>;
    if constexpr (std::is_same_v<Broken, detail::NoBrokenRule>) {
      run(hidden, CallerRows{{topk_ids, topk_weights}, layer_.router(), zeros_}, output, options, stream, probe);
    } else {
      [[maybe_unused]] typename Broken::template Error<true> const error;
    }
  }
  /// Collective. Instead of a forward() that this rank cannot make: its peers get E_PEER. Never throws. With dual batch in the CUDA space,
  /// decide_dual_batch() must have set before whether batches are split, because this call has no rows to decide by.
  void abandon(Stream<Space> stream = {});

  /// Waits for the stream, within the backend's deadline even if a peer has died, and throws any error; as the layer's. On a TP group it
  /// also waits for the group's sums, and names the rank that does not join them within twice the deadline.
  void wait(Stream<Space> stream = {});
  /// Throws the errors of calls that the stream has finished; as the layer's.
  void check();
  /// Sets whether forwards run in two halves from now on, the same on all ranks; nullopt: their number of rows decides. E_STATE for true
  /// where they cannot.
  void decide_dual_batch(std::optional<bool> verdict)
    requires(runner::detail::kPresent<typename Parts::DualBatch>)
  {
    halved_.decide(verdict);
  }
  /// Whether a forward can run in two halves (dual_batch::Halves with its second exchange).
  bool can_split() const {
    if constexpr (kDualBatch) {
      return halved_.has_second_exchange();
    } else {
      return false;
    }
  }

  /// Which batches run in two halves from now on, and why, in words.
  std::string dual_batch_choice() const
    requires(runner::detail::kPresent<typename Parts::DualBatch>)
  {
    return halved_.choice();
  }

  /// How the shared experts are computed, and why, in words; empty where their policy leaves no choice.
  std::string shared_choice() const { return runner::detail::choice_of(shared_); }
  /// How the gate's logits are computed, and why, in words; empty without a gate inside or without a choice.
  std::string gate_choice() const { return runner::detail::choice_of(gate_); }
  /// CUDA space: the address of the gate's float32 weight [num_logits, H] (gate::Any with an MLP: of its first matrix) if a copy is read in
  /// its place; the owner may free it. Else null.
  void const* unread_gate_weight() const { return runner::detail::unread_weight_of(gate_); }

  /// Call this after the bytes of the routed experts' weights were replaced in place (load balancing), before the next forward() or graph
  /// replay: the kernels with a copy of their own rebuild it in stream order, also the second one of a dual batch. Shared experts beside
  /// the layer do not move and are not told.
  void weights_changed(Stream<Space> stream = {});
  /// As the layer's.
  WeightMove& weight_move() { return layer_.weight_move(); }
  /// As moe::capture_obstacle(runner).
  std::string capture_obstacle();

  Layer& layer() { return layer_; }
  /// Whether the experts route inside: no mapping, no counted load, no routing to look at.
  static constexpr bool is_monolithic() { return runner::detail::kMonolithic<LayerT>; }
  /// Routing of the last forward(), or of its last chunk: [M, k] logical ids (an id >= num_experts is a zero expert) and weights, in the
  /// layer's memory. Under sequence parallelism M counts this rank's rows.
  auto topk_ids() { return layer_.topk_ids(); }
  auto topk_weights() { return layer_.topk_weights(); }
  /// The sums over the TP group of each forward().
  runner::ReductionPlan const& reductions() const { return plan_; }
  std::int64_t hidden() const { return sizes_.hidden; }
  std::int64_t max_rows() const { return sizes_.max_rows; }
  /// Bytes that runner and layer hold on this rank besides their weights.
  std::size_t bytes() const {
    std::size_t second = 0;
    if constexpr (kDualBatch) second = halved_.window_bytes();
    return arena_.bytes() + layer_.bytes() + second;
  }

 private:
  template <class Policy>
  using Part = typename runner::detail::PartOf<Policy, Space, Act>::type;
  static constexpr bool kHasShared = runner::detail::kPresent<typename Parts::Shared>;
  static constexpr bool kChunked = runner::detail::kPresent<typename Parts::Chunking>;
  static constexpr bool kDualBatch = runner::detail::kPresent<typename Parts::DualBatch>;
  static constexpr bool kParallel = runner::detail::kPresent<typename Parts::Parallel>;
  static_assert(!kParallel || Space::kKind == SpaceKind::cuda || std::is_same_v<Act, float>,
                "moe: sums over a TP group in the host space need float32 rows. Fix: a layer with Act = float");
  /// The exchange has halves between which the shared experts fit.
  static constexpr bool kSharedFitsBetween = kHasShared && runner::detail::kInHalves<LayerT>;
  static constexpr bool kHasInput = runner::detail::kPresent<typename Parts::Input>;
  static constexpr bool kHasOutput = runner::detail::kPresent<typename Parts::Output>;
  static constexpr bool kHasZeroExperts = runner::detail::kPresent<typename Parts::ZeroExperts>;
  /// Whether anything is between the layer's output and the block's.
  static constexpr bool kPlain = !kParallel && !kHasShared && !kHasOutput && !kHasZeroExperts &&
                                 std::is_same_v<typename Parts::Scaling, runner::scaling::None> &&
                                 std::is_same_v<typename Parts::End, runner::end::None>;
  using SharedRow = typename runner::detail::SharedRowOf<Part<typename Parts::Shared>, Act>::type;
  using Finish = runner::FinishRows<Act, SharedRow>;

  using Chunks = typename runner::detail::ChunksOf<typename Parts::Chunking, Comm>::type;

  // Where a forward's routing comes from (runner/routing_source.hpp).
  static constexpr bool kCut = kChunked || kParallel;
  using InnerLogits = runner::detail::InnerLogits<Part<typename Parts::Gate>, Act, Space>;
  template <class Logit>
  using OuterLogits = runner::detail::OuterLogits<Logit, Act, kCut>;
  using CallerRows = runner::detail::CallerRows<Layer, kCut>;

  // ---- construction.hpp
  static typename Layer::Params layer_params(Params const& p);
  static runner::ReductionPlan plan(Params const& p);
  static runner::Sizes sizes(Params const& p);
  static std::int64_t kernel_hidden(Params const& p);
  template <class Policy>
  Part<Policy> transform(char const* name, typename Policy::Params const& p, std::int64_t in, std::int64_t out);
  void take_memory(Params const& p);
  void check(Params const& p) const;
  void check_expert_norm(ExpertNormWeights const& norm, Params const& p) const;

  /// Whether the shared experts of a forward of `rows` rows run between the halves of an exchange; with a side stream they begin before it.
  bool shared_waits([[maybe_unused]] std::int64_t rows) const {
    if constexpr (requires { shared_.overlaps(rows); }) return shared_between_ && !shared_.overlaps(rows);
    return shared_between_;
  }

  // ---- forward.hpp
  template <class Routing, class Probe>
  void run(Rows<Act const> hidden, Routing const& routing, Rows<Act> output, ForwardOptions const& options, Stream<Space> stream,
           Probe& probe);
  template <class Routing, class Probe>
  void run_rank(Rows<Act const> hidden, Routing const& routing, Rows<Act> output, ForwardOptions const& options, Stream<Space> stream,
                Probe& probe);
  template <class Call>
  void together(std::int64_t rows, Stream<Space> stream, Call const& call);
  void refuse(ErrorCode code, std::int64_t rows, Stream<Space> stream);
  void refuse_pass(std::int64_t rows, Stream<Space> stream);
  template <class Routing, class Probe>
  void run_alone(Rows<Act const> hidden, Routing const& routing, Rows<Act> output, ForwardOptions const& options, Stream<Space> stream,
                 Probe& probe);
  template <class Routing, class Probe>
  void run_chunks(Rows<Act const> hidden, Routing const& routing, Rows<Act> output, ForwardOptions const& options, Stream<Space> stream,
                  Probe& probe);
  template <class Routing, class Probe>
  void pass(Rows<Act const> hidden, Routing const& routing, std::int64_t first, Rows<Act> output, ForwardOptions options,
            Stream<Space> stream, Probe& probe);
  // The stages of a pass, and what they hand on.
  template <class RowRouting>  // logits, or routing::GivenRouting
  struct Batch {
    Rows<Act const> hidden;
    Rows<Act> output;
    ForwardOptions options;
    Stream<Space> stream;
    Rows<Act const> x = {};  // the experts' input
    RowRouting routing = {};
    Rows<Act> routed = {};  // the layer's output, kernel_hidden columns
    bool halves = false;    // in two
  };
  template <class B, class Routing, class Probe>
  void gate_stage(B& batch, Routing const& routing, std::int64_t first, Probe& probe);
  template <class B, class Probe>
  void layer_stage(B& batch, Probe& probe);
  template <class X, class Y, class B, class Probe>  // around_shared.hpp
  void layer_around_shared(X x, Y routed, B& batch, Probe& probe);
  void abandon_layer(bool halves, Stream<Space> stream);
  bool layer_is_over();
  void wait_layer(Stream<Space> stream);
  void end_layer() noexcept;
  Rows<Act const> expert_input(Rows<Act const> hidden, Stream<Space> stream);
  template <class Probe>
  void run_shared(Rows<Act const> hidden, Stream<Space> stream, Probe& probe);
  void leave(Rows<Act const> x, Rows<Act> routed, Rows<Act> output, bool complete_terms, bool shared_term, Stream<Space> stream);
  template <class Probe>
  void leave_group(Rows<Act const> x, Rows<Act> routed, Rows<Act> output, Stream<Space> stream, Probe& probe);
  template <class Probe>
  void finish_rows(Finish const& rows, Stream<Space> stream, Probe& probe);
  void add_zero_experts(Finish& finish, Rows<Act const> x);
  void add_shared(Finish& finish);
  void add_end(Finish& finish, bool bias);

  // ---- validate.hpp
  void validate_widths(Rows<Act const> hidden, Rows<Act> output) const;
  void validate(Rows<Act const> hidden, Rows<Act> output) const;
  template <class Routing>
  void check_routing(Routing const& routing, Rows<Act> output, ForwardOptions const& options) const;
  void expect_joint_weights(bool routes) const;

  Arena<Space> arena_;
  runner::Sizes sizes_;
  std::int64_t kernel_hidden_;
  typename Parts::Scaling::Params scaling_;
  typename Parts::End::Params end_;
  float factor_ = 1.0F;
  Part<typename Parts::Gate> gate_;
  Part<typename Parts::Input> input_;
  Part<typename Parts::Output> output_;
  Part<typename Parts::Shared> shared_;
  typename runner::detail::GroupOf<typename Parts::Parallel>::type group_;
  runner::ReductionPlan plan_;
  runner::SharedOutput shared_output_ = runner::SharedOutput::none;
  Layer layer_;
  typename runner::detail::HalvedOf<typename Parts::DualBatch, Layer>::type halved_;
  Chunks chunks_;
  bool shared_between_ = false;  // the shared experts run between the halves of an exchange
  std::byte* zeros_ = nullptr;   // a row of hidden states and a row of logits, for a chunk without rows
  Act* dummy_ = nullptr;         // [H], the output of such a row
  Act* sum_ = nullptr;           // [max_rows, H], what the TP group adds up at the end
  Act* padded_ = nullptr;        // [max_rows, kernel_hidden], if the layer is wider than the routed path
  Act* routed_ = nullptr;        // [max_rows, kernel_hidden], unless the layer writes the block's output
  float* joint_ = nullptr;       // [max_rows, S], routing weights of shared experts
  int num_joint_ = 0;
  int num_zero_ = 0;
  routing::ZeroExpertKind zero_kind_ = routing::ZeroExpertKind::none;
};

}  // namespace moe
