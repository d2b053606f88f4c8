// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/comm_exchange_test.cu: Naive, AllGatherReduceScatter and AllToAllV over comm::Nccl, exact and fixed sizes, against the
// definition and, quantised, against the host's exchange bit for bit.
// moe-ranks: 2 4 8
#include <mpi.h>

#include "moe/comm/nccl.hpp"
#include "moe/quantization/fp8_group128.hpp"
#include "tests/comm_exchange_harness.cuh"
#include "tests/mpi/exchange_harness.hpp"

namespace {

using moe::error_of;
using namespace moe_test;
using DeviceComm = moe::comm::Nccl;
using DeviceNaive = moe::backends::Naive<DeviceComm>;
using DeviceGather = moe::backends::AllGatherReduceScatter<DeviceComm>;
using DeviceAllToAll = moe::backends::AllToAllV<DeviceComm>;
static_assert(moe::Communicator<DeviceComm>);

/// A communicator of all ranks; the host's is left for the tests to compare with.
DeviceComm device_communicator(Comm& host, std::int64_t timeout_ms = 20'000) {
  return DeviceComm::over_communicator(host, {.timeout_ms = timeout_ms});
}

using moe::ErrorCode;
using moe::PlacementStrategy;

/// The host's communicator and the device's.
struct Ranks {
  Comm host{MPI_COMM_WORLD, {.timeout_ms = 20'000}};
  DeviceComm device = device_communicator(host);
  int size() const { return host.size(); }
  int rank() const { return host.rank(); }
};
Ranks& ranks() {
  static Ranks r;
  return r;
}

template <class Backend>
class Exchange : public testing::Test {
 public:
  using Harness = DeviceHarness<Backend>;
  using Setup = typename Harness::Setup;
};
using Backends = testing::Types<DeviceNaive, DeviceGather, DeviceAllToAll>;
TYPED_TEST_SUITE(Exchange, Backends);

TYPED_TEST(Exchange, T1_T2_T20_RoundTrips) {
  auto& r = ranks();
  for (Sizes sizes : {Sizes::exact, Sizes::fixed}) {
    for (PlacementStrategy strategy : {PlacementStrategy::linear, PlacementStrategy::round_robin}) {
      for (int experts : {1, 7, 8 * r.size()}) {
        typename TestFixture::Harness h(r.device, {.num_experts = experts, .k = experts < 3 ? 1 : 3, .strategy = strategy, .sizes = sizes});
        for (int round = 0; round < 6; ++round) {
          std::int64_t const rows = round == 0 ? 0 : random_rows(r.rank(), round, 8);
          h.check(random_batch<float>(r.rank(), round, rows, 32, experts < 3 ? 1 : 3, experts),
                  moe::text(experts, " experts, round ", round, sizes == Sizes::fixed ? ", fixed" : ", exact"));
        }
      }
    }
  }
}

TYPED_TEST(Exchange, T3_T19_OneRankAndDuplicates) {
  auto& r = ranks();
  int const experts = 4 * r.size();
  for (Sizes sizes : {Sizes::exact, Sizes::fixed}) {
    typename TestFixture::Harness h(r.device, {.hidden = 20, .num_experts = experts, .k = 4, .max_tokens = 40, .sizes = sizes});
    for (int round = 0; round < 3; ++round) {
      auto b = random_batch<float>(r.rank(), round, 40, 20, 4, experts);
      for (std::size_t i = 0; i < b.ids.size(); ++i) {
        std::int32_t const last = experts - 1 - static_cast<std::int32_t>(i % 4);
        b.ids[i] = round == 0 ? last : round == 1 ? b.ids[i - i % 2] : -1;
      }
      h.check(b, moe::text("round ", round));
    }
  }
}

TYPED_TEST(Exchange, T4_TooManyRowsOnOneRank) {
  auto& r = ranks();
  for (Sizes sizes : {Sizes::exact, Sizes::fixed}) {
    typename TestFixture::Harness h(r.device, {.sizes = sizes});
    auto const good = random_batch<float>(r.rank(), 1, 8, 32, 3, 7);
    auto const large = random_batch<float>(r.rank(), 1, 9, 32, 3, 7);
    bool const guilty = r.rank() == r.size() - 1;
    if (sizes == Sizes::exact || guilty) {
      auto const message = expect_error(ErrorCode::capacity, [&] { h.forward(guilty ? large : good); });
      EXPECT_NE(message.find(guilty ? "max_tokens_per_rank 8" : moe::text("rank ", r.size() - 1)), std::string::npos) << message;
    } else {  // no rank waits: the outputs are NaN and check() throws the reason
      h.enqueue(h.upload(good));
      expect_error(ErrorCode::capacity, [&] { h.exchange().wait(h.stream()); });
      for (float v : h.download(8)) ASSERT_TRUE(std::isnan(v));
    }
    h.check(good, "after the refusal");
  }
}

TYPED_TEST(Exchange, T12_ShapesDiffer) {
  auto& r = ranks();
  auto const message =
      expect_error(ErrorCode::mismatch, [&] { typename TestFixture::Harness h(r.device, {.hidden = r.rank() == 1 ? 48 : 32}); });
  EXPECT_NE(message.find("hidden"), std::string::npos) << message;
  auto const sizes = expect_error(
      ErrorCode::mismatch, [&] { typename TestFixture::Harness h(r.device, {.sizes = r.rank() == 1 ? Sizes::fixed : Sizes::exact}); });
  EXPECT_NE(sizes.find("fixed"), std::string::npos) << sizes;
}

TYPED_TEST(Exchange, LayersOutOfStep) {
  auto& r = ranks();
  typename TestFixture::Harness first(r.device, {});
  typename TestFixture::Harness second(r.device, {});
  auto const b = random_batch<float>(r.rank(), 2, 5, 32, 3, 7);
  auto const message = expect_error(ErrorCode::mismatch, [&] { (r.rank() == 0 ? first : second).forward(b); });
  EXPECT_NE(message.find("layer"), std::string::npos) << message;
}

TYPED_TEST(Exchange, T21_CallOrder) {
  auto& r = ranks();
  for (Sizes sizes : {Sizes::exact, Sizes::fixed}) {
    typename TestFixture::Harness h(r.device, {.sizes = sizes});
    auto const b = random_batch<float>(r.rank(), 2, 5, 32, 3, 7);
    auto const in = h.upload(b);
    expect_error(ErrorCode::state, [&] { h.exchange().finalize(h.output(5), h.stream()); });
    auto const tokens = h.exchange().prepare(in, h.stream());
    expect_error(ErrorCode::state, [&] { h.exchange().prepare(in, h.stream()); });
    h.run_experts(tokens);
    h.exchange().finalize(h.output(5), h.stream());
    h.exchange().wait(h.stream());
    h.compare(b, h.download(5), "");
    expect_error(ErrorCode::state, [&] { h.exchange().finalize(h.output(5), h.stream()); });
  }
}

TYPED_TEST(Exchange, AbandonedDispatch) {
  auto& r = ranks();
  for (Sizes sizes : {Sizes::exact, Sizes::fixed}) {
    typename TestFixture::Harness h(r.device, {.sizes = sizes});
    auto const b = random_batch<float>(r.rank(), 2, 5, 32, 3, 7);
    if (r.rank() == 0) {
      h.exchange().abandon(h.stream());
    } else {
      auto const message = expect_error(ErrorCode::peer, [&] { h.forward(b); });
      EXPECT_NE(message.find("rank 0 abandoned"), std::string::npos) << message;
    }
    h.check(b, "after it");
  }
}

TYPED_TEST(Exchange, AbandonedCombine) {
  auto& r = ranks();
  for (Sizes sizes : {Sizes::exact, Sizes::fixed}) {
    typename TestFixture::Harness h(r.device, {.sizes = sizes});
    auto const b = random_batch<float>(r.rank(), 2, 5, 32, 3, 7);
    h.run_experts(h.exchange().prepare(h.upload(b), h.stream()));
    if (r.rank() == 0) {
      h.exchange().abandon(h.stream());
    } else {
      h.exchange().finalize(h.output(5), h.stream());
    }
    if (sizes == Sizes::exact) {  // the next round tells all ranks
      h.stream().synchronize();
      expect_error(ErrorCode::peer, [&] { h.forward(b); });
    } else if (r.rank() != 0) {
      expect_error(ErrorCode::peer, [&] { h.exchange().wait(h.stream()); });
    }
    if (r.rank() != 0) {
      for (float v : h.download(5)) ASSERT_TRUE(sizes == Sizes::exact || std::isnan(v));
    }
    h.check(b, "after it");
  }
}

TYPED_TEST(Exchange, T9_GraphReplays) {
  auto& r = ranks();
  typename TestFixture::Harness h(r.device, {.sizes = Sizes::fixed});
  EXPECT_TRUE(h.exchange().capturable());
  expect_graph_replays(h, r.rank());
  h.check(random_batch<float>(r.rank(), 30, 3, 32, 3, 7), "after the replays");

  typename TestFixture::Harness exact(r.device, {});
  EXPECT_FALSE(exact.exchange().capturable());
  auto const given = exact.upload(random_batch<float>(r.rank(), 0, 8, 32, 3, 7));
  moe::check_cuda(cudaStreamBeginCapture(exact.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  expect_error(ErrorCode::state, [&] { exact.exchange().prepare(given, exact.stream()); });
  cudaGraph_t graph = nullptr;
  moe::check_cuda(cudaStreamEndCapture(exact.stream(), &graph), "cudaStreamEndCapture");
  cudaGraphDestroy(graph);
}

TYPED_TEST(Exchange, T7_T23_DelaysAndDeterminism) {
  auto& r = ranks();
  for (Sizes sizes : {Sizes::exact, Sizes::fixed}) {
    typename TestFixture::Harness h(r.device, {.hidden = 64, .num_experts = 16, .k = 4, .max_tokens = 24, .sizes = sizes});
    auto const b = random_batch<float>(r.rank(), 3, 24, 64, 4, 16, false);
    auto const first = h.forward(b);
    std::mt19937 random(static_cast<unsigned>(r.rank()));
    for (int round = 0; round < 40; ++round) {
      auto const in = h.upload(b);
      occupy<<<1, 1, 0, h.stream()>>>(static_cast<long long>(random() % 200000));
      auto const tokens = h.exchange().prepare(in, h.stream());
      occupy<<<1, 1, 0, h.stream()>>>(static_cast<long long>(random() % 200000));
      h.run_experts(tokens);
      h.exchange().finalize(h.output(24), h.stream());
      if (round % 10 == 9) {
        h.exchange().wait(h.stream());
        ASSERT_EQ(h.download(24), first) << "round " << round;
      } else {
        h.stream().synchronize();
      }
    }
  }
}

TEST(AllToAllV, T25_ReceiveOverflow) {
  auto& r = ranks();
  int const experts = 2 * r.size();
  DeviceHarness<DeviceAllToAll> h(r.device, {.num_experts = experts, .k = 2, .max_recv_rows = 8 + r.size()});
  auto b = random_batch<float>(r.rank(), 1, 8, 32, 2, experts);
  std::fill(b.ids.begin(), b.ids.end(), 0);
  auto const message = expect_error(ErrorCode::capacity, [&] { h.forward(b); });
  EXPECT_NE(message.find(moe::text("rank 0 would receive ", 8 * r.size())), std::string::npos) << message;
  std::fill(b.ids.begin(), b.ids.end(), 2 * r.rank());
  h.check(b, "after the overflow");
  expect_error(ErrorCode::config, [&] { DeviceHarness<DeviceAllToAll> other(r.device, {.max_recv_rows = 9, .sizes = Sizes::fixed}); });
}

/// bf16 rows in e4m3 records, expert outputs in bf16: the same bits as the host's exchange over MPI.
template <class HostBackend, class DeviceBackend>
void equals_host(Sizes sizes, std::int64_t max_tokens = 48) {
  using moe::bf16;
  using Quant = moe::quantization::Fp8Group<>;
  auto& r = ranks();
  int const experts = 3 * r.size() + 1;
  Harness<HostBackend, bf16, Quant, bf16> host(r.host, {.hidden = 256, .num_experts = experts, .k = 4, .max_tokens = max_tokens});
  DeviceHarness<DeviceBackend, bf16, Quant, bf16> device(
      r.device, {.hidden = 256, .num_experts = experts, .k = 4, .max_tokens = max_tokens, .sizes = sizes});
  for (int round = 0; round < 4; ++round) {
    auto const b = random_batch<bf16>(r.rank(), round, random_rows(r.rank(), round, max_tokens), 256, 4, experts);
    auto const want = host.forward(b);
    auto const got = device.forward(b);
    for (std::size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(moe::to_float(got[i]), moe::to_float(want[i])) << "round " << round << " at " << i;
    }
  }
}
TEST(AllToAllV, T6_QuantisedEqualsHost) {
  equals_host<AllToAllBackend, DeviceAllToAll>(Sizes::exact);
  equals_host<AllToAllBackend, DeviceAllToAll>(Sizes::fixed);
  equals_host<AllToAllBackend, DeviceAllToAll>(Sizes::exact, 2500);  // enough tokens that one warp packs a token for all ranks
}
TEST(AllGatherReduceScatter, T6_QuantisedEqualsHost) {
  equals_host<GatherBackend, DeviceGather>(Sizes::exact);
  equals_host<GatherBackend, DeviceGather>(Sizes::fixed);
}

/// A barrier with the other ranks at the end of a scope, also after an exception.
struct MeetAtExit {
  Comm& host;
  ~MeetAtExit() {
    error_of([&] { host.barrier({}); });
  }
};

/// The waiting ranks name the missing one; CUDA and a new group work afterwards.
TYPED_TEST(Exchange, T10_T24_RankThatDoesNotCome) {
  auto& r = ranks();
  for (Sizes sizes : {Sizes::exact, Sizes::fixed}) {
    int const late = r.size() - 1;
    auto const b = random_batch<float>(r.rank(), 2, 5, 32, 3, 7);
    {
      auto comm = device_communicator(r.host);
      typename TestFixture::Harness h(comm, {.sizes = sizes});
      h.check(b, "before");
      comm.set_timeout_ms(700);
      MeetAtExit const end{r.host};
      {
        MeetAtExit const start{r.host};
      }
      if (r.rank() == late) {
        usleep(2'000'000);
      }
      auto const error = error_of([&] { h.forward(b); });
      EXPECT_TRUE(error.has_value());
      if (r.rank() != late && error) {
        EXPECT_EQ(error->code(), ErrorCode::timeout) << error->what();
        EXPECT_NE(error->message().find(moe::text("peer ", late)), std::string::npos) << error->what();
      }
      if (r.rank() == late) {  // may have been told by the others, and then finds them gone
        EXPECT_TRUE(error_of([&] { h.forward(b); }).has_value());
      }
      expect_error(ErrorCode::state, [&] { h.forward(b); });
      moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    auto comm = device_communicator(r.host);
    typename TestFixture::Harness h(comm, {.sizes = sizes});
    h.check(b, "a new group");
  }
}

}  // namespace
