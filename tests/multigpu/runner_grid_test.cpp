// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_grid_test.cpp: a block on every grid of GPUs gives what one rank gives, by every kind of transport; chunks give the
// bits of the whole batch; wrong calls reach all ranks.
#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <list>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "../expect_error.hpp"
#include "../runner_fused_shared_model.hpp"
#include "../runner_grid_model.hpp"
#include "moe/backends/collective/all_to_all_v_cuda.hpp"
#include "moe/backends/collective/gather_exchange_cuda.hpp"
#include "moe/backends/collective/no_expert_parallel_cuda.hpp"
#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/comm/nccl.hpp"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/experts/cuda_reference.hpp"
#include "moe/experts/monolithic.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/runner/device/captured_sizes.hpp"
#include "moe/runner/device/dense_shared.hpp"
#include "moe/runner/device/linear.hpp"
#include "moe/runner/device/ranks.hpp"
#include "moe/runner/device/row_kernels.hpp"
#include "several_hosts.hpp"

namespace {

using namespace moe_test::grid;
using moe_test::expect_error;
using Cuda = space::cuda;
using comm::Nccl;
using Window = comm::NcclSymmetric;
using Config = models::RuntimeLayer<bf16, bf16>;
using Local = backends::NoExpertParallel<Cuda>;
using Gather = backends::AllGatherReduceScatter<Nccl>;
using AllToAll = backends::AllToAllV<Nccl>;
using LowLatency = backends::LowLatency<Window>;
using HighThroughput = backends::HighThroughput<Window>;
template <class Backend, class Experts = experts::CudaReference>
using LayerOf = ModularKernel<Config, routing::AnyRouter, quantization::None, Backend, Experts>;
using Inside = experts::Monolithic<experts::CudaReference>;
using Store = experts::WeightStore<Config, quantization::None, Cuda>;
constexpr std::int64_t kTimeout = 20'000;

struct Alone : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using Input = runner::transform::Projection<bf16>;
  using Output = runner::transform::Projection<bf16>;
  using Shared = runner::shared::Dense<bf16>;
  using Scaling = runner::scaling::Factor;
  using ZeroExperts = runner::zero_experts::Identity;
  using End = runner::end::BiasNorm;
};
struct Parts : Alone {
  using Parallel = runner::parallel::Groups<Nccl>;
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

/// The ranks that have this rank's color, in world order. One communicator for each `kind`, for all tests.
std::map<std::string, std::unique_ptr<Nccl>> communicators;
Nccl* group(std::string const& kind, int color) {
  auto& found = communicators[kind];
  if (found == nullptr) {
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, color, world_rank(), &part);
    int rank = 0, size = 1;
    MPI_Comm_rank(part, &rank);
    MPI_Comm_size(part, &size);
    auto const broadcast = [&](void* data, std::size_t bytes) { MPI_Bcast(data, static_cast<int>(bytes), MPI_BYTE, 0, part); };
    found = std::make_unique<Nccl>(Nccl::over(rank, size, broadcast, {.timeout_ms = kTimeout}));
    MPI_Comm_free(&part);
  }
  return found.get();
}
/// The ranks that a rank's layer connects, and its TP group.
Nccl* layer_comm(MoeParallel const& p) {
  return runner::layer_group(p) == runner::LayerGroup::ep ? group("ep", 0) : group(text("tokens ", p.tp_size), p.tp_rank);
}
Nccl* tp_comm(MoeParallel const& p) { return group(text("tp ", p.tp_size), p.flat_rank / p.tp_size); }
/// call(comm) with the communicator of a backend over NCCL or of one rank.
template <class Backend, class Call>
auto with_comm(MoeParallel const& moe, Call const& call) {
  if constexpr (std::is_same_v<typename Backend::Comm, Nccl>) {
    return call(*layer_comm(moe));
  } else {
    static comm::Self<Cuda> self;
    return call(self);
  }
}
class Communicators : public testing::Environment {
  void TearDown() override { communicators.clear(); }
};
[[maybe_unused]] auto* const cleared = testing::AddGlobalTestEnvironment(new Communicators);

