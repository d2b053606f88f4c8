// SPDX-License-Identifier: Apache-2.0
// tests/mpi/runner_dual_batch_test.cpp: two halves of a batch give the bits of the whole batch over every backend whose sending and waiting
// are separate; all ranks split or none; an error in one half ends both on all ranks, and the next forward works.
// moe-ranks: 1 2 4
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "../expect_error.hpp"
#include "../numbers.hpp"
#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/window/host/high_throughput.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/backends/window/host/pplx.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/mpi_shared.hpp"
#include "moe/experts/reference.hpp"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/runner.hpp"

namespace {

using namespace moe;
using moe_test::expect_error;
constexpr int kHidden = 32, kIntermediate = 16, kTopK = 2, kMost = 9, kShared = 1, kBlocks = 10;

struct Config : LayerDefaults {
  static constexpr int hidden = kHidden, intermediate = kIntermediate, topk = kTopK;
  using Activation = activation::Silu;
};

/// Experts that fail on request: on the `fails_on`-th call from now on (1 is the next); 0: never.
struct FailingExperts : experts::Reference<float> {
  static inline int fails_on = 0;
  template <class C, class Quant, ActivationFormat Format>
  class Kernel : public experts::Reference<float>::Kernel<C, Quant, Format> {
    using Base = typename experts::Reference<float>::template Kernel<C, Quant, Format>;

   public:
    using Base::Base;
    template <class Tokens, class Out>
    void apply(Tokens const& tokens, Out out, HostStream stream) {
      if (fails_on > 0 && --fails_on == 0) throw Error(ErrorCode::internal, "experts: injected");
      Base::apply(tokens, out, stream);
    }
  };
};

struct PlainParts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using Shared = runner::shared::Separate<experts::Reference<float>>;
};
struct DualParts : PlainParts {
  using DualBatch = runner::dual_batch::Halves;
};
struct BareParts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using DualBatch = runner::dual_batch::Halves;
};
struct ChunkParts : DualParts {
  using Chunking = runner::chunking::Lockstep;
};

using moe_test::numbers;

struct CountDispatches : NoProbe {
  int halves = 0;
  void begin(Phase p) { halves += p == Phase::experts ? 1 : 0; }
};

template <class Backend>
class DualBatch : public testing::Test {
 protected:
  using Layer = ModularKernel<Config, routing::AnyRouter, quantization::None, Backend, FailingExperts>;
  using Plain = Runner<Layer, PlainParts>;
  using Dual = Runner<Layer, DualParts>;

