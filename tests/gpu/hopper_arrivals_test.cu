// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_arrivals_test.cu: the Hopper layer beside a dispatch that another stream plays: rows of two ranks come late, expert by
// expert, with their counts behind them, in either format. The bits are those of a call whose rows are all there; rows that never come end
// the waits by the deadline, and the failure names their rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <initializer_list>
#include <numeric>
#include <thread>
#include <vector>

#include "hopper_reference.cuh"
#include "moe/comm/arrivals.hpp"
#include "moe/core/cuda_graph.hpp"
#include "moe/experts/hopper/contiguous_layer.hpp"
#include "on_hopper.hpp"

namespace {

using namespace moe::hopper;
using namespace moe_test;
using moe::check_cuda;

constexpr int kRanks = 2;

enum class Order { ascending, descending, together };

/// Pinned host memory.
template <class T>
class Pinned {
 public:
  explicit Pinned(std::size_t count) { check_cuda(cudaMallocHost(&data_, std::max<std::size_t>(count, 1) * sizeof(T)), "cudaMallocHost"); }
  Pinned(Pinned const&) = delete;
  Pinned& operator=(Pinned const&) = delete;
  ~Pinned() { cudaFreeHost(data_); }
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
};

/// The rows of a problem on their way: token t comes from rank t % kRanks. Copies between host and device need no multiprocessor, so they
/// pass kernels that wait.
class Delivery {
 public:
  explicit Delivery(Problem const& problem)
      : p_(problem),
        row_bytes_(static_cast<std::size_t>(problem.shape.hidden) * element_bytes(problem.scheme)),
        scales_(problem.scheme == Scheme::fp8_block ? static_cast<std::size_t>(problem.shape.hidden + 127) / 128 : 0),
        rows_(row_bytes_ * static_cast<std::size_t>(problem.tokens)),
        row_scales_(scales_ * static_cast<std::size_t>(problem.tokens)),
        counts_(kRanks * static_cast<std::size_t>(problem.shape.num_experts)),
        failure_(1),
        arrived_(kRanks * static_cast<std::size_t>(problem.shape.num_experts)),
        expected_(kRanks * static_cast<std::size_t>(problem.shape.num_experts)) {
    for (auto& part : windows_) part = TypedMemory<char>(moe::comm::kWindowControlBytes);
    check_cuda(cudaMemcpy(rows_.data(), p_.x.data(), row_bytes_ * static_cast<std::size_t>(p_.tokens), cudaMemcpyDeviceToHost), "rows");
    if (scales_ > 0) {
      check_cuda(
          cudaMemcpy(row_scales_.data(), p_.x_scales.data(), 4 * scales_ * static_cast<std::size_t>(p_.tokens), cudaMemcpyDeviceToHost),
          "scales");
    }
    ids_ = p_.ids.download();
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  Delivery(Delivery const&) = delete;
  Delivery& operator=(Delivery const&) = delete;
  ~Delivery() { cudaStreamDestroy(stream_); }

  /// No row has come; what lies in their places is NaN. `tokens`: the first tokens of the problem, which have rows.
  void reset(int tokens) {
    tokens_ = tokens;
    int const experts = p_.shape.num_experts;
    std::vector<std::uint64_t> expected(static_cast<std::size_t>(kRanks * experts));
    std::fill_n(counts_.data(), expected.size(), 0U);
    for (int t = 0; t < tokens; ++t) {
      for (int j = 0; j < p_.shape.topk; ++j) {
        if (int const e = id(t, j); e >= 0) ++counts_.data()[static_cast<std::size_t>(t % kRanks * experts + e)];
      }
    }
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = moe::comm::count_word(1, 0, counts_.data()[i]);
    expected_.upload(expected);
    arrived_.fill_bytes(0);
    for (auto const& part : windows_) part.fill_bytes(0);
    std::memset(failure_.data(), 0, sizeof(moe::comm::FailureRecord));
    p_.x.fill_bytes(0xFF);
    if (scales_ > 0) p_.x_scales.fill_bytes(0xFF);
    check_cuda(cudaDeviceSynchronize(), "reset");
  }
  /// All rows at once, for a call that does not wait.
  void deliver_before() {
    deliver(Order::together);
    check_cuda(cudaStreamSynchronize(stream_), "deliver");
  }
  /// Enqueues the rows of every expert but `without`, each expert's counts after its rows.
  void deliver(Order order, int without = -1) {
    std::vector<int> experts(static_cast<std::size_t>(p_.shape.num_experts));
    std::iota(experts.begin(), experts.end(), 0);
    if (order == Order::descending) std::reverse(experts.begin(), experts.end());
    std::vector<bool> sent(static_cast<std::size_t>(tokens_), false);
    auto const send = [&](int t) {
      auto const at = static_cast<std::size_t>(t);
      if (sent[at]) return;
      sent[at] = true;
      copy(p_.x.data() + at * row_bytes_, rows_.data() + at * row_bytes_, row_bytes_);
      if (scales_ > 0) copy(p_.x_scales.data() + at * scales_, row_scales_.data() + at * scales_, 4 * scales_);
    };
    if (order == Order::together) {
      for (int t = 0; t < tokens_; ++t) send(t);
    }
    for (int e : experts) {
      for (int rank = 0; rank < kRanks; ++rank) {
        if (e == without && rank == kRanks - 1) continue;
        for (int t = rank; t < tokens_; t += kRanks) {
          for (int j = 0; j < p_.shape.topk; ++j) {
            if (id(t, j) == e) send(t);
          }
        }
        auto const at = static_cast<std::size_t>(rank * p_.shape.num_experts + e);
        copy(arrived_.data() + at, counts_.data() + at, 4);
      }
    }
  }
  moe::comm::Arrivals arrivals(std::uint64_t timeout_ns) const {
    moe::comm::Arrivals a{};
    for (int r = 0; r < kRanks; ++r) a.window.peer[r] = windows_[r].data();
    a.window.size = kRanks;
    a.window.failure = failure_.data();
    a.window.timeout_ns = timeout_ns;
    a.arrived = arrived_.data();
    a.expected = expected_.data();
    a.stride = a.experts = p_.shape.num_experts;
    return a;
  }
  moe::comm::FailureRecord failure() const { return *failure_.data(); }
  int rows_from(int rank, int expert) const {
    return static_cast<int>(counts_.data()[static_cast<std::size_t>(rank * p_.shape.num_experts + expert)]);
  }

 private:
  /// The expert of choice j, or -1 for none here.
  int id(int t, int j) const {
    int const e = ids_[static_cast<std::size_t>(t * p_.shape.topk + j)];
    return e >= 0 && e < p_.shape.num_experts ? e : -1;
  }
  void copy(void* to, void const* from, std::size_t bytes) {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
  }

  Problem const& p_;
  std::size_t row_bytes_, scales_;
  Pinned<char> rows_;
  Pinned<float> row_scales_;
  Pinned<std::uint32_t> counts_;
  Pinned<moe::comm::FailureRecord> failure_;
  TypedMemory<std::uint32_t> arrived_;
  TypedMemory<std::uint64_t> expected_;
  TypedMemory<char> windows_[kRanks];
  std::vector<std::int32_t> ids_;
  cudaStream_t stream_ = nullptr;
  int tokens_ = 0;
};

constexpr std::uint64_t kLong = 20'000'000'000ULL;

class HopperArrivals : public testing::TestWithParam<Scheme> {
 protected:
  void SetUp() override {
    if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  void TearDown() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  static std::vector<Tuning> tunings() {
    std::vector<Tuning> all;
    for (int rows : GetParam() == Scheme::fp8_block ? std::vector<int>{16, 64, 80, kBlockRows} : std::vector<int>{16, 64, 160}) {
      for (int cluster : {1, 2}) {
        Tuning t{};
        t.tile_rows = rows;
        t.cluster = cluster;
        if (cluster == 1 || rows >= kBlockRows) all.push_back(t);
        t.column_blocks = 3;  // sums in the kernel of the products
        if (rows >= kBlockRows) all.push_back(t);
      }
    }
    return all;
  }
  static Features features() {
    Features f{};
    f.quantized_x = GetParam() == Scheme::fp8_block;
    return f;
  }

  /// Three late calls between calls whose rows are all there, on one layer: the same bits, which are right.
  void check(LocalShape shape, int tokens, Pattern pattern, Tuning const& tuning, int valid = -1) {
    Problem const problem(shape, GetParam(), tokens, pattern, 40 + static_cast<std::uint64_t>(tokens), features());
    Delivery delivery(problem);
    ContiguousLayer const layer(shape, GetParam(), problem.layer_weights(), LayerOptions{}, launcher_with_columns(GetParam()));
    TypedMemory<char> const workspace(static_cast<std::size_t>(layer.workspace_bytes(tokens)));
    TypedMemory<char> const out(static_cast<std::size_t>(tokens) * shape.hidden * 2);
    TypedMemory<std::int32_t> const count(1);
    int const rows = valid < 0 ? tokens : valid;
    count.upload({rows});
    LayerCall call = problem.call(out.data());
    call.num_tokens = count.data();
    auto const run = [&](moe::comm::Arrivals const* arrivals) {
      call.arrivals = arrivals;
      layer.forward(call, tuning, workspace.data(), stream_);
    };
    auto const result = [&] {
      EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
      return out.download();
    };
    auto const poison = [&] {
      workspace.fill_bytes(0xFF);
      out.fill_bytes(0xFF);
      check_cuda(cudaDeviceSynchronize(), "poison");  // stream_ does not wait for the default stream
    };
    delivery.reset(rows);
    delivery.deliver_before();
    poison();
    run(nullptr);
    std::vector<char> const want = result();
    if (rows == tokens) {
      EXPECT_LT(compare(problem, out.data(), 64).relative, tolerance(GetParam(), tokens)) << "the call whose rows are all there";
    }
    for (Order order : {Order::descending, Order::ascending, Order::together}) {
      delivery.reset(rows);
      poison();
      auto const arrivals = delivery.arrivals(kLong);
      run(&arrivals);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      delivery.deliver(order);
      EXPECT_TRUE(want == result()) << "order " << static_cast<int>(order) << ", " << tokens << " tokens, " << tuning;
      EXPECT_EQ(delivery.failure().code, 0U);
      poison();
      run(nullptr);
      EXPECT_TRUE(want == result()) << "after order " << static_cast<int>(order) << ", " << tokens << " tokens, " << tuning;
    }
  }

  /// Batches: expert e has the first kCounts[e] of its rows, or all `capacity` of them. Their counts are there, the rows come late.
  void check_batches(LocalShape const& shape, int capacity, std::initializer_list<int> expected_rows) {
    constexpr int kCounts[] = {170, 0, 1, 17, 64};
    int const places = shape.num_experts * capacity;
    Problem problem(shape, GetParam(), places, Pattern::random, 77, features());
    std::vector<std::int32_t> counts, ids;
    for (int e = 0; e < shape.num_experts; ++e) {
      counts.push_back(std::min(kCounts[e % 5], capacity));
      for (int r = 0; r < capacity; ++r) ids.push_back(r < counts.back() ? e : -1);
    }
    problem.ids.upload(ids);
    Delivery delivery(problem);
    ContiguousLayer const layer(shape, GetParam(), problem.layer_weights(), LayerOptions{}, launcher_with_columns(GetParam()));
    TypedMemory<char> const workspace(static_cast<std::size_t>(layer.workspace_bytes(places)));
    TypedMemory<char> const out(static_cast<std::size_t>(places) * shape.hidden * 2);
    TypedMemory<std::int32_t> const device_counts(counts.size());
    device_counts.upload(counts);
    auto const arrivals = delivery.arrivals(kLong);
    float const* const scales = features().quantized_x ? problem.x_scales.data() : nullptr;
    auto const run = [&](int expected, bool late, Order order) {
      delivery.reset(places);
      workspace.fill_bytes(0xFF);
      out.fill_bytes(0xFF);
      check_cuda(cudaDeviceSynchronize(), "poison");  // stream_ does not wait for the default stream
      if (!late) delivery.deliver_before();
      layer.forward_batched(problem.x.data(), device_counts.data(), capacity, expected, out.data(), workspace.data(), stream_, scales,
                            nullptr, late ? &arrivals : nullptr);
      if (late) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        delivery.deliver(order);
      }
      EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
      EXPECT_EQ(delivery.failure().code, 0U);
      return out.download();
    };
    for (int expected : expected_rows) {
      std::vector<char> const want = run(expected, false, Order::together);
      for (Order order : {Order::descending, Order::ascending, Order::together}) {
        EXPECT_TRUE(want == run(expected, true, order)) << "order " << static_cast<int>(order) << ", expected rows " << expected;
        EXPECT_TRUE(want == run(expected, false, order)) << "after order " << static_cast<int>(order) << ", expected rows " << expected;
      }
    }
  }

