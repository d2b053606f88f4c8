// SPDX-License-Identifier: Apache-2.0
// tests/mpi/runner_grid_test/harness.hpp: a block on a grid of ranks against the same block on one rank, for every composition of lists of
// the registry. Each .cpp of this folder registers some backends, so that they compile side by side into one program.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <boost/hana.hpp>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "../../expect_error.hpp"
#include "../../mpi_world.hpp"
#include "../../runner_grid_model.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/mpi_shared.hpp"
#include "moe/models/registry.hpp"

namespace moe_test::grid {

namespace hana = boost::hana;
using moe_test::world_rank;
using moe_test::world_size;
inline constexpr std::int64_t kTimeout = 20'000;

struct RankParts : HostParts {
  using Parallel = runner::parallel::Groups<comm::Mpi>;
};
/// The same in chunks of kChunk rows.
inline constexpr int kChunk = 2;
struct RankChunkParts : RankParts {
  using Chunking = runner::chunking::Lockstep;
};
template <class Backend, class Experts>
using RankLayer = ModularKernel<HostConfig, routing::AnyRouter, quantization::None, Backend, Experts>;

/// The ranks of the group, in world order. One communicator for each kind, for all tests.
inline comm::Mpi* group(GridGroup const& g) {
  static std::map<std::string, std::unique_ptr<comm::Mpi>> known;
  auto& found = known[g.kind];
  if (found == nullptr) {
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, g.color, world_rank(), &part);
    found = std::make_unique<comm::Mpi>(part, comm::Mpi::Params{.timeout_ms = kTimeout});
    MPI_Comm_free(&part);
  }
  return found.get();
}
inline comm::Mpi* layer_comm(MoeParallel const& p) { return group(layer_ranks(p)); }
inline comm::Mpi* tp_comm(MoeParallel const& p) { return group(tp_ranks(p)); }

/// A rank of a grid. Borrows the model's gate.
template <class Backend, class Experts, class Parts = RankParts>
class Rank {
 public:
  using R = Runner<RankLayer<Backend, Experts>, Parts>;
  /// Its groups are those of the whole program.
  Rank(Grid const& g, Model const& m, int rank, BackendFacts const& facts = Backend::kFacts) : Rank(parallel_of(g, rank, facts), m) {}
  Rank(Grid const& g, Model&& m, int rank, BackendFacts const& facts = Backend::kFacts) = delete;
  Rank(MoeParallel const& p, Model&& m, comm::Mpi* tp_group, comm::Mpi* layer_group_) = delete;
  Rank(MoeParallel const& p, Model const& m) : Rank(p, m, tp_comm(p), layer_comm(p)) {}
  Rank(MoeParallel const& p, Model const& m, comm::Mpi* tp_group, comm::Mpi* layer_group_)
      : hidden(m.hidden),
        moe(p),
        tp(tp_group),
        layer_group(layer_group_),
        placement(m.experts, moe.ep_size),
        shards(m.form.shared == SharedOutput::partial ? p.tp_size : 1),
        shared13(cut13(m.shared13, kShared, m.hidden, moe.tp_rank % shards, shards)),
        shared2(cut2(m.shared2, kShared, m.hidden, moe.tp_rank % shards, shards)),
        store(experts_of<HostStore>(m, placement, moe.ep_rank, moe.moe_tp_rank, moe.moe_tp_size)),
        runner(comm(), store.view(), grid_params(m)) {}
  template <class Probe = NoProbe>
  std::vector<float> forward(std::vector<float> const& x, Probe&& probe = {}) {
    std::vector<float> out(x.size());
    auto const rows = static_cast<std::int64_t>(x.size()) / hidden;
    runner.forward(make_rows(x.data(), rows, hidden), make_rows(out.data(), rows, hidden), {}, {}, probe);
    return summed(std::move(out));
  }
  /// The same with the routing of the last forward, whole, as a caller gives it. Without sequence parallelism.
  template <class Probe = NoProbe>
  std::vector<float> forward_routed(std::vector<float> const& x, Probe&& probe = {}) {
    auto const rows = static_cast<std::int64_t>(x.size()) / hidden;
    auto const* const ids = runner.topk_ids().data_handle();
    auto const* const weights = runner.topk_weights().data_handle();
    return forward_routed(x, {ids, ids + rows * kTopK}, {weights, weights + rows * kTopK}, probe);
  }
  template <class Probe = NoProbe>
  std::vector<float> forward_routed(std::vector<float> const& x, std::vector<std::int32_t> const& ids, std::vector<float> const& weights,
                                    Probe&& probe = {}) {
    std::vector<float> out(x.size());
    auto const rows = static_cast<std::int64_t>(x.size()) / hidden;
    runner.forward_routed(make_rows(x.data(), rows, hidden), make_rows(ids.data(), rows, kTopK), make_rows(weights.data(), rows, kTopK),
                          make_rows(out.data(), rows, hidden), {}, {}, probe);
    return summed(std::move(out));
  }

