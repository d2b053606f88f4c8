// SPDX-License-Identifier: Apache-2.0
// tests/comm_exchange_harness.cuh: exchanges over a Communicator of the device, with the batches and the experts of the host's tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "moe/backends/collective/device/all_to_all_v.cuh"
#include "moe/backends/collective/device/gather_exchange.cuh"
#include "moe/core/buffer.hpp"
#include "moe/core/cuda_graph.hpp"
#include "moe/quantization/none.hpp"
#include "tests/exchange_batch.hpp"
#include "tests/factor_experts.cuh"

namespace moe_test {

using moe::backends::Sizes;

static __global__ void occupy(long long clocks) {
  long long const start = clock64();
  while (clock64() - start < clocks) {
  }
}

template <class Backend, class Act = float, class Quant = moe::quantization::None, class Partial = float>
class DeviceHarness {
 public:
  using Cfg = Config<Act>;
  using Exchange = typename Backend::template Exchange<Cfg, Quant, Partial>;
  static_assert(moe::PrepareAndFinalize<Backend>);
  static_assert(moe::ExchangeOf<Exchange, Cfg>);

  struct Setup {
    std::int64_t hidden = 32;
    int num_experts = 7;
    int k = 3;
    std::int64_t max_tokens = 8;
    moe::PlacementStrategy strategy = moe::PlacementStrategy::linear;
    std::int64_t max_recv_rows = 0;
    Sizes sizes = Sizes::exact;
  };

  DeviceHarness(typename Backend::Comm& comm, Setup const& s)
      : setup_(s),
        placement_(s.num_experts, comm.size(), s.strategy, true),
        x_(s.max_tokens * s.hidden),
        out_(s.max_tokens * s.hidden),
        ids_(s.max_tokens * s.k),
        weights_(s.max_tokens * s.k),
        exchange_(comm, moe::Shape<Cfg>({s.hidden, 8, s.num_experts, s.k}), s.max_tokens, placement_, Quant{}, params(s), arena_),
        physical_(s.num_experts) {
    arena_.seal();
    auto const owned = placement_.local_to_physical(comm.rank());
    num_local_ = static_cast<int>(owned.size());
    moe::Memory<moe::space::cuda>::copy_from_host(physical_.data(), owned.data(), owned.size() * sizeof(std::int32_t));
  }

  Exchange& exchange() { return exchange_; }
  moe::CudaStream& stream() { return stream_; }

  /// Copies a batch to the device; a batch with more rows than fit is truncated, but keeps its row count.
  moe::RoutedTokens<Act> upload(Batch<Act> const& b) {
    auto const rows = static_cast<std::size_t>(std::min(b.rows, setup_.max_tokens));
    auto copy = [](auto& to, auto const& from, std::size_t n) {
      moe::Memory<moe::space::cuda>::copy_from_host(to.data(), from.data(), n * sizeof(from[0]));
    };
    copy(x_, b.x, rows * static_cast<std::size_t>(b.hidden));
    copy(ids_, b.ids, rows * static_cast<std::size_t>(b.k));
    copy(weights_, b.weights, rows * static_cast<std::size_t>(b.k));
    std::vector<Act> const poison(rows * static_cast<std::size_t>(b.hidden), moe::from_float<Act>(-77.0F));
    copy(out_, poison, poison.size());
    return {moe::make_rows(static_cast<Act const*>(x_.data()), b.rows, b.hidden),
            moe::make_rows(static_cast<std::int32_t const*>(ids_.data()), b.rows, b.k),
            moe::make_rows(static_cast<float const*>(weights_.data()), b.rows, b.k)};
  }
  template <class Tokens>
  void run_experts(Tokens const& tokens) {
    auto const y = exchange_.expert_output();
    EXPECT_EQ(y.extent(0), tokens.rows.extent(0));
    EXPECT_LE(y.extent(0), exchange_.max_rows());
    if (y.extent(0) > 0) {
      factor_experts<Act><<<static_cast<unsigned>(y.extent(0)), 32, static_cast<std::size_t>(setup_.hidden) * sizeof(float), stream_>>>(
          Quant{}, tokens, physical_.data(), num_local_, static_cast<int>(setup_.hidden), y.data_handle());
      moe::check_launch("factor_experts");
    }
  }
  moe::Rows<Act> output(std::int64_t rows) { return moe::make_rows(out_.data(), rows, setup_.hidden); }
  std::vector<Act> download(std::int64_t rows) {
    std::vector<Act> out(static_cast<std::size_t>(rows * setup_.hidden));
    moe::Memory<moe::space::cuda>::copy_to_host(out.data(), out_.data(), out.size() * sizeof(Act));
    return out;
  }
  void enqueue(moe::RoutedTokens<Act> const& in) {
    run_experts(exchange_.prepare(in, stream_));
    exchange_.finalize(output(in.hidden.extent(0)), stream_);
  }
  std::vector<Act> forward(Batch<Act> const& b) {
    enqueue(upload(b));
    exchange_.wait(stream_);
    return download(b.rows);
  }
  void compare(Batch<Act> const& b, std::vector<Act> const& out, std::string const& what) const {
    for (std::int64_t t = 0; t < b.rows; ++t) {
      for (std::int64_t h = 0; h < b.hidden; ++h) {
        ASSERT_EQ(moe::to_float(out[static_cast<std::size_t>(t * b.hidden + h)]), b.expected(t, h, setup_.num_experts))
            << what << " token " << t << " column " << h;
      }
    }
  }
  void check(Batch<Act> const& b, std::string const& what = "") { compare(b, forward(b), what); }

 private:
  static typename Backend::Params params(Setup const& s) {
    typename Backend::Params p{};
    p.sizes = s.sizes;
    if constexpr (requires { p.max_recv_rows; }) {
      p.max_recv_rows = s.max_recv_rows;
    }
    return p;
  }
  Setup setup_;
  moe::ExpertPlacement placement_;
  moe::Arena<moe::space::cuda> arena_;
  moe::CudaStream stream_;
  moe::Buffer<Act, moe::space::cuda> x_, out_;
  moe::Buffer<std::int32_t, moe::space::cuda> ids_;
  moe::Buffer<float, moe::space::cuda> weights_;
  Exchange exchange_;
  moe::Buffer<std::int32_t, moe::space::cuda> physical_;
  int num_local_ = 0;
};

/// Rounds of fixed sizes, captured once and replayed with other rows.
template <class Harness>
void expect_graph_replays(Harness& h, int rank) {
  auto const in = h.upload(random_batch<float>(rank, 0, 8, 32, 3, 7));
  h.enqueue(in);  // NCCL must connect and modules must load outside the capture
  h.exchange().wait(h.stream());
  moe::CudaGraph const graph(h.stream(), [&] { h.enqueue(in); });
  for (int round = 1; round <= 20; ++round) {
    auto const b = random_batch<float>(rank, round, 8, 32, 3, 7);
    h.upload(b);
    graph.launch(h.stream());
    h.exchange().wait(h.stream());
    h.compare(b, h.download(8), moe::text("replay ", round));
  }
}

}  // namespace moe_test
