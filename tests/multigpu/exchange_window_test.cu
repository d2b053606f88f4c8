// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/exchange_window_test.cu: OneSided, TwoSided and Pplx as policies, one process a GPU: prepare, identity experts, finalize;
// captured in a graph; a rank that gives up.
// moe-ranks: 2 4 8
#include <gtest/gtest.h>
#include <mpi.h>

#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/quantization/fp8_group128.hpp"
#include "moe/quantization/none.hpp"
#include "tests/multigpu/window_harness.cuh"

namespace {

using namespace moe_test;
using moe::bf16;
using moe::check_cuda;
using Window = moe::comm::NcclSymmetric;
static_assert(moe::PrepareAndFinalize<moe::backends::OneSided<Window>>);
static_assert(moe::PrepareAndFinalize<moe::backends::TwoSided<Window>>);
static_assert(moe::PrepareAndFinalize<moe::backends::Pplx<Window>>);

struct Config : moe::LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  struct Activation {};
};
constexpr int kHidden = 1024;
constexpr int kTopK = 4;
constexpr int kMaxTokens = 100;
constexpr int kLocal = 8;

struct OneSidedPolicy {
  using Backend = moe::backends::OneSided<Window>;
  static constexpr char const* kName = "one_sided";
  static constexpr SumOrder kOrder = SumOrder::named_ranks;
};
struct TwoSidedPolicy {
  using Backend = moe::backends::TwoSided<Window>;
  static constexpr char const* kName = "two_sided";
  static constexpr SumOrder kOrder = SumOrder::ranks;
};
struct PplxPolicy {
  using Backend = moe::backends::Pplx<Window>;
  static constexpr char const* kName = "pplx";
  static constexpr SumOrder kOrder = SumOrder::choices;
};

/// An exchange of this rank, and rounds through it.
template <class Policy, class Quant>
class Subject {
 public:
  using Backend = typename Policy::Backend;
  using Exchange = typename Backend::template Exchange<Config, Quant, bf16>;
  static_assert(moe::ExchangeOf<Exchange, Config>);

