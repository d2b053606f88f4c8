// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_transports_test.cpp: what runners send between GPUs: rows gathered after quantisation (N23), with routed rows and
// with experts that route inside. In the host space: tests/mpi/runner_transports_test.cpp.
#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "../runner_grid_model.hpp"
#include "counting_nccl.hpp"
#include "moe/backends/collective/device/gather_exchange.hpp"
#include "moe/backends/collective/device/no_expert_parallel.hpp"
#include "moe/experts/cuda_reference.hpp"
#include "moe/experts/monolithic.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/int8_per_token.hpp"
#include "moe/runner/device/linear.hpp"
#include "moe/runner/device/row_kernels.hpp"

namespace {

using namespace moe;
using backends::Sizes;
using moe_test::CountingNccl;
using moe_test::grid::bf16_numbers;
using quantization::None;
using Cuda = space::cuda;
using Config = models::RuntimeLayer<bf16, bf16>;
using Local = backends::NoExpertParallel<Cuda>;
using Gather = backends::AllGatherReduceScatter<CountingNccl>;
using Routed = experts::CudaReference;
using Inside = experts::Monolithic<experts::CudaReference>;
constexpr int kHidden = 256, kIntermediate = 128, kExperts = 8;
constexpr std::int64_t kMost = 9;

struct Parts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
};

/// A runner and this rank's weights, of a model that all ranks know.
template <class Quant, class Backend, class Experts>
class Block {
 public:
  using R = Runner<ModularKernel<Config, routing::AnyRouter, Quant, Backend, Experts>, Parts>;
  using Store = experts::WeightStore<Config, Quant, Cuda>;
  Block(typename Backend::Comm& comm, int topk, typename Backend::Params const& backend = {})
      : placement_(kExperts, comm.size()), store_(store(comm.rank())) {
    gate_.copy_from_host(bf16_numbers(1, gate_.size()).data());
    typename R::Params p{.layer = {.shape = {.hidden = kHidden, .intermediate = kIntermediate, .num_experts = kExperts, .topk = topk},
                                   .max_tokens_per_rank = kMost,
                                   .placement = placement_,
                                   .router = {.num_experts = kExperts, .topk = topk},
                                   .backend = backend}};
    p.gate.weight = make_rows(static_cast<float const*>(gate_.data()), kExperts, kHidden);
    runner_.emplace(comm, store_.view(), p);
  }
  std::vector<float> forward(std::vector<float> const& x) {
    std::vector<bf16> values(x.size());
    std::transform(x.begin(), x.end(), values.begin(), [](float v) { return from_float<bf16>(v); });
    Buffer<bf16, Cuda> in(static_cast<std::int64_t>(x.size())), out(in.size());
    in.copy_from_host(values.data());
    Memory<Cuda>::fill(out.data(), 0xff, out.bytes());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    auto const rows = in.size() / kHidden;
    runner_->forward(make_rows(static_cast<bf16 const*>(in.data()), rows, kHidden), make_rows(out.data(), rows, kHidden), {}, stream_);
    runner_->wait(stream_);
    stream_.synchronize();
    runner_->check();
    out.copy_to_host(values.data());
    std::vector<float> result;
    for (bf16 v : values) result.push_back(to_float(v));
    return result;
  }

 private:
  Store store(int rank) const {
    auto const mine = placement_.local_to_physical(rank);
    Store out(static_cast<std::int64_t>(mine.size()), kHidden, kIntermediate, true);
    for (std::size_t l = 0; l < mine.size(); ++l) {
      out.set_expert(static_cast<std::int64_t>(l), bf16_numbers(100 + mine[l], 2 * kIntermediate * kHidden).data(),
                     bf16_numbers(200 + mine[l], kHidden * kIntermediate).data());
    }
    return out;
  }
  ExpertPlacement placement_;
  Buffer<float, Cuda> gate_{kExperts * kHidden};
  Store store_;
  CudaStream stream_;
  std::optional<R> runner_;
};

