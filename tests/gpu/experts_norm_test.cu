// SPDX-License-Identifier: Apache-2.0
// tests/gpu/experts_norm_test.cu: a norm of each expert's output before the weighted sum (Muse-Spark) on the device: CudaReference against
// the experts of the host, in both formats, with poisoned memory, gaps between rows, a row count on the device, and in a graph.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../expect_close.hpp"
#include "../output_norm.hpp"
#include "device_values.cuh"
#include "moe/core/cuda_graph.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/reference.hpp"
#include "moe/quantization/none.hpp"

namespace {

using namespace moe;
using namespace moe_test::output_norm;
using Cuda = space::cuda;
using OnHost = experts::Reference<double>;
using moe_test::DeviceBuffer;
using moe_test::expect_close;
using moe_test::floats;
using moe_test::normal;
using moe_test::upload;
using quantization::None;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
/// Of the largest output. Rows and weights of bf16 are widened exactly, and all that follows is float32: no looser bound for them.
constexpr float kTolerance = 4e-6F;

template <class T>
std::vector<T> normal_rows(Sizes const& s, float sigma = 1.0F) {
  std::vector<T> out;
  for (float v : normal(7, s.rows * s.hidden)) out.push_back(from_float<T>(sigma * v));
  return out;
}
/// Rows of `cols` elements with `gap` elements after each.
template <class T>
std::vector<T> with_gaps(std::vector<T> const& rows, std::int64_t cols, std::int64_t gap, T filler) {
  std::vector<T> out;
  for (auto from = rows.begin(); from != rows.end(); from += cols) {
    out.insert(out.end(), from, from + cols);
    out.insert(out.end(), static_cast<std::size_t>(gap), filler);
  }
  return out;
}
template <class T>
void fill_with_nan(DeviceBuffer<T>& buffer) {
  if (buffer.size() > 0) Memory<Cuda>::fill(buffer.data(), 0xFF, buffer.bytes());
}

/// CudaReference with a standard batch. NaN: the gaps between rows, the weights of slots without an expert, and, once poison() was called,
/// workspace and output.
template <class Config>
class StandardBatch {
 public:
  using Act = typename Config::Act;

  /// gap: elements between the rows of each array.
  StandardBatch(Sizes const& s, std::vector<Act> const& x, Routing routing, bool normed = true, std::int64_t gap = 0)
      : s_(s),
        gap_(gap),
        weights_(store<Config, Cuda>(s, normed)),
        kernel_(shape<Config>(s), weights_.view(), s.rows, {}, {}, {}, arena_),
        x_(upload(with_gaps(x, s.hidden, gap, from_float<Act>(kNan)))),
        bad_x_(upload(std::vector<Act>(static_cast<std::size_t>(x_.size()), from_float<Act>(kNan)))),
        ids_(upload(with_gaps(routing.ids, s.topk, gap, std::int32_t{0}))),
        bad_ids_(upload(std::vector<std::int32_t>(static_cast<std::size_t>(ids_.size()), 0))),
        y_(s.rows * (s.hidden + gap)) {
    for (std::size_t i = 0; i < routing.ids.size(); ++i) {
      if (routing.ids[i] < 0) routing.weights[i] = kNan;
    }
    topk_weights_ = upload(with_gaps(routing.weights, s.topk, gap, kNan));
  }
  StandardBatch(Sizes const& s, std::vector<Act> const& x, bool normed = true, std::int64_t gap = 0)
      : StandardBatch(s, x, routing_of(s), normed, gap) {}