/// Weights in device memory, in the element that is asked for.
class OnDevice {
 public:
  template <class T>
  T const* as(T const*, std::vector<float> const& from) {
    std::vector<T> values(from.size());
    std::transform(from.begin(), from.end(), values.begin(), [](float v) { return from_float<T>(v); });
    auto const bytes = static_cast<std::int64_t>(values.size() * sizeof(T));
    memory_.emplace_back(std::max<std::int64_t>(bytes, 1));
    Memory<Cuda>::copy_from_host(memory_.back().data(), values.data(), static_cast<std::size_t>(bytes));
    return reinterpret_cast<T const*>(memory_.back().data());
  }

 private:
  std::list<Buffer<std::byte, Cuda>> memory_;
};

/// Input and output of a forward.
struct Rowset {
  explicit Rowset(std::vector<float> const& x) : rows(static_cast<std::int64_t>(x.size()) / kHidden), in(room(x)), out(in.size()) {
    std::vector<bf16> values(static_cast<std::size_t>(in.size()));
    std::transform(x.begin(), x.end(), values.begin(), [](float v) { return from_float<bf16>(v); });
    in.copy_from_host(values.data());
    Memory<Cuda>::fill(out.data(), 0xff, out.bytes());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  Rows<bf16 const> x() const { return make_rows(static_cast<bf16 const*>(in.data()), rows, kHidden); }
  Rows<bf16> y() { return make_rows(out.data(), rows, kHidden); }
  std::vector<float> result() {
    std::vector<bf16> values(static_cast<std::size_t>(out.size()));
    out.copy_to_host(values.data());
    std::vector<float> wide;
    for (std::int64_t i = 0; i < rows * kHidden; ++i) wide.push_back(to_float(values[static_cast<std::size_t>(i)]));
    return wide;
  }
  std::int64_t rows;
  Buffer<bf16, Cuda> in, out;

 private:
  static std::int64_t room(std::vector<float> const& x) { return std::max<std::int64_t>(static_cast<std::int64_t>(x.size()), kHidden); }
};

/// Waits for the stream within the deadline, and throws what the exchange or a communicator has found.
template <class R>
void finish(R& runner, Nccl* comm, cudaStream_t stream) {
  if (comm != nullptr) comm->synchronize(stream);
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  if constexpr (requires { runner.layer().exchange().check(); }) runner.layer().exchange().check();
}

/// A rank of a grid.
template <class Backend, class Experts = experts::CudaReference>
class Rank {
 public:
  using R = Runner<LayerOf<Backend, Experts>, Parts>;
  Rank(Grid const& g, Model const& m, bool rows_agree, BackendFacts const& facts = Backend::kFacts)
      : moe(place_of(g, world_rank(), facts)),
        tp(group(text("tp ", g.tp), world_rank() / g.tp)),
        layer_group(runner::layer_group(moe) == runner::LayerGroup::ep ? group("ep", 0) : group(text("tokens ", g.tp), moe.tp_rank)),
        placement(kExperts, moe.ep_size),
        shards(m.form.shared == SharedOutput::partial ? g.tp : 1),
        store(experts_of<Store>(m, placement, moe.ep_rank, moe.moe_tp_rank, moe.moe_tp_size)),
        runner(comm(), store.view(), grid_params(m, rows_agree)) {}
  std::vector<float> forward(std::vector<float> const& x) {
    Rowset rows(x);
    runner.forward(rows.x(), rows.y(), {}, stream);
    finish(runner, tp, stream);
    std::vector<float> out = rows.result();
    if (!runner.reductions().result_partial) return out;
    Buffer<float, Cuda> terms(std::max<std::int64_t>(static_cast<std::int64_t>(out.size()), 1));
    out.resize(static_cast<std::size_t>(terms.size()));
    terms.copy_from_host(out.data());
    tp->all_reduce(terms.data(), terms.size(), terms.data(), stream);
    stream.synchronize();
    terms.copy_to_host(out.data());
    out.resize(x.size());
    return out;
  }

  MoeParallel moe;
  Nccl *tp, *layer_group;
  ExpertPlacement placement;
  int shards;
  OnDevice weights;
  Store store;
  comm::Self<Cuda> self;
  CudaStream stream;
  R runner;