CountingNccl& ranks() {
  static std::optional<CountingNccl> comm;
  if (!comm) {
    int rank = 0, size = 1;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    auto const broadcast = [](void* data, std::size_t bytes) { MPI_Bcast(data, static_cast<int>(bytes), MPI_BYTE, 0, MPI_COMM_WORLD); };
    comm.emplace(comm::Nccl::over(rank, size, broadcast, {.timeout_ms = 20'000}));
  }
  return *comm;
}
/// Ranks have different rows, and different numbers of them.
std::int64_t own_rows() { return 5 + ranks().rank(); }
std::vector<float> own_tokens() { return bf16_numbers(1000 + ranks().rank(), own_rows() * kHidden); }

/// Output of two forwards over gathered rows, and the bytes that this rank gave to the gather of one.
struct Result {
  std::vector<float> output;
  std::int64_t bytes;
};
template <class Quant, class Experts>
Result gathered(int topk, Sizes sizes) {
  Block<Quant, Gather, Experts> block(ranks(), topk, {.sizes = sizes});
  std::vector<float> const x = own_tokens(), first = block.forward(x);
  ranks().gathered = 0;
  Result result{block.forward(x), 0};
  result.bytes = ranks().gathered;
  EXPECT_EQ(result.output, first);
  return result;
}
/// The same where nothing is gathered: one GPU has all experts, and quantises the rows where it computes.
template <class Quant>
std::vector<float> alone(int topk) {
  comm::Self<Cuda> self;
  return Block<Quant, Local, Routed>(self, topk).forward(own_tokens());
}

/// A record's bytes but for the row: weights and ids, each a multiple of 16 bytes.
std::int64_t routing_bytes(int columns) { return 2 * ((columns * 4 + 15) / 16 * 16); }
std::int64_t moved_rows(Sizes sizes) { return sizes == Sizes::fixed ? kMost : own_rows(); }

template <class Quant>
class Transports : public testing::Test {};
using Schemes = testing::Types<quantization::Fp8PerToken<>, quantization::Fp8Block<>, quantization::Int8PerToken>;
TYPED_TEST_SUITE(Transports, Schemes);

// A row is gathered as its codes and scales, and gives what it gives where nothing is gathered. With one expert a row nothing is summed in
// another order, so the bits are the same; with three the sums in float32 may differ by one step of bf16.
TYPED_TEST(Transports, N23_RowsAreGatheredAfterQuantisation) {
  for (Sizes sizes : {Sizes::exact, Sizes::fixed}) {
    for (int topk : {1, 3}) {
      SCOPED_TRACE(text(sizes == Sizes::fixed ? "fixed" : "exact", " sizes, top ", topk));
      Result const whole = gathered<None, Routed>(topk, sizes), codes = gathered<TypeParam, Routed>(topk, sizes);
      // 256 bf16 become 256 codes of a byte and scales of at most 16 bytes; ids and weights stay.
      EXPECT_EQ(whole.bytes, moved_rows(sizes) * (2 * kHidden + routing_bytes(topk)));
      EXPECT_EQ(codes.bytes, moved_rows(sizes) * (kHidden + 16 + routing_bytes(topk)));

      std::vector<float> const want = alone<TypeParam>(topk);
      ASSERT_EQ(codes.output.size(), want.size());
      EXPECT_NE(codes.output, whole.output) << "nothing was quantised";
      float largest = 0;
      for (float v : want) largest = std::max(largest, std::abs(v));
      EXPECT_GT(largest, 0.0F);
      for (std::size_t i = 0; i < want.size(); ++i) {
        ASSERT_NEAR(codes.output[i], want[i], topk == 1 ? 0.0F : std::abs(want[i]) / 128 + 1e-5F * largest) << "value " << i;
      }
    }
  }
}

// Experts that route inside get the same codes, with a column for each logit.
TEST(MonolithicTransports, N23_RowsAreGatheredAfterQuantisation) {
  using Quant = quantization::Fp8PerToken<>;
  for (Sizes sizes : {Sizes::exact, Sizes::fixed}) {
    Result const inside = gathered<Quant, Inside>(3, sizes);
    EXPECT_EQ(inside.output, (gathered<Quant, Routed>(3, sizes).output));
    EXPECT_EQ(inside.bytes, moved_rows(sizes) * (kHidden + 16 + routing_bytes(kExperts)));
  }
}

}  // namespace
