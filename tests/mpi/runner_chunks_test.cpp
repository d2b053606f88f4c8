// SPDX-License-Identifier: Apache-2.0
// tests/mpi/runner_chunks_test.cpp: a batch in chunks gives the bits of the whole batch; all ranks make the same number of passes; padding
// is not counted.
// moe-ranks: 1 4
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "../expect_error.hpp"
#include "../numbers.hpp"
#include "moe/backends/allgather_reduce_scatter.hpp"
#include "moe/backends/window/host/low_latency.hpp"
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
constexpr int kHidden = 32, kIntermediate = 16, kTopK = 2, kMost = 5;

struct Config : LayerDefaults {
  static constexpr int hidden = kHidden, intermediate = kIntermediate, topk = kTopK;
  using Activation = activation::Silu;
};
struct WholeParts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
};
struct ChunkParts : WholeParts {
  using Chunking = runner::chunking::Lockstep;
};
struct OuterParts : RunnerDefaults {
  using Chunking = runner::chunking::Lockstep;
};

using moe_test::numbers;

struct CountDispatches : NoProbe {
  int passes = 0;
  void begin(Phase p) { passes += p == Phase::dispatch ? 1 : 0; }
};

template <class Backend>
class Chunks : public testing::Test {
 protected:
  using Layer = ModularKernel<Config, routing::AnyRouter, quantization::None, Backend, experts::Reference<float>>;

