// SPDX-License-Identifier: Apache-2.0
// tests/mpi/runner_grid_test.cpp: a block on every grid of tensor, data and context parallel ranks gives what one rank gives, by every kind
// of transport; wrong calls reach all ranks.
// moe-ranks: 1 2 4
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../expect_error.hpp"
#include "../runner_grid_model.hpp"
#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/allgather_reduce_scatter.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/mpi_shared.hpp"

namespace {

using namespace moe_test::grid;
using moe_test::expect_error;
constexpr std::int64_t kTimeout = 20'000;

struct Parts : HostParts {
  using Parallel = runner::parallel::Groups<comm::Mpi>;
};

/// The ranks that have this rank's color, in world order. One communicator for each `kind`, for all tests.
comm::Mpi* group(std::string const& kind, int color) {
  static std::map<std::string, std::unique_ptr<comm::Mpi>> known;
  auto& found = known[kind];
  if (found == nullptr) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, color, rank, &part);
    found = std::make_unique<comm::Mpi>(part, comm::Mpi::Params{.timeout_ms = kTimeout});
    MPI_Comm_free(&part);
  }
  return found.get();
}
/// A rank of a grid.
template <class Backend>
class Rank {
 public:
  using Layer = HostLayer<Backend>;
  using R = Runner<Layer, Parts>;
  Rank(Grid const& g, Model const& m, int rank, BackendFacts const& facts = Backend::kFacts)
      : moe(place_of(g, rank, facts)),
        tp(group(text("tp ", g.tp), rank / g.tp)),
        layer_group(runner::layer_group(moe) == runner::LayerGroup::ep ? group("ep", 0) : group(text("tokens ", g.tp), moe.tp_rank)),
        placement(kExperts, moe.ep_size),
        shards(m.form.shared == SharedOutput::partial ? g.tp : 1),
        shared13(cut13(m.shared13, kShared, kHidden, moe.tp_rank % shards, shards)),
        shared2(cut2(m.shared2, kShared, kHidden, moe.tp_rank % shards, shards)),
        store(experts_of<HostStore>(m, placement, moe.ep_rank, moe.moe_tp_rank, moe.moe_tp_size)),
        runner(comm(), store.view(), grid_params(m)) {}
  std::vector<float> forward(std::vector<float> const& x) {
    std::vector<float> out(x.size());
    auto const rows = static_cast<std::int64_t>(x.size()) / kHidden;
    runner.forward(make_rows(x.data(), rows, kHidden), make_rows(out.data(), rows, kHidden));
    if (runner.reductions().result_partial) tp->all_reduce(out.data(), static_cast<std::int64_t>(out.size()), out.data(), {});
    return out;
  }

  MoeParallel moe;
  comm::Mpi *tp, *layer_group;
  ExpertPlacement placement;
  int shards;
  std::vector<float> shared13, shared2;
  HostStore store;
  comm::Self<> self;
  R runner;

 private:
  typename Backend::Comm& comm() {
    if constexpr (std::is_same_v<typename Backend::Comm, comm::Mpi>) {
      return *layer_group;
    } else {
      return self;
    }
  }
  typename R::Params grid_params(Model const& m) const {
    auto p = params<R>(m, placement, kIntermediate / moe.moe_tp_size, shared13, shared2, InPlace{});
    p.parallel = {.moe = moe, .tp = tp, .reduce_results = m.form.reduce_results};
    return p;
  }
};

int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}
int world_size() {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}
template <class Backend>
class RunnerGrid : public testing::Test {};
using Backends = testing::Types<backends::NoExpertParallel<>, backends::AllGatherReduceScatter<comm::Mpi>, backends::AllToAllV<comm::Mpi>,
                                backends::LowLatency<comm::MpiShared>>;
TYPED_TEST_SUITE(RunnerGrid, Backends);