 private:
  typename Backend::Comm& comm() {
    if constexpr (std::is_same_v<typename Backend::Comm, Nccl>) {
      return *layer_group;
    } else {
      return self;
    }
  }
  typename R::Params grid_params(Model const& m, bool rows_agree) {
    auto p = params<R>(m, placement, kIntermediate / moe.moe_tp_size, cut13(m.shared13, kShared, kHidden, moe.tp_rank % shards, shards),
                       cut2(m.shared2, kShared, kHidden, moe.tp_rank % shards, shards), weights);
    if constexpr (requires { p.parallel.moe; }) {
      p.parallel = {.moe = moe, .tp = tp, .reduce_results = m.form.reduce_results, .rows_agree = rows_agree};
    }
    return p;
  }
};

void expect_close(std::vector<float> const& got, std::vector<float> const& want) {
  float largest = 0;
  for (float v : want) largest = std::max(largest, std::abs(v));
  for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 1.5e-2 * largest) << "value " << i;
}

template <class Backend>
class RunnerGrid : public testing::Test {};
using Backends = testing::Types<Local, Gather, AllToAll, LowLatency, HighThroughput>;
TYPED_TEST_SUITE(RunnerGrid, Backends);

/// Every grid; the forms that differ in their sums. Ranks agree on rows in every other one. Experts that route inside have no zero experts.
template <class Backend, class Experts>
void equals_one_rank() {
  Form const forms[] = {{false, false, SharedOutput::none, true},
                        {false, false, SharedOutput::partial, true},
                        {false, true, SharedOutput::complete, true},
                        {true, true, SharedOutput::partial, true},
                        {true, false, SharedOutput::partial, false}};
  int ran = 0, refused = 0;
  for (Grid const& g : grids(world_size())) {
    for (bool sp : {false, true}) {
      BackendFacts facts = Backend::kFacts;
      if (sp && !facts.sequence_parallel) continue;
      facts.sequence_parallel = sp;
      for (Form const& form : forms) {
        SCOPED_TRACE(text("tp ", g.tp, ", dp ", g.dp, ", pcp ", g.pcp, ", ep ", g.ep, ", sp ", sp, ", latent ", form.latent, ", norm ",
                          form.norm, ", shared ", static_cast<int>(form.shared), ", reduce ", form.reduce_results));
        Model const m{.form = form, .zero = facts::routes_inside<Experts>() ? 0 : kZero};
        MoeParallel const place = place_of(g, 0, facts);
        if (runner::parallel_conflict(place) != nullptr || (place.use_sp_moe() && form.shared == SharedOutput::partial)) {
          expect_error(ErrorCode::config, "", [&] { Rank<Backend, Experts> rank(g, m, false, facts); });
          ++refused;
          continue;
        }
        Rank<Backend, Experts> rank(g, m, ran % 2 == 1, facts);
        std::vector<float> const x = tokens(rank.moe), want = on_one_rank(m, x);
        expect_close(rank.forward(x), want);
        expect_close(rank.forward(x), want);
        if (testing::Test::HasFatalFailure()) return;
        ++ran;
      }
    }
  }
  EXPECT_GT(ran, 0);
}

TYPED_TEST(RunnerGrid, EqualsOneRank) { equals_one_rank<TypeParam, experts::CudaReference>(); }

// Ranks on several hosts: a backend over a window refuses them on all ranks at construction, in one sentence that names the ones that need
// no window. As after every failed construction the group is over; a new one works with such a backend.
template <class Backend>
void refuses_hosts() {
  Model const m{.form = {false, false, SharedOutput::complete}};
  for (Grid const& g : grids(world_size())) {
    MoeParallel const place = place_of(g, world_rank(), Backend::kFacts);
    if (runner::parallel_conflict(place) != nullptr) continue;
    SCOPED_TRACE(text("tp ", g.tp, ", dp ", g.dp, ", pcp ", g.pcp));
    expect_error(ErrorCode::unsupported, "AllToAllV and AllGatherReduceScatter need", [&] { Rank<Backend> rank(g, m, false); });
    communicators.clear();
    Rank<AllToAll> works(g, m, false);
    std::vector<float> const x = tokens(works.moe), want = on_one_rank(m, x);
    expect_close(works.forward(x), want);
  }
}
TEST(RunnerHosts, WindowsRefuseSeveralHosts) {
  if (!moe_test::on_several_hosts()) GTEST_SKIP() << "the ranks are on one host; MOE_TEST_HOSTS is not set";
  refuses_hosts<LowLatency>();
  refuses_hosts<HighThroughput>();
}