  comm::Mpi mpi{MPI_COMM_WORLD, {.timeout_ms = 20'000}};
  int const num_experts = 2 * mpi.size();
  std::vector<float> gate = numbers(7, num_experts* kHidden);
  experts::WeightStore<Config, quantization::None> store = filled();
  // The identity as a mapping, so that slots are counted.
  std::vector<std::int32_t> slots = [this] {
    std::vector<std::int32_t> v;
    for (int e = 0; e < num_experts; ++e) v.push_back(e);
    return v;
  }();
  std::vector<std::int32_t> ones = std::vector<std::int32_t>(slots.size(), 1), counted = std::vector<std::int32_t>(slots.size());

  experts::WeightStore<Config, quantization::None> filled() const {
    experts::WeightStore<Config, quantization::None> out(2, kHidden, kIntermediate, true);
    for (int e = 0; e < 2; ++e) {
      int const id = 2 * mpi.rank() + e;
      out.set_expert(e, numbers(100 + id, 2 * kIntermediate * kHidden).data(), numbers(200 + id, kHidden * kIntermediate).data());
    }
    return out;
  }
  template <class R>
  typename R::Params params(std::int64_t capacity) {
    typename R::Params p{.layer = {.shape = {.num_experts = num_experts},
                                   .max_tokens_per_rank = capacity,
                                   .placement = ExpertPlacement(num_experts, mpi.size()),
                                   .router = {.num_experts = num_experts, .topk = kTopK}}};
    p.layer.mapping = {.num_experts = num_experts,
                       .num_physical = num_experts,
                       .max_replicas = 1,
                       .logical_to_physical = slots.data(),
                       .replica_count = ones.data(),
                       .source_rank = mpi.rank(),
                       .ep_size = mpi.size()};
    p.layer.load.load_counter = counted.data();
    if constexpr (requires { p.gate.weight; }) p.gate = {make_rows(gate.data(), num_experts, kHidden)};
    return p;
  }
  /// This rank's rows of a step.
  std::int64_t rows_of(std::vector<int> const& counts) const { return counts[static_cast<std::size_t>(mpi.rank())]; }
  std::vector<float> input(std::int64_t rows) const { return numbers(1000 + mpi.rank(), rows * kHidden); }
};
using Backends = testing::Types<backends::AllGatherReduceScatter<comm::Mpi>, backends::LowLatency<comm::MpiShared>>;
TYPED_TEST_SUITE(Chunks, Backends);

TYPED_TEST(Chunks, N2_N3_N4_N22_EqualTheWholeBatch) {
  using Whole = Runner<typename TestFixture::Layer, WholeParts>;
  using Chunked = Runner<typename TestFixture::Layer, ChunkParts>;
  using Outer = Runner<typename TestFixture::Layer, OuterParts>;
  std::vector<std::vector<int>> const steps{{5, 3, 0, 1}, {0, 0, 0, 0}, {4, 4, 0, 4}, {1, 1, 1, 1}, {5, 5, 5, 5}};
  Whole whole(this->mpi, this->store.view(), this->template params<Whole>(kMost));
  for (int chunk : {1, 2, 8}) {
    for (ChunkMode mode : {ChunkMode::exact, ChunkMode::min_one}) {
      auto p = this->template params<Chunked>(chunk);
      p.chunking.mode = mode;
      Chunked chunked(this->mpi, this->store.view(), p);
      auto q = this->template params<Outer>(chunk);
      q.chunking.mode = mode;
      Outer outer(this->mpi, this->store.view(), q);
      for (auto const& counts : steps) {
        SCOPED_TRACE(text("chunk ", chunk, ", mode ", static_cast<int>(mode), ", rank 0 has ", counts[0]));
        std::int64_t const m = this->rows_of(counts);
        std::vector<float> const x = this->input(m);
        std::vector<float> want(x.size(), -1.0F), got(x.size(), -2.0F), logits;
        auto run = [&](auto& runner, std::vector<float>& out, auto&&... rest) {
          std::fill(this->counted.begin(), this->counted.end(), 0);
          runner.forward(make_rows(x.data(), m, kHidden), make_rows(out.data(), m, kHidden), rest...);
          return this->counted;
        };
        auto const slots = run(whole, want);
        std::vector<std::int32_t> const ids(whole.topk_ids().data_handle(), whole.topk_ids().data_handle() + m * kTopK);
        std::vector<float> const weights(whole.topk_weights().data_handle(), whole.topk_weights().data_handle() + m * kTopK);
        CountDispatches probe;
        EXPECT_EQ(run(chunked, got, ForwardOptions{}, HostStream{}, probe), slots) << "slots of real rows only";
        EXPECT_EQ(got, want);
        int const most = *std::max_element(counts.begin(), counts.begin() + this->mpi.size());
        int const needed = (most + chunk - 1) / chunk;
        EXPECT_EQ(probe.passes, mode == ChunkMode::min_one ? std::max(needed, 1) : needed);

        // The same with the routing of the whole batch, given by the caller; other ranks learn of an invalid slot before any pass.
        auto const given = [&](auto& runner, std::vector<std::int32_t> const& chosen) {
          std::fill(got.begin(), got.end(), -2.0F);
          std::fill(this->counted.begin(), this->counted.end(), 0);
          runner.forward_routed(make_rows(x.data(), m, kHidden), make_rows(chosen.data(), m, kTopK), make_rows(weights.data(), m, kTopK),
                                make_rows(got.data(), m, kHidden));
        };
        given(chunked, ids);
        EXPECT_EQ(got, want);
        EXPECT_EQ(this->counted, slots);
        given(outer, ids);
        EXPECT_EQ(got, want);
        if (counts[0] > 0) {
          std::vector<std::int32_t> wrong = ids;
          if (this->mpi.rank() == 0) {
            wrong.back() = this->num_experts;
            expect_error(ErrorCode::argument, text("topk_ids[", m - 1, ", 1]: ", this->num_experts, " is out of range [-1, "),
                         [&] { given(chunked, wrong); });
          } else {
            expect_error(ErrorCode::peer, "rank 0 refused its arguments with E_ARG", [&] { given(chunked, wrong); });
          }
          EXPECT_EQ(got, std::vector<float>(got.size(), -2.0F));
        }

        // The same with the gate outside.
        for (std::int64_t t = 0; t < m; ++t) {
          for (int e = 0; e < this->num_experts; ++e) {
            logits.push_back(runner::detail::dot(this->gate.data() + e * kHidden, x.data() + t * kHidden, kHidden));
          }
        }
        std::fill(got.begin(), got.end(), -2.0F);
        outer.forward(make_rows(x.data(), m, kHidden), make_rows(logits.data(), m, this->num_experts), make_rows(got.data(), m, kHidden));
        EXPECT_EQ(got, want);
      }
    }
  }
}

TYPED_TEST(Chunks, N21_WithoutChunksTheCapacityHolds) {
  using Whole = Runner<typename TestFixture::Layer, WholeParts>;
  Whole whole(this->mpi, this->store.view(), this->template params<Whole>(2));
  std::vector<float> const x = this->input(3);
  std::vector<float> out(x.size());
  expect_error(ErrorCode::capacity, "hidden_states: 3 rows exceed max_tokens_per_rank 2",
               [&] { whole.forward(make_rows(x.data(), 3, kHidden), make_rows(out.data(), 3, kHidden)); });
}

TYPED_TEST(Chunks, BadInput) {
  using Chunked = Runner<typename TestFixture::Layer, ChunkParts>;
  for (int chunk : {-1, 3}) {
    auto p = this->template params<Chunked>(2);
    p.chunking.rows = chunk;
    expect_error(ErrorCode::config, text("chunk size: ", chunk, " is out of range [1, max_tokens_per_rank 2]"),
                 [&] { Chunked runner(this->mpi, this->store.view(), p); });
  }
  auto p = this->template params<Chunked>(2);
  p.chunking.rows = 1;
  Chunked runner(this->mpi, this->store.view(), p);
  std::vector<float> const x = this->input(3);
  std::vector<float> out(x.size());
  bool const errs = this->mpi.rank() == this->mpi.size() - 1;
  auto forward = [&](std::int64_t rows, ForwardOptions const& options = {}) {
    runner.forward(make_rows(x.data(), 3, kHidden), make_rows(out.data(), rows, kHidden), options);
  };
  auto const others_are_told = [&] {
    expect_error(ErrorCode::peer, text("rank ", this->mpi.size() - 1, " refused its arguments with E_ARG"), [&] { forward(3); });
  };
  if (errs) {
    expect_error(ErrorCode::argument, "output: rows: 2, expected 3", [&] { forward(2); });
  } else {
    others_are_told();
  }
  for (std::int64_t const wrong : {4, -2}) {
    if (errs) {
      expect_error(ErrorCode::argument, text("num_valid_rows: ", wrong, " is out of range [0, 3], or -1 for all rows"),
                   [&] { forward(3, {.num_valid_rows = wrong}); });
    } else {
      others_are_told();
    }
  }
  forward(3);
}

}  // namespace