  comm::Mpi mpi{MPI_COMM_WORLD, {.timeout_ms = 20'000}};
  int const num_experts = 2 * mpi.size();
  std::vector<float> gate = numbers(7, num_experts* kHidden), shared13 = numbers(8, kShared * 2 * kIntermediate * kHidden),
                     shared2 = numbers(9, kShared * kHidden * kIntermediate);
  experts::WeightStore<Config, quantization::None> store = filled();

  experts::WeightStore<Config, quantization::None> filled() const {
    experts::WeightStore<Config, quantization::None> out(2, kHidden, kIntermediate, true);
    for (int e = 0; e < 2; ++e) {
      int const id = 2 * mpi.rank() + e;
      out.set_expert(e, numbers(100 + id, 2 * kIntermediate * kHidden).data(), numbers(200 + id, kHidden * kIntermediate).data());
    }
    return out;
  }
  template <class R>
  typename R::Params params(std::int64_t capacity = kMost, std::int64_t min_rows = 2) {
    typename R::Params p{.layer = {.shape = {.num_experts = num_experts},
                                   .max_tokens_per_rank = capacity,
                                   .placement = ExpertPlacement(num_experts, mpi.size()),
                                   .router = {.num_experts = num_experts, .topk = kTopK}}};
    p.gate = {make_rows(gate.data(), num_experts, kHidden)};
    if constexpr (requires { p.shared.count; }) {
      p.shared.count = kShared;
      p.shared.intermediate = kIntermediate;
      auto set = [](auto& to, std::vector<float> const& from, std::int64_t rows, std::int64_t cols) {
        to.codes = make_blocks(from.data(), kShared, rows, cols);
        to.rows = rows;
        to.cols = cols;
      };
      set(p.shared.weights.w13, shared13, 2 * kIntermediate, kHidden);
      set(p.shared.weights.w2, shared2, kHidden, kIntermediate);
      p.shared.activation = {activation::Kind::silu, {}};
    }
    if constexpr (requires { p.dual_batch.min_rows; }) p.dual_batch.min_rows = min_rows;
    return p;
  }
  std::int64_t rows_of(std::vector<int> const& counts) const { return counts[static_cast<std::size_t>(mpi.rank())]; }
  std::vector<float> input(std::int64_t rows, int seed = 0) const { return numbers(1000 + 50 * seed + mpi.rank(), rows * kHidden); }
  /// Calls of the experts in one forward: 2 in halves, 1 as a whole.
  template <class R>
  int forward(R& runner, std::vector<float> const& x, std::vector<float>& out) {
    CountDispatches probe;
    auto const m = static_cast<std::int64_t>(x.size()) / kHidden;
    runner.forward(make_rows(x.data(), m, kHidden), make_rows(out.data(), m, kHidden), ForwardOptions{}, HostStream{}, probe);
    return probe.halves;
  }
  /// The same with the routing of the runner's last forward, as a caller gives it.
  template <class R>
  int forward_again(R& runner, std::vector<float> const& x, std::vector<float>& out) {
    CountDispatches probe;
    auto const m = static_cast<std::int64_t>(x.size()) / kHidden;
    auto const* const ids = runner.topk_ids().data_handle();
    auto const* const weights = runner.topk_weights().data_handle();
    std::vector<std::int64_t> const given(ids, ids + m * kTopK);
    std::vector<float> const chosen_weights(weights, weights + m * kTopK);
    runner.forward_routed(make_rows(x.data(), m, kHidden), make_rows(given.data(), m, kTopK), make_rows(chosen_weights.data(), m, kTopK),
                          make_rows(out.data(), m, kHidden), ForwardOptions{}, HostStream{}, probe);
    return probe.halves;
  }
};
using Backends =
    testing::Types<backends::AllToAllV<comm::Mpi>, backends::LowLatencyRankMajor<comm::MpiShared>,
                   backends::HighThroughput<comm::MpiShared>, backends::LowLatency<comm::MpiShared>, backends::Pplx<comm::MpiShared>>;
TYPED_TEST_SUITE(DualBatch, Backends);

TYPED_TEST(DualBatch, N11_N13_EqualsTheWholeBatchAndAllRanksAgree) {
  using Dual = typename TestFixture::Dual;
  typename TestFixture::Plain plain(this->mpi, this->store.view(), this->template params<typename TestFixture::Plain>());
  Dual dual(this->mpi, this->store.view(), this->template params<Dual>());
  // The last four: a rank with one row, or none, votes no for all.
  std::vector<std::vector<int>> const steps{{2, 2, 2, 2}, {9, 9, 9, 9}, {5, 3, 2, 8}, {4, 1, 4, 4},
                                            {9, 0, 9, 9}, {1, 1, 1, 1}, {0, 0, 0, 0}};
  for (std::size_t step = 0; step < steps.size(); ++step) {
    SCOPED_TRACE(step);
    std::vector<float> const x = this->input(this->rows_of(steps[step]), static_cast<int>(step));
    std::vector<float> want(x.size(), -1.0F), got(x.size(), -2.0F);
    EXPECT_EQ(this->forward(plain, x, want), 1);
    int const least = *std::min_element(steps[step].begin(), steps[step].begin() + this->mpi.size());
    EXPECT_EQ(this->forward(dual, x, got), least >= 2 ? 2 : 1);
    EXPECT_EQ(got, want);
    std::fill(got.begin(), got.end(), -2.0F);
    EXPECT_EQ(this->forward_again(dual, x, got), least >= 2 ? 2 : 1) << "with the choice of the forward before";
    EXPECT_EQ(got, want);
    this->forward_again(plain, x, got);
    EXPECT_EQ(got, want);
    std::vector<float> same = x;  // in place
    this->forward(dual, same, same);
    EXPECT_EQ(same, want);
  }
  // The caller's decision, with halves of one row and none.
  for (std::optional<bool> const verdict : {std::optional(true), std::optional(false)}) {
    dual.decide_dual_batch(verdict);
    for (int const rows : {0, 1, 7}) {
      std::vector<float> const x = this->input(rows == 7 ? this->mpi.rank() : rows, rows);
      std::vector<float> want(x.size(), -1.0F), got(x.size(), -2.0F);
      this->forward(plain, x, want);
      EXPECT_EQ(this->forward(dual, x, got), *verdict ? 2 : 1);
      EXPECT_EQ(got, want);
    }
  }
}

TYPED_TEST(DualBatch, N11_ALongChain) {
  using Dual = typename TestFixture::Dual;
  typename TestFixture::Plain plain(this->mpi, this->store.view(), this->template params<typename TestFixture::Plain>());
  std::vector<std::unique_ptr<Dual>> blocks;
  for (int b = 0; b < kBlocks; ++b) {
    blocks.push_back(std::make_unique<Dual>(this->mpi, this->store.view(), this->template params<Dual>()));
  }
  std::vector<float> x = this->input(6), y = x;
  for (int round = 0; round < 1000; ++round) {
    Dual& dual = *blocks[static_cast<std::size_t>(round % kBlocks)];
    std::vector<float> next(x.size());
    ASSERT_EQ(this->forward(dual, x, next), 2);
    x = next;
    if (round >= 2 * kBlocks) continue;
    this->forward(plain, y, next);
    y = next;
    ASSERT_EQ(x, y) << "round " << round;
  }
}

TYPED_TEST(DualBatch, N12_AnErrorInOneHalfEndsBoth) {
  using Dual = typename TestFixture::Dual;
  typename TestFixture::Plain plain(this->mpi, this->store.view(), this->template params<typename TestFixture::Plain>());
  Dual dual(this->mpi, this->store.view(), this->template params<Dual>());
  std::vector<float> const x = this->input(8);
  std::vector<float> want(x.size()), got(x.size());
  this->forward(plain, x, want);
  bool const errs = this->mpi.rank() == this->mpi.size() - 1;
  for (int const half : {1, 2, 1}) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      SCOPED_TRACE(half);
      FailingExperts::fails_on = errs ? half : 0;
      if (errs) {
        expect_error(ErrorCode::internal, "experts: injected", [&] { this->forward(dual, x, got); });
      } else {
        expect_error(ErrorCode::peer, "abandoned", [&] { this->forward(dual, x, got); });
      }
    }
    std::fill(got.begin(), got.end(), -2.0F);
    EXPECT_EQ(this->forward(dual, x, got), 2);
    EXPECT_EQ(got, want);
  }
  // Wrong arguments of one rank, which the vote does not see, and abandon().
  for (int const how : {0, 1, 2}) {
    SCOPED_TRACE(how);
    auto const wrong = [&] {
      if (how == 0) {
        dual.forward(make_rows(x.data(), 8, kHidden), make_rows(got.data(), 7, kHidden));
      } else {
        dual.forward(make_rows(static_cast<float const*>(nullptr), kMost + 1, kHidden), make_rows(got.data(), kMost + 1, kHidden));
      }
    };
    if (!errs) {
      expect_error(ErrorCode::peer, "rank", [&] { this->forward(dual, x, got); });
    } else if (how == 2) {
      dual.abandon();
    } else {
      EXPECT_THROW(wrong(), Error);
    }
    std::fill(got.begin(), got.end(), -2.0F);
    this->forward(dual, x, got);
    EXPECT_EQ(got, want);
  }
}

