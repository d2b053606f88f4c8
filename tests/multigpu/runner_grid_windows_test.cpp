// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_grid_windows_test.cpp: a block on every grid of GPUs gives what one rank gives, by every backend of the registry
// over windows; such backends refuse ranks on several hosts.
// moe-ranks: 2 4
#include <gtest/gtest.h>
#include <mpi.h>

#include <cstddef>
#include <vector>

#include "registry_backends.hpp"
#include "runner_grid_cases.hpp"
#include "several_hosts.hpp"

namespace moe_test::grid {
INSTANTIATE_TYPED_TEST_SUITE_P(OverWindows, RunnerGrid, TestTypes<backends_over_nccl_windows>, BackendNames);
INSTANTIATE_TYPED_TEST_SUITE_P(OverWindows, FusedShared, TestTypes<backends_over_nccl_windows>, BackendNames);
}  // namespace moe_test::grid

namespace {

using namespace moe_test::grid;
namespace hana = boost::hana;
using moe_test::expect_error;
using AllToAll = backends::AllToAllV<Nccl>;

// Ranks on several hosts: a backend over a window refuses them on all ranks at construction, in one sentence that names the ones that need
// no window. As after every failed construction the group is over; a new one works with such a backend.
template <class Backend>
void refuses_hosts(Grid const& g) {
  SCOPED_TRACE(text(Backend::kName, ", tp ", g.tp, ", dp ", g.dp, ", pcp ", g.pcp));
  Model const m{.form = {false, false, SharedOutput::complete}, .hidden = kWideHidden};
  expect_error(ErrorCode::unsupported, "AllToAllV and AllGatherReduceScatter need", [&] { Rank<Backend> rank(g, m, false); });
  communicators.clear();
  Rank<AllToAll> works(g, m, false);
  std::vector<float> const x = tokens(works.moe, m.hidden), want = on_one_rank(m, x);
  expect_close(works.forward(x), want, kTolerance);
}
// Each backend on one of the grids that it can serve; the next backend takes the next grid of its list.
TEST(RunnerHosts, WindowsRefuseSeveralHosts) {
  if (!moe_test::on_several_hosts()) GTEST_SKIP() << "the ranks are on one host; MOE_TEST_HOSTS is not set";
  std::size_t turn = 0;
  hana::for_each(moe_test::backends_over_nccl_windows, [&](auto type) {
    using Backend = typename decltype(type)::type;
    std::vector<Grid> legal = grids(world_size());
    std::erase_if(legal, [](Grid const& g) { return runner::parallel_conflict(parallel_of(g, world_rank(), Backend::kFacts)) != nullptr; });
    ASSERT_FALSE(legal.empty()) << Backend::kName;
    refuses_hosts<Backend>(legal[turn++ % legal.size()]);
  });
}

}  // namespace