// Shared experts between the halves of an exchange, and before the layer.
TYPED_TEST(RunnerGrid, SharedBesideTheExchangeKeepTheBits) {
  if (TypeParam::kFacts.transport == Transport::local) GTEST_SKIP() << "no exchange";
  for (Grid const& g : {Grid{1, world_size(), 1, true}, Grid{world_size(), 1, 1, true}}) {
    Model const beside{.form = {false, false, SharedOutput::partial}}, before{.form = {false, false, SharedOutput::partial, true, false}};
    Rank<TypeParam> one(g, beside, false), other(g, before, false);
    std::vector<float> const x = tokens(one.moe), want = other.forward(x);
    EXPECT_EQ(one.forward(x), want);
    EXPECT_EQ(one.forward(x), want);
  }
}

/// A grid in one graph: ranks that state their rows wait for nobody.
template <class Backend>
void replays(Grid const& g, SharedOutput shared) {
  Model const m{.form = {false, false, shared}};
  Rank<Backend> rank(g, m, true);
  std::vector<float> const want = rank.forward(bf16_numbers(70, 4 * kHidden));
  Rowset rows(bf16_numbers(70, 4 * kHidden));
  {
    runner::CapturedSizes<Cuda> graphs;
    std::vector<std::int64_t> const sizes{4};
    graphs.capture(*group("ep", 0), sizes, runner::capture_obstacle(rank.runner.layer()), [&](std::int64_t n, cudaStream_t s) {
      rank.runner.forward(make_rows(rows.x().data_handle(), n, kHidden), make_rows(rows.y().data_handle(), n, kHidden), {}, s);
    });
    for (int i = 0; i < 3; ++i) {
      Memory<Cuda>::fill(rows.out.data(), 0xff, rows.out.bytes());
      check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      graphs.replay(4, rank.stream);
      finish(rank.runner, rank.tp, rank.stream);
      EXPECT_EQ(rows.result(), want);
    }
  }
  Rank<Backend> asks(g, m, false);
  CudaStream stream;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  expect_error(ErrorCode::state, "capture", [&] { asks.runner.forward(rows.x(), rows.y(), {}, stream); });
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  cudaGraphDestroy(graph);
  std::vector<float> const again = asks.forward(bf16_numbers(70, 4 * kHidden));
  EXPECT_EQ(again, want) << "the refused capture left nothing behind";
}
TEST(RunnerGridGraph, TensorParallelLocal) { replays<Local>({world_size(), 1, 1, true}, SharedOutput::partial); }
TEST(RunnerGridGraph, TensorParallelLowLatency) { replays<LowLatency>({world_size(), 1, 1, true}, SharedOutput::complete); }

// ---- Shared experts as further experts of the layer (N20): every rank computes those of its own rows.

struct FusedParts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using Parallel = runner::parallel::Groups<Nccl>;
};