TYPED_TEST(DualBatch, WithChunksAndWithoutSharedExperts) {
  using Chunked = Runner<typename TestFixture::Layer, ChunkParts>;
  using Bare = Runner<typename TestFixture::Layer, BareParts>;
  typename TestFixture::Plain plain(this->mpi, this->store.view(), this->template params<typename TestFixture::Plain>());
  auto p = this->template params<Chunked>(4);
  p.chunking.rows = 4;
  Chunked chunked(this->mpi, this->store.view(), p);
  std::vector<float> const x = this->input(this->mpi.rank() == 0 ? 9 : 7);
  std::vector<float> want(x.size()), got(x.size());
  this->forward(plain, x, want);
  this->forward(chunked, x, got);
  EXPECT_EQ(got, want);

  Bare bare(this->mpi, this->store.view(), this->template params<Bare>());
  std::vector<float> halves(x.size()), whole(x.size());
  EXPECT_EQ(this->forward(bare, x, halves), 2);
  bare.decide_dual_batch(false);
  EXPECT_EQ(this->forward(bare, x, whole), 1);
  EXPECT_EQ(halves, whole);
  EXPECT_GT(bare.bytes(), bare.layer().bytes());
}

// Without its second exchange a runner is as one without DualBatch. The ranks must agree on that.
TYPED_TEST(DualBatch, TheSecondExchangeIsOptional) {
  using Dual = typename TestFixture::Dual;
  typename TestFixture::Plain plain(this->mpi, this->store.view(), this->template params<typename TestFixture::Plain>());
  Dual both(this->mpi, this->store.view(), this->template params<Dual>());
  auto p = this->template params<Dual>();
  p.dual_batch.second_exchange = false;
  Dual dual(this->mpi, this->store.view(), p);
  EXPECT_TRUE(both.can_split());
  EXPECT_FALSE(dual.can_split());
  EXPECT_FALSE(plain.can_split());
  EXPECT_LT(dual.bytes(), both.bytes()) << "the memory of the second exchange";
  std::vector<float> const x = this->input(8);
  std::vector<float> want(x.size()), got(x.size());
  EXPECT_EQ(this->forward(plain, x, want), 1);
  EXPECT_EQ(this->forward(dual, x, got), 1);
  EXPECT_EQ(got, want);
  expect_error(ErrorCode::state, "second_exchange = true", [&] { dual.decide_dual_batch(true); });
  dual.decide_dual_batch(false);
  dual.abandon();
  EXPECT_EQ(this->forward(dual, x, got), 1);

  auto one = this->template params<Dual>(1);  // a row is not split
  one.dual_batch.second_exchange = false;
  Dual of_one_row(this->mpi, this->store.view(), one);
  EXPECT_EQ(of_one_row.max_rows(), 1);
  if (this->mpi.size() == 1) return;
  p.dual_batch.second_exchange = this->mpi.rank() == 0;
  expect_error(ErrorCode::mismatch, "dual batch: second_exchange", [&] { Dual differs(this->mpi, this->store.view(), p); });
}

