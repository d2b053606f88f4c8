// SPDX-License-Identifier: Apache-2.0
// tests/mpi/runner_transports_test.cpp: what runners send: rows gathered after quantisation (N23); runners of several shapes over the
// windows of one manager (N24).
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "../expect_close.hpp"
#include "../expect_error.hpp"
#include "../runner_grid_model.hpp"
#include "moe/backends/allgather_reduce_scatter.hpp"
#include "moe/backends/window/host/high_throughput.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/backends/window/host/one_sided.hpp"
#include "moe/backends/window/host/pplx.hpp"
#include "moe/backends/window/host/two_sided.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/mpi_shared.hpp"
#include "moe/models/registry.hpp"
#include "moe/quantization/fp8_per_token.hpp"

namespace {

using namespace moe_test::grid;
using moe_test::expect_close;
using moe_test::expect_error;
using moe_test::uneven_rows;
constexpr std::int64_t kTimeout = 20'000;

/// Sizes of one runner.
struct Size {
  int experts, topk, hidden;
};
struct AnySize : LayerDefaults {
  using Activation = activation::Silu;
};
struct Parts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
};
template <class Backend, class Quant>
using RunnerOf = Runner<ModularKernel<AnySize, routing::AnyRouter, Quant, Backend, experts::Reference<float>>, Parts>;

/// A runner and its weights, which all ranks know.
template <class Backend, class Quant = quantization::None>
class Block {
 public:
  using R = RunnerOf<Backend, Quant>;
  using Store = experts::WeightStore<AnySize, Quant>;
  Block(typename Backend::Comm& comm, Size const& s, typename Backend::Params const& backend = {})
      : size_(s),
        placement_(s.experts, comm.size()),
        gate_(bf16_numbers(7 * s.experts + s.hidden, s.experts * s.hidden)),
        store_(store(comm.rank())),
        runner_(comm, store_.view(), params(backend)) {}
  std::vector<float> forward(std::vector<float> const& x) {
    std::vector<float> out(x.size());
    auto const rows = static_cast<std::int64_t>(x.size()) / size_.hidden;
    runner_.forward(make_rows(x.data(), rows, size_.hidden), make_rows(out.data(), rows, size_.hidden));
    return out;
  }

 private:
  Store store(int rank) const {
    auto const mine = placement_.local_to_physical(rank);
    Store out(static_cast<std::int64_t>(mine.size()), size_.hidden, kIntermediate, true);
    for (std::size_t l = 0; l < mine.size(); ++l) {
      out.set_expert(static_cast<std::int64_t>(l), bf16_numbers(100 + mine[l], 2 * kIntermediate * size_.hidden).data(),
                     bf16_numbers(200 + mine[l], size_.hidden * kIntermediate).data());
    }
    return out;
  }
  typename R::Params params(typename Backend::Params const& backend) const {
    typename R::Params p{
        .layer = {.shape = {.hidden = size_.hidden, .intermediate = kIntermediate, .num_experts = size_.experts, .topk = size_.topk},
                  .max_tokens_per_rank = kMost,
                  .placement = placement_,
                  .router = {.num_experts = size_.experts, .topk = size_.topk},
                  .backend = backend}};
    p.gate.weight = make_rows(gate_.data(), size_.experts, size_.hidden);
    return p;
  }
  Size size_;
  ExpertPlacement placement_;
  std::vector<float> gate_;
  Store store_;
  R runner_;
};

template <class Quant = quantization::None>
std::vector<float> on_one_rank(Size const& s, std::vector<float> const& x) {
  comm::Self<> self;
  return Block<backends::NoExpertParallel<>, Quant>(self, s).forward(x);
}

/// Counts the bytes of gathered rows.
class Counting : public comm::Mpi {
 public:
  using comm::Mpi::Mpi;
  void all_gather_v(void const* in, std::int64_t bytes, void* out, std::int64_t const* counts, std::int64_t const* offsets, HostStream s) {
    gathered += bytes;
    comm::Mpi::all_gather_v(in, bytes, out, counts, offsets, s);
  }
  std::int64_t gathered = 0;
};

