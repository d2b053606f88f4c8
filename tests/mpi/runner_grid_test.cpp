// SPDX-License-Identifier: Apache-2.0
// tests/mpi/runner_grid_test.cpp: a block on every grid of tensor, data and context parallel ranks gives what one rank gives, by every kind
// of transport; wrong calls reach all ranks.
// moe-ranks: 1 2 4
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../expect_error.hpp"
#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/allgather_reduce_scatter.hpp"
#include "moe/backends/no_expert_parallel.hpp"
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
using runner::SharedOutput;
constexpr int kHidden = 48, kLatent = 32, kIntermediate = 16, kShared = 8, kExperts = 8, kZero = 2, kTopK = 3, kMost = 7;
constexpr std::int64_t kTimeout = 20'000;

struct Config : LayerDefaults {
  static constexpr int topk = kTopK;
  using Activation = activation::Silu;
};
/// Everything that a block can have, most of it chosen at run time.
template <class Comm>
struct Parts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using Input = runner::transform::Projection<float>;
  using Output = runner::transform::Projection<float>;
  using Shared = runner::shared::Separate<experts::Reference<float>>;
  using Scaling = runner::scaling::Factor;
  using ZeroExperts = runner::zero_experts::Identity;
  using End = runner::end::BiasNorm;
  using Parallel = runner::parallel::Groups<Comm>;
};
struct AloneParts : Parts<comm::Mpi> {
  using Parallel = runner::parallel::None;
};
template <class Backend>
using LayerOf = ModularKernel<Config, routing::AnyRouter, quantization::None, Backend, experts::Reference<float>>;

std::vector<float> numbers(int seed, std::int64_t count) {
  std::mt19937 gen(static_cast<unsigned>(seed));
  std::uniform_real_distribution<float> value(-0.5F, 0.5F);
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& v : out) v = value(gen);
  return out;
}
/// Rows [rank · part, …) of both halves of w13 [2 full, cols], and columns of w2 [cols, full].
std::vector<float> cut13(std::vector<float> const& w, int full, int cols, int rank, int size) {
  std::vector<float> out;
  int const part = full / size;
  for (int half : {0, full}) out.insert(out.end(), w.begin() + (half + rank * part) * cols, w.begin() + (half + (rank + 1) * part) * cols);
  return out;
}
std::vector<float> cut2(std::vector<float> const& w, int full, int cols, int rank, int size) {
  std::vector<float> out;
  int const part = full / size;
  for (int r = 0; r < cols; ++r) out.insert(out.end(), w.begin() + r * full + rank * part, w.begin() + r * full + (rank + 1) * part);
  return out;
}

/// What a block has.
struct Form {
  bool latent, norm;
  SharedOutput shared;
  bool reduce_results = true;
};
int width(Form const& f) { return f.latent ? kLatent : kHidden; }

/// Weights that all ranks know.
struct Model {
  Form form;
  std::vector<float> gate = numbers(1, (kExperts + kZero) * kHidden), in = numbers(2, kLatent* kHidden), out = numbers(3, kHidden* kLatent);
  std::vector<float> shared13 = numbers(4, 2 * kShared * kHidden), shared2 = numbers(5, kHidden* kShared), bias = numbers(6, kHidden);
  std::vector<float> w13(int e) const { return numbers(100 + e, 2 * kIntermediate * width(form)); }
  std::vector<float> w2(int e) const { return numbers(200 + e, kIntermediate * width(form)); }
};

using Store = experts::WeightStore<Config, quantization::None>;
Store experts_of(Model const& m, ExpertPlacement const& placement, int ep_rank, int tp_rank, int tp_size) {
  auto const mine = placement.local_to_physical(ep_rank);
  Store out(static_cast<std::int64_t>(mine.size()), width(m.form), kIntermediate / tp_size, true);
  for (std::size_t l = 0; l < mine.size(); ++l) {
    out.set_expert(static_cast<std::int64_t>(l), cut13(m.w13(mine[l]), kIntermediate, width(m.form), tp_rank, tp_size).data(),
                   cut2(m.w2(mine[l]), kIntermediate, width(m.form), tp_rank, tp_size).data());
  }
  return out;
}