  Subject()
      : comm_(connect()),
        experts_(kLocal * comm_.size()),
        exchange_(comm_,
                  moe::Shape<Config>(moe::LayerShape{.hidden = kHidden, .intermediate = 128, .num_experts = experts_, .topk = kTopK}),
                  kMaxTokens, moe::ExpertPlacement(experts_, comm_.size()), Quant{},
                  typename Backend::Params{.blocks = 32, .window = {std::uint64_t{5'000'000'000}}}, arena_) {}

  void bring(unsigned seed) {
    int const me = comm_.rank();
    int const tokens = (static_cast<int>(seed) + me) % 3 == 0 ? 0 : kMaxTokens - 7 * static_cast<int>(seed);
    tokens_ = make_tokens(me, tokens, kHidden, kTopK, experts_, comm_.size(), seed % 2 == 0 ? Routing::uniform : Routing::with_gaps, seed);
    buffers_ = make_buffers(tokens_, kHidden, kLocal, 0);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  auto prepare() {
    auto const& in = buffers_.in;
    return exchange_.prepare(
        {moe::make_rows(in.x, in.tokens, kHidden), moe::make_rows(in.ids, in.tokens, kTopK), moe::make_rows(in.weights, in.tokens, kTopK)},
        stream_);
  }
  void round() {
    auto const t = prepare();
    auto const y = exchange_.expert_output();
    auto const* const rows = reinterpret_cast<char const*>(t.rows.data_handle());
    constexpr bool kFp8 = Quant::kQuantizesActivations;
    if constexpr (requires { t.expert_num_tokens; }) {
      identity_batched<<<dim3(8, kLocal), 128, 0, stream_>>>(rows, t.scales.data_handle(), nullptr, t.expert_num_tokens.data_handle(),
                                                             static_cast<int>(t.rows.extent(1)), kHidden, kFp8, y.data_handle());
    } else {
      identity_standard<<<64, 128, 0, stream_>>>(rows, static_cast<int>(t.rows.stride(0)) * (kFp8 ? 1 : 2), t.scales.data_handle(),
                                                 static_cast<int>(t.scales.stride(0)), t.topk_ids.data_handle(),
                                                 t.topk_weights.data_handle(), t.num_rows, static_cast<int>(t.rows.extent(0)), kTopK,
                                                 kHidden, kFp8, y.data_handle());
    }
    exchange_.finalize(moe::make_rows(as_bf16(buffers_.out), buffers_.in.tokens, kHidden), stream_);
  }
  std::string wrong() {
    stream_.synchronize();
    exchange_.check();
    PeerShape const s{Policy::kName, comm_.size(), kMaxTokens, kHidden, kTopK, experts_, Quant::kQuantizesActivations, 32};
    return check_sums(s, Policy::kOrder, tokens_, buffers_, comm_.rank(), 1);
  }
  Exchange& exchange() { return exchange_; }
  moe::CudaStream& stream() { return stream_; }
  moe::comm::Nccl& comm() { return comm_; }

 private:
  static moe::comm::Nccl connect() {
    int rank = 0, size = 1;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    return moe::comm::Nccl::over(
        rank, size, [](void* data, std::size_t bytes) { MPI_Bcast(data, static_cast<int>(bytes), MPI_BYTE, 0, MPI_COMM_WORLD); });
  }
  moe::comm::Nccl comm_;
  int experts_;
  moe::Arena<moe::space::cuda> arena_;
  Exchange exchange_;
  moe::CudaStream stream_;
  RankTokens tokens_;
  RankBuffers buffers_;
};

template <class Policy>
class WindowPolicy : public testing::Test {};
struct PolicyNames {
  template <class Policy>
  static std::string GetName(int) {
    return Policy::kName;
  }
};
using Policies = testing::Types<OneSidedPolicy, TwoSidedPolicy, PplxPolicy>;
TYPED_TEST_SUITE(WindowPolicy, Policies, PolicyNames);

TYPED_TEST(WindowPolicy, T1_T2_RoundTripFp8) {
  Subject<TypeParam, moe::quantization::Fp8Group<>> subject;
  for (unsigned seed = 0; seed < 6; ++seed) {
    subject.bring(seed);
    subject.round();
    EXPECT_EQ(subject.wrong(), "");
  }
  EXPECT_THROW(subject.exchange().finalize(moe::make_rows(static_cast<bf16*>(nullptr), 0, kHidden), subject.stream()), moe::Error);
}
TYPED_TEST(WindowPolicy, T1_T2_RoundTripUnquantised) {
  Subject<TypeParam, moe::quantization::None> subject;
  for (unsigned seed = 0; seed < 6; ++seed) {
    subject.bring(seed);
    subject.round();
    EXPECT_EQ(subject.wrong(), "");
  }
}

TYPED_TEST(WindowPolicy, T9_CapturedPairsReplay) {
  Subject<TypeParam, moe::quantization::Fp8Group<>> subject;
  subject.bring(1);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t pairs = nullptr;
  check_cuda(cudaStreamBeginCapture(subject.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  subject.round();
  subject.round();
  check_cuda(cudaStreamEndCapture(subject.stream(), &graph), "cudaStreamEndCapture");
  check_cuda(cudaGraphInstantiate(&pairs, graph, 0), "cudaGraphInstantiate");
  for (int i = 0; i < 50; ++i) {
    check_cuda(cudaGraphLaunch(pairs, subject.stream()), "cudaGraphLaunch");
  }
  EXPECT_EQ(subject.wrong(), "");
  cudaGraphExecDestroy(pairs);
  cudaGraphDestroy(graph);
}

TYPED_TEST(WindowPolicy, T10_ARankThatGivesUpIsNamed) {
  Subject<TypeParam, moe::quantization::Fp8Group<>> subject;
  subject.bring(1);
  int const last = subject.comm().size() - 1;
  if (subject.comm().rank() == last) {
    subject.exchange().abandon(subject.stream());
    subject.stream().synchronize();
  } else {
    subject.prepare();
    subject.stream().synchronize();
    try {
      subject.exchange().check();
      ADD_FAILURE() << "no failure seen";
    } catch (moe::TransportError const& e) {
      EXPECT_EQ(e.code(), moe::ErrorCode::peer) << e.what();
      EXPECT_EQ(e.peer(), last) << e.what();
    }
  }
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  MPI_Barrier(MPI_COMM_WORLD);
}

}  // namespace