template <class Backend>
class FusedShared : public testing::Test {
 protected:
  using R = Runner<LayerOf<Backend>, FusedParts>;
  void run(MoeParallel const& moe) {
    Model const m{.form = {false, false, SharedOutput::none}};
    bool const alone = moe.ep_size == 1;  // then the shared experts are among those of the placement
    ExpertPlacement const placement(alone ? kExperts + kFused : kExperts, moe.ep_size), routed(kExperts, moe.ep_size);
    int const part = kIntermediate / moe.moe_tp_size;
    std::vector<std::int32_t> mine(routed.local_to_physical(moe.ep_rank).begin(), routed.local_to_physical(moe.ep_rank).end());
    for (int i = 0; i < kFused; ++i) mine.push_back(kExperts + i);
    Store store(static_cast<std::int64_t>(mine.size()), kHidden, part, true);
    for (std::size_t l = 0; l < mine.size(); ++l) {
      store.set_expert(static_cast<std::int64_t>(l), cut13(m.w13(mine[l]), kIntermediate, kHidden, moe.moe_tp_rank, moe.moe_tp_size).data(),
                       cut2(m.w2(mine[l]), kIntermediate, kHidden, moe.moe_tp_rank, moe.moe_tp_size).data());
    }
    typename R::Params p{
        .layer = {.shape = {.hidden = kHidden, .intermediate = part, .num_experts = kExperts + kFused, .topk = kTopK + kFused},
                  .max_tokens_per_rank = kMost,
                  .placement = placement,
                  .router = {.num_experts = kExperts, .topk = kTopK, .num_fused_shared = kFused, .fused_shared_weight = kFusedWeight}}};
    OnDevice weights;
    p.gate.weight = make_rows(weights.as(p.gate.weight.data_handle(), bf16_numbers(1, kExperts * kHidden)), kExperts, kHidden);
    Nccl* const tp = tp_comm(moe);
    p.parallel = {.moe = moe, .tp = tp};
    R runner = with_comm<Backend>(moe, [&](auto& comm) { return R(comm, store.view(), p); });
    CudaStream stream;
    std::vector<float> const x = tokens(moe), want = fused_beside(m, x);
    for (int i = 0; i < 2; ++i) {
      Rowset rows(x);
      runner.forward(rows.x(), rows.y(), {}, stream);
      finish(runner, tp, stream);
      expect_close(rows.result(), want);
    }
    std::int64_t const routed_rows = runner::parallel::slice_of(static_cast<std::int64_t>(x.size() / kHidden), moe).rows;
    std::vector<std::int32_t> ids(static_cast<std::size_t>(routed_rows * (kTopK + kFused)));
    if (!ids.empty()) Memory<Cuda>::copy_to_host(ids.data(), runner.topk_ids().data_handle(), ids.size() * sizeof(std::int32_t));
    for (std::size_t i = 0; i < ids.size(); ++i) {  // logical ids, the shared experts in the last columns
      int const column = static_cast<int>(i) % (kTopK + kFused) - kTopK;
      if (column < 0) continue;
      ASSERT_EQ(ids[i], kExperts + column);
    }
  }
};
TYPED_TEST_SUITE(FusedShared, Backends);

TYPED_TEST(FusedShared, N20_EqualsBeside) {
  int ran = 0;
  for (Grid const& g : grids(world_size())) {
    for (bool sp : {false, true}) {
      BackendFacts facts = TypeParam::kFacts;
      if (sp && !facts.sequence_parallel) continue;
      facts.sequence_parallel = sp;
      MoeParallel const moe = place_of(g, world_rank(), facts);
      if (runner::parallel_conflict(moe) != nullptr) continue;
      SCOPED_TRACE(text("tp ", g.tp, ", dp ", g.dp, ", pcp ", g.pcp, ", ep ", g.ep, ", sp ", sp));
      this->run(moe);
      if (testing::Test::HasFatalFailure()) return;
      ++ran;
    }
  }
  EXPECT_GT(ran, 0);
}

// ---- Experts that route inside (N16): rows and logits are gathered, and every rank chooses.

template <class Backend, class Experts>
std::vector<float> gathered(MoeParallel const& moe) {
  using L = ModularKernel<Config, routing::AnyRouter, quantization::None, Backend, Experts>;
  using R = Runner<L, FusedParts>;
  Model const m{.form = {false, false, SharedOutput::none}};
  ExpertPlacement const placement(kExperts, moe.ep_size);
  Store const store = experts_of<Store>(m, placement, moe.ep_rank, moe.moe_tp_rank, moe.moe_tp_size);
  typename R::Params p{
      .layer = {.shape = {.hidden = kHidden, .intermediate = kIntermediate / moe.moe_tp_size, .num_experts = kExperts, .topk = kTopK},
                .max_tokens_per_rank = kMost,
                .placement = placement,
                .router = {.num_experts = kExperts, .topk = kTopK}}};
  OnDevice weights;
  p.gate.weight = make_rows(weights.as(p.gate.weight.data_handle(), bf16_numbers(1, kExperts * kHidden)), kExperts, kHidden);
  Nccl* const tp = tp_comm(moe);
  p.parallel = {.moe = moe, .tp = tp};
  return with_comm<Backend>(moe, [&](auto& comm) {
    R runner(comm, store.view(), p);
    CudaStream stream;
    Rowset rows(tokens(moe));
    runner.forward(rows.x(), rows.y(), {}, stream);
    finish(runner, tp, stream);
    return rows.result();
  });
}