/// The parameters of a runner but for its grid. shared13, shared2: this rank's part.
template <class R>
typename R::Params params(Model const& m, ExpertPlacement const& placement, int intermediate, std::vector<float> const& shared13,
                          std::vector<float> const& shared2) {
  typename R::Params p{.layer = {.shape = {.hidden = width(m.form), .intermediate = intermediate, .num_experts = kExperts},
                                 .max_tokens_per_rank = kMost,
                                 .placement = placement,
                                 .router = {.num_experts = kExperts, .topk = kTopK, .num_zero_experts = kZero}}};
  p.hidden = kHidden;
  p.gate = {make_rows(m.gate.data(), kExperts + kZero, kHidden)};
  if (m.form.latent) {
    p.input.weight = make_rows(m.in.data(), kLatent, kHidden);
    p.output.weight = make_rows(m.out.data(), kHidden, kLatent);
    p.output.normalise = m.form.norm;
    p.output.eps = 1e-3F;
  }
  p.scaling.routed = 1.5F;
  p.end.bias = m.bias.data();
  p.end.normalise = m.form.norm;
  p.end.eps = 1e-3F;
  if (m.form.shared != SharedOutput::none) {
    auto const columns = static_cast<std::int64_t>(shared2.size()) / kHidden;
    p.shared.count = 1;
    p.shared.intermediate = columns;
    p.shared.weights.w13 = {make_blocks(shared13.data(), 1, 2 * columns, kHidden),
                            make_rows(p.shared.weights.w13.scales.data_handle(), 1, 0),
                            {},
                            2 * columns,
                            kHidden};
    p.shared.weights.w2 = {
        make_blocks(shared2.data(), 1, kHidden, columns), make_rows(p.shared.weights.w2.scales.data_handle(), 1, 0), {}, kHidden, columns};
    p.shared.sharding = m.form.shared;
    p.shared.average = true;
  }
  return p;
}

std::vector<float> on_one_rank(Model const& m, std::vector<float> const& x) {
  using R = Runner<LayerOf<backends::NoExpertParallel<>>, AloneParts>;
  ExpertPlacement const placement(kExperts, 1);
  Store const store = experts_of(m, placement, 0, 0, 1);
  comm::Self<> self;
  R runner(self, store.view(), params<R>(m, placement, kIntermediate, m.shared13, m.shared2));
  std::vector<float> out(x.size());
  auto const rows = static_cast<std::int64_t>(x.size()) / kHidden;
  runner.forward(make_rows(x.data(), rows, kHidden), make_rows(out.data(), rows, kHidden));
  return out;
}

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
struct Grid {
  int tp, dp, pcp;
  bool ep;
};

/// A rank of a grid.
template <class Backend>
class Rank {
 public:
  using Layer = LayerOf<Backend>;
  using R = Runner<Layer, Parts<comm::Mpi>>;
  Rank(Grid const& g, Model const& m, int rank, BackendFacts const& facts = Backend::kFacts)
      : moe(flatten({.tp_size = g.tp,
                     .tp_rank = rank % g.tp,
                     .pcp_size = g.pcp,
                     .pcp_rank = rank / g.tp % g.pcp,
                     .dp_size = g.dp,
                     .dp_rank = rank / g.tp / g.pcp,
                     .enable_expert_parallel = g.ep,
                     .backend = facts})),
        tp(group(text("tp ", g.tp), rank / g.tp)),
        layer_group(runner::layer_group(moe) == runner::LayerGroup::ep ? group("ep", 0) : group(text("tokens ", g.tp), moe.tp_rank)),
        placement(kExperts, moe.ep_size),
        shards(m.form.shared == SharedOutput::partial ? g.tp : 1),
        shared13(cut13(m.shared13, kShared, kHidden, moe.tp_rank % shards, shards)),
        shared2(cut2(m.shared2, kShared, kHidden, moe.tp_rank % shards, shards)),
        store(experts_of(m, placement, moe.ep_rank, moe.moe_tp_rank, moe.moe_tp_size)),
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
  Store store;
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
    auto p = params<R>(m, placement, kIntermediate / moe.moe_tp_size, shared13, shared2);
    p.parallel = {moe, tp, m.form.reduce_results};
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
std::vector<Grid> grids() {
  std::vector<Grid> out;
  int const n = world_size();
  for (int tp = 1; tp <= n; ++tp) {
    if (n % tp != 0) continue;
    for (bool ep : {false, true}) {
      out.push_back({tp, n / tp, 1, ep});
      if (n / tp > 1) out.push_back({tp, 1, n / tp, ep});
    }
  }
  return out;
}
/// Tokens of a rank: TP peers hold the same, the others different ones, one none. N10: 5 rows over 2 or 4 TP ranks.
std::vector<float> tokens(MoeParallel const& p) {
  constexpr int kCounts[] = {5, 3, 0, 1};
  int const at = p.dp_rank * p.pcp_size + p.pcp_rank;
  return numbers(1000 + at, static_cast<std::int64_t>(kCounts[at]) * kHidden);
}

template <class Backend>
class RunnerGrid : public testing::Test {};
using Backends = testing::Types<backends::NoExpertParallel<>, backends::AllGatherReduceScatter<comm::Mpi>, backends::AllToAllV<comm::Mpi>,
                                backends::LowLatency<comm::MpiShared>>;
TYPED_TEST_SUITE(RunnerGrid, Backends);

// N1, N5, N8, N9, N10, N18.
TYPED_TEST(RunnerGrid, EqualsOneRank) {
  int ran = 0, refused = 0;
  for (Grid const& g : grids()) {
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
