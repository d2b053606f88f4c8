// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_shapes_test.cu: runners of several shapes between GPUs over the windows of one manager, in turn on one stream
// (N24): a window for each shape, and the bits of runners with windows of their own. Ranks that disagree on a shape or on the runner get
// E_MISMATCH.
// moe-ranks: 2 4
#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "../expect_close.hpp"
#include "../expect_error.hpp"
#include "../numbers.hpp"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/nccl.hpp"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/comm/self.hpp"
#include "moe/comm/window_manager.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/weights.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/runner/device/linear.cuh"
#include "moe/runner/device/row_kernels.cuh"
#include "moe/runner/runner.hpp"

namespace {

using namespace moe;
using moe_test::bf16_numbers;
using moe_test::expect_close;
using moe_test::expect_error;
using moe_test::uneven_rows;
using Cuda = space::cuda;
using Config = models::RuntimeLayer<bf16, bf16>;
using Window = comm::NcclSymmetric;
using Manager = comm::WindowManager<Window>;
using Local = backends::NoExpertParallel<Cuda>;
using Low = backends::LowLatency<Window>;
using High = backends::HighThroughput<Window>;
constexpr int kIntermediate = 64;
constexpr std::int64_t kMost = 9;

/// Sizes of one runner.
struct Size {
  int experts, topk, hidden;
};
struct Parts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
};

/// A runner and its weights, which all ranks know.
template <class Backend>
class Block {
 public:
  using R = Runner<ModularKernel<Config, routing::AnyRouter, quantization::None, Backend, experts::CudaReference>, Parts>;

