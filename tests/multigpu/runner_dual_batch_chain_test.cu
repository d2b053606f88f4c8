// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_dual_batch_chain_test.cu: a chain of ten blocks between GPUs, every batch in two halves, over many rounds without a
// wait, called and as one graph: the bits of whole batches, and no deadlock (N11). Windows are those of each block, or shared.
// moe-ranks: 2 4
#include <mpi.h>

#include <array>
#include <memory>
#include <vector>

#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/nccl.hpp"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/comm/window_manager.hpp"
#include "tests/gpu/dual_batch_block.cuh"

namespace {

using namespace moe_test;
using Window = comm::NcclSymmetric;

/// The rows of the next block: the sums of a block's input and output. Clipped, since an expert's output grows with the square of its input
/// and some tokens would leave the numbers after a few blocks.
__global__ void add_rows(bf16 const* x, bf16 const* y, bf16* next, std::int64_t n) {
  std::int64_t const i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) next[i] = from_float<bf16>(fminf(fmaxf(to_float(x[i]) + to_float(y[i]), -4.0F), 4.0F));
}

template <class Backend, class Experts>
class Chain {
 public:
  static constexpr int kBlocks = 10;
  using Outputs = std::array<std::vector<std::uint16_t>, kBlocks>;

  /// rows: of this rank, in every block.
  Chain(comm::Nccl& comm, typename Backend::Params const& params, std::int64_t rows) : rows_(rows) {
    for (int b = 0; b < kBlocks; ++b) blocks_.push_back(std::make_unique<Block>(comm, params, 0, b));
  }
  /// Other rows of the first block, and logits of all. Outputs are NaN.
  void bring(int seed) {
    for (auto& block : blocks_) block->bring(seed);
  }
  /// Enqueues all blocks, one after the other.
  void launch(bool halves) {
    for (std::size_t b = 0; b < kBlocks; ++b) {
      blocks_[b]->launch(rows_, halves, stream_);
      if (b + 1 == kBlocks) return;
      std::int64_t const n = rows_ * Block::kHidden;
      add_rows<<<static_cast<unsigned>((n + 255) / 256), 256, 0, stream_>>>(blocks_[b]->hidden(), blocks_[b]->output(),
                                                                            blocks_[b + 1]->hidden(), n);
      check_launch("add_rows");
    }
  }
  Outputs result() {
    stream_.synchronize();
    Outputs all;
    for (std::size_t b = 0; b < kBlocks; ++b) {
      blocks_[b]->block().check();
      all[b] = blocks_[b]->bits(rows_);
    }
    return all;
  }
  cudaStream_t stream() const { return stream_; }

 private:
  using Block = DualBlock<Backend, Experts>;
  std::int64_t rows_;
  std::vector<std::unique_ptr<Block>> blocks_;
  CudaStream stream_;
};

template <class Backend, class Experts>
void chain_has_the_bits_of_whole_batches(comm::Mpi& host, comm::Nccl& comm, typename Backend::Params const& params = {}) {
  constexpr int kCalled = 100, kReplayed = 1000, kUnwaited = 250;  // rounds
  SCOPED_TRACE(Backend::kName);
  Chain<Backend, Experts> chain(comm, params, 96 - 9 * comm.rank());
  typename Chain<Backend, Experts>::Outputs want;
  for (int seed = 1; seed <= 3; ++seed) {
    chain.bring(seed);
    host.barrier({});
    chain.launch(false);
    want = chain.result();
    EXPECT_NE(want.front(), want.back());
    chain.bring(seed);
    host.barrier({});
    chain.launch(true);
    ASSERT_EQ(chain.result(), want) << "called, seed " << seed;
  }
  for (int round = 0; round < kCalled; ++round) chain.launch(round % 7 != 3);
  ASSERT_EQ(chain.result(), want) << "after " << kCalled << " rounds of calls";

  CudaGraph const graph(chain.stream(), [&] { chain.launch(true); });
  chain.bring(3);
  host.barrier({});
  for (int round = 1; round <= kReplayed; ++round) {
    graph.launch(chain.stream());
    if (round % kUnwaited == 0) ASSERT_EQ(chain.result(), want) << "after " << round << " replays";
  }
}

class DualBatchChain : public testing::Test {
 protected:
  comm::Mpi host{MPI_COMM_WORLD, {.timeout_ms = 40'000}};
  comm::Nccl comm = comm::Nccl::over_communicator(host, {.timeout_ms = 20'000});
};

TEST_F(DualBatchChain, N11_HighThroughput) {
  chain_has_the_bits_of_whole_batches<backends::HighThroughput<Window>, experts::HopperContiguous>(host, comm);
}
TEST_F(DualBatchChain, N11_LowLatency) {
  chain_has_the_bits_of_whole_batches<backends::LowLatency<Window>, experts::HopperMasked>(host, comm);
}
/// Blocks of one shape, so that all first halves travel through one window, and all second halves through another.
TEST_F(DualBatchChain, N11_LowLatencyInSharedWindows) {
  comm::WindowManager<Window> manager(comm);
  backends::LowLatency<Window>::Params params{};
  params.manager = &manager;
  chain_has_the_bits_of_whole_batches<backends::LowLatency<Window>, experts::HopperMasked>(host, comm, params);
  EXPECT_EQ(manager.size(), 2U);
}

}  // namespace
