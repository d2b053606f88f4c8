// SPDX-License-Identifier: Apache-2.0
// tests/gpu/runner_rows_test.cu: what a block does with its rows on the device against the same arithmetic in double: the pass that
// finishes the output, norms, gates, copies; the side stream; and graphs of several sizes.
#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "device_values.cuh"
#include "expect_error.hpp"
#include "moe/comm/self.hpp"
#include "moe/core/cuda_graph.hpp"
#include "moe/runner/device/captured_sizes.hpp"
#include "moe/runner/device/row_kernels.cuh"
#include "moe/runner/device/side_stream.hpp"

namespace {

using namespace moe;
using moe_test::DeviceBuffer;
using moe_test::excess;
using moe_test::floats;
using moe_test::upload;
using moe_test::Values;
using moe_test::worst_error;
using Cuda = space::cuda;
using Kernels = runner::RowKernels<Cuda>;

struct FinishCase {
  std::int64_t rows, width;
  float scale = 1.0F;
  bool shared = false, zero = false, bias = false, normalise = false, norm_weight = false;
  float factor = 1.0F, shared_scale = 1.0F, zero_scale = 1.0F;
  std::int64_t pad = 0;  ///< columns past the width in routed and shared rows
  bool in_place = false;
};

constexpr int kExperts = 6, kTopk = 3;

template <class X, class S>
void finish_equals_double(FinishCase const& c) {
  SCOPED_TRACE(text(c.rows, " x ", c.width, " + ", c.pad));
  std::mt19937 gen(5);
  std::int64_t const stride = c.width + c.pad;
  Values<X> routed(c.rows * stride, 1.0F, gen);
  Values<S> const shared(c.rows * stride, 1.0F, gen);
  Values<X> const x(c.rows * c.width, 1.0F, gen);
  Values<float> const weights(c.rows * kTopk, 1.0F, gen);
  Values<float> const bias(c.width, 1.0F, gen);
  Values<float> const norm(c.width, 1.0F, gen);
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < c.rows * kTopk; ++i) ids.push_back(static_cast<std::int32_t>(gen() % (kExperts + 2)));
  auto const device_ids = upload(ids);
  DeviceBuffer<X> out(c.rows * c.width);

  runner::FinishRows<X, S> f;
  f.routed = routed.rows(c.rows, c.width, stride);
  f.output = c.in_place ? make_strided_rows(routed.device.data(), c.rows, c.width, stride) : make_rows(out.data(), c.rows, c.width);
  f.scale = c.scale;
  if (c.shared) {
    f.shared = shared.rows(c.rows, c.width, stride);
    f.shared_scale = c.shared_scale;
    f.factor = c.factor;
  }
  if (c.zero) {
    f.ids = make_rows(device_ids.data(), c.rows, kTopk);
    f.weights = weights.rows(c.rows, kTopk);
    f.x = x.rows(c.rows, c.width);
    f.num_experts = kExperts;
    f.topk = kTopk;
    f.zero_kind = routing::ZeroExpertKind::identity;
    f.zero_scale = c.zero_scale;
  }
  if (c.bias) f.bias = bias.device.data();
  f.normalise = c.normalise;
  f.norm = c.norm_weight ? norm.device.data() : nullptr;
  f.eps = 1e-5F;
  Kernels::finish(f, nullptr);

  std::vector<double> want;
  for (std::int64_t t = 0; t < c.rows; ++t) {
    double z = 0.0;
    for (int j = 0; j < kTopk; ++j) z += ids[static_cast<std::size_t>(t * kTopk + j)] >= kExperts ? weights.at(t * kTopk + j) : 0.0F;
    double squares = 0.0;
    std::vector<double> row;
    for (std::int64_t i = 0; i < c.width; ++i) {
      double v = routed.at(t * stride + i);
      if (c.zero) v += c.zero_scale * z * x.at(t * c.width + i);
      v *= c.scale;
      if (c.shared) v = c.factor * (v + static_cast<double>(c.shared_scale) * shared.at(t * stride + i));
      if (c.bias) v += bias.at(i);
      squares += v * v;
      row.push_back(v);
    }
    double const r = c.normalise ? 1.0 / std::sqrt(squares / static_cast<double>(c.width) + 1e-5) : 1.0;
    for (std::int64_t i = 0; i < c.width; ++i) {
      want.push_back(row[static_cast<std::size_t>(i)] * r * (c.normalise && c.norm_weight ? norm.at(i) : 1.0F));
    }
  }
  std::vector<float> got;
  if (c.in_place) {
    auto const all = floats(routed.device);
    for (std::int64_t t = 0; t < c.rows; ++t) got.insert(got.end(), all.begin() + t * stride, all.begin() + t * stride + c.width);
  } else {
    got = floats(out);
  }
  EXPECT_LE(excess<X>(got, want), 1.0);
}

