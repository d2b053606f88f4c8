// SPDX-License-Identifier: Apache-2.0
// tests/mpi/runner_dual_overlap_test.cpp: in the host space one half of a batch computes while the other travels. The last rank keeps its
// rows of one half back until rank 0 has computed the other half. Without the overlap rank 0 would wait for those rows first.
// moe-ranks: 2 4
#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <functional>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "../numbers.hpp"
#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/backends/window/host/pplx.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/mpi_shared.hpp"
#include "moe/experts/reference.hpp"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/runner.hpp"

namespace {

using namespace moe;
using moe_test::numbers;
constexpr int kHidden = 32, kIntermediate = 16, kTopK = 2, kRows = 8;
constexpr int kPatience = 30'000, kImpatience = 300;  // ms
constexpr int kAgain = 3;                             // forwards

struct Config : LayerDefaults {
  static constexpr int hidden = kHidden, intermediate = kIntermediate, topk = kTopK;
  using Activation = activation::Silu;
};
struct DualParts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using DualBatch = runner::dual_batch::Halves;
};

/// MPI that calls before_start() before the rows of a half leave, and after all ranks know how many they are.
struct HeldMpi : comm::Mpi {
  using Mpi::Mpi;
  std::function<void()> before_start;
  void start_all_to_all_v(Transfer& transfer, void const* in, std::int64_t const* in_counts, std::int64_t const* in_offsets, void* out,
                          std::int64_t const* out_counts, std::int64_t const* out_offsets) {
    if (before_start) before_start();
    Mpi::start_all_to_all_v(transfer, in, in_counts, in_offsets, out, out_counts, out_offsets);
  }
};

/// Rank 0 tells the last rank how many halves it has computed.
class Signals {
 public:
  Signals() {
    MPI_Comm_dup(MPI_COMM_WORLD, &comm_);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
  }
  Signals(Signals const&) = delete;
  ~Signals() { MPI_Comm_free(&comm_); }
  bool is_first() const { return rank_ == 0; }
  bool is_last() const { return rank_ == size_ - 1; }
  void send(int halves) { MPI_Send(nullptr, 0, MPI_INT, size_ - 1, halves, comm_); }
  /// Whether rank 0 has said so within `limit` milliseconds.
  bool wait(int halves, int limit) {
    auto const end = std::chrono::steady_clock::now() + std::chrono::milliseconds(limit);
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Irecv(nullptr, 0, MPI_INT, 0, halves, comm_, &request);
    int came = 0;
    while (came == 0 && std::chrono::steady_clock::now() < end) {
      MPI_Test(&request, &came, MPI_STATUS_IGNORE);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    if (came == 0) MPI_Cancel(&request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);  // returns at once if it came: the request is null then
    return came != 0;
  }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
};

/// What the last rank waited for, in order, and whether it came in time.
using Waited = std::vector<std::pair<int, bool>>;

/// Sends rank 0's signals; on the last rank calls at_stage(phase, n) when the n-th stage of a phase begins.
struct Watch : NoProbe {
  Signals& signals;
  std::function<void(Phase, int)> at_stage;
  std::vector<int> begun = std::vector<int>(kNumPhases);
  explicit Watch(Signals& s) : signals(s) {}
  void begin(Phase phase) {
    int const n = ++begun[static_cast<std::size_t>(phase)];
    if (signals.is_last() && at_stage) at_stage(phase, n);
  }
  void end(Phase phase) {
    if (signals.is_first() && phase == Phase::experts) signals.send(begun[static_cast<std::size_t>(phase)]);
  }
};

template <class Backend>
class DualOverlap : public testing::Test {
 protected:
  using Layer = ModularKernel<Config, routing::AnyRouter, quantization::None, Backend, experts::Reference<float>>;
  using Dual = Runner<Layer, DualParts>;
  static constexpr bool kOverMpi = std::is_same_v<typename Backend::Comm, HeldMpi>;
  /// Ranks send outputs without an agreement before. Pplx agrees first, which no probe comes between.
  static constexpr bool kSendsAlone = std::is_same_v<Backend, backends::LowLatency<comm::MpiShared>>;