  /// From now on the device knows how many rows are valid.
  void set_num_rows(std::int32_t count) {
    if (num_rows_.size() == 0) num_rows_ = DeviceBuffer<std::int32_t>(1);
    num_rows_.copy_from_host(&count);
  }
  /// Every slot of the workspace is written, by rows of NaN that all have experts.
  void poison() {
    apply(bad_x_, bad_ids_, nullptr, nullptr);
    fill_with_nan(y_);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void enqueue(cudaStream_t stream) { apply(x_, ids_, num_rows_.data(), stream); }
  /// The output, without its gaps, which must not have been written.
  std::vector<float> result() const {
    std::vector<float> const all = floats(y_);
    std::vector<float> out;
    for (auto row = all.begin(); row != all.end(); row += s_.hidden + gap_) {
      auto const end = row + s_.hidden;
      out.insert(out.end(), row, end);
      EXPECT_TRUE(std::all_of(end, end + gap_, [](float v) { return std::isnan(v); })) << "written behind a row";
    }
    return out;
  }

 private:
  void apply(DeviceBuffer<Act> const& x, DeviceBuffer<std::int32_t> const& ids, std::int32_t const* num_rows, cudaStream_t stream) {
    StandardTokensOf<Config, None> tokens{};
    tokens.rows = make_strided_rows(x.data(), s_.rows, s_.hidden, s_.hidden + gap_);
    tokens.topk_ids = make_strided_rows(ids.data(), s_.rows, s_.topk, s_.topk + gap_);
    tokens.topk_weights = make_strided_rows(static_cast<float const*>(topk_weights_.data()), s_.rows, s_.topk, s_.topk + gap_);
    tokens.num_rows = num_rows;
    kernel_.apply(tokens, make_strided_rows(y_.data(), s_.rows, s_.hidden, s_.hidden + gap_), stream);
  }

  Sizes s_;
  std::int64_t gap_;
  Arena<Cuda> arena_;
  experts::WeightStore<Config, None, Cuda> weights_;
  experts::CudaReference::Kernel<Config, None, ActivationFormat::standard> kernel_;
  DeviceBuffer<Act> x_, bad_x_;
  DeviceBuffer<std::int32_t> ids_, bad_ids_, num_rows_;
  DeviceBuffer<float> topk_weights_, y_;
};

/// CudaReference with the batch of batched(). NaN: rows past an expert's count, and, once poison() was called, workspace and output.
template <class Config>
class BatchedBatch {
 public:
  using Act = typename Config::Act;

  /// gathers: each row of x is there once, in reverse order, and experts have lists of rows.
  BatchedBatch(Sizes const& s, std::vector<Act> const& x, bool normed = true, bool gathers = false)
      : s_(s),
        weights_(store<Config, Cuda>(s, normed)),
        kernel_(shape<Config>(s), weights_.view(), s.rows, {}, {}, {}, arena_),
        counts_(upload(counts_of(s))),
        all_(upload(std::vector<std::int32_t>(static_cast<std::size_t>(s.experts), static_cast<std::int32_t>(s.rows)))),
        y_(s.experts * s.rows * s.hidden) {
    std::vector<Act> rows;
    std::vector<std::int32_t> lists;
    for (std::int32_t const count : counts_of(s)) {
      rows.insert(rows.end(), x.begin(), x.begin() + count * s.hidden);
      rows.resize(rows.size() + static_cast<std::size_t>((s.rows - count) * s.hidden), from_float<Act>(kNan));
      for (std::int64_t i = s.rows - 1; i >= 0; --i) lists.push_back(static_cast<std::int32_t>(i));
    }
    bad_x_ = upload(std::vector<Act>(rows.size(), from_float<Act>(kNan)));
    if (gathers) {
      rows.clear();
      for (std::int64_t i = s.rows - 1; i >= 0; --i) rows.insert(rows.end(), x.begin() + i * s.hidden, x.begin() + (i + 1) * s.hidden);
      lists_ = upload(lists);
    }
    x_ = upload(rows);
  }

