// SPDX-License-Identifier: Apache-2.0
// bench/runner_bench.cu: what a block costs on the device around its layer: the gate's kernel against cuBLASLt, and gate, shared experts
// and finish in one graph against their products alone, for three gates: in bf16, in float32 with values of bf16, and in float32. Weights
// rotate, so that they come from memory. Gates are checked before they are timed; shared experts and finish are not.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench/arguments.hpp"
#include "bench/bench_report.hpp"
#include "moe/core/cuda_graph.hpp"
#include "moe/runner/device/dense_shared.cuh"
#include "moe/runner/device/row_kernels.cuh"

namespace {

using namespace moe;
using Cuda = space::cuda;
using runner::Sums;

template <class T>
Buffer<T, Cuda> normals(std::int64_t n, float sigma) {
  static std::mt19937 gen(1);
  std::normal_distribution<float> normal(0.0F, sigma);
  std::vector<T> values(static_cast<std::size_t>(n));
  std::size_t const period = std::min<std::size_t>(values.size(), 1 << 20);  // as random as the check needs
  for (std::size_t i = 0; i < period; ++i) values[i] = from_float<T>(normal(gen));
  for (std::size_t i = period; i < values.size(); ++i) values[i] = values[i - period];
  Buffer<T, Cuda> out(n);
  out.copy_from_host(values.data());
  return out;
}

/// Microseconds of one body(i): the median over launches of a graph with `bodies` of them.
double graph_time(int bodies, std::function<void(int, cudaStream_t)> const& body) {
  CudaStream stream;
  for (int i = 0; i < bodies; ++i) body(i, stream);
  stream.synchronize();
  CudaGraph const graph(stream, [&] {
    for (int i = 0; i < bodies; ++i) body(i, stream);
  });
  std::vector<double> times;
  CudaEvent begin, end;
  for (int i = 0; i < 25; ++i) {
    begin.record(stream);
    graph.launch(stream);
    end.record(stream);
    float const ms = end.since(begin);
    if (i >= 5) times.push_back(1000.0 * ms / bodies);
  }
  return moe_bench::median_and_spread(times).first;
}

/// The largest difference of n values over their root mean square.
double difference(Buffer<float, Cuda> const& a, Buffer<float, Cuda> const& b, std::int64_t n) {
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  std::vector<float> x(static_cast<std::size_t>(n)), y(x.size());
  Memory<Cuda>::copy_to_host(x.data(), a.data(), x.size() * sizeof(float));
  Memory<Cuda>::copy_to_host(y.data(), b.data(), y.size() * sizeof(float));
  double norm = 0, worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    norm += static_cast<double>(y[i]) * y[i];
    worst = std::max(worst, std::isfinite(x[i]) ? std::abs(static_cast<double>(x[i]) - y[i]) : 1e30);
  }
  return worst / std::sqrt(norm / static_cast<double>(x.size()));
}

/// The values of `from` in float32, times `factor`.
Buffer<float, Cuda> widened(bf16 const* from, std::int64_t n, float factor = 1.0F) {
  std::vector<bf16> host(static_cast<std::size_t>(n));
  Memory<Cuda>::copy_to_host(host.data(), from, host.size() * sizeof(bf16));
  std::vector<float> wide;
  for (bf16 v : host) wide.push_back(factor * to_float(v));
  Buffer<float, Cuda> out(n);
  out.copy_from_host(wide.data());
  return out;
}

constexpr float kOffBf16 = 1.0F + 0x1p-12F;  // a value of bf16 times this is none

struct Ring {
  std::int64_t size;
  int count;
  Buffer<bf16, Cuda> memory;
  Ring(std::int64_t n)
      : size(n),
        count(static_cast<int>(std::clamp<std::int64_t>((std::int64_t{80} << 20) / n, 2, 48))),
        memory(normals<bf16>(n * count, 0.02F)) {}
  bf16 const* at(int i) const { return memory.data() + i % count * size; }
};

