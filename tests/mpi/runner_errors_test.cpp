// SPDX-License-Identifier: Apache-2.0
// tests/mpi/runner_errors_test.cpp: the runner's wrong calls, row by row: code and text on the rank that makes them, E_PEER on the others,
// and a call that works afterwards. Logits with a gate inside, or none without one, do not compile (compile_fail/runner_logits.cpp).
// moe-ranks: 2
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "moe/backends/common/wire_row.hpp"
#include "moe/eplb/hold_forwards.hpp"
#include "moe/quantization/fp8_group128.hpp"
#include "runner_grid_test/harness.hpp"

namespace {

using namespace moe_test::grid;
using moe_test::expect_error;

using Subject = Rank<backends::AllGatherReduceScatter<comm::Mpi>, experts::Reference<float>>;
BackendFacts facts() {
  BackendFacts out = backends::AllGatherReduceScatter<comm::Mpi>::kFacts;
  out.sequence_parallel = false;
  return out;
}
Model model() { return {.form = {false, false, SharedOutput::partial}}; }

/// One call of a runner: its arrays' sizes.
struct Call {
  std::int64_t rows = 3, hidden = kHidden, out_rows = 3, out_hidden = kHidden;
};
void forward(Subject& rank, Call const& c) {
  std::vector<float> const x = bf16_numbers(50, (kMost + 1) * kHidden);
  std::vector<float> out(x.size(), std::numeric_limits<float>::quiet_NaN());
  rank.runner.forward(make_rows(x.data(), c.rows, c.hidden), make_rows(out.data(), c.out_rows, c.out_hidden));
}

struct Row {
  char const* condition;
  Call call;
  ErrorCode code;
  std::string text;
};

// The last rank's call is wrong. TP ranks learn it from their group, DP ranks from the layer's.
TEST(RunnerErrors, WrongCallsRowByRow) {
  std::vector<Row> const rows{
      {"the width of hidden is another", {.hidden = kHidden - 8}, ErrorCode::argument, "hidden_states: width: 56, expected 64"},
      {"the width of output is another", {.out_hidden = kHidden - 8}, ErrorCode::argument, "output: width: 56, expected 64"},
      {"rows differ", {.out_rows = 2}, ErrorCode::argument, "output: rows: 2, expected 3"},
      {"more rows than the layer takes, without chunks",
       {.rows = kMost + 1, .out_rows = kMost + 1},
       ErrorCode::capacity,
       "hidden_states: 8 rows exceed max_tokens_per_rank 7"},
  };
  Model const m = model();
  for (Grid const& grid : {Grid{2, 1, 1, true}, Grid{1, 2, 1, true}}) {
    Subject rank(grid, m, world_rank(), facts());
    for (Row const& row : rows) {
      SCOPED_TRACE(text(row.condition, ", tp ", grid.tp));
      if (world_rank() == 1) {
        expect_error(row.code, row.text, [&] { forward(rank, row.call); });
      } else {
        expect_error(ErrorCode::peer, grid.tp > 1 ? text("TP rank 1 failed with ", name(row.code)) : "rank 1 abandoned the call",
                     [&] { forward(rank, {}); });
      }
      forward(rank, {});
    }
  }
}

// The last rank's weights are being moved: in one of its calls, and not in the next.
TEST(RunnerErrors, ForwardWhileWeightsMove) {
  Model const m = model();
  for (Grid const& grid : {Grid{2, 1, 1, true}, Grid{1, 2, 1, true}}) {
    SCOPED_TRACE(text("tp ", grid.tp));
    Subject rank(grid, m, world_rank(), facts());
    for (int call = 0; call < 2; ++call) {
      if (world_rank() == 1) {
        std::array const users{&rank.runner.weight_move()};
        eplb::HoldForwards const held(3, users);
        expect_error(ErrorCode::state, "forward: the weights of layer 3 are being moved", [&] { forward(rank, {}); });
      } else {
        expect_error(ErrorCode::peer, grid.tp > 1 ? "TP rank 1 failed with E_STATE" : "rank 1 abandoned the call",
                     [&] { forward(rank, {}); });
      }
      forward(rank, {});
    }
  }
}

// An invalid slot of the caller's routing on the last rank, on grids with sequence parallelism, too: the whole batch's routing is given.
TEST(RunnerErrors, RoutingOfTheCaller) {
  Model const m{.form = {true, false, SharedOutput::complete}};
  for (Grid const& grid : {Grid{2, 1, 1, true}, Grid{1, 2, 1, true}}) {
    for (bool const sequence : {false, true}) {
      SCOPED_TRACE(text("tp ", grid.tp, ", sequence parallel ", sequence));
      BackendFacts facts_of = facts();
      facts_of.sequence_parallel = sequence;
      Subject rank(grid, m, world_rank(), facts_of);
      std::vector<float> const x = tokens(rank.moe), want = rank.forward(x);
      OneRank const routed = one_rank(m, x);
      EXPECT_EQ(rank.forward_routed(x, routed.ids, routed.weights), want);
      std::vector<std::int32_t> wrong = routed.ids;
      if (world_rank() == 1) {
        wrong.back() = wrong[wrong.size() - 2];
        expect_error(ErrorCode::argument, text(wrong.back(), " occurs twice in its row"),
                     [&] { rank.forward_routed(x, wrong, routed.weights); });
      } else {
        expect_error(ErrorCode::peer, "", [&] { rank.forward_routed(x, wrong, routed.weights); });
      }
      EXPECT_EQ(rank.forward_routed(x, routed.ids, routed.weights), want);
    }
  }
}

struct Chunked : RunnerDefaults {
  using Scaling = runner::scaling::Factor;
  using Chunking = runner::chunking::Lockstep;
};

TEST(RunnerErrors, WrongConstructionsRowByRow) {
  using R = Runner<HostLayer<backends::NoExpertParallel<>>, Chunked>;
  Model const m = model();
  ExpertPlacement const placement(kExperts, 1);
  HostStore const store = experts_of<HostStore>(m, placement, 0, 0, 1);
  comm::Self<> self;
  auto construct = [&](int chunk, float in_weights, float on_output) {
    typename R::Params p{.layer = {.shape = {.hidden = kHidden, .intermediate = kIntermediate, .num_experts = kExperts},
                                   .max_tokens_per_rank = kMost,
                                   .placement = placement,
                                   .router = {.num_experts = kExperts, .topk = kTopK, .routed_scaling_factor = in_weights}}};
    p.chunking.rows = chunk;
    p.scaling.routed = on_output;
    R const runner(self, store.view(), p);
  };
  expect_error(ErrorCode::config, "chunk size: 8 is out of range [1, max_tokens_per_rank 7]", [&] { construct(8, 1, 1); });
  expect_error(ErrorCode::config, "chunk size: -1 is out of range [1, max_tokens_per_rank 7]", [&] { construct(-1, 1, 1); });
  expect_error(ErrorCode::config, "routed_scaling_factor: 2.5 in the routing weights and 2 on the output", [&] { construct(7, 2.5F, 2); });
  construct(7, 2.5F, 1);
}

// A reduction that is asked of a group that is down.
TEST(RunnerErrors, GroupThatIsDown) {
  comm::Mpi tp(MPI_COMM_WORLD, {.timeout_ms = 300});
  comm::Mpi layer(MPI_COMM_SELF, {.timeout_ms = 300});
  Model const m = model();
  Subject rank(parallel_of({2, 1, 1, true}, world_rank(), facts()), m, &tp, &layer);
  forward(rank, {});
  if (world_rank() == 0) {  // the other rank does not come
    expect_error(ErrorCode::timeout, "", [&] { forward(rank, {}); });
    expect_error(ErrorCode::peer, "the TP group is down", [&] { forward(rank, {}); });
  }
  MPI_Barrier(MPI_COMM_WORLD);
  Subject again({2, 1, 1, true}, m, world_rank(), facts());
  forward(again, {});
}

// What is gathered is quantised first, so a row of codes and scales travels instead of one of floats.
TEST(RunnerErrors, GathersQuantisedRows) {
  using Plain = backends::detail::WireRow<HostConfig, quantization::None>;
  using Codes = backends::detail::WireRow<HostConfig, quantization::Fp8Group<>>;
  std::int64_t const plain = Plain(256, kTopK).bytes(), codes = Codes(256, kTopK).bytes();
  EXPECT_GE(plain, 256 * 4 + kTopK * 8);
  EXPECT_LT(codes, 256 + 2 * 4 + kTopK * 8 + 64);
}

}  // namespace