template <class Backend>
class MonolithicGrid : public testing::Test {};
using MonolithicBackends = testing::Types<Local, Gather>;
TYPED_TEST_SUITE(MonolithicGrid, MonolithicBackends);

TYPED_TEST(MonolithicGrid, N16_EqualsRoutedRows) {
  int ran = 0;
  for (Grid const& g : grids(world_size())) {
    MoeParallel const moe = place_of(g, world_rank(), TypeParam::kFacts);
    if (runner::parallel_conflict(moe) != nullptr) continue;
    SCOPED_TRACE(text("tp ", g.tp, ", dp ", g.dp, ", pcp ", g.pcp, ", ep ", g.ep));
    std::vector<float> const want = gathered<TypeParam, experts::CudaReference>(moe);
    expect_close(gathered<TypeParam, Inside>(moe), want);
    ++ran;
  }
  EXPECT_GT(ran, 0);
}

// The block of N1, as with routed rows.
TYPED_TEST(MonolithicGrid, N1_EqualsOneRank) { equals_one_rank<TypeParam, Inside>(); }

// A rank with a wrong argument, and a TP group whose ranks differ: all ranks get an error, and the next call works.
TEST(RunnerGridErrors, ReachAllRanks) {
  int const last = world_size() - 1;
  Model const m{.form = {false, false, SharedOutput::partial}};
  Rank<Local> rank({world_size(), 1, 1, true}, m, false);
  bool const errs = world_rank() == last;
  auto forward = [&](std::int64_t n, std::int64_t out_rows) {
    Rowset rows(bf16_numbers(50, 3 * kHidden));
    rank.runner.forward(make_rows(rows.x().data_handle(), n, kHidden), make_rows(rows.y().data_handle(), out_rows, kHidden), {},
                        rank.stream);
    finish(rank.runner, rank.tp, rank.stream);
  };
  if (errs) {
    expect_error(ErrorCode::argument, "output: rows: 2, expected 3", [&] { forward(3, 2); });
  } else {
    expect_error(ErrorCode::peer, text("TP rank ", last, " failed with E_ARG"), [&] { forward(3, 3); });
  }
  forward(3, 3);
  expect_error(ErrorCode::mismatch, "TP ranks hold the same tokens", [&] { forward(errs ? 2 : 3, errs ? 2 : 3); });
  forward(3, 3);
}

// The last rank's call is wrong, row by row. TP ranks learn it from their group, DP ranks from the layer's; the next call works.
template <class Backend>
void wrong_calls(Grid const& g) {
  struct Row {
    std::int64_t rows, hidden, out_rows, out_hidden;
    ErrorCode code;
    std::string text;
  };
  std::vector<Row> const wrong{
      {3, kHidden - 8, 3, kHidden, ErrorCode::argument, "hidden_states: width: 56, expected 64"},
      {3, kHidden, 3, kHidden - 8, ErrorCode::argument, "output: width: 56, expected 64"},
      {3, kHidden, 2, kHidden, ErrorCode::argument, "output: rows: 2, expected 3"},
      {kMost + 1, kHidden, kMost + 1, kHidden, ErrorCode::capacity, "hidden_states: 8 rows exceed max_tokens_per_rank 7"},
  };
  BackendFacts facts = Backend::kFacts;
  facts.sequence_parallel = false;
  Model const m{.form = {false, false, SharedOutput::partial}};
  Rank<Backend> rank(g, m, false, facts);
  Rowset rows(bf16_numbers(50, (kMost + 1) * kHidden));
  auto const forward = [&](Row const& r) {
    rank.runner.forward(make_rows(rows.x().data_handle(), r.rows, r.hidden), make_rows(rows.y().data_handle(), r.out_rows, r.out_hidden),
                        {}, rank.stream);
    finish(rank.runner, rank.tp, rank.stream);
  };
  Row const right{3, kHidden, 3, kHidden, ErrorCode::argument, ""};
  for (Row const& row : wrong) {
    SCOPED_TRACE(row.text);
    if (world_rank() == world_size() - 1) {
      expect_error(row.code, row.text, [&] { forward(row); });
    } else {
      expect_error(ErrorCode::peer, g.tp > 1 ? text("TP rank ", g.tp - 1, " failed with ", name(row.code)) : "", [&] { forward(right); });
    }
    MPI_Barrier(MPI_COMM_WORLD);
    forward(right);
  }
}
TEST(RunnerGridErrors, WrongCallsRowByRow) {
  wrong_calls<Local>({world_size(), 1, 1, true});
  wrong_calls<Gather>({1, world_size(), 1, true});
}