// N1, N5, N8, N9, N10, N18.
TYPED_TEST(RunnerGrid, EqualsOneRank) {
  int ran = 0, refused = 0;
  for (Grid const& g : grids(world_size())) {
    for (bool sp : {false, true}) {
      BackendFacts facts = TypeParam::kFacts;
      if (sp && !facts.sequence_parallel) continue;
      facts.sequence_parallel = sp;
      for (bool latent : {false, true}) {
        for (bool norm : {false, true}) {
          for (SharedOutput shared : {SharedOutput::none, SharedOutput::partial, SharedOutput::complete}) {
            for (bool reduce_results : {true, false}) {
              SCOPED_TRACE(text("tp ", g.tp, ", dp ", g.dp, ", pcp ", g.pcp, ", ep ", g.ep, ", sp ", sp, ", latent ", latent, ", norm ",
                                norm, ", shared ", static_cast<int>(shared), ", reduce ", reduce_results));
              Model const m{.form = {latent, norm, shared, reduce_results}};
              MoeParallel const place =
                  flatten({.tp_size = g.tp, .pcp_size = g.pcp, .dp_size = g.dp, .enable_expert_parallel = g.ep, .backend = facts});
              bool const legal = runner::parallel_conflict(place) == nullptr && !(place.use_sp_moe() && shared == SharedOutput::partial);
              if (!legal) {
                expect_error(ErrorCode::config, "", [&] { Rank<TypeParam> rank(g, m, world_rank(), facts); });
                ++refused;
                continue;
              }
              Rank<TypeParam> rank(g, m, world_rank(), facts);
              std::vector<float> const x = tokens(rank.moe), want = on_one_rank(m, x), got = rank.forward(x);
              for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 2e-5) << "value " << i;
              ++ran;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(ran, 0);
  EXPECT_EQ(refused > 0, world_size() > 1 && (TypeParam::kFacts.transport != Transport::gather || world_size() > 2));
}

// Shared experts between the halves of an exchange, and before the layer.
TYPED_TEST(RunnerGrid, SharedBesideTheExchangeKeepTheBits) {
  if (TypeParam::kFacts.transport == Transport::local) GTEST_SKIP() << "no exchange";
  for (Grid const& g : {Grid{1, world_size(), 1, true}, Grid{world_size(), 1, 1, true}}) {
    Model const beside{.form = {false, false, SharedOutput::partial}}, before{.form = {false, false, SharedOutput::partial, true, false}};
    Rank<TypeParam> one(g, beside, world_rank()), other(g, before, world_rank());
    std::vector<float> const x = tokens(one.moe), want = other.forward(x);
    EXPECT_EQ(one.forward(x), want);
    EXPECT_EQ(one.forward(x), want);
  }
}

// A rank with a wrong argument, and a TP group whose ranks differ: all ranks get an error, and the next call works.
TEST(RunnerGridErrors, ReachAllRanks) {
  int const n = world_size(), last = n - 1;
  if (n == 1) GTEST_SKIP() << "needs more than one rank";
  int const tp = 2;
  Model const m{.form = {false, false, SharedOutput::partial}};
  Rank<backends::AllGatherReduceScatter<comm::Mpi>> rank({tp, n / tp, 1, true}, m, world_rank(),
                                                         {.name = "gather", .transport = Transport::gather});
  bool const errs = world_rank() == last;
  std::vector<float> const x = numbers(50, 3 * kHidden);
  std::vector<float> out(x.size());
  auto forward = [&](std::int64_t rows, std::int64_t out_rows) {
    rank.runner.forward(make_rows(x.data(), rows, kHidden), make_rows(out.data(), out_rows, kHidden));
  };
  if (errs) {
    expect_error(ErrorCode::argument, "output: rows: 2, expected 3", [&] { forward(3, 2); });
  } else {
    expect_error(ErrorCode::peer, "", [&] { forward(3, 3); });
  }
  forward(3, 3);
  if (rank.moe.dp_rank == rank.moe.dp_size - 1) {
    expect_error(ErrorCode::mismatch, "TP ranks hold the same tokens", [&] { forward(errs ? 2 : 3, errs ? 2 : 3); });
  } else {
    expect_error(ErrorCode::peer, "", [&] { forward(3, 3); });
  }
  forward(3, 3);
}

}  // namespace