void gate(std::int64_t hidden, std::int64_t experts) {
  std::int64_t const most = 4096;
  Ring const w(experts * hidden);
  auto const x = normals<bf16>(most * hidden, 1.0F);
  Buffer<float, Cuda> got(most * experts), want(most * experts), wide = widened(w.at(0), experts * hidden);
  Arena<Cuda> arena;
  std::vector<std::unique_ptr<runner::Linear<Cuda, bf16, bf16, float>>> own, blas;  // one algorithm for all rows; the best for each
  for (int i = 0; i < w.count; ++i) {
    Rows<bf16 const> const view = make_rows(w.at(i), experts, hidden);
    own.push_back(std::make_unique<runner::Linear<Cuda, bf16, bf16, float>>(view, nullptr, Sums::per_row, most, arena));
    blas.push_back(std::make_unique<runner::Linear<Cuda, bf16, bf16, float>>(view, nullptr, Sums::blocked, most, arena));
  }
  using Float32 = runner::Linear<Cuda, float, bf16, float>;
  Rows<float const> const wide_view = make_rows(static_cast<float const*>(wide.data()), experts, hidden);
  Float32 const exact(wide_view, nullptr, Sums::per_row, most, arena, runner::WeightReads::every_call);
  std::vector<std::unique_ptr<Float32>> narrow;  // float32 weights with values of bf16
  for (int i = 0; i < w.count; ++i) {
    Buffer<float, Cuda> const values = widened(w.at(i), experts * hidden);  // not read after the construction
    narrow.push_back(std::make_unique<Float32>(make_rows(values.data(), experts, hidden), nullptr, Sums::per_row, most, arena));
    if (narrow.back()->unread_weight() == nullptr) {
      std::printf("gate H %5ld E %3ld: values of bf16 took %s\n", hidden, experts, narrow.back()->choice().c_str());
      return;
    }
  }
  for (std::int64_t const m : {1, 16, 32, 64, 128, 256, 4096}) {
    Rows<bf16 const> const rows = make_rows(static_cast<bf16 const*>(x.data()), m, hidden);
    auto const kernel = [&](int i, cudaStream_t stream) {
      runner::device::small_product<bf16, bf16, float>({.x = x.data(),
                                                        .x_stride = hidden,
                                                        .w = w.at(i),
                                                        .w_stride = hidden,
                                                        .bias = nullptr,
                                                        .y = got.data(),
                                                        .y_stride = experts,
                                                        .rows = static_cast<int>(m),
                                                        .n = static_cast<int>(experts),
                                                        .k = static_cast<int>(hidden),
                                                        .log_cluster = 0},
                                                       runner::device::choose_small_product(m, experts, hidden), stream);
    };
    kernel(0, nullptr);
    blas[0]->apply(rows, make_rows(want.data(), m, experts), nullptr);
    double const off = difference(got, want, m * experts);
    exact.apply(rows, make_rows(got.data(), m, experts), nullptr);
    double const off_exact = difference(got, want, m * experts);
    own[0]->apply(rows, make_rows(got.data(), m, experts), nullptr);
    double const off_per_row = difference(got, want, m * experts);
    narrow[0]->apply(rows, make_rows(got.data(), m, experts), nullptr);
    double const off_narrow = difference(got, want, m * experts);
    if (off > 1e-4 || off_exact > 1e-4 || off_per_row > 1e-4 || off_narrow > 1e-4) {
      std::printf("gate H %5ld E %3ld M %4ld: WRONG by %g, per row %g, float32 %g, float32 with values of bf16 %g\n", hidden, experts, m,
                  off, off_per_row, off_exact, off_narrow);
      continue;
    }
    auto const time = [&](auto const& products) {
      return graph_time(48, [&](int i, cudaStream_t s) {
        products[static_cast<std::size_t>(i % w.count)]->apply(rows, make_rows(got.data(), m, experts), s);
      });
    };
    std::printf(
        "gate H %5ld E %3ld M %4ld: own %7.2f us, cublasLt %7.2f us, per row %7.2f us, float32 with values of bf16 %7.2f us, "
        "float32 (in L2) %7.2f us\n",
        hidden, experts, m, graph_time(48, kernel), time(blas), time(own), time(narrow),
        graph_time(48, [&](int, cudaStream_t s) { exact.apply(rows, make_rows(got.data(), m, experts), s); }));
    std::fflush(stdout);
  }
}