// A reduction that is asked of a group that is down; a new group works.
TEST(RunnerGridErrors, GroupThatIsDown) {
  Model const m{.form = {false, false, SharedOutput::partial}};
  std::vector<float> const x = bf16_numbers(50, 3 * kHidden);
  {
    Rank<Local> rank({world_size(), 1, 1, true}, m, false);
    expect_close(rank.forward(x), on_one_rank(m, x));
    rank.tp->abort();
    expect_error(ErrorCode::peer, "the TP group is down", [&] { rank.forward(x); });
  }
  communicators.clear();
  MPI_Barrier(MPI_COMM_WORLD);
  Rank<Local> again({world_size(), 1, 1, true}, m, false);
  expect_close(again.forward(x), on_one_rank(m, x));
}

struct WholeParts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
};
struct ChunkParts : WholeParts {
  using Chunking = runner::chunking::Lockstep;
};

template <class Backend>
class RunnerChunks : public testing::Test {
 protected:
  template <class P>
  using R = Runner<LayerOf<Backend>, P>;
  Model const m{.form = {false, false, SharedOutput::none}};
  Nccl& comm = *group("ep", 0);
  ExpertPlacement const placement{kExperts, world_size()};
  Store store = experts_of<Store>(m, placement, world_rank(), 0, 1);
  OnDevice weights;
  CudaStream stream;
  // The identity as a mapping, so that slots are counted.
  Buffer<std::int32_t, Cuda> slots{kExperts}, ones{kExperts}, counted{kExperts};
  void SetUp() override {
    std::vector<std::int32_t> ids(kExperts);
    std::iota(ids.begin(), ids.end(), 0);
    slots.copy_from_host(ids.data());
    ones.copy_from_host(std::vector<std::int32_t>(kExperts, 1).data());
  }
  std::vector<std::int32_t> counts() {
    std::vector<std::int32_t> out(kExperts);
    counted.copy_to_host(out.data());
    return out;
  }

  template <class P>
  typename R<P>::Params chunk_params(std::int64_t capacity) {
    typename R<P>::Params p{.layer = {.shape = {.hidden = kHidden, .intermediate = kIntermediate, .num_experts = kExperts, .topk = kTopK},
                                      .max_tokens_per_rank = capacity,
                                      .placement = placement,
                                      .router = {.num_experts = kExperts, .topk = kTopK}}};
    p.gate.weight = make_rows(weights.as(p.gate.weight.data_handle(), bf16_numbers(1, kExperts * kHidden)), kExperts, kHidden);
    p.layer.mapping = {.num_experts = kExperts,
                       .num_physical = kExperts,
                       .max_replicas = 1,
                       .logical_to_physical = slots.data(),
                       .replica_count = ones.data(),
                       .source_rank = world_rank(),
                       .ep_size = world_size()};
    p.layer.load.load_counter = counted.data();
    return p;
  }
  template <class Runner>
  std::vector<float> run(Runner& runner, std::vector<float> const& x) {
    Rowset rows(x);
    Memory<Cuda>::fill(counted.data(), 0, counted.bytes());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    runner.forward(rows.x(), rows.y(), {}, stream);
    finish(runner, &comm, stream);
    return rows.result();
  }
  static std::int64_t rows_of(std::vector<int> const& counts) { return counts[static_cast<std::size_t>(world_rank())]; }
};
using ChunkBackends = testing::Types<Gather, LowLatency>;
TYPED_TEST_SUITE(RunnerChunks, ChunkBackends);

