// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/exchange_window_test.cu: OneSided, TwoSided and Pplx as policies, one process per GPU: prepare, identity experts,
// finalize; captured in a graph; refusals, abandoned rounds, placements.
#include <gtest/gtest.h>
#include <mpi.h>

#include <optional>

#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/core/cuda_graph.hpp"
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

  Subject() : Subject(std::nullopt) {}
  explicit Subject(std::optional<moe::ExpertPlacement> const& placement)
      : comm_(connect()),
        placement_(placement.value_or(moe::ExpertPlacement(kLocal * comm_.size(), comm_.size()))),
        experts_(placement_.num_physical()),
        exchange_(comm_,
                  moe::Shape<Config>(moe::LayerShape{.hidden = kHidden, .intermediate = 128, .num_experts = experts_, .topk = kTopK}),
                  kMaxTokens, placement_, Quant{}, typename Backend::Params{.blocks = 32, .window = {5'000}}, arena_) {}

  void bring(unsigned seed) {
    int const me = comm_.rank();
    int const tokens = (static_cast<int>(seed) + me) % 3 == 0 ? 0 : kMaxTokens - 7 * static_cast<int>(seed);
    tokens_ = make_tokens(me, tokens, kHidden, kTopK, experts_, comm_.size(), seed % 2 == 0 ? Routing::uniform : Routing::with_gaps, seed);
    buffers_ = make_buffers(tokens_, kHidden, kLocal, 0);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  /// kMaxTokens rows, so that every rank has some for every other.
  void bring_all(unsigned seed) {
    tokens_ = make_tokens(comm_.rank(), kMaxTokens, kHidden, kTopK, experts_, comm_.size(), Routing::uniform, seed);
    buffers_ = make_buffers(tokens_, kHidden, kLocal, 0);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  moe::RoutedTokens<bf16> in(int rows) {
    auto const& in = buffers_.in;
    return {moe::make_rows(in.x, rows, kHidden), moe::make_rows(in.ids, rows, kTopK), moe::make_rows(in.weights, rows, kTopK)};
  }
  void prepare() { given_.emplace(exchange_.prepare(in(buffers_.in.tokens), stream_)); }
  /// The error of prepare() for `in`.
  std::string prepare_error(moe::RoutedTokens<bf16> const& in) {
    try {
      exchange_.prepare(in, stream_);
    } catch (moe::Error const& e) {
      return e.message();
    }
    return "no error";
  }
  void round() {
    prepare();
    finish();
  }
  /// Identity experts and finalize().
  void finish() {
    auto const& t = *given_;
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
    PeerShape const s{Policy::kName, comm_.size(), kMaxTokens, kHidden, kTopK, kLocal * comm_.size(), Quant::kQuantizesActivations, 32};
    RankTokens placed = tokens_;  // ids as rank * L + local, as the expected sums use them
    for (auto& id : placed.ids) {
      id = id < 0 ? id : placement_.owner(id) * kLocal + placement_.local(id);
    }
    return check_sums(s, Policy::kOrder, placed, buffers_, comm_.rank(), 1);
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
  moe::ExpertPlacement placement_;
  int experts_;
  moe::Arena<moe::space::cuda> arena_;
  Exchange exchange_;
  moe::CudaStream stream_;
  RankTokens tokens_;
  RankBuffers buffers_;
  std::optional<typename Exchange::Tokens> given_;
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
  moe::CudaGraph const pairs(subject.stream(), [&] {
    subject.round();
    subject.round();
  });
  for (int i = 0; i < 50; ++i) {
    pairs.launch(subject.stream());
  }
  EXPECT_EQ(subject.wrong(), "");
}

/// All ranks take part in a round except `refusing`, which calls refuse() instead. All others are told once, and the next rounds succeed.
template <class Subject, class Refuse>
void expect_refusal(Subject& subject, int refusing, moe::ErrorCode code, std::string const& sentence, Refuse&& refuse) {
  static unsigned seed = 10;
  subject.bring_all(++seed);
  if (subject.comm().rank() == refusing) {
    refuse();
  } else {
    subject.round();
  }
  subject.stream().synchronize();
  try {
    subject.exchange().check();
    EXPECT_EQ(subject.comm().rank(), refusing) << "not told: " << sentence;
  } catch (moe::TransportError const& e) {
    EXPECT_NE(subject.comm().rank(), refusing) << e.what();
    EXPECT_EQ(e.code(), code) << e.what();
    EXPECT_EQ(e.peer(), refusing) << e.what();
    EXPECT_EQ(std::string(e.message()).find(moe::text("rank ", refusing, " ", sentence, " (")), 0U) << e.what();
  }
  subject.exchange().check();  // once
  for (unsigned i = 0; i < 3; ++i) {
    subject.bring(i + seed % 3);
    subject.round();
    EXPECT_EQ(subject.wrong(), "") << "after: " << sentence;
  }
}

TYPED_TEST(WindowPolicy, T4_T12_RefusalsLeaveTheGroupSound) {
  Subject<TypeParam, moe::quantization::Fp8Group<>> subject;
  moe::bf16 const* const none = nullptr;
  for (int refusing = 0; refusing < subject.comm().size(); ++refusing) {
    expect_refusal(subject, refusing, moe::ErrorCode::capacity, "refused its arguments with E_CAPACITY", [&] {
      EXPECT_EQ(subject.prepare_error(subject.in(kMaxTokens + 1)), "hidden_states: 101 rows exceed max_tokens_per_rank 100");
    });
    expect_refusal(subject, refusing, moe::ErrorCode::peer, "refused its arguments with E_ARG", [&] {
      auto in = subject.in(kMaxTokens);
      in.hidden = moe::make_rows(none, kMaxTokens, kHidden);
      EXPECT_EQ(subject.prepare_error(in), "hidden_states: null pointer for 100 rows");
    });
    expect_refusal(subject, refusing, moe::ErrorCode::peer, "abandoned the call", [&] { subject.exchange().abandon(subject.stream()); });
  }
}

TYPED_TEST(WindowPolicy, T12_ARankThatGivesUpBeforeCombineIsNamed) {
  Subject<TypeParam, moe::quantization::Fp8Group<>> subject;
  int const last = subject.comm().size() - 1;
  subject.bring_all(3);
  subject.prepare();
  if (subject.comm().rank() == last) {
    subject.exchange().abandon(subject.stream());
  } else {
    subject.finish();
  }
  subject.stream().synchronize();
  if (subject.comm().rank() != last) {
    try {
      subject.exchange().check();
      ADD_FAILURE() << "no failure seen";
    } catch (moe::TransportError const& e) {
      EXPECT_EQ(e.code(), moe::ErrorCode::peer) << e.what();
      EXPECT_EQ(e.peer(), last) << e.what();
      EXPECT_EQ(e.phase(), "combine") << e.what();
    }
  } else {
    EXPECT_NO_THROW(subject.exchange().check());
  }
  subject.bring(4);
  subject.round();
  subject.stream().synchronize();
  EXPECT_NO_THROW(subject.exchange().check());
  for (unsigned seed = 5; seed < 8; ++seed) {
    EXPECT_EQ(subject.wrong(), "") << "after a rank gave up";
    subject.bring(seed);
    subject.round();
  }
  EXPECT_EQ(subject.wrong(), "");
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  MPI_Barrier(MPI_COMM_WORLD);
}

// Placements that are not contiguous id ranges.
TYPED_TEST(WindowPolicy, T20_PlacementsDealtInTurn) {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  int const experts = std::is_same_v<TypeParam, PplxPolicy> ? kLocal * size : kLocal * size - 1;
  Subject<TypeParam, moe::quantization::Fp8Group<>> subject(moe::ExpertPlacement(experts, size, moe::PlacementStrategy::round_robin));
  for (unsigned seed = 0; seed < 4; ++seed) {
    subject.bring(seed);
    subject.round();
    EXPECT_EQ(subject.wrong(), "");
  }
}

}  // namespace