/// DeepSeek-V3: hidden 7168, 256 experts, one shared expert of 2048. The products are the same for the three gates: cuBLASLt's in bf16.
void block(std::int64_t m) {
  constexpr std::int64_t kHidden = 7168, kExperts = 256, kShared = 2048;
  constexpr int kSets = 3;
  auto const x = normals<bf16>(m * kHidden, 1.0F);
  auto const routed = normals<bf16>(m * kHidden, 1.0F);
  Buffer<float, Cuda> logits(m * kExperts);
  Buffer<bf16, Cuda> out(m * kHidden), mid(m * 2 * kShared), half(m * kShared);
  check_cuda(cudaMemset(half.data(), 0, half.bytes()), "cudaMemset");
  Arena<Cuda> arena;
  struct Set {
    Buffer<bf16, Cuda> gate, w13, w2;
    Buffer<float, Cuda> exact, wide;  // the gate in float32: with its values, and with others
    std::unique_ptr<runner::Linear<Cuda, bf16, bf16, float>> own, blas;
    std::unique_ptr<runner::Linear<Cuda, float, bf16, float>> exact_gate, wide_gate;
    std::unique_ptr<runner::Linear<Cuda, bf16, bf16, bf16>> up, down;
    std::unique_ptr<runner::device::DenseShared<bf16>> shared;
  };
  std::vector<Set> sets(kSets);
  for (Set& s : sets) {
    s.gate = normals<bf16>(kExperts * kHidden, 0.02F);
    s.w13 = normals<bf16>(2 * kShared * kHidden, 0.02F);
    s.w2 = normals<bf16>(kShared * kHidden, 0.02F);
    auto const view = [](Buffer<bf16, Cuda> const& b, std::int64_t n, std::int64_t k) { return make_rows(b.data(), n, k); };
    s.own = std::make_unique<runner::Linear<Cuda, bf16, bf16, float>>(view(s.gate, kExperts, kHidden), nullptr, Sums::per_row, m, arena);
    s.blas = std::make_unique<runner::Linear<Cuda, bf16, bf16, float>>(view(s.gate, kExperts, kHidden), nullptr, Sums::blocked, m, arena);
    s.exact = widened(s.gate.data(), kExperts * kHidden);
    s.wide = widened(s.gate.data(), kExperts * kHidden, kOffBf16);
    auto const float32 = [&](Buffer<float, Cuda> const& b) {
      return std::make_unique<runner::Linear<Cuda, float, bf16, float>>(make_rows(b.data(), kExperts, kHidden), nullptr, Sums::per_row, m,
                                                                        arena);
    };
    s.exact_gate = float32(s.exact);
    s.wide_gate = float32(s.wide);
    s.up = std::make_unique<runner::Linear<Cuda, bf16, bf16, bf16>>(view(s.w13, 2 * kShared, kHidden), nullptr, Sums::blocked, m, arena);
    s.down = std::make_unique<runner::Linear<Cuda, bf16, bf16, bf16>>(view(s.w2, kHidden, kShared), nullptr, Sums::blocked, m, arena);
    runner::device::DenseSharedParams<bf16> p;
    p.weights.w13 = {make_blocks(static_cast<bf16 const*>(s.w13.data()), 1, 2 * kShared, kHidden), {}, {}, 2 * kShared, kHidden};
    p.weights.w2 = {make_blocks(static_cast<bf16 const*>(s.w2.data()), 1, kHidden, kShared), {}, {}, kHidden, kShared};
    s.shared = std::make_unique<runner::device::DenseShared<bf16>>(p, kHidden, m, arena);
  }
  Rows<bf16 const> const rows = make_rows(static_cast<bf16 const*>(x.data()), m, kHidden);
  auto const finish = [&](Set& s, cudaStream_t stream) {
    runner::FinishRows<bf16, bf16> f;
    f.routed = make_rows(static_cast<bf16 const*>(routed.data()), m, kHidden);
    f.output = make_rows(out.data(), m, kHidden);
    f.scale = 2.5F;
    f.shared = make_rows(static_cast<bf16 const*>(s.shared->output().data_handle()), m, kHidden);
    runner::RowKernels<Cuda>::finish(f, stream);
  };
  auto const outside = [&](auto const& gate) {
    return graph_time(12, [&](int i, cudaStream_t stream) {
      Set& s = sets[static_cast<std::size_t>(i % kSets)];
      gate(s).apply(rows, make_rows(logits.data(), m, kExperts), stream);
      s.shared->run(rows, {}, stream);
      finish(s, stream);
    });
  };
  auto const products = [&](int i, cudaStream_t stream) {
    Set& s = sets[static_cast<std::size_t>(i % kSets)];
    s.blas->apply(rows, make_rows(logits.data(), m, kExperts), stream);
    s.up->apply(rows, make_rows(mid.data(), m, 2 * kShared), stream);
    s.down->apply(make_rows(static_cast<bf16 const*>(half.data()), m, kShared), make_rows(out.data(), m, kHidden), stream);
  };
  Buffer<float, Cuda> want(m * kExperts);
  sets[0].blas->apply(rows, make_rows(want.data(), m, kExperts), nullptr);
  auto const off = [&](auto const& gate) {
    gate.apply(rows, make_rows(logits.data(), m, kExperts), nullptr);
    return difference(logits, want, m * kExperts);
  };
  if (off(*sets[0].own) > 1e-4 || off(*sets[0].exact_gate) > 1e-4 ||
      off(*sets[0].wide_gate) > 2e-3) {  // other values: 1 + 2^-12 times the weights, up to 5 sigma
    std::printf("outside M %4ld: WRONG by %g, float32 with values of bf16 %g, float32 %g\n", m, off(*sets[0].own), off(*sets[0].exact_gate),
                off(*sets[0].wide_gate));
    return;
  }
  double const b = graph_time(12, products);
  double const up = graph_time(12, [&](int i, cudaStream_t stream) {
    sets[static_cast<std::size_t>(i % kSets)].up->apply(rows, make_rows(mid.data(), m, 2 * kShared), stream);
  });
  double const down = graph_time(12, [&](int i, cudaStream_t stream) {
    sets[static_cast<std::size_t>(i % kSets)].down->apply(make_rows(static_cast<bf16 const*>(half.data()), m, kShared),
                                                          make_rows(out.data(), m, kHidden), stream);
  });
  double const end = graph_time(12, [&](int i, cudaStream_t stream) { finish(sets[static_cast<std::size_t>(i % kSets)], stream); });
  auto const print = [&](char const* name, double a, std::string const& choice) {
    std::printf("outside M %4ld: gate in %-25s: block %7.2f us, products %7.2f us, more %6.2f us (up %.2f, down %.2f, finish %.2f)%s%s\n",
                m, name, a, b, a - b, up, down, end, choice.empty() ? "" : "; ", choice.c_str());
  };
  print("bf16", outside([](Set const& s) -> auto const& { return *s.own; }), "");
  print("float32, values of bf16", outside([](Set const& s) -> auto const& { return *s.exact_gate; }), sets[0].exact_gate->choice());
  print("float32, other values", outside([](Set const& s) -> auto const& { return *s.wide_gate; }), sets[0].wide_gate->choice());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) return moe_bench::refuse("runner_bench", moe_bench::BadArgument(moe::text(argv[1], ": it takes no argument")));
  for (std::int64_t const m : {1, 16, 64, 128, 256, 1024}) block(m);
  gate(7168, 256);
  gate(2048, 64);
  gate(5120, 160);
}