TYPED_TEST(RunnerChunks, N2_N3_N4_N22_EqualTheWholeBatch) {
  using Whole = typename TestFixture::template R<WholeParts>;
  using Chunked = typename TestFixture::template R<ChunkParts>;
  std::vector<std::vector<int>> const steps{{5, 3, 0, 1}, {3, 0, 5, 1}, {0, 0, 0, 0}, {4, 4, 0, 4}, {1, 1, 1, 1}, {5, 5, 5, 5}};
  Whole whole(this->comm, this->store.view(), this->template chunk_params<WholeParts>(kMost));
  for (int chunk : {1, 2, 8}) {
    for (ChunkMode mode : {ChunkMode::exact, ChunkMode::min_one}) {
      for (std::int64_t most : {0, 5}) {
        auto p = this->template chunk_params<ChunkParts>(chunk);
        p.chunking.mode = mode;
        p.chunking.most_rows = most;
        Chunked chunked(this->comm, this->store.view(), p);
        for (auto const& counts : steps) {
          SCOPED_TRACE(text("chunk ", chunk, ", mode ", static_cast<int>(mode), ", most ", most, ", rank 0 has ", counts[0]));
          std::vector<float> const x = bf16_numbers(1000 + world_rank(), this->rows_of(counts) * kHidden);
          std::vector<float> const want = this->run(whole, x);
          std::vector<std::int32_t> const slots = this->counts();
          EXPECT_EQ(this->run(chunked, x), want);
          EXPECT_EQ(this->counts(), slots) << "slots of real rows only";
          EXPECT_EQ(std::accumulate(slots.begin(), slots.end(), 0), this->rows_of(counts) * kTopK);
        }
      }
    }
  }
}

/// A batch of fixed passes in one graph; a rank whose rows exceed the stated ones is refused before any pass, and the next call works.
TYPED_TEST(RunnerChunks, StatedRowsNeedNoHost) {
  using Chunked = typename TestFixture::template R<ChunkParts>;
  auto p = this->template chunk_params<ChunkParts>(2);
  p.chunking.most_rows = 5;
  Chunked chunked(this->comm, this->store.view(), p);
  std::vector<float> const x = bf16_numbers(1000 + world_rank(), (5 - world_rank() % 3) * kHidden), want = this->run(chunked, x);
  Rowset rows(x);
  {
    runner::CapturedSizes<Cuda> graphs;
    std::vector<std::int64_t> const sizes{5};
    graphs.capture(this->comm, sizes, runner::capture_obstacle(chunked.layer()),
                   [&](std::int64_t, cudaStream_t s) { chunked.forward(rows.x(), rows.y(), {}, s); });
    for (int i = 0; i < 2; ++i) {
      Memory<Cuda>::fill(rows.out.data(), 0xff, rows.out.bytes());
      check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      graphs.replay(5, this->stream);
      finish(chunked, &this->comm, this->stream);
      EXPECT_EQ(rows.result(), want);
    }
  }
  std::vector<float> const long_x = bf16_numbers(5, 6 * kHidden);
  if (world_rank() == 0) {
    expect_error(ErrorCode::capacity, "hidden_states: 6 rows exceed 5", [&] { this->run(chunked, long_x); });
  } else {
    expect_error(ErrorCode::peer, "", [&] { this->run(chunked, x); });
  }
  MPI_Barrier(MPI_COMM_WORLD);
  try {  // over a window the other ranks find the abandoned passes one by one
    finish(chunked, &this->comm, this->stream);
  } catch (Error const& e) {
    EXPECT_EQ(e.code(), ErrorCode::peer) << e.what();
  }
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_EQ(this->run(chunked, x), want);
}

}  // namespace