  int hidden;
  MoeParallel moe;
  comm::Mpi *tp, *layer_group;
  ExpertPlacement placement;
  int shards;
  std::vector<float> shared13, shared2;
  HostStore store;
  comm::Self<> self;
  R runner;

 private:
  /// The caller's sum where the runner leaves it.
  std::vector<float> summed(std::vector<float> out) const {
    if (runner.reductions().result_partial) tp->all_reduce(out.data(), static_cast<std::int64_t>(out.size()), out.data(), {});
    return out;
  }
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
    if constexpr (requires { p.chunking.rows; }) p.chunking.rows = kChunk;
    return p;
  }
};

/// Combinations that all tests of this program have run, and those that were refused as the rules say.
struct Count {
  int compositions = 0;
  int equal = 0;
  int refused = 0;
  bool operator==(Count const&) const = default;
  friend std::ostream& operator<<(std::ostream& out, Count const& c) {
    return out << c.compositions << " compositions, " << c.equal << " equal to one rank, " << c.refused << " refused";
  }
};
inline Count count;

/// What the matrix runs over besides the composition and the grid. On more than 4 ranks, and with experts that route inside, only blocks
/// with neither latent width nor norm. Blocks with both have a layer with padding, see EqualsOneRank.
inline std::vector<Form> forms(bool inside) {
  std::vector<Form> out;
  for (bool latent : {false, true}) {
    for (bool norm : {false, true}) {
      if ((world_size() > 4 || inside) && (latent || norm)) continue;
      for (SharedOutput shared : {SharedOutput::none, SharedOutput::partial, SharedOutput::complete}) {
        for (bool reduce_results : {true, false}) out.push_back({latent, norm, shared, reduce_results});
      }
    }
  }
  return out;
}

/// A block on every grid of the world's ranks, in every form, against the same block on one rank. More than 4 ranks: TP and DP up to 4, on
/// 16 so many of context parallel ranks, too.
template <class Backend, class Experts>
class EqualsOneRank : public testing::Test {
 public:
  void TestBody() override {
    int const n = world_size();
    for (Grid const& g : grids(n)) {
      if (n > 4 && (g.tp > 4 || g.dp > 4 || g.pcp > (n > 8 ? 4 : 1))) continue;
      for (bool sp : {false, true}) {
        BackendFacts facts = Backend::kFacts;
        if (sp && !facts.sequence_parallel) continue;
        facts.sequence_parallel = sp;
        for (Form const& form : forms(facts::routes_inside<Experts>())) run(g, facts, form);
      }
    }
    ++count.compositions;
  }

 private:
  void run(Grid const& g, BackendFacts const& facts, Form const& form) {
    SCOPED_TRACE(text("tp ", g.tp, ", dp ", g.dp, ", pcp ", g.pcp, ", ep ", g.ep, ", sp ", facts.sequence_parallel, ", latent ",
                      form.latent, ", norm ", form.norm, ", shared ", static_cast<int>(form.shared), ", reduce ", form.reduce_results));
    Model const m{.form = form,
                  .experts = std::max(kExperts, world_size()),
                  .zero = facts::routes_inside<Experts>() ? 0 : kZero,
                  .padding = form.latent && form.norm ? kLatent : 0};
    MoeParallel const parallel = parallel_of(g, world_rank(), facts);
    bool const legal = runner::parallel_conflict(parallel) == nullptr && !(parallel.use_sp_moe() && form.shared == SharedOutput::partial);
    if (!legal) {
      expect_error(ErrorCode::config, "", [&] { Rank<Backend, Experts> rank(g, m, world_rank(), facts); });
      ++count.refused;
      return;
    }
    Rank<Backend, Experts> rank(g, m, world_rank(), facts);
    std::vector<float> const x = tokens(rank.moe), want = on_one_rank(m, x), got = rank.forward(x);
    for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 2e-5) << "value " << i;
    ++count.equal;
  }
};

/// One test per legal composition of these backends and experts. Experts that route inside have no zero experts.
template <class Backends, class ExpertsList>
bool register_grids(Backends backends, ExpertsList experts, char const* file, int line) {
  auto const legal = registry::legal_compositions<HostConfig>(hana::tuple_t<quantization::None>, backends, experts);
  hana::for_each(legal, [&](auto triple) {
    using Backend = typename decltype(+triple[hana::size_c<1>])::type;
    using Experts = typename decltype(+triple[hana::size_c<2>])::type;
    testing::RegisterTest("RunnerGrid", text(Backend::kName, "_", Experts::kName, "_equals_one_rank").c_str(), nullptr, nullptr, file, line,
                          []() -> testing::Test* { return new EqualsOneRank<Backend, Experts>; });
  });
  return true;
}

}  // namespace moe_test::grid