TEST(RunnerFinish, EqualsDouble) {
  finish_equals_double<bf16, bf16>({.rows = 5, .width = 2048, .scale = 2.5F, .shared = true});
  finish_equals_double<bf16, float>({.rows = 3, .width = 1032, .shared = true, .factor = 0.5F});
  finish_equals_double<bf16, bf16>({.rows = 9, .width = 64, .scale = 2.0F, .zero = true, .zero_scale = 1.5F});
  finish_equals_double<f16, f16>({.rows = 2, .width = 520, .shared = true, .shared_scale = 0.4F});
  finish_equals_double<float, float>({.rows = 4, .width = 72, .scale = 0.5F, .shared = true, .zero = true, .bias = true});
}
TEST(RunnerFinish, Norms) {
  finish_equals_double<bf16, bf16>({.rows = 5, .width = 2048, .shared = true, .normalise = true, .norm_weight = true});
  finish_equals_double<float, float>({.rows = 3, .width = 96, .shared = true, .zero = true, .bias = true, .normalise = true});
  finish_equals_double<bf16, bf16>({.rows = 2, .width = 16384, .normalise = true, .norm_weight = true});
  finish_equals_double<float, float>({.rows = 3, .width = 37, .bias = true, .normalise = true, .norm_weight = true});
}
TEST(RunnerFinish, OddWidthsStridesAndInPlace) {
  finish_equals_double<bf16, bf16>({.rows = 7, .width = 33, .scale = 1.5F, .shared = true, .zero = true, .bias = true});
  finish_equals_double<bf16, bf16>({.rows = 4, .width = 40, .scale = 1.5F, .shared = true, .pad = 24});
  finish_equals_double<bf16, bf16>({.rows = 4, .width = 40, .shared = true, .pad = 3});
  finish_equals_double<bf16, bf16>({.rows = 4, .width = 264, .scale = 1.5F, .shared = true, .bias = true, .pad = 8, .in_place = true});
  finish_equals_double<float, float>({.rows = 4, .width = 264, .scale = 1.5F, .normalise = true, .in_place = true});
}
// Routed values that f16 holds and 2.5 times them does not: with the factor on the shared output instead nothing overflows, and 2.5 times
// the block's output is what bf16 gives.
TEST(RunnerFinish, N19_ScalingInF16OfLargeValues) {
  constexpr std::int64_t kWidth = 520;
  auto const block = [&]<class T>(T, float routed_scale, float shared_scale) {
    DeviceBuffer<T> routed = upload(std::vector<T>(kWidth, from_float<T>(40'000.0F)));
    DeviceBuffer<T> shared = upload(std::vector<T>(kWidth, from_float<T>(-9'000.0F))), out(kWidth);
    runner::FinishRows<T, T> f;
    f.routed = make_rows(static_cast<T const*>(routed.data()), 1, kWidth);
    f.output = make_rows(out.data(), 1, kWidth);
    f.shared = make_rows(static_cast<T const*>(shared.data()), 1, kWidth);
    f.scale = routed_scale;
    f.shared_scale = shared_scale;
    Kernels::finish(f, nullptr);
    return floats(out);
  };
  std::vector<float> const want = block(bf16{}, 2.5F, 1.0F), plain = block(f16{}, 2.5F, 1.0F), got = block(f16{}, 1.0F, 1 / 2.5F);
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_GT(want[i], 65'504.0F);
    ASSERT_TRUE(std::isinf(plain[i])) << "the factor on the routed output overflows";
    ASSERT_NEAR(2.5F * got[i], want[i], want[i] / 128);
  }
}
TEST(RunnerFinish, ARowWithoutZeroExpertsDoesNotReadItsInput) {
  DeviceBuffer<float> x = upload(std::vector<float>(8, std::numeric_limits<float>::quiet_NaN()));
  DeviceBuffer<float> routed = upload(std::vector<float>(8, 1.0F));
  DeviceBuffer<float> weights = upload(std::vector<float>{0.5F});
  auto const ids = upload(std::vector<std::int32_t>{2});
  runner::FinishRows<float, float> f;
  f.routed = make_rows(static_cast<float const*>(routed.data()), 1, 8);
  f.output = make_rows(routed.data(), 1, 8);
  f.x = make_rows(static_cast<float const*>(x.data()), 1, 8);
  f.ids = make_rows(ids.data(), 1, 1);
  f.weights = make_rows(static_cast<float const*>(weights.data()), 1, 1);
  f.num_experts = 4;
  f.topk = 1;
  f.zero_kind = routing::ZeroExpertKind::identity;
  Kernels::finish(f, nullptr);
  EXPECT_EQ(floats(routed), std::vector<float>(8, 1.0F));
}
TEST(RunnerFinish, WrongSizesAreRefused) {
  DeviceBuffer<float> a(64);
  runner::FinishRows<float, float> f;
  f.routed = make_rows(static_cast<float const*>(a.data()), 2, 8);
  f.output = make_rows(a.data(), 2, 16);
  moe_test::expect_error(ErrorCode::argument, "finish: routed: 2 x 8, expected 2 x 16", [&] { Kernels::finish(f, nullptr); });
  f.output = make_rows(a.data(), 2, 8);
  f.shared = make_rows(static_cast<float const*>(a.data()), 1, 8);
  moe_test::expect_error(ErrorCode::argument, "finish: shared output: 1 x 8", [&] { Kernels::finish(f, nullptr); });
  f.shared = {};
  f.routed = make_rows(static_cast<float const*>(a.data()), 0, 8);
  f.output = make_rows(a.data(), 0, 8);
  Kernels::finish(f, nullptr);  // no rows, no work
}

template <class X, class Y>
void rms_norm_equals_double(std::int64_t rows, std::int64_t width, bool weighted) {
  std::mt19937 gen(6);
  Values<X> const x(rows * width, 3.0F, gen);
  Values<float> const weight(width, 1.0F, gen);
  DeviceBuffer<Y> y(rows * width);
  Kernels::rms_norm(x.rows(rows, width), weighted ? weight.device.data() : nullptr, 1e-6F, 0.25F, make_rows(y.data(), rows, width),
                    nullptr);
  std::vector<double> want;
  for (std::int64_t t = 0; t < rows; ++t) {
    double squares = 0.0;
    for (std::int64_t i = 0; i < width; ++i) squares += static_cast<double>(x.at(t * width + i)) * x.at(t * width + i);
    double const r = 1.0 / std::sqrt(squares / static_cast<double>(width) + 1e-6);
    for (std::int64_t i = 0; i < width; ++i) want.push_back(x.at(t * width + i) * r * 0.25 * (weighted ? weight.at(i) : 1.0F));
  }
  EXPECT_LE(excess<Y>(floats(y), want), 1.0);
}
TEST(RunnerRows, RmsNorm) {
  rms_norm_equals_double<bf16, bf16>(4, 7168, true);
  rms_norm_equals_double<bf16, float>(3, 2048, false);
  rms_norm_equals_double<float, float>(5, 45, true);
  rms_norm_equals_double<f16, f16>(2, 512, true);
}
TEST(RunnerRows, GeluAndSigmoidGate) {
  std::mt19937 gen(8);
  Values<float> x(3 * 50, 1.0F, gen);
  Values<float> const v(50, 0.3F, gen);
  DeviceBuffer<float> gates(3 * 2);
  Kernels::sigmoid_gate(x.rows(3, 50), v.device.data(), make_rows(gates.data(), 3, 2), nullptr);
  std::vector<double> want;
  for (std::int64_t t = 0; t < 3; ++t) {
    double dot = 0.0;
    for (std::int64_t i = 0; i < 50; ++i) dot += static_cast<double>(x.at(t * 50 + i)) * v.at(i);
    want.insert(want.end(), 2, 1.0 / (1.0 + std::exp(-dot)));
  }
  EXPECT_LT(worst_error(floats(gates), want), 3e-6);
  Kernels::gelu(make_rows(x.device.data(), 3, 50), nullptr);
  want.clear();
  for (float f : x.host) want.push_back(0.5 * f * (1.0 + std::erf(f / std::sqrt(2.0))));
  EXPECT_LT(worst_error(floats(x.device), want), 3e-6);
}
TEST(RunnerRows, CopyColumns) {
  std::mt19937 gen(2);
  for (auto const& [from_width, to_width] : std::vector<std::array<std::int64_t, 2>>{{40, 64}, {64, 40}, {33, 50}, {7, 7}}) {
    Values<bf16> const from(3 * from_width, 1.0F, gen);
    DeviceBuffer<bf16> to(3 * to_width);
    Memory<Cuda>::fill(to.data(), 0xff, to.bytes());
    Kernels::copy_columns(from.rows(3, from_width), make_rows(to.data(), 3, to_width), nullptr);
    auto const got = floats(to);
    for (std::int64_t t = 0; t < 3; ++t) {
      for (std::int64_t i = 0; i < to_width; ++i) {
        EXPECT_EQ(got[static_cast<std::size_t>(t * to_width + i)], i < from_width ? from.at(t * from_width + i) : 0.0F) << t << ' ' << i;
      }
    }
  }
}

/// b = 2 a, c = a on the side, then d = b + c: in a stream, and replayed from a graph.
TEST(RunnerSideStream, ForksAndJoinsAlsoInAGraph) {
  std::int64_t const n = 1 << 20;
  DeviceBuffer<float> a(n), b(n), c(n), d(n);
  runner::SideStream<Cuda> side;
  CudaStream main;
  auto const view = [&](DeviceBuffer<float>& v) { return make_rows(v.data(), 1, n); };
  auto const constant = [&](DeviceBuffer<float> const& v) { return make_rows(v.data(), 1, n); };
  auto const scaled = [&](DeviceBuffer<float> const& from, float scale, DeviceBuffer<float>& to, cudaStream_t stream) {
    runner::FinishRows<float, float> f;
    f.routed = constant(from);
    f.output = view(to);
    f.scale = scale;
    Kernels::finish(f, stream);
  };
  auto const set_input = [&](float value) {
    std::vector<float> const host(static_cast<std::size_t>(n), value);
    a.copy_from_host(host.data());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  };
  auto const enqueue = [&] {
    scaled(a, 1.0F, d, main);  // the side stream must see this
    cudaStream_t const beside = side.fork(main);
    scaled(d, 1.0F, c, beside);
    scaled(a, 2.0F, b, main);
    side.join(main);
    runner::FinishRows<float, float> f;
    f.routed = constant(b);
    f.shared = constant(c);
    f.output = view(d);
    Kernels::finish(f, main);
  };
  set_input(1.0F);
  enqueue();
  EXPECT_EQ(floats(d), std::vector<float>(static_cast<std::size_t>(n), 3.0F));
  CudaGraph const graph(main, enqueue);
  for (int i = 2; i < 6; ++i) {
    set_input(static_cast<float>(i));
    graph.launch(main);
    EXPECT_EQ(floats(d), std::vector<float>(static_cast<std::size_t>(n), 3.0F * static_cast<float>(i)));
  }
}

TEST(RunnerCapturedSizes, ReplaysTheSmallestSizeThatFits) {
  comm::Self<Cuda> self;
  DeviceBuffer<float> x = upload(std::vector<float>(8 * 16, 1.0F));
  DeviceBuffer<float> y(8 * 16);
  std::vector<std::int64_t> calls;
  runner::CapturedSizes<Cuda> graphs;
  CudaStream stream;
  moe_test::expect_error(ErrorCode::state, "nothing is captured", [&] { graphs.replay(1, stream); });
  std::array<std::int64_t, 4> const sizes{2, 8, 4, 8};
  graphs.capture(self, sizes, "", [&](std::int64_t rows, cudaStream_t s) {
    calls.push_back(rows);
    Kernels::copy_columns(make_rows(static_cast<float const*>(x.data()), rows, 16), make_rows(y.data(), rows, 16), s);
  });
  EXPECT_EQ(calls, (std::vector<std::int64_t>{8, 8, 4, 4, 2, 2})) << "each size runs once, then is captured, the largest first";
  EXPECT_EQ(graphs.sizes(), (std::vector<std::int64_t>{2, 4, 8}));
  for (std::int64_t const rows : {0, 1, 2, 3, 4, 5, 8}) {
    Memory<Cuda>::fill(y.data(), 0, y.bytes());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::int64_t const size = graphs.replay(rows, stream);
    EXPECT_EQ(size, rows <= 2 ? 2 : rows <= 4 ? 4 : 8);
    auto const got = floats(y);
    EXPECT_EQ(std::count(got.begin(), got.end(), 1.0F), size * 16);
    std::int32_t count = -1;
    Memory<Cuda>::copy_to_host(&count, graphs.num_rows(), sizeof count);
    EXPECT_EQ(count, rows);
  }
  EXPECT_EQ(calls.size(), 6U) << "a replay calls no host code";
  moe_test::expect_error(ErrorCode::capacity, "9 rows exceed the largest size 8", [&] { graphs.replay(9, stream); });
}
/// A layer as capture_obstacle() sees it.
struct Capturable {
  bool value;
  bool capturable() const { return value; }
};
struct NamedPolicy {
  static constexpr char const* kName = "policy";
};
struct LayerFacts {
  using Backend = NamedPolicy;
  using Experts = NamedPolicy;
  Capturable backend, experts;
  Capturable& exchange() { return backend; }
  Capturable& kernel() { return experts; }
};
TEST(RunnerCapturedSizes, ObstaclesOfALayer) {
  LayerFacts fits{{true}, {true}};
  LayerFacts exact{{false}, {true}};
  LayerFacts grouped{{true}, {false}};
  EXPECT_EQ(runner::capture_obstacle(fits), "");
  EXPECT_EQ(runner::capture_obstacle(exact), "policy reads exact sizes on the host; choose fixed sizes in its Params");
  EXPECT_EQ(runner::capture_obstacle(grouped), "policy reads the rows per expert back; set Params::fixed_groups, or choose other experts");
}
TEST(RunnerCapturedSizes, SaysWhatCannotBeCapturedBeforeAnyWork) {
  comm::Self<Cuda> self;
  runner::CapturedSizes<Cuda> graphs;
  std::array<std::int64_t, 1> const sizes{4};
  auto const never = [](std::int64_t, cudaStream_t) { FAIL() << "work was issued"; };
  moe_test::expect_error(ErrorCode::state, "capture: it reads counts", [&] { graphs.capture(self, sizes, "it reads counts", never); });
  moe_test::expect_error(ErrorCode::config, "sizes from 0", [&] { graphs.capture(self, std::array<std::int64_t, 1>{0}, "", never); });
  moe_test::expect_error(ErrorCode::config, "no sizes", [&] { graphs.capture(self, std::span<std::int64_t const>{}, "", never); });
  // What only the capture shows leaves no graph and no broken stream.
  moe_test::expect_error(ErrorCode::cuda, "cudaStreamSynchronize",
                         [&] { graphs.capture(self, sizes, "", [](std::int64_t, cudaStream_t s) { Memory<Cuda>::synchronize(s); }); });
  moe_test::expect_error(ErrorCode::state, "nothing is captured", [&] { graphs.replay(1, nullptr); });
  DeviceBuffer<float> y(4);
  graphs.capture(self, sizes, "", [&](std::int64_t rows, cudaStream_t s) {
    check_cuda(cudaMemsetAsync(y.data(), 0, static_cast<std::size_t>(rows) * sizeof(float), s), "cudaMemsetAsync");
  });
  EXPECT_EQ(graphs.replay(3, nullptr), 4);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

}  // namespace
