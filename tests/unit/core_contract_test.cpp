// SPDX-License-Identifier: Apache-2.0
// tests/unit/core_contract_test.cpp: every backend whose exchange is in another header names a header that exists, in either space;
// optional facts have their defaults; archetypes model the contracts.
// moe-alone: it tests compositions whose headers are not included.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <numeric>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "../archetypes.hpp"
#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/allgather_reduce_scatter.hpp"
#include "moe/backends/high_throughput.hpp"
#include "moe/backends/low_latency.hpp"
#include "moe/backends/naive.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/backends/one_sided.hpp"
#include "moe/backends/pplx.hpp"
#include "moe/backends/two_sided.hpp"
#include "moe/core/contract/communicator.hpp"
#include "moe/experts/cuda_reference.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/monolithic.hpp"
#include "moe/experts/reference.hpp"
#include "moe/experts/weights.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/none.hpp"
#include "moe/quantization/support.hpp"
#include "moe/routing/fixed_sizes.hpp"
#include "moe/routing/softmax_topk.hpp"

namespace {

using namespace moe_test;

/// The minimal window for a policy, in either space.
template <class SpaceT>
struct Window {
  using Space = SpaceT;
  using Comm = moe::comm::Self<Space>;
  int rank() const;
  int size() const;
  void* peer(int rank, std::int64_t offset);
  std::int64_t bytes() const;
};

/// The error text of a layer over Backend without the header of its exchange.
template <class Backend>
std::string sentence() {
  using Exchange = typename Backend::template Exchange<Tiny, ArchetypeQuantization<>, float>;
  return Exchange::MissingInclude::kSentence;
}

template <class Space>
std::vector<std::string> sentences() {
  using W = Window<Space>;
  return {sentence<moe::backends::LowLatency<W>>(),     sentence<moe::backends::LowLatencyRankMajor<W>>(),
          sentence<moe::backends::HighThroughput<W>>(), sentence<moe::backends::OneSided<W>>(),
          sentence<moe::backends::TwoSided<W>>(),       sentence<moe::backends::Pplx<W>>()};
}

TEST(Contract, AMissingIncludeNamesAHeaderThatExists) {
  using Cuda = moe::space::cuda;
  std::vector<std::string> all = sentences<moe::space::host>();
  for (std::string const& one : all) EXPECT_NE(one.find("moe/backends/window/host/"), std::string::npos) << one;
  for (std::string const& one : sentences<Cuda>()) {
    EXPECT_NE(one.find("moe/backends/window/device/"), std::string::npos) << one;
    all.push_back(one);
  }
  all.push_back(sentence<moe::backends::NoExpertParallel<Cuda>>());
  all.push_back(sentence<moe::backends::AllToAllV<moe::comm::Self<Cuda>>>());
  all.push_back(sentence<moe::backends::Naive<moe::comm::Self<Cuda>>>());
  all.push_back(sentence<moe::backends::AllGatherReduceScatter<moe::comm::Self<Cuda>>>());
  std::filesystem::path const include = std::filesystem::path(MOE_TEST_DATA) / ".." / ".." / "include";
  for (std::string const& one : all) {
    std::size_t const begin = one.find("#include <"), end = one.find('>', begin);
    ASSERT_NE(begin, std::string::npos) << one;
    std::string const header = one.substr(begin + 10, end - begin - 10);
    EXPECT_TRUE(std::filesystem::exists(include / header)) << one;
  }
  EXPECT_EQ(all.size(), 16U);
}

// A policy that states no optional fact has the default of each.
struct Silent {};
struct Loud {
  static constexpr bool kRowsStay = true, kTakesRowCount = true, kSkipsForeignIds = true, kBatchInvariant = true, kNormalisesOutput = true;
  static constexpr int kSharedMemoryLimit = 7;
  using RowsAsTheyAre = float;
  bool deduplicate = true;
  int waited = 0, checked = 0, changed = 0, ended = 0;
  void wait(int) { ++waited; }
  void check() { ++checked; }
  bool over() const { return true; }
  void end() { ++ended; }
  void weights_changed(int) { ++changed; }
  int expert_output() { return 1; }
  int expert_output(int output) { return output; }
};
// The members that are objects' own, each with a value that is not its default.
struct LoudConfig {
  float routed_scaling_factor = 2.0F;
  int num_zero_experts = 3, num_joint_shared = 4;
  char zero_expert_kind = 'z';
};
struct LoudPart {
  static constexpr int kShapeMultiple = 8;
  using Window = int;
  static bool takes(int kind, bool) { return kind == 1; }
  static bool allows_threads() { return false; }
  template <class Element>
  static constexpr bool carries_element() {
    return false;
  }
  template <class Element>
  static constexpr bool returns_element() {
    return false;
  }
  bool capturable() const { return false; }
  LoudConfig config() const { return {}; }
  int resolved() const { return 0; }
  std::string tuning() const { return ""; }
  std::vector<std::uint64_t> waited_ns() const { return {7}; }
  void set_phase(char const* name) { phase = name; }
  void reserve_reduction(std::int64_t n) { reserved = n; }
  void all_gather_host(void const*, std::int64_t, void*) {}
  bool failed() const { return true; }
  void begin_abort() { ++aborted; }
  std::string phase;
  std::int64_t reserved = 0;
  int aborted = 0;
};
struct LoudRouter {
  using Config = LoudConfig;  // without the base class
};
struct LoudWindow {
  LoudPart window() { return {}; }
};
struct LoudParams {
  int num_experts = 0, workers = 0, expected_rows = 0, num_threads = 0;
  float const* correction_bias = nullptr;
  std::int64_t const* hash_table = nullptr;
  int* workspace = nullptr;
  std::optional<int> expert_rank{};
};
struct LoudLayer : Tiny {
  static constexpr bool has_selection_bias = true, fixed_kernels = true;
  static constexpr int num_zero_experts = 2;
};
struct OwnOutput {
  int expert_output() { return 1; }
};

TEST(Contract, OptionalFactsHaveDefaults) {
  namespace facts = moe::facts;
  EXPECT_FALSE(facts::rows_stay<Silent>());
  EXPECT_FALSE(facts::takes_row_count<Silent>());
  EXPECT_FALSE(facts::skips_foreign_ids<Silent>());
  EXPECT_FALSE(facts::experts_are_batch_invariant<Silent>());
  EXPECT_FALSE(facts::normalises_output<Silent>());
  EXPECT_TRUE(facts::normalises_output<Loud>());
  EXPECT_EQ(kExpertNorm<Tiny>, ExpertNorm::none);
  EXPECT_TRUE(facts::backend_is_batch_invariant<Silent>());
  EXPECT_TRUE((facts::carries_element<Silent, float>()));
  EXPECT_TRUE((facts::returns_element<Silent, float>()));
  EXPECT_FALSE(facts::deduplicates(Silent{}));
  EXPECT_EQ(facts::shared_memory_limit<Silent>(), 0);
  EXPECT_EQ((facts::shared_memory_bytes<Silent, Tiny, int>()), 0);
  EXPECT_TRUE((std::is_same_v<facts::RowsRead<Silent, int>::type, int>));
  Silent silent;
  EXPECT_EQ(facts::window_bytes(silent), 0U);
  facts::wait(silent, 0);
  facts::check(silent);
  facts::weights_changed(silent, 0);
  facts::end(silent);
  EXPECT_FALSE(facts::is_over(silent));
  OwnOutput own;
  EXPECT_EQ(facts::expert_output(own, 5), 1);
  EXPECT_TRUE(facts::capturable(silent));
  EXPECT_FALSE(facts::may_not_capture<Silent>() || facts::has_tuning<Silent>() || facts::counts_waits<Silent>());
  EXPECT_FALSE((facts::waits<Silent, int>() || facts::copies_weights<Silent, int>()));
  EXPECT_TRUE(facts::waited_ns(silent).empty());
  EXPECT_FALSE(facts::has_window<Silent>());
  EXPECT_TRUE(facts::takes<Silent>(0, true));
}

TEST(Contract, ARouterThatStatesNoFactHasTheDefaultOfEach) {
  namespace facts = moe::facts;
  EXPECT_FALSE(facts::resolves<Silent>());
  EXPECT_EQ(facts::routed_scaling_factor(Silent{}), 1.0F);
  EXPECT_EQ(facts::num_zero_experts(Silent{}), 0);
  EXPECT_EQ(facts::zero_expert_kind(Silent{}, 'n'), 'n');
  EXPECT_EQ(facts::num_joint_shared(Silent{}), 0);
  EXPECT_FALSE(facts::chooses_by_row<Silent>() || facts::chooses_by_row<StatedRouter>() || facts::chooses_by_row<LoudRouter>());
  EXPECT_TRUE(facts::chooses_by_row<StatedRowRouter>());
  EXPECT_TRUE(facts::resolves<LoudPart>());
  EXPECT_EQ(facts::routed_scaling_factor(LoudPart{}), 2.0F);
  EXPECT_EQ(facts::num_zero_experts(LoudPart{}), 3);
  EXPECT_EQ(facts::zero_expert_kind(LoudPart{}, 'n'), 'z');
  EXPECT_EQ(facts::num_joint_shared(LoudPart{}), 4);
}

TEST(Contract, OptionalMembersOfParamsHaveDefaults) {
  namespace facts = moe::facts;
  EXPECT_FALSE(facts::lacks_num_experts(Silent{}));
  EXPECT_FALSE(facts::takes_correction_bias<Silent>() || facts::takes_tables<Silent>() || facts::takes_expert_rank<Silent>());
  EXPECT_FALSE(facts::takes_workers<Silent>() || facts::takes_expected_rows<Silent>() || facts::takes_num_threads<Silent>());
  EXPECT_FALSE(facts::shares_workspace<Silent>());
  EXPECT_EQ(facts::expert_rank(Silent{}, 5), 5);
  EXPECT_TRUE(facts::lacks_num_experts(LoudParams{}));
  EXPECT_FALSE(facts::lacks_num_experts(LoudParams{.num_experts = 1}));
  EXPECT_TRUE(facts::takes_correction_bias<LoudParams>() && facts::takes_tables<LoudParams>() && facts::takes_expert_rank<LoudParams>());
  EXPECT_TRUE(facts::takes_workers<LoudParams>() && facts::takes_expected_rows<LoudParams>() && facts::takes_num_threads<LoudParams>());
  EXPECT_TRUE(facts::shares_workspace<LoudParams>());
  EXPECT_EQ(facts::expert_rank(LoudParams{}, 5), 5);
  EXPECT_EQ(facts::expert_rank(LoudParams{.expert_rank = 2}, 5), 2);
  EXPECT_FALSE(moe::kHasSelectionBias<Tiny> || moe::kFixedKernels<Tiny>);
  EXPECT_EQ(moe::kNumZeroExperts<Tiny>, 0);
  EXPECT_EQ(moe::kNumZeroExperts<LoudLayer>, 2);
  EXPECT_TRUE(moe::kHasSelectionBias<LoudLayer> && moe::kFixedKernels<LoudLayer>);
}

TEST(Contract, SchemesActivationsAndCommunicatorsHaveDefaults) {
  namespace facts = moe::facts;
  using Quant = ArchetypeQuantization<>;
  using Computed = std::vector<float>;  // has operator[] and is not an array
  EXPECT_FALSE(facts::has_shape_multiple<Quant>() || facts::has_static_scale<Quant>() || facts::has_global_scale<Quant>());
  EXPECT_FALSE(facts::bounds_amax<Quant>() || facts::has_weight_codec<Quant>());
  EXPECT_TRUE(facts::bounds_amax<StatedQuantization>() && facts::has_weight_codec<StatedQuantization>());
  EXPECT_TRUE(facts::bounds_amax<moe::quantization::Fp8PerToken<>>());
  EXPECT_FALSE((facts::quantizes_computed_rows<Quant, Computed>()));
  EXPECT_TRUE((facts::quantizes_computed_rows<StatedQuantization, Computed>()));
  EXPECT_FALSE(facts::fixes_kind<Silent>() || facts::chooses_kind<Silent>() || facts::has_constants<Silent>());
  EXPECT_TRUE(facts::fixes_kind<moe::activation::Silu>() && facts::chooses_kind<moe::activation::Any>());
  EXPECT_TRUE(facts::has_constants<moe::activation::Silu>() && !facts::chooses_kind<moe::activation::Silu>());
  Silent silent;
  facts::set_phase(silent, "dispatch");
  facts::reserve_reduction(silent, 9);
  facts::begin_abort(silent);
  EXPECT_FALSE(facts::failed(silent));
  EXPECT_EQ(facts::ended_rank(silent), -1);
  EXPECT_FALSE(facts::gathers_host_memory<Silent>());
  EXPECT_FALSE((facts::gathers_on_the_host<Silent, moe::HostStream>()));
  EXPECT_TRUE((facts::gathers_on_the_host<moe::comm::Self<>, moe::HostStream>()));
  EXPECT_TRUE(facts::allows_threads<Silent>());
  EXPECT_FALSE(facts::starts_transfers<Silent>() || facts::has_groups<Silent>());
  LoudPart loud;
  facts::set_phase(loud, "dispatch");
  facts::reserve_reduction(loud, 9);
  facts::begin_abort(loud);
  EXPECT_TRUE(facts::failed(loud));
  EXPECT_EQ(loud.aborted, 1);
  EXPECT_EQ(loud.phase, "dispatch");
  EXPECT_EQ(loud.reserved, 9);
  EXPECT_TRUE(facts::gathers_host_memory<LoudPart>());
  EXPECT_FALSE(facts::allows_threads<LoudPart>());
}

TEST(Contract, OptionalFactsAreRead) {
  namespace facts = moe::facts;
  EXPECT_TRUE(facts::rows_stay<Loud>() && facts::takes_row_count<Loud>() && facts::skips_foreign_ids<Loud>());
  EXPECT_TRUE(facts::experts_are_batch_invariant<Loud>());
  EXPECT_EQ(facts::shared_memory_limit<Loud>(), 7);
  EXPECT_TRUE((std::is_same_v<facts::RowsRead<Loud, int>::type, float>));
  EXPECT_TRUE(facts::deduplicates(Loud{}));
  Loud loud;
  EXPECT_EQ(facts::expert_output(loud, 5), 5);
  facts::wait(loud, 0);
  facts::check(loud);
  facts::weights_changed(loud, 0);
  EXPECT_EQ(loud.waited + loud.checked + loud.changed, 3);
  facts::end(loud);
  EXPECT_EQ(loud.ended, 1);
  EXPECT_TRUE(facts::is_over(loud));
  EXPECT_TRUE((facts::waits<Loud, int>() && facts::copies_weights<Loud, int>()));
  LoudPart part;
  EXPECT_TRUE(facts::may_not_capture<LoudPart>() && facts::may_not_capture<LoudPart const>() && !facts::capturable(part));
  EXPECT_TRUE(facts::has_tuning<LoudPart>() && facts::has_shape_multiple<LoudPart>() && facts::has_window<LoudPart>());
  EXPECT_EQ(facts::waited_ns(part), std::vector<std::uint64_t>{7});
  LoudWindow window;
  EXPECT_TRUE(facts::counts_waits<LoudWindow>());
  EXPECT_EQ(facts::waited_ns(window), std::vector<std::uint64_t>{7});
  EXPECT_TRUE(facts::takes<LoudPart>(1, false) && !facts::takes<LoudPart>(0, false));
  EXPECT_FALSE((facts::carries_element<LoudPart, float>() || facts::returns_element<LoudPart, float>()));
}

template <class Layer, class Probe = moe::NoProbe>
std::vector<float> output_of(typename Layer::RouterType::Params const& router, Probe&& probe = {}) {
  moe::comm::Self<> self;
  Layer layer(self, {}, {.max_tokens_per_rank = 8, .placement = moe::ExpertPlacement(4, 1), .router = router});
  std::vector<float> x(5 * 64), z(5 * 4), y(5 * 64, -1.0F);
  std::iota(x.begin(), x.end(), 0.0F);
  layer.forward(moe::make_rows<64>(static_cast<float const*>(x.data()), 5, 64), moe::make_rows(static_cast<float const*>(z.data()), 5, 4),
                moe::make_rows<64>(y.data(), 5, 64), {}, {}, probe);
  layer.weights_changed();
  layer.wait();
  layer.check();
  return y;
}

// The archetypes with every optional member say what holds without it.
TEST(Contract, StatedDefaultsChangeNothing) {
  namespace facts = moe::facts;
  using Stated = moe::ModularKernel<Tiny, StatedRouter, StatedQuantization, StatedBackend, StatedExperts>;
  using Params = StatedBackend::Params;
  EXPECT_EQ(output_of<Stated>({.num_experts = 4, .topk = 2}), output_of<Compose<>>({}));
  EXPECT_EQ(facts::selects<StatedRouter>(), facts::selects<Silent>());
  static_assert(std::is_same_v<moe::detail::BackendNeeds<StatedBackend>::type, moe::detail::BackendNeeds<Silent>::type>);
  EXPECT_EQ(facts::rows_stay<StatedBackend>(), facts::rows_stay<Silent>());
  EXPECT_EQ((facts::carries_element<StatedBackend, float>()), (facts::carries_element<Silent, float>()));
  EXPECT_EQ((facts::returns_element<StatedBackend, float>()), (facts::returns_element<Silent, float>()));
  EXPECT_EQ(facts::backend_is_batch_invariant<StatedBackend>(), facts::backend_is_batch_invariant<Silent>());
  EXPECT_EQ(facts::is_asynchronous<StatedBackend>(), facts::is_asynchronous<Silent>());
  EXPECT_EQ(facts::deduplicates(Params{}), facts::deduplicates(Silent{}));
  EXPECT_EQ(facts::expert_rank(Params{}, 3), facts::expert_rank(Silent{}, 3));
  EXPECT_EQ(facts::takes_row_count<Stated::Exchange>(), facts::takes_row_count<Silent>());
  EXPECT_EQ(facts::arrives<Stated::Exchange>(), facts::arrives<Silent>());
  EXPECT_EQ(facts::completes<Stated::Exchange>(), facts::completes<Silent>());
  EXPECT_EQ(facts::skips_foreign_ids<Stated::Kernel>(), facts::skips_foreign_ids<Silent>());
  EXPECT_TRUE((std::is_same_v<Stated::RowQuant, StatedQuantization>));
  EXPECT_TRUE((facts::waits<Stated::Exchange, moe::HostStream>() && facts::copies_weights<Stated::Kernel, moe::HostStream>()));
  EXPECT_TRUE(facts::may_not_capture<Stated::Exchange>() && facts::may_not_capture<Stated::Kernel>());
  EXPECT_TRUE(facts::has_tuning<Stated::Kernel>() && facts::counts_waits<Stated::Exchange>() && facts::resolves<StatedRouter>());
}

// What the archetypes end is over, which a fact that did not call them would not know.
TEST(Contract, StatedGroupsAreOverOnceTheyAreEnded) {
  namespace facts = moe::facts;
  using Stated = moe::ModularKernel<Tiny, StatedRouter, StatedQuantization, StatedBackend, StatedExperts>;
  moe::comm::Self<> self;
  Stated layer(self, {}, {.max_tokens_per_rank = 8, .placement = moe::ExpertPlacement(4, 1), .router = {.num_experts = 4, .topk = 2}});
  EXPECT_FALSE(facts::is_over(layer.exchange()));
  facts::end(layer.exchange());
  EXPECT_TRUE(facts::is_over(layer.exchange()));

  static_assert(moe::Communicator<StatedCommunicator>);
  StatedCommunicator comm;
  EXPECT_FALSE(facts::failed(comm));
  EXPECT_EQ(facts::ended_rank(comm), -1);
  facts::begin_abort(comm);
  EXPECT_TRUE(facts::failed(comm));
  EXPECT_EQ(facts::ended_rank(comm), 0);
  EXPECT_TRUE(facts::gathers_host_memory<StatedCommunicator>() && facts::counts_waits<StatedCommunicator>());
  EXPECT_TRUE(facts::starts_transfers<StatedCommunicator>() && facts::has_groups<StatedCommunicator>());
  EXPECT_EQ(facts::allows_threads<StatedCommunicator>(), facts::allows_threads<Silent>());
  int const sent = 5;
  int received = 0;
  comm.all_gather_host(&sent, sizeof sent, &received);
  EXPECT_EQ(received, sent);
}

// The archetypes with one member changed: the layer uses what they say.
template <class X>
struct Arriving : X {
  using X::X;
  static constexpr bool kArrives = true;
  template <class Rows>
  auto prepare_arriving(Rows const& in, moe::HostStream stream) {
    ++late;
    return X::prepare_arriving(in, stream);
  }
  inline static int late = 0;
  struct Mapped {
    std::int64_t bytes() const { return 640; }
  };
  Mapped window() const { return {}; }
};
template <class K>
struct Beside : K {
  using K::K;
  template <class Tokens>
  void apply(Tokens const& tokens, moe::Rows<float> y, moe::HostStream stream) const {
    K::apply(tokens, y, stream);
  }
  template <class Tokens, class Arrivals>
  void apply(Tokens const& tokens, moe::Rows<float> y, Arrivals const& arrivals, moe::HostStream stream) const {
    ++started;
    K::apply(tokens, y, arrivals, stream);
  }
  inline static int started = 0;
};

TEST(Contract, ALayerUsesArrivalsAndTheWindow) {
  using Layer =
      moe::ModularKernel<Tiny, StatedRouter, StatedQuantization, WithExchange<Arriving, StatedBackend>, WithKernel<Beside, StatedExperts>>;
  EXPECT_EQ(output_of<Layer>({.num_experts = 4, .topk = 2}), output_of<Compose<>>({}));
  EXPECT_EQ(Layer::Kernel::started, 1);
  EXPECT_EQ(Layer::Exchange::late, 1);
  moe::comm::Self<> self;
  Layer layer(self, {}, {.max_tokens_per_rank = 8, .placement = moe::ExpertPlacement(4, 1), .router = {.num_experts = 4, .topk = 2}});
  EXPECT_EQ(layer.memory().window, 640U);
}

template <class X>
struct Completing : X {
  using X::X;
  static constexpr bool kCompletes = true;
  auto completions() {
    ++handed_out;
    return X::completions();
  }
  template <class Out>
  void finalize(Out out, moe::HostStream stream) {
    EXPECT_EQ(handed_out, told);
    X::finalize(out, stream);
  }
  inline static int handed_out = 0, told = 0;
};
template <class X>
using ArrivingAndCompleting = Arriving<Completing<X>>;
/// Each overload counts: without a schedule, with the combine, with the dispatch, with both.
template <class K>
struct Counted : K {
  using K::K;
  using Tokens = moe::StandardTokensOf<Tiny, StatedQuantization>;
  using Rows = moe::Rows<float>;
  void apply(Tokens const& tokens, Rows y, moe::HostStream stream) const {
    ++calls[0];
    K::apply(tokens, y, stream);
  }
  void apply(Tokens const& tokens, Rows y, StatedCompletions const& completions, moe::HostStream stream) const {
    ++calls[1];
    ++*told;
    K::apply(tokens, y, completions, stream);
  }
  void apply(Tokens const& tokens, Rows y, StatedArrivals const& arrivals, moe::HostStream stream) const {
    ++calls[2];
    K::apply(tokens, y, arrivals, stream);
  }
  void apply(Tokens const& tokens, Rows y, StatedArrivals const& arrivals, StatedCompletions const& completions,
             moe::HostStream stream) const {
    ++calls[3];
    ++*told;
    K::apply(tokens, y, arrivals, completions, stream);
  }
  inline static int calls[4] = {};
  inline static int* told = nullptr;
};

/// The phases that a forward begins and ends, + and - before their initials.
struct NotedPhases {
  std::string all;
  static char initial(moe::Phase phase) { return "rdecsfR"[static_cast<int>(phase)]; }
  void begin(moe::Phase phase) { (all += '+') += initial(phase); }
  void end(moe::Phase phase) { (all += '-') += initial(phase); }
};

template <template <class> class Change>
void expect_completions(int overload, std::string const& phases) {
  using Layer =
      moe::ModularKernel<Tiny, StatedRouter, StatedQuantization, WithExchange<Change, StatedBackend>, WithKernel<Counted, StatedExperts>>;
  using Exchange = typename Layer::Exchange;
  Exchange::handed_out = Exchange::told = 0;
  Layer::Kernel::told = &Exchange::told;
  std::fill_n(Layer::Kernel::calls, 4, 0);
  NotedPhases noted;
  EXPECT_EQ(output_of<Layer>({.num_experts = 4, .topk = 2}, noted), output_of<Compose<>>({}));
  EXPECT_EQ(noted.all, phases);  // what is in one schedule is one phase
  EXPECT_EQ(Exchange::handed_out, 1);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(Layer::Kernel::calls[i], i == overload ? 1 : 0) << i;
}
TEST(Contract, ALayerUsesCompletions) {
  expect_completions<Completing>(1, "+r-r+d-d+e-e");
  expect_completions<ArrivingAndCompleting>(3, "+r-r+e-e");
}

// One token of twos: gate and up are 2, and the second product keeps what the activation made of them.
template <class ActivationT>
struct ActivatedConfig : Tiny {
  using Activation = ActivationT;
  static constexpr float activation_limit = 0.5F;
  static constexpr auto activation_kind = moe::activation::Kind::silu_clamped;
};
template <class Quant = moe::quantization::None, class ActivationT>
float activated(ActivationT const& activation) {
  using Config = ActivatedConfig<ActivationT>;
  using Layer = moe::ModularKernel<Config, ArchetypeRouter<>, Quant, ArchetypeBackend<>, moe::experts::Reference<>>;
  moe::experts::WeightStore<Config, Quant> weights(4, 64, 32, true);
  std::vector<float> const w13(64 * 64, 1.0F / 64), w2(64 * 32, 1.0F / 32), x(64, 2.0F), z(4);
  for (int expert = 0; expert < 4; ++expert) weights.set_expert(expert, w13.data(), w2.data());
  moe::comm::Self<> self;
  Layer layer(self, weights.view(),
              {.max_tokens_per_rank = 1, .placement = moe::ExpertPlacement(4, 1), .router = {}, .activation = activation});
  std::vector<float> y(64);
  layer.forward(moe::make_rows<64>(x.data(), 1, 64), moe::make_rows(z.data(), 1, 4), moe::make_rows<64>(y.data(), 1, 64));
  return y[0];
}

TEST(Contract, ActivationsAreUsedWithTheirKindAndConstants) {
  static_assert(moe::Activation<ArchetypeActivation> && moe::Activation<StatedActivation> && moe::Activation<ChosenActivation>);
  EXPECT_TRUE(moe::facts::fixes_kind<StatedActivation>() && !moe::facts::chooses_kind<StatedActivation>());
  EXPECT_TRUE(moe::facts::chooses_kind<ChosenActivation>() && !moe::facts::fixes_kind<ChosenActivation>());
  EXPECT_TRUE(moe::facts::has_constants<StatedActivation>() && moe::facts::has_constants<ChosenActivation>());
  EXPECT_FLOAT_EQ(activated(ArchetypeActivation{}), 4.0F);
  EXPECT_FLOAT_EQ(activated(StatedActivation{}), activated(moe::activation::Silu{}));
  EXPECT_FLOAT_EQ(activated(ChosenActivation{}), activated(moe::activation::Silu{}));
  EXPECT_FLOAT_EQ(activated(ChosenActivation{.kind = moe::activation::Kind::gelu}), activated(moe::activation::Gelu{}));
  // What a configuration states is set, and what the formula cannot take is refused.
  EXPECT_EQ(moe::default_activation<ActivatedConfig<StatedActivation>>().constants.limit, 0.5F);
  auto const chosen = moe::default_activation<ActivatedConfig<ChosenActivation>>();
  EXPECT_EQ(chosen.kind, moe::activation::Kind::silu_clamped);
  EXPECT_EQ(chosen.constants.limit, 0.5F);
  EXPECT_THROW(activated(StatedActivation{.constants = {.limit = -1.0F}}), moe::Error);
  EXPECT_THROW(activated(ChosenActivation{.constants = {.limit = -1.0F}}), moe::Error);
}

// A scheme of its required members alone: experts of the host go through its functions, kernels written for formats refuse it.
TEST(Contract, ASchemeNeedNotStateItsFormat) {
  namespace facts = moe::facts;
  using Quant = ArchetypeQuantization<>;
  EXPECT_TRUE(facts::quantizes_activations<Quant>());
  EXPECT_EQ(facts::act_granularity<Quant>(), moe::quantization::ScaleGranularity::group);
  EXPECT_EQ(facts::weight_granularity<Quant>(), moe::quantization::ScaleGranularity::group);
  EXPECT_FALSE(facts::states_format<Quant>());
  EXPECT_FALSE(facts::quantizes_activations<StatedQuantization>());
  EXPECT_EQ(facts::act_granularity<StatedQuantization>(), moe::quantization::ScaleGranularity::none);
  EXPECT_EQ(facts::weight_granularity<StatedQuantization>(), moe::quantization::ScaleGranularity::none);
  EXPECT_TRUE(facts::states_format<StatedQuantization>() && facts::states_format<moe::quantization::Fp8PerToken<>>());

  EXPECT_FLOAT_EQ(activated<Quant>(ArchetypeActivation{}), 4.0F);
  EXPECT_FLOAT_EQ(activated<StatedQuantization>(ArchetypeActivation{}), 4.0F);
  EXPECT_TRUE(moe::backends::OneSided<Window<moe::space::host>>::carries<Quant>());
  EXPECT_FALSE(moe::backends::OneSided<Window<moe::space::cuda>>::carries<Quant>());
  EXPECT_TRUE(moe::backends::OneSided<Window<moe::space::cuda>>::carries<StatedQuantization>());
  EXPECT_FALSE(moe::experts::CudaReference::supports_quantization<Quant>());
  EXPECT_FALSE(moe::experts::HopperContiguous::supports_quantization<Quant>());
  EXPECT_TRUE(moe::experts::CudaReference::supports_quantization<StatedQuantization>());
  EXPECT_TRUE(moe::experts::HopperContiguous::supports_quantization<StatedQuantization>());
}

// Experts route inside, and sizes are compiled in, for routers that choose by row.
TEST(Contract, RoutersByRowAreTaken) {
  using Inside = moe::experts::Monolithic<moe::experts::Reference<>>;
  using ByRow = moe::Composition<Tiny, StatedRowRouter, moe::quantization::None, moe::backends::NoExpertParallel<>, Inside>;
  using Own = moe::Composition<Tiny, StatedRouter, moe::quantization::None, moe::backends::NoExpertParallel<>, Inside>;
  EXPECT_TRUE(ByRow::kLegal);
  EXPECT_STREQ(Own::reason(), moe::rules::MonolithicRouter::kSentence);
  EXPECT_FALSE(moe::routing::TakesFixedSizes<StatedRowRouter>) << "its choices have no type of their own";
  EXPECT_FALSE(moe::routing::TakesFixedSizes<StatedRouter>);
  EXPECT_TRUE((moe::routing::TakesFixedSizes<moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>>));
}

struct OnDevice : ExpertsFacts {
  static constexpr bool kOnDevice = true;
};
struct TakesNoScheme : OnDevice {
  static constexpr bool kQuantization = false;
};
struct NativeExperts : ArchetypeExperts<OnDevice> {
  template <class Quant>
  static constexpr moe::quantization::Support support_on(int sm) {
    return sm == 90 ? moe::quantization::Support::native : moe::quantization::Support::none;
  }
};
TEST(Contract, SupportOfASchemeHasADefault) {
  namespace facts = moe::facts;
  using moe::quantization::Support;
  using Quant = moe::quantization::Fp8PerToken<>;
  EXPECT_EQ((facts::support_on<ArchetypeExperts<>, Quant>(90)), Support::none);
  EXPECT_EQ((facts::support_on<ArchetypeExperts<OnDevice>, Quant>(90)), Support::emulated);
  EXPECT_EQ((facts::support_on<ArchetypeExperts<TakesNoScheme>, Quant>(90)), Support::none);
  EXPECT_EQ((facts::support_on<StatedExperts, Quant>(90)), (facts::support_on<ArchetypeExperts<>, Quant>(90)));
  EXPECT_EQ((facts::support_on<NativeExperts, Quant>(90)), Support::native);
  EXPECT_EQ((facts::support_on<NativeExperts, Quant>(80)), Support::none);
  EXPECT_NO_THROW((moe::quantization::check_support<Quant, ArchetypeExperts<OnDevice>>(90, false)));
  EXPECT_THROW((moe::quantization::check_support<Quant, ArchetypeExperts<OnDevice>>(90, true)), moe::Error);
  EXPECT_NO_THROW((moe::quantization::check_support<Quant, NativeExperts>(90, true)));
}

TEST(Contract, RunTimeReasonNamesTheMember) {
  struct NoTopK : ArchetypeRouter<> {
    using ArchetypeRouter::ArchetypeRouter;
    void topk() = delete;
  };
  using Composed = moe::Composition<Tiny, NoTopK, ArchetypeQuantization<>, ArchetypeBackend<>, ArchetypeExperts<>>;
  ASSERT_FALSE(Composed::kLegal);
  EXPECT_NE(std::string(Composed::reason()).find("'int topk() const'"), std::string::npos) << Composed::reason();
}

}  // namespace