// Three passes of two halves. The ranks agree on their number in each forward, or it is fixed. After an error the next forward works.
TYPED_TEST(DualBatch, ErrorsOfAPassEndTheForwardOnAllRanks) {
  using Chunked = Runner<typename TestFixture::Layer, ChunkParts>;
  bool const errs = this->mpi.rank() == this->mpi.size() - 1;
  std::vector<float> const x = this->input(12);
  for (std::int64_t const most : {0, 12}) {
    auto p = this->template params<Chunked>(4);
    p.chunking = {.rows = 4, .most_rows = most};
    Chunked chunked(this->mpi, this->store.view(), p);
    std::vector<float> want(x.size()), got(x.size());
    EXPECT_EQ(this->forward(chunked, x, want), 6);
    auto const works = [&] {
      std::fill(got.begin(), got.end(), -2.0F);
      EXPECT_EQ(this->forward(chunked, x, got), 6);
      EXPECT_EQ(got, want);
    };
    for (int call = 1; call <= 6; ++call) {
      SCOPED_TRACE(text("most_rows ", most, ", call ", call, " of the experts fails"));
      FailingExperts::fails_on = errs ? call : 0;
      expect_error(errs ? ErrorCode::internal : ErrorCode::peer, errs ? "injected" : "abandoned", [&] { this->forward(chunked, x, got); });
      works();
    }
    // Wrong arguments of one rank, and abandon().
    if (!errs) {
      expect_error(ErrorCode::peer, "rank", [&] { this->forward(chunked, x, got); });
      expect_error(ErrorCode::peer, "rank", [&] { this->forward(chunked, x, got); });
    } else {
      expect_error(ErrorCode::argument, "output: rows: 11, expected 12",
                   [&] { chunked.forward(make_rows(x.data(), 12, kHidden), make_rows(got.data(), 11, kHidden)); });
      chunked.abandon();
    }
    works();
  }
}

TYPED_TEST(DualBatch, BadInput) {
  using Dual = typename TestFixture::Dual;
  auto p = this->template params<Dual>(1);
  expect_error(ErrorCode::config, "dual batch: max_tokens_per_rank 1 cannot be split; at least 2",
               [&] { Dual runner(this->mpi, this->store.view(), p); });
  p = this->template params<Dual>();
  p.dual_batch.min_rows = -1;
  expect_error(ErrorCode::config, "dual batch: min_rows -1", [&] { Dual runner(this->mpi, this->store.view(), p); });
  p = this->template params<Dual>();
  p.dual_batch.expert_workers = 4;
  expect_error(ErrorCode::unsupported, "dual batch: expert_workers: 4", [&] { Dual runner(this->mpi, this->store.view(), p); });
  // One rank alone has wrong parameters.
  p = this->template params<Dual>();
  bool const errs = this->mpi.rank() == this->mpi.size() - 1;
  p.dual_batch.min_rows = errs ? -1 : 2;
  expect_error(errs ? ErrorCode::config : ErrorCode::peer, errs ? "min_rows -1" : "refused its arguments",
               [&] { Dual runner(this->mpi, this->store.view(), p); });
}

}  // namespace
