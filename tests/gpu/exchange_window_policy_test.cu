// SPDX-License-Identifier: Apache-2.0
// tests/gpu/exchange_window_policy_test.cu: OneSided, TwoSided and Pplx as policies, between simulated ranks on one GPU: refusals and
// abandoned rounds of one rank and the others' errors, placements, windows that layers share.
// moe-alone: the registers of its kernels are tested.
#include <gtest/gtest.h>

#include <functional>

#include "moe/backends/window/device/one_sided/launch.cuh"
#include "moe/backends/window/device/pplx/launch.cuh"
#include "moe/backends/window/device/two_sided/launch.cuh"
#include "moe/quantization/none.hpp"
#include "tests/gpu/exchange_policy_ranks.cuh"
#include "tests/gpu/shared_gpu.cuh"

namespace {

using namespace moe_test;
using moe::ErrorCode;
using moe::text;
using Fp8 = Fp8Transport;
using moe::quantization::None;

constexpr std::uint64_t kTimeout = 3'000'000'000ULL;
constexpr std::uint64_t kShort = 150'000'000ULL;
constexpr int kHidden = 512;
constexpr int kTopK = 4;
constexpr int kMaxTokens = 8;

using OneSided = moe::backends::OneSided<SimulatedWindow>;
using TwoSided = moe::backends::TwoSided<SimulatedWindow>;
using Pplx = moe::backends::Pplx<SimulatedWindow>;

/// Whether finalize() waits for every rank, or for those that have rows of this one.
template <class Backend>
constexpr bool kCombineMeets = std::is_same_v<Backend, OneSided>;
template <class Backend>
constexpr bool kPerRank = Backend::kFormat == moe::ActivationFormat::standard;

template <class Backend>
typename Backend::Params params(std::uint64_t timeout = kTimeout) {
  typename Backend::Params p;
  p.window = {timeout};
  if constexpr (std::is_same_v<Backend, TwoSided>) {
    p.queue_depth = 2;
    p.queue_entry_bytes = 4096;
  }
  return p;
}

template <class Backend>
class DevicePolicy : public testing::Test {
 public:
  static void good_rounds(auto& run, std::string const& what) {
    static unsigned seed = 100;
    for (int i = 0; i < 3; ++i, ++seed) {
      run.bring(seed, i == 1 ? Routing::with_gaps : Routing::uniform);
      run.round();
      run.expect_good(kPerRank<Backend>, what);
    }
  }
};
struct BackendNames {
  template <class Backend>
  static std::string GetName(int) {
    return Backend::kName;
  }
};
using Backends = testing::Types<OneSided, TwoSided, Pplx>;
TYPED_TEST_SUITE(DevicePolicy, Backends, BackendNames);

/// An argument that a rank refuses, and the errors that it and the others get.
struct Wrong {
  ErrorCode own;
  ErrorCode others;
  std::string sentence;
  std::function<moe::RoutedTokens<bf16>(moe::RoutedTokens<bf16> const&)> in;
};
std::vector<Wrong> wrongs() {
  using In = moe::RoutedTokens<bf16>;
  return {
      {ErrorCode::capacity, ErrorCode::capacity, "hidden_states: 9 rows exceed max_tokens_per_rank 8",
       [](In const& t) {
         return In{moe::make_rows(t.hidden.data_handle(), 9, kHidden), moe::make_rows(t.topk_ids.data_handle(), 9, kTopK),
                   moe::make_rows(t.topk_weights.data_handle(), 9, kTopK)};
       }},
      {ErrorCode::argument, ErrorCode::peer, "hidden_states: width: 504, expected 512",
       [](In const& t) { return In{moe::make_strided_rows(t.hidden.data_handle(), 8, 504, kHidden), t.topk_ids, t.topk_weights}; }},
      {ErrorCode::argument, ErrorCode::peer, "topk_ids: width: 3, expected 4",
       [](In const& t) { return In{t.hidden, moe::make_strided_rows(t.topk_ids.data_handle(), 8, 3, kTopK), t.topk_weights}; }},
      {ErrorCode::argument, ErrorCode::peer, "topk_ids: row stride 8, expected 4",
       [](In const& t) { return In{t.hidden, moe::make_strided_rows(t.topk_ids.data_handle(), 8, kTopK, 8), t.topk_weights}; }},
      {ErrorCode::argument, ErrorCode::peer, "hidden_states: null pointer for 8 rows",
       [](In const& t) { return In{moe::make_rows(static_cast<bf16 const*>(nullptr), 8, kHidden), t.topk_ids, t.topk_weights}; }},
  };
}

// One rank, then two, then all refuse their arguments. Every rank is told which other rank and why, and the following rounds are exact.
TYPED_TEST(DevicePolicy, T4_T12_RefusalsLeaveTheGroupSound) {
  Ranks<TypeParam, Fp8> run(RankSizes{}, params<TypeParam>());
  this->good_rounds(run, "before");
  for (Wrong const& wrong : wrongs()) {
    for (unsigned refusing : {0b0001U, 0b1000U, 0b0110U, 0b1111U}) {
      SCOPED_TRACE(text(wrong.sentence, ", ranks ", refusing));
      run.bring(7, Routing::uniform, kMaxTokens);
      for (int r = 0; r < run.size(); ++r) {
        if (((refusing >> r) & 1U) == 0) {
          run.pair(r);
          continue;
        }
        EXPECT_EQ(expect_error(wrong.own, [&] { run.at(r).prepare(wrong.in(run.in(r)), run.stream(r)); }), wrong.sentence);
        expect_error(ErrorCode::state, [&] { run.at(r).finalize(run.out(r), run.stream(r)); });
      }
      run.synchronize();
      for (int r = 0; r < run.size(); ++r) {
        unsigned const others = refusing & ~(1U << r);
        try {
          run.at(r).check();
          EXPECT_EQ(others, 0U) << "rank " << r << " was not told";
        } catch (moe::TransportError const& e) {
          EXPECT_EQ(e.code(), wrong.others) << e.what();
          EXPECT_EQ(e.rank(), r);
          EXPECT_NE((others >> e.peer()) & 1U, 0U) << e.what();
          EXPECT_EQ(e.phase(), "dispatch counts") << e.what();
          EXPECT_EQ(std::string(e.message()).find(text("rank ", e.peer(), " refused its arguments with ", moe::name(wrong.own), " (")), 0U)
              << e.what();
        }
        run.at(r).check();  // once
      }
      this->good_rounds(run, "after a refusal");
      if (this->HasFailure()) return;
    }
  }
}

// Round after round with nothing in between, so that both words of a rank are in use.
TYPED_TEST(DevicePolicy, T4_RefusalsInARow) {
  Ranks<TypeParam, None, float> run(RankSizes{}, params<TypeParam>());
  for (int i = 0; i < 6; ++i) {
    run.bring(static_cast<unsigned>(i), Routing::uniform, kMaxTokens);
    int const refusing = i % run.size();
    for (int r = 0; r < run.size(); ++r) {
      if (r == refusing) {
        expect_error(ErrorCode::capacity, [&] { run.at(r).prepare(wrongs()[0].in(run.in(r)), run.stream(r)); });
      } else {
        run.pair(r);
      }
    }
    if (i == 4) {  // rank 0 may still have to report the others' refusals of rounds 1 to 3, never its own of round 0
      run.synchronize();
      try {
        run.at(0).check();
      } catch (moe::TransportError const& e) {
        EXPECT_EQ(e.code(), ErrorCode::capacity) << e.what();
        EXPECT_NE(e.peer(), 0) << e.what();
      }
    }
    if (i >= 4) run.expect_refusal(ErrorCode::capacity, i - 4, "refused its arguments with E_CAPACITY");
  }
  this->good_rounds(run, "after refusals in a row");
}

TYPED_TEST(DevicePolicy, T12_T21_AbandonedRoundsLeaveTheGroupSound) {
  Ranks<TypeParam, Fp8> run(RankSizes{}, params<TypeParam>());
  for (int gives_up : {3, 0}) {
    for (bool prepared : {false, true}) {
      SCOPED_TRACE(text("rank ", gives_up, prepared ? " after prepare" : " instead of prepare"));
      run.bring(5, Routing::uniform, kMaxTokens);  // every rank has rows at every other
      for (int r = 0; r < run.size(); ++r) {
        if (r != gives_up) {
          run.pair(r);
          continue;
        }
        if (prepared) run.at(r).prepare(run.in(r), run.stream(r));
        run.at(r).abandon(run.stream(r));
        expect_error(ErrorCode::state, [&] { run.at(r).finalize(run.out(r), run.stream(r)); });
      }
      if (prepared && std::is_same_v<TypeParam, Pplx>) {
        // It has told the others and does not wait: nothing of that comes back to it in the next round.
        run.synchronize();
        for (int r = 0; r < run.size(); ++r) {
          if (r == gives_up) continue;
          EXPECT_EQ(expect_error(ErrorCode::peer, [&] { run.at(r).check(); }).find(text("rank ", gives_up, " abandoned the call (")), 0U);
        }
        run.bring(6, Routing::uniform, kMaxTokens);
        run.round();
        run.synchronize();
        for (int r = 0; r < run.size(); ++r) {
          run.at(r).check();
          EXPECT_EQ(run.differs(r, kPerRank<TypeParam>), "");
        }
      } else {
        run.expect_refusal(ErrorCode::peer, gives_up, "abandoned the call", prepared ? "combine" : "dispatch counts");
      }
      this->good_rounds(run, "after a rank gave up");
    }
  }
}

// Ranks without rows at the rank that gives up are complete and do not wait for it.
TYPED_TEST(DevicePolicy, T12_ARankThatWaitsForNoRowsSeesTheAbandonLater) {
  Ranks<TypeParam, Fp8> run(RankSizes{}, params<TypeParam>());
  run.bring(5, Routing::uniform, kMaxTokens);
  for (int r = 0; r < 3; ++r) run.name_one_expert(r, 4 * r);  // nothing for rank 3
  for (int r = 0; r < 3; ++r) run.pair(r);
  run.at(3).prepare(run.in(3), run.stream(3));
  run.at(3).abandon(run.stream(3));
  if (kCombineMeets<TypeParam>) {
    run.expect_refusal(ErrorCode::peer, 3, "abandoned the call", "combine");
  } else {
    run.synchronize();
    for (int r = 0; r < 3; ++r) EXPECT_EQ(run.differs(r, kPerRank<TypeParam>), "");
    run.bring(6);
    run.round();
    run.expect_refusal(ErrorCode::peer, 3, "abandoned the call", "combine");
    for (int r = 0; r < 4; ++r) EXPECT_EQ(run.differs(r, kPerRank<TypeParam>), "") << "the round in which they were told is a good one";
  }
  this->good_rounds(run, "after a rank gave up");
}

TYPED_TEST(DevicePolicy, T4_T10_ATimeoutReplacesARefusal) {
  Ranks<TypeParam, Fp8> run(RankSizes{}, params<TypeParam>(kShort));
  run.expect_timeout_after_refusal();
}

/// Two layers whose exchanges share a window.
template <class Backend>
struct TwoLayers {
  SimulatedGroup group{4};
  std::vector<SimulatedRank> ranks;
  std::vector<std::unique_ptr<Manager>> managers;
  std::vector<Manager*> pointers = [this] {
    for (int r = 0; r < 4; ++r) ranks.emplace_back(group, r);
    std::vector<Manager*> all;
    for (SimulatedRank& rank : ranks) {
      managers.push_back(std::make_unique<Manager>(rank, SimulatedWindow::Params{kTimeout}));
      all.push_back(managers.back().get());
    }
    return all;
  }();
  Ranks<Backend, Fp8> a{RankSizes{}, params<Backend>(), pointers, &ranks};
  Ranks<Backend, Fp8> b{RankSizes{}, params<Backend>(), pointers, &ranks};
};

TYPED_TEST(DevicePolicy, T4_F2_ALayerOfASharedWindowRefuses) {
  TwoLayers<TypeParam> layers;
  auto& a = layers.a;
  auto& b = layers.b;
  for (auto* refuses : {&b, &a}) {
    refuses->bring(3, Routing::uniform, kMaxTokens);
    for (int r = 0; r < 4; ++r) {
      if (r == 1) {
        expect_error(ErrorCode::capacity, [&] { refuses->at(r).prepare(wrongs()[0].in(refuses->in(r)), refuses->stream(r)); });
      } else {
        refuses->pair(r);
      }
    }
    refuses->expect_refusal(ErrorCode::capacity, 1, "refused its arguments with E_CAPACITY");
    this->good_rounds(a, "first layer");
    this->good_rounds(b, "second layer");
  }
}

TYPED_TEST(DevicePolicy, T21_F2_ASharedWindowHasOneDispatchAtATime) {
  TwoLayers<TypeParam> layers;
  auto& a = layers.a;
  auto& b = layers.b;
  a.bring(5);
  b.bring(6);
  for (int r = 0; r < 4; ++r) {
    auto const tokens = a.at(r).prepare(a.in(r), a.stream(r));
    EXPECT_EQ(expect_error(ErrorCode::state, [&] { b.at(r).prepare(b.in(r), b.stream(r)); }),
              "prepare: another exchange of this window has a dispatch without its combine");
    expect_error(ErrorCode::state, [&] { b.at(r).finalize(b.out(r), b.stream(r)); });
    b.at(r).abandon(b.stream(r));  // there is no open round
    run_identity(tokens, a.at(r).expert_output(), a.stream(r));
    a.at(r).finalize(a.out(r), a.stream(r));
  }
  a.expect_good(kPerRank<TypeParam>);
  this->good_rounds(b, "second layer");
  this->good_rounds(a, "first layer");
}

// Placements that are not contiguous ranges: round robin, uneven, ranks without experts, replicas of a plan.
TYPED_TEST(DevicePolicy, T1_T20_Placements) {
  auto rounds = [&](RankSizes const& s, std::string const& what) {
    Ranks<TypeParam, Fp8> run(s, params<TypeParam>());
    unsigned seed = 1;
    for (Routing routing : {Routing::uniform, Routing::with_gaps, Routing::duplicates, Routing::one_rank, Routing::none}) {
      run.bring(seed++, routing);
      run.round();
      run.expect_good(kPerRank<TypeParam>, what);
    }
  };
  for (auto strategy : {moe::PlacementStrategy::linear, moe::PlacementStrategy::round_robin}) {
    for (int experts : {16, 13, 3}) {
      RankSizes const s{.topk = experts == 3 ? 2 : 4, .experts = experts, .strategy = strategy};
      std::string const what = text(experts, " experts, ", moe::name(strategy));
      if (experts % s.ranks != 0 && std::is_same_v<TypeParam, Pplx>) {
        EXPECT_EQ(expect_error(ErrorCode::unsupported, [&] { Ranks<TypeParam, Fp8>(s, params<TypeParam>()); }),
                  text("pplx: ", experts,
                       " experts do not divide by 4 ranks, which its batches need (docs/semantics/exchange.md §9); one_sided and two_sided "
                       "take them"));
      } else {
        rounds(s, what);
      }
    }
  }
  std::vector<std::int32_t> const replicas{0, 5, 1, 6, 2, 0, 7, 3, 5, 9, 4, 8, 0, 5, 10, 11};
  rounds({.placement = moe::ExpertPlacement::from_physical_to_logical(replicas, 12, 4)}, "replicas");
}

// Ranks that place experts differently must not exchange rows.
TYPED_TEST(DevicePolicy, T12_PlacementsThatDifferAreAMismatch) {
  using moe::ExpertPlacement;
  auto shape = [](ExpertPlacement const& p) {
    moe::Shape<PolicyConfig> const s({.hidden = kHidden, .intermediate = 128, .num_experts = 16, .topk = kTopK});
    return moe::backends::detail::peer_shape<Fp8>("x", 4, s, kMaxTokens, p, 8).tag().value();
  };
  EXPECT_NE(shape(ExpertPlacement(16, 4)), shape(ExpertPlacement(16, 4, moe::PlacementStrategy::round_robin)));
  EXPECT_EQ(shape(ExpertPlacement(16, 4)), shape(ExpertPlacement(16, 4)));
}

// One rank of a group with identical tokens refuses: the others of the group do not wait for its sends.
TEST(PplxDevicePolicy, T4_RefusalsInAGroupThatSharesTokens) {
  auto p = params<Pplx>();
  p.dp_size = 2;
  Ranks<Pplx, Fp8> run(RankSizes{}, p);
  auto bring = [&](unsigned seed) {
    run.bring(seed, Routing::uniform, kMaxTokens);
    for (int r : {1, 3}) run.copy_tokens(r - 1, r);
  };
  for (unsigned i = 0; i < 4; ++i) {
    bring(2 * i);
    int const refusing = static_cast<int>(i);
    for (int r = 0; r < 4; ++r) {
      if (r == refusing) {
        expect_error(ErrorCode::capacity, [&] { run.at(r).prepare(wrongs()[0].in(run.in(r)), run.stream(r)); });
      } else {
        run.pair(r);
      }
    }
    run.expect_refusal(ErrorCode::capacity, refusing, "refused its arguments with E_CAPACITY");
    bring(2 * i + 1);
    run.round();
    run.expect_good(false, "after a refusal in a group");
  }
}

TEST(PplxDevicePolicy, T4_T17_RefusalsBetweenHalves) {
  Ranks<Pplx, Fp8> run(RankSizes{}, params<Pplx>());
  for (bool refuses : {true, false}) {  // rank 2 refuses its arguments, or gives up between the halves
    run.bring(1, Routing::uniform, kMaxTokens);
    for (int r = 0; r < 4; ++r) {
      auto& x = run.at(r);
      auto const s = run.stream(r);
      if (r == 2) {
        if (refuses) {
          expect_error(ErrorCode::capacity, [&] { x.prepare_send(wrongs()[0].in(run.in(r)), s); });
          expect_error(ErrorCode::state, [&] { x.prepare_receive(s); });
        } else {
          x.prepare_send(run.in(r), s);
          x.abandon(s);
        }
        continue;
      }
      x.prepare_send(run.in(r), s);
      run_identity(x.prepare_receive(s), x.expert_output(), s);
      x.finalize_send(s);
      x.finalize_receive(run.out(r), s);
    }
    run.synchronize();
    for (int r : {0, 1, 3}) {
      std::string const message = expect_error(refuses ? ErrorCode::capacity : ErrorCode::peer, [&] { run.at(r).check(); });
      EXPECT_EQ(message.find(refuses ? "rank 2 refused its arguments with E_CAPACITY (" : "rank 2 abandoned the call ("), 0U) << message;
    }
    run.bring(2);
    run.round();
    run.synchronize();
    for (int r = 0; r < 4; ++r) {
      run.at(r).check();
      EXPECT_EQ(run.differs(r, false), "");
    }
  }
}

TYPED_TEST(DevicePolicy, TheWindowHasTheBytesOfTheFormula) {
  auto const size = memory_size();
  auto const p = params<TypeParam>();
  Ranks<TypeParam> run(memory_sizes(), p);
  if constexpr (std::is_same_v<TypeParam, OneSided>) {
    expect_window(run, moe::backends::one_sided_window(size), "one_sided");
  } else if constexpr (std::is_same_v<TypeParam, TwoSided>) {
    moe::detail::PeerShape const shape{.ranks = 4, .max_tokens = 256, .hidden = 2048, .topk = 4, .num_experts = 16, .blocks = 10};
    int const queues = moe::detail::TwoSidedLayout(shape, {p.queue_depth, p.queue_entry_bytes}).queues;
    expect_window(run, moe::backends::two_sided_window(size, queues, p.queue_depth, p.queue_entry_bytes), "two_sided");
  } else {
    expect_window(run, moe::backends::pplx_window(size), "pplx");
  }
}

}  // namespace