  Block(typename Backend::Comm& comm, Size const& s, typename Backend::Params const& backend = {})
      : size_(s),
        placement_(s.experts, comm.size()),
        gate_(std::int64_t{s.experts} * s.hidden),
        in_(kMost * s.hidden),
        out_(kMost * s.hidden),
        store_(static_cast<std::int64_t>(placement_.local_to_physical(comm.rank()).size()), s.hidden, kIntermediate, true) {
    std::int64_t local = 0;
    for (std::int32_t const e : placement_.local_to_physical(comm.rank())) {
      store_.set_expert(local++, bf16_numbers(100 + e, std::int64_t{2} * kIntermediate * s.hidden).data(),
                        bf16_numbers(200 + e, std::int64_t{s.hidden} * kIntermediate).data());
    }
    gate_.copy_from_host(bf16_numbers(7 * s.experts + s.hidden, gate_.size()).data());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    typename R::Params p{.layer = {.shape = {.hidden = s.hidden, .intermediate = kIntermediate, .num_experts = s.experts, .topk = s.topk},
                                   .max_tokens_per_rank = kMost,
                                   .placement = placement_,
                                   .router = {.num_experts = s.experts, .topk = s.topk},
                                   .backend = backend}};
    p.gate.weight = make_rows(static_cast<float const*>(gate_.data()), s.experts, s.hidden);
    runner_.emplace(comm, store_.view(), p);
  }
  /// The rows of the next forward. The output is NaN.
  void bring(std::vector<float> const& x) {
    rows_ = static_cast<std::int64_t>(x.size()) / size_.hidden;
    std::vector<bf16> values(static_cast<std::size_t>(in_.size()));
    std::transform(x.begin(), x.end(), values.begin(), [](float v) { return from_float<bf16>(v); });
    in_.copy_from_host(values.data());
    Memory<Cuda>::fill(out_.data(), 0xff, static_cast<std::size_t>(out_.bytes()));
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void launch(cudaStream_t stream) {
    runner_->forward(make_rows(static_cast<bf16 const*>(in_.data()), rows_, size_.hidden), make_rows(out_.data(), rows_, size_.hidden), {},
                     stream);
  }
  /// Waits for the stream.
  std::vector<float> result(cudaStream_t stream) {
    runner_->wait(stream);
    std::vector<bf16> values(static_cast<std::size_t>(out_.size()));
    out_.copy_to_host(values.data());
    std::vector<float> all;
    for (std::int64_t i = 0; i < rows_ * size_.hidden; ++i) all.push_back(to_float(values[static_cast<std::size_t>(i)]));
    return all;
  }
  std::vector<float> forward(std::vector<float> const& x, cudaStream_t stream) {
    bring(x);
    launch(stream);
    return result(stream);
  }

 private:
  Size size_;
  ExpertPlacement placement_;
  Buffer<float, Cuda> gate_;
  Buffer<bf16, Cuda> in_, out_;
  std::int64_t rows_ = 0;
  experts::WeightStore<Config, quantization::None, Cuda> store_;
  std::optional<R> runner_;
};

/// One GPU has all experts. Outputs travel in bf16 and are summed in another order.
void expect_close_to_one_rank(std::vector<float> const& got, Size const& s, std::vector<float> const& x) {
  CudaStream stream;
  comm::Self<Cuda> self;
  expect_close(got, Block<Local>(self, s).forward(x, stream), 1.5e-2F);
}

class RunnerShapes : public testing::Test {
 protected:
  /// Every round enqueues all runners, some of them twice, before it looks at an output.
  template <class Backend>
  void several_shapes() {
    int const n = comm.size();
    Manager manager(comm);
    typename Backend::Params shared{};
    shared.manager = &manager;
    std::vector<Size> const sizes{{4 * n, 3, 256}, {2 * n, 2, 384}, {6 * n, 1, 128}, {4 * n, 3, 256}};
    std::vector<std::unique_ptr<Block<Backend>>> blocks, owners;
    for (Size const& s : sizes) {
      blocks.push_back(std::make_unique<Block<Backend>>(comm, s, shared));
      owners.push_back(std::make_unique<Block<Backend>>(comm, s));
    }
    EXPECT_EQ(manager.size(), 3U) << "a window for each shape";
    for (int round = 0; round < 4; ++round) {
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        std::vector<float> const x = uneven_rows(sizes[i].hidden, comm.rank(), round, kMost);
        blocks[i]->bring(x);
        owners[i]->bring(x);
      }
      for (std::size_t const i : {0U, 1U, 2U, 3U, 1U, 0U, 3U}) blocks[i]->launch(stream);
      for (auto& owner : owners) owner->launch(stream);
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        SCOPED_TRACE(text(Backend::kName, ", round ", round, ", runner ", i));
        std::vector<float> const got = blocks[i]->result(stream);
        EXPECT_EQ(got, owners[i]->result(stream));
        expect_close_to_one_rank(got, sizes[i], uneven_rows(sizes[i].hidden, comm.rank(), round, kMost));
      }
    }
  }
  template <class Backend>
  void another_topk_on_one_rank() {
    int const n = comm.size();
    Manager manager(comm);
    typename Backend::Params shared{};
    shared.manager = &manager;
    Size const s{2 * n, 2, 256};
    for (int const who : {n - 1, 0}) {
      expect_error(ErrorCode::mismatch, "top_k",
                   [&] { Block<Backend> const refused(comm, {s.experts, comm.rank() == who ? 1 : 2, s.hidden}, shared); });
    }
    EXPECT_EQ(manager.size(), 0U);
    std::vector<float> const x = uneven_rows(s.hidden, comm.rank(), 0, kMost);
    expect_close_to_one_rank(Block<Backend>(comm, s, shared).forward(x, stream), s, x);
  }
  /// Rank 0 calls another runner of the shape than the others: no rank gets an output, and with new windows all work again.
  template <class Backend>
  void another_runner_on_one_rank() {
    Size const s{2 * comm.size(), 2, 256};
    std::vector<float> const x = bf16_numbers(5 + comm.rank(), kMost * s.hidden);
    for (int repeat = 0; repeat < 2; ++repeat) {
      Manager manager(comm);
      typename Backend::Params shared{};
      shared.manager = &manager;
      Block<Backend> first(comm, s, shared), second(comm, s, shared);
      EXPECT_EQ(manager.size(), 1U);
      expect_close_to_one_rank(first.forward(x, stream), s, x);
      expect_close_to_one_rank(second.forward(x, stream), s, x);
      Block<Backend>& mine = comm.rank() == 0 ? first : second;
      mine.bring(x);
      mine.launch(stream);
      std::optional<Error> const error = error_of([&] { mine.result(stream); });
      int const code = error ? static_cast<int>(error->code()) : -1;
      EXPECT_TRUE(error && (error->code() == ErrorCode::mismatch || error->code() == ErrorCode::peer)) << (error ? error->what() : "none");
      std::vector<int> codes(static_cast<std::size_t>(comm.size()));
      host.all_gather(&code, sizeof code, codes.data(), {});  // no rank's window goes before all have ended
      EXPECT_GE(std::count(codes.begin(), codes.end(), static_cast<int>(ErrorCode::mismatch)), 1);
    }
  }

  comm::Mpi host{MPI_COMM_WORLD, {.timeout_ms = 40'000}};
  comm::Nccl comm = comm::Nccl::over_communicator(host, {.timeout_ms = 10'000});
  CudaStream stream;
};

TEST_F(RunnerShapes, N24_SeveralShapesOverLowLatency) { several_shapes<Low>(); }
TEST_F(RunnerShapes, N24_SeveralShapesOverHighThroughput) { several_shapes<High>(); }
TEST_F(RunnerShapes, N24_AnotherTopKOnOneRank) {
  another_topk_on_one_rank<Low>();
  another_topk_on_one_rank<High>();
}
TEST_F(RunnerShapes, N24_AnotherRunnerOnOneRank) {
  another_runner_on_one_rank<Low>();
  another_runner_on_one_rank<High>();
}

}  // namespace