  HeldMpi mpi{MPI_COMM_WORLD, {.timeout_ms = 2 * kPatience}};
  Signals signals;
  int const num_experts = 2 * mpi.size();
  std::vector<float> gate = numbers(7, num_experts* kHidden), x = numbers(1000 + mpi.rank(), kRows* kHidden);
  experts::WeightStore<Config, quantization::None> store{2, kHidden, kIntermediate, true};

  void SetUp() override {
    for (int e = 0; e < 2; ++e) {
      int const id = 2 * mpi.rank() + e;
      store.set_expert(e, numbers(100 + id, 2 * kIntermediate * kHidden).data(), numbers(200 + id, kHidden * kIntermediate).data());
    }
  }
  typename Dual::Params params() const {
    typename Dual::Params p{.layer = {.shape = {.num_experts = num_experts},
                                      .max_tokens_per_rank = kRows,
                                      .placement = ExpertPlacement(num_experts, mpi.size()),
                                      .router = {.num_experts = num_experts, .topk = kTopK}}};
    p.gate = {make_rows(gate.data(), num_experts, kHidden)};
    return p;
  }
  template <class Probe>
  std::vector<float> forward(Dual& dual, Probe&& probe) const {
    std::vector<float> out(x.size());
    dual.forward(make_rows(x.data(), kRows, kHidden), make_rows(out.data(), kRows, kHidden), ForwardOptions{}, HostStream{}, probe);
    return out;
  }
};
using Backends = testing::Types<backends::AllToAllV<HeldMpi>, backends::LowLatency<comm::MpiShared>, backends::Pplx<comm::MpiShared>>;
TYPED_TEST_SUITE(DualOverlap, Backends);

TYPED_TEST(DualOverlap, OneHalfComputesWhileTheOtherTravels) {
  typename TestFixture::Dual dual(this->mpi, this->store.view(), this->params());
  dual.decide_dual_batch(false);
  std::vector<float> const want = this->forward(dual, NoProbe{});
  dual.decide_dual_batch(true);
  for (int again = 0; again < kAgain; ++again) {
    Waited waited;
    auto const wait = [&](int halves) { waited.emplace_back(halves, this->signals.wait(halves, kPatience)); };
    Watch watch(this->signals);
    // Rows of the second half leave this rank after rank 0 has computed the first half; outputs of the first half after the second.
    int started = 0;
    if constexpr (TestFixture::kOverMpi) {
      this->mpi.before_start = [&] {
        ++started;
        if (this->signals.is_last() && (started == 2 || started == 3)) wait(started - 1);
      };
    } else {
      watch.at_stage = [&](Phase phase, int n) {
        if (phase == Phase::dispatch && n == 2) wait(1);
        if (TestFixture::kSendsAlone && phase == Phase::combine && n == 1) wait(2);
      };
    }
    EXPECT_EQ(this->forward(dual, watch), want);
    this->mpi.before_start = nullptr;
    EXPECT_EQ(watch.begun[static_cast<std::size_t>(Phase::experts)], 2);
    EXPECT_EQ(started, TestFixture::kOverMpi ? 4 : 0) << "each half starts its rows twice";
    Waited const both = TestFixture::kOverMpi || TestFixture::kSendsAlone ? Waited{{1, true}, {2, true}} : Waited{{1, true}};
    EXPECT_EQ(waited, this->signals.is_last() ? both : Waited{}) << "no overlap";
  }
}

// The same wait over a whole batch ends without its signal: rank 0 needs this rank's rows before it computes.
TYPED_TEST(DualOverlap, AWholeBatchHasNoOverlap) {
  typename TestFixture::Dual dual(this->mpi, this->store.view(), this->params());
  dual.decide_dual_batch(false);
  Watch watch(this->signals);
  bool in_time = true;
  watch.at_stage = [&](Phase phase, int n) {
    if (phase == Phase::dispatch && n == 1) in_time = this->signals.wait(1, kImpatience);
  };
  this->forward(dual, watch);
  if (!this->signals.is_last()) return;
  EXPECT_FALSE(in_time);
  EXPECT_TRUE(this->signals.wait(1, kPatience)) << "it comes once the rows have left";
}

}  // namespace