/// Output of one forward, compared with one rank's, which quantises where it computes; returns the bytes that this rank gave to the gather.
template <class Quant>
std::int64_t gathered_bytes(Size const& s) {
  Counting comm(MPI_COMM_WORLD, {.timeout_ms = kTimeout});
  Block<backends::AllGatherReduceScatter<Counting>, Quant> block(comm, s);
  std::vector<float> const x = bf16_numbers(3 + comm.rank(), 5 * s.hidden);
  comm.gathered = 0;
  expect_close(block.forward(x), on_one_rank<Quant>(s, x), 2e-6F);
  return comm.gathered;
}

// A row is gathered as its codes and scales, and gives what it gives where nothing is gathered.
TEST(RunnerTransports, N23_RowsAreGatheredAfterQuantisation) {
  Size const s{8, 3, 128};
  std::int64_t const whole = gathered_bytes<quantization::None>(s), codes = gathered_bytes<quantization::Fp8PerToken<>>(s);
  // 5 rows of 128 floats become 128 codes and a scale of at most 16 bytes; ids and weights stay.
  EXPECT_GT(codes, 5 * 128);
  EXPECT_EQ(codes, whole - 5 * (128 * 4 - (128 + 16)));
}

/// The backends over windows, and how many experts there must be for a rank.
template <class Backend>
class RunnerWindows : public testing::Test {
 protected:
  comm::Mpi comm{MPI_COMM_WORLD, {.timeout_ms = kTimeout}};
};
template <class List>
struct TypesOf;
template <class... T>
struct TypesOf<boost::hana::tuple<T...>> {
  using type = testing::Types<typename T::type...>;
};
using WindowBackends = typename TypesOf<std::remove_const_t<decltype(registry::window_backends)>>::type;
TYPED_TEST_SUITE(RunnerWindows, WindowBackends);

TYPED_TEST(RunnerWindows, N24_SeveralShapesOverOneManager) {
  int const n = this->comm.size();
  comm::WindowManager<typename TypeParam::Window> manager(this->comm);
  typename TypeParam::Params params{};
  params.manager = &manager;
  Size const sizes[] = {{4 * n, 3, 64}, {2 * n, 2, 96}, {6 * n, 1, 32}, {4 * n, 3, 64}};
  std::vector<std::unique_ptr<Block<TypeParam>>> blocks;
  for (Size const& s : sizes) blocks.push_back(std::make_unique<Block<TypeParam>>(this->comm, s, params));
  EXPECT_EQ(manager.size(), 3U) << "a window for each shape";
  for (int round = 0; round < 4; ++round) {
    for (std::size_t i : {0U, 1U, 2U, 3U, 1U, 0U}) {
      SCOPED_TRACE(text("round ", round, ", runner ", i));
      std::vector<float> const x = uneven_rows(sizes[i].hidden, this->comm.rank(), round, kMost);
      expect_close(blocks[i]->forward(x), on_one_rank(sizes[i], x), 2e-6F);
    }
  }
}

TYPED_TEST(RunnerWindows, N24_AnotherTopKOnOneRank) {
  int const n = this->comm.size();
  if (n == 1) GTEST_SKIP() << "one rank has no peers";
  comm::WindowManager<typename TypeParam::Window> manager(this->comm);
  typename TypeParam::Params params{};
  params.manager = &manager;
  expect_error(ErrorCode::mismatch, "top_k",
               [&] { Block<TypeParam>(this->comm, {2 * n, this->comm.rank() == n - 1 ? 1 : 2, 64}, params); });
  EXPECT_EQ(manager.size(), 0U);
  Size const s{2 * n, 2, 64};
  std::vector<float> const x = uneven_rows(s.hidden, this->comm.rank(), 0, kMost);
  expect_close(Block<TypeParam>(this->comm, s, params).forward(x), on_one_rank(s, x), 2e-6F);
}

}  // namespace
