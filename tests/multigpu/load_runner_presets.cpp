// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/load_runner_presets.cpp: load_runner() over all_to_all_v between GPUs: each rank loads its own experts of the bundled
// DeepSeek-V3 checkpoint; the output is transformers' and that of one rank with all experts. g++ compiles it; the library holds the
// kernels.
#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdint>
#include <filesystem>
#include <load_deepseek.hpp>
#include <utility>
#include <vector>

#include "../expect_error.hpp"
#include "../golden_dir.hpp"
#include "../gpu/loaded_block.hpp"
#include "../gpu/on_hopper.hpp"
#include "moe/io/safetensors.hpp"
#include "moe/models/load_runner_cuda.hpp"

namespace {

using namespace moe;
namespace fs = std::filesystem;
using Cuda = space::cuda;
using comm::Nccl;
using moe_test::forward;
using moe_test::relative_error;
using Ranks = load_deepseek::all_to_all_v::none::prefill;
using Alone = load_deepseek::no_expert_parallel::none::prefill;

constexpr std::int64_t kMost = 91;  // rows of a rank; the file has 364

fs::path checkpoint() { return moe_test::golden_checkpoint("deepseek_v3_tiny"); }

Nccl connect() {
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  auto const broadcast = [](void* data, std::size_t bytes) { MPI_Bcast(data, static_cast<int>(bytes), MPI_BYTE, 0, MPI_COMM_WORLD); };
  return Nccl::over(rank, size, broadcast, {.timeout_ms = 20'000});
}

class LoadOnGpus : public testing::Test {
 protected:
  void SetUp() override {
    if (!moe_test::on_hopper()) GTEST_SKIP() << "presets in the CUDA space need compute capability 9.0";
  }
};

TEST_F(LoadOnGpus, DeepSeekV3EqualsTransformersAndOneRank) {
  Nccl group = connect();
  comm::Self<Cuda> self;
  for (int layer : {1, 2}) {
    SCOPED_TRACE(text("layer ", layer));
    io::SafetensorsFile const file(checkpoint() / "moe_io.safetensors");
    auto const x = file.read<bf16>(text("layers.", layer, ".moe_in"));
    auto const want = file.read<float>(text("layers.", layer, ".moe_out_f32"));
    auto block = load_runner<Ranks>(checkpoint(), layer, group, {.max_tokens_per_rank = kMost});
    auto all = load_runner<Alone>(checkpoint(), layer, self, {.max_tokens_per_rank = kMost});
    EXPECT_EQ(block.placement().ep_size(), group.size());
    EXPECT_EQ(block.placement().num_local(group.rank()), 16 / group.size());
    EXPECT_EQ(all.placement().num_local(0), 16);
    std::int64_t const first = group.rank() % 4 * kMost * block.runner().hidden();
    bool const last = group.rank() == group.size() - 1;
    for (std::int64_t rows :
         {kMost - 13 * (group.rank() % 4), std::int64_t{1}, std::int64_t{last ? 0 : 5}}) {  // another number on each rank
      auto const got = forward(block, x.data() + first, rows);
      if (rows == 0) continue;
      EXPECT_LT(relative_error(got, want.data() + first), 1.2e-2) << rows << " rows, rank " << group.rank();
      EXPECT_LT(relative_error(got, forward(all, x.data() + first, rows).data()), 1.2e-2) << rows << " rows, rank " << group.rank();
    }
  }
}

/// One rank's checkpoint is not there: that rank gets E_ARG with the path, the others E_PEER, all before the deadline.
TEST_F(LoadOnGpus, ACheckpointThatOneRankDoesNotHave) {
  Nccl group = connect();
  if (group.rank() == group.size() - 1) {
    moe_test::expect_error(ErrorCode::argument, "/no/such/checkpoint",
                           [&] { load_runner<Ranks>("/no/such/checkpoint", 1, group, {.max_tokens_per_rank = kMost}); });
  } else {
    moe_test::expect_error(ErrorCode::peer, "", [&] { load_runner<Ranks>(checkpoint(), 1, group, {.max_tokens_per_rank = kMost}); });
  }
}

}  // namespace