  void poison() {
    apply(bad_x_, all_, false, nullptr);
    fill_with_nan(y_);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void enqueue(cudaStream_t stream) { apply(x_, counts_, lists_.size() > 0, stream); }
  /// The output. Rows past an expert's count, which may be anything, are 0.
  std::vector<float> result() const {
    std::vector<float> out = floats(y_);
    auto block = out.begin();
    for (std::int32_t const count : counts_of(s_)) {
      auto const end = block + s_.rows * s_.hidden;
      std::fill(block + count * s_.hidden, end, 0.0F);
      block = end;
    }
    return out;
  }

 private:
  void apply(DeviceBuffer<Act> const& x, DeviceBuffer<std::int32_t> const& counts, bool gathers, cudaStream_t stream) {
    BatchedTokensOf<Config, None> tokens{};
    tokens.rows = make_blocks(x.data(), gathers ? 1 : s_.experts, s_.rows, s_.hidden);
    tokens.expert_num_tokens = make_vector(counts.data(), s_.experts);
    if (gathers) tokens.gather = make_rows(static_cast<std::int32_t const*>(lists_.data()), s_.experts, s_.rows);
    kernel_.apply(tokens, make_blocks(y_.data(), s_.experts, s_.rows, s_.hidden), stream);
  }

  Sizes s_;
  Arena<Cuda> arena_;
  experts::WeightStore<Config, None, Cuda> weights_;
  experts::CudaReference::Kernel<Config, None, ActivationFormat::batched> kernel_;
  DeviceBuffer<Act> x_, bad_x_;
  DeviceBuffer<std::int32_t> counts_, all_, lists_;
  DeviceBuffer<float> y_;
};

/// The output of one call.
template <class Batch>
std::vector<float> call(Batch& batch) {
  CudaStream stream;
  batch.poison();
  batch.enqueue(stream);
  return batch.result();
}
template <class Config, class... Options>
std::vector<float> standard_on_device(Sizes const& s, std::vector<typename Config::Act> const& x, Options const&... options) {
  StandardBatch<Config> batch(s, x, options...);
  return call(batch);
}
template <class Config, class... Options>
std::vector<float> batched_on_device(Sizes const& s, std::vector<typename Config::Act> const& x, Options const&... options) {
  BatchedBatch<Config> batch(s, x, options...);
  return call(batch);
}
/// The first rows of y, then zeros.
std::vector<float> first_rows(std::vector<float> y, std::int64_t rows, std::int64_t hidden) {
  std::fill(y.begin() + rows * hidden, y.end(), 0.0F);
  return y;
}

template <class T>
class NormOnDevice : public testing::Test {};
using RowTypes = testing::Types<float, bf16>;
TYPED_TEST_SUITE(NormOnDevice, RowTypes);

TYPED_TEST(NormOnDevice, X25_EachOutputIsNormalisedBeforeItIsWeighted) {
  std::vector<Sizes> cases(std::begin(kStandard), std::end(kStandard));
  cases.push_back({7, 5, 3});  // fewer columns than a thread block has warps
  for (Sizes s : cases) {
    for (bool const biases : {true, false}) {
      SCOPED_TRACE(testing::Message() << s.rows << " rows of " << s.hidden << (biases ? "" : " without biases"));
      s.biases = biases;
      auto const x = normal_rows<TypeParam>(s);
      std::vector<float> const want = standard<OnHost, Normed<TypeParam>>(s, x, true);
      expect_close(standard_on_device<Normed<TypeParam>>(s, x), want, kTolerance);
      expect_close(standard_on_device<IfGiven<TypeParam>>(s, x), want, kTolerance);
    }
  }
}
TYPED_TEST(NormOnDevice, X25_BatchesAreNormalisedRowByRow) {
  for (Sizes s : kBatched) {
    for (bool const biases : {true, false}) {
      SCOPED_TRACE(testing::Message() << s.rows << " rows of " << s.hidden << (biases ? "" : " without biases"));
      s.biases = biases;
      auto const x = normal_rows<TypeParam>(s);
      std::vector<float> const got = batched_on_device<Normed<TypeParam>>(s, x);
      expect_close(got, batched<OnHost, Normed<TypeParam>>(s, x, true), kTolerance);
      EXPECT_EQ(batched_on_device<IfGiven<TypeParam>>(s, x), got);
      EXPECT_EQ(batched_on_device<Normed<TypeParam>>(s, x, true, true), got) << "gathered";
    }
  }
}
TYPED_TEST(NormOnDevice, X25_WithoutOneTheBitsAreThoseOfALayerThatHasNone) {
  Sizes const s{33, 72, 40};
  auto const x = normal_rows<TypeParam>(s);
  EXPECT_EQ(standard_on_device<IfGiven<TypeParam>>(s, x, false), standard_on_device<Plain<TypeParam>>(s, x, false));
  EXPECT_EQ(batched_on_device<IfGiven<TypeParam>>(s, x, false), batched_on_device<Plain<TypeParam>>(s, x, false));
}
TYPED_TEST(NormOnDevice, X25_LargeSmallAndZeroOutputs) {
  Sizes const s{.rows = 4, .hidden = 24, .intermediate = 16, .biases = false};
  for (float const size : {1e15F, 1e-10F, 0.0F}) {  // outputs of about 1e30 and 1e-20, whose squares leave float32, and zeros
    SCOPED_TRACE(testing::Message() << "rows of " << size);
    auto const x = normal_rows<TypeParam>(s, size);
    std::vector<float> const got = standard_on_device<Normed<TypeParam>>(s, x);
    expect_close(got, standard<OnHost, Normed<TypeParam>>(s, x, true), kTolerance);
    EXPECT_EQ(moe_test::largest(got) == 0.0F, size == 0.0F);
    expect_close(batched_on_device<Normed<TypeParam>>(s, x), batched<OnHost, Normed<TypeParam>>(s, x, true), kTolerance);
  }
}
TYPED_TEST(NormOnDevice, X25_RowsMayLieApart) {
  for (bool const on_input : {false, true}) {
    Sizes const s{.rows = 33, .hidden = 72, .intermediate = 40, .on_input = on_input};
    auto const x = normal_rows<TypeParam>(s);
    EXPECT_EQ(standard_on_device<Normed<TypeParam>>(s, x, true, 8), standard_on_device<Normed<TypeParam>>(s, x));
  }
}
TYPED_TEST(NormOnDevice, X25_TheDevicesRowCount) {
  Sizes const s{33, 72, 40};
  auto x = normal_rows<TypeParam>(s);
  std::vector<float> const all = standard_on_device<Normed<TypeParam>>(s, x);
  for (std::int32_t const count : {33, 20, 1, 0}) {
    std::fill(x.begin() + count * s.hidden, x.end(), from_float<TypeParam>(kNan));
    StandardBatch<Normed<TypeParam>> batch(s, x);
    batch.set_num_rows(count);
    EXPECT_EQ(call(batch), first_rows(all, count, s.hidden)) << count << " rows";
  }
}
TYPED_TEST(NormOnDevice, X25_RowsWithoutAnExpertAreZero) {
  Sizes const s{33, 72, 40};
  auto const x = normal_rows<TypeParam>(s);
  std::vector<float> const all = standard_on_device<Normed<TypeParam>>(s, x);
  for (std::int64_t const rows : {20, 0}) {
    Routing routing = routing_of(s);
    std::fill(routing.ids.begin() + rows * s.topk, routing.ids.end(), kNoExpert);
    EXPECT_EQ(standard_on_device<Normed<TypeParam>>(s, x, routing), first_rows(all, rows, s.hidden)) << rows << " rows have experts";
  }
}
TYPED_TEST(NormOnDevice, X25_NoRows) {
  EXPECT_TRUE(standard_on_device<Normed<TypeParam>>({0, 24, 16}, {}).empty());
  EXPECT_TRUE(batched_on_device<Normed<TypeParam>>({0, 24, 16}, {}).empty());
}

/// Replays have the bits of a call.
template <class Batch>
void expect_replays(Batch& batch, CudaGraph const& graph, cudaStream_t stream, std::vector<float> const& want) {
  for (int replay = 0; replay < 2; ++replay) {
    batch.poison();
    graph.launch(stream);
    EXPECT_EQ(batch.result(), want) << "replay " << replay;
  }
}
TEST(NormOnDeviceInAGraph, X25_Standard) {
  Sizes const s{33, 72, 40};
  StandardBatch<Normed<float>> batch(s, normal_rows<float>(s));
  batch.set_num_rows(33);
  std::vector<float> const want = call(batch);
  CudaStream stream;
  CudaGraph const graph(stream, [&] { batch.enqueue(stream); });
  for (std::int32_t const count : {33, 7, 0, 33}) {
    SCOPED_TRACE(testing::Message() << count << " rows");
    batch.set_num_rows(count);
    expect_replays(batch, graph, stream, first_rows(want, count, s.hidden));
  }
}
TEST(NormOnDeviceInAGraph, X25_Batched) {
  Sizes const s{33, 72, 40};
  BatchedBatch<Normed<float>> batch(s, normal_rows<float>(s));
  std::vector<float> const want = call(batch);
  CudaStream stream;
  CudaGraph const graph(stream, [&] { batch.enqueue(stream); });
  expect_replays(batch, graph, stream, want);
}

/// A thread block then normalises several slots, one after the other.
TEST(NormOnDeviceOfManySlots, X25_MoreThanThreadBlocks) {
  Sizes const few{70, 8, 4}, many{360'000, 8, 4};
  ASSERT_GT(many.rows * many.topk, experts::detail::reference_blocks(experts::detail::kWarps * many.rows * many.topk));
  std::vector<float> const x = normal_rows<float>(few), want = standard_on_device<Normed<float>>(few, x);
  Routing const routing = routing_of(few);
  std::vector<float> rows;
  Routing repeated;
  for (std::int64_t r = 0; r < many.rows; ++r) {
    std::int64_t const from = r % few.rows;
    rows.insert(rows.end(), x.begin() + from * few.hidden, x.begin() + (from + 1) * few.hidden);
    for (std::int64_t slot = from * few.topk; slot < (from + 1) * few.topk; ++slot) {
      repeated.ids.push_back(routing.ids[static_cast<std::size_t>(slot)]);
      repeated.weights.push_back(routing.weights[static_cast<std::size_t>(slot)]);
    }
  }
  std::vector<float> const got = standard_on_device<Normed<float>>(many, rows, repeated);
  ASSERT_EQ(got.size(), rows.size());
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], want[i % want.size()]) << "row " << i / 8;
}

}  // namespace