  /// A layer, and a call of it whose rows are all there: `want` is its output. Later calls may wait for their rows.
  struct LateCall {
    static constexpr LocalShape kShape{8, 1024, 256, 2};
    static constexpr int kTokens = 400;
    Tuning tuning;
    cudaStream_t stream;
    Problem const problem;
    Delivery delivery;
    ContiguousLayer const layer;
    TypedMemory<char> const workspace, out;
    LayerCall call;
    std::vector<char> want;

    LateCall(Tuning const& tuning_, cudaStream_t stream_, std::uint64_t seed)
        : tuning(tuning_),
          stream(stream_),
          problem(kShape, GetParam(), kTokens, Pattern::random, seed, features()),
          delivery(problem),
          layer(kShape, GetParam(), problem.layer_weights(), LayerOptions{}, launcher_with_columns(GetParam())),
          workspace(static_cast<std::size_t>(layer.workspace_bytes(kTokens))),
          out(static_cast<std::size_t>(kTokens) * kShape.hidden * 2),
          call(problem.call(out.data())) {
      delivery.reset(kTokens);
      delivery.deliver_before();
      forward();
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      want = out.download();
    }
    void forward() const { layer.forward(call, tuning, workspace.data(), stream); }
  };

  cudaStream_t stream_ = nullptr;
};

TEST_P(HopperArrivals, LateRowsGiveTheSameBits) {
  for (Tuning const& tuning : tunings()) {
    check({8, 1024, 256, 2}, 700, Pattern::random, tuning);
    check({5, 1152, 384, 3}, 333, Pattern::some_missing, tuning);
    check({3, 7168, 128, 1}, 64, Pattern::random, tuning);
  }
}

TEST_P(HopperArrivals, LateRowsOfBatchesGiveTheSameBits) {
  for (LocalShape const shape : {LocalShape{8, 1024, 256, 1}, LocalShape{5, 1152, 384, 1}, LocalShape{1, 512, 128, 1}}) {
    check_batches(shape, 170, {1, 16, 64, 170});
  }
}

/// For compute-sanitizer, under which a larger case takes minutes.
TEST_P(HopperArrivals, FewUnits) {
  for (Tuning const& tuning : tunings()) check({2, 256, 128, 2}, 9, Pattern::random, tuning);
  check_batches({2, 256, 128, 1}, 9, {1, 64});
}

TEST_P(HopperArrivals, OneExpertTakesAllOrNone) {
  for (Tuning const& tuning : tunings()) {
    for (int tokens : {1, 40, 700}) {
      check({8, 512, 256, 2}, tokens, Pattern::one_expert, tuning);
      check({8, 512, 256, 2}, tokens, Pattern::all_missing, tuning);
    }
    check({64, 512, 256, 4}, 200, Pattern::few_experts, tuning);
  }
}

TEST_P(HopperArrivals, FewOfTheRowsThatFit) {
  for (Tuning const& tuning : tunings()) {
    for (int valid : {0, 1, 129}) check({8, 512, 256, 2}, 500, Pattern::random, tuning, valid);
  }
}

TEST_P(HopperArrivals, ACapturedCallWaitsAtEveryReplay) {
  for (Tuning const& tuning : tunings()) {
    LateCall late(tuning, stream_, 9);
    auto const arrivals = late.delivery.arrivals(kLong);
    late.call.arrivals = &arrivals;
    moe::CudaGraph const graph(stream_, [&] { late.forward(); });
    for (Order order : {Order::descending, Order::ascending}) {
      late.delivery.reset(LateCall::kTokens);
      late.out.fill_bytes(0xFF);
      graph.launch(stream_);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      late.delivery.deliver(order);
      ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
      EXPECT_TRUE(late.want == late.out.download()) << tuning;
      EXPECT_EQ(late.delivery.failure().code, 0U);
    }
  }
}

TEST_P(HopperArrivals, RowsThatNeverComeEndByTheDeadline) {
  for (Tuning const& tuning : tunings()) {
    LateCall late(tuning, stream_, 3);

    late.delivery.reset(LateCall::kTokens);
    constexpr int kMissing = 5;
    ASSERT_GT(late.delivery.rows_from(kRanks - 1, kMissing), 0);
    auto const arrivals = late.delivery.arrivals(300'000'000ULL);
    late.call.arrivals = &arrivals;
    late.forward();
    late.delivery.deliver(Order::ascending, kMissing);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_EQ(late.delivery.failure().code, 1U + static_cast<std::uint32_t>(moe::ErrorCode::timeout));
    EXPECT_EQ(late.delivery.failure().peer, kRanks - 1);

    late.delivery.reset(LateCall::kTokens);
    late.forward();
    late.delivery.deliver(Order::ascending);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_TRUE(late.want == late.out.download()) << "after a failure, " << tuning;
  }
}

TEST(HopperArrivalsRefused, SchemesThatQuantiseOnTheWay) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  for (Scheme scheme : {Scheme::fp8_block, Scheme::fp8_row, Scheme::int8_row}) {
    Problem const problem({4, 256, 256, 2}, scheme, 8, Pattern::random, 1);
    ContiguousLayer const layer(problem.shape, scheme, problem.layer_weights());
    TypedMemory<char> const memory(1 << 22);
    LayerCall call = problem.call(memory.data());
    moe::comm::Arrivals const arrivals{};
    call.arrivals = &arrivals;
    EXPECT_THROW(layer.forward(call, memory.data(), nullptr), moe::Error) << name(scheme);
  }
}

INSTANTIATE_TEST_SUITE_P(Schemes, HopperArrivals, testing::Values(Scheme::bf16, Scheme::fp8_block),
                         [](auto const& info) { return std::string(name(info.param)); });

}  // namespace
