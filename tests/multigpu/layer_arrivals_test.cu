// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/layer_arrivals_test.cu: HighThroughput and HopperContiguous in one schedule give the bits of the same layer without it:
// random rounds, skew, no tokens, an overflow, a captured graph, a rank that gives up, a rank that stays away.
// moe-ranks: 1 2 4
#include <gtest/gtest.h>
#include <mpi.h>

#include <optional>
#include <random>

#include "moe/activation/activation.hpp"
#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/core/cuda_graph.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/softmax_topk.hpp"
#include "tests/gpu/typed_memory.cuh"

namespace {

using namespace moe;
using moe_test::TypedMemory;
using Window = comm::NcclSymmetric;

struct Plain : LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
};
struct Fused : Plain {
  static constexpr bool overlap_dispatch = true;
};
using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
template <class Config>
using Layer = ModularKernel<Config, Router, quantization::None, backends::HighThroughput<Window>, experts::HopperContiguous>;
static_assert(Layer<Fused>::Exchange::kArrives && !Layer<Plain>::Exchange::kArrives);

constexpr int kLocal = 12, kHidden = 1024, kIntermediate = 512, kTopK = 5, kMaxTokens = 700;

enum class Pattern { uniform, gaps, one_expert, own_rank, next_rank, none };

/// The two layers of this rank, over the same weights.
class Subject {
 public:
  explicit Subject(int max_tokens = kMaxTokens, int capacity = 0, int timeout_ms = 20'000)
      : comm_(connect()), max_tokens_(max_tokens), shape_{kHidden, kIntermediate, kLocal * comm_.size(), kTopK, false} {
    w13_ = TypedMemory<bf16>(std::size_t{kLocal} * 2 * kIntermediate * kHidden);
    w2_ = TypedMemory<bf16>(std::size_t{kLocal} * kHidden * kIntermediate);
    auto const fill = [&](TypedMemory<bf16> const& to, int seed, float sigma) {
      moe_test::fill_normal<<<256, 256>>>(reinterpret_cast<__nv_bfloat16*>(to.data()), static_cast<long long>(to.size()),
                                          static_cast<std::uint64_t>(seed), sigma);
    };
    fill(w13_, 2 * comm_.rank(), 0.03F);
    fill(w2_, 2 * comm_.rank() + 1, 0.04F);
    x_ = TypedMemory<bf16>(std::size_t{kMaxTokens} * kHidden);
    ids_ = TypedMemory<std::int32_t>(std::size_t{kMaxTokens} * kTopK);
    weights_ = TypedMemory<float>(std::size_t{kMaxTokens} * kTopK);
    for (auto& out : out_) out = TypedMemory<bf16>(std::size_t{kMaxTokens} * kHidden);
    check_cuda(cudaDeviceSynchronize(), "fill");
    build(plain_, capacity, timeout_ms);
    build(fused_, capacity, timeout_ms);
  }

  /// Brings rows of this rank; the same seed on all ranks.
  void bring(unsigned seed, Pattern pattern, int most) {
    std::mt19937 random(seed * 64 + static_cast<unsigned>(comm_.rank()));
    tokens_ = most == 0 || random() % 7 == 0 ? 0 : static_cast<int>(random() % static_cast<unsigned>(most)) + 1;
    bring_rows(tokens_, random, pattern);
  }
  void bring_all(unsigned seed, Pattern pattern, int tokens) {
    std::mt19937 random(seed * 64 + static_cast<unsigned>(comm_.rank()));
    bring_rows(tokens, random, pattern);
  }
  template <class Config>
  void forward(Layer<Config>& layer, int which) {
    check_cuda(cudaMemsetAsync(out_[which].data(), 0xff, out_[which].bytes(), stream_), "cudaMemsetAsync");
    layer.forward_routed(make_rows(static_cast<bf16 const*>(x_.data()), tokens_, kHidden),
                         make_rows(static_cast<std::int32_t const*>(ids_.data()), tokens_, kTopK),
                         make_rows(static_cast<float const*>(weights_.data()), tokens_, kTopK),
                         make_rows(out_[which].data(), tokens_, kHidden), {}, stream_);
  }
  void forward_plain() { forward(*plain_, 0); }
  void forward_fused() { forward(*fused_, 1); }
  template <class Config>
  static std::string error(Layer<Config>& layer, cudaStream_t stream) {
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    try {
      layer.check();
    } catch (Error const& e) {
      return e.what();
    }
    return "";
  }
  std::string fused_error() { return error(*fused_, stream_); }
  std::string plain_error() { return error(*plain_, stream_); }
  /// Where the outputs differ, or nothing.
  std::string difference() {
    stream_.synchronize();
    auto const a = out_[0].download(), b = out_[1].download();
    auto const n = static_cast<std::size_t>(tokens_) * kHidden;
    double sum = 0;
    for (std::size_t i = 0; i < n; ++i) {
      sum += std::abs(static_cast<double>(to_float(a[i])));
      if (std::memcmp(&a[i], &b[i], sizeof a[i]) != 0) {
        return text("token ", i / kHidden, " column ", i % kHidden, ": fused ", to_float(b[i]), ", unfused ", to_float(a[i]), " of ",
                    tokens_, " tokens");
      }
    }
    if (!std::isfinite(sum)) return "the sums are not finite";
    norm_ += sum;
    return "";
  }
  std::string round(unsigned seed, Pattern pattern, int most) {
    bring(seed, pattern, most);
    forward_plain();
    forward_fused();
    std::string const wrong = difference() + plain_error() + fused_error();
    return wrong;
  }
  double norm() const { return norm_; }
  Layer<Fused>& fused() { return *fused_; }
  CudaStream& stream() { return stream_; }
  int rank() const { return comm_.rank(); }
  int size() const { return comm_.size(); }

 private:
  static comm::Nccl connect() {
    int rank = 0, size = 1;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    return comm::Nccl::over(rank, size,
                            [](void* data, std::size_t bytes) { MPI_Bcast(data, static_cast<int>(bytes), MPI_BYTE, 0, MPI_COMM_WORLD); });
  }
  template <class Config>
  void build(std::optional<Layer<Config>>& layer, int capacity, int timeout_ms) {
    auto const matrix = [](TypedMemory<bf16> const& codes, int rows, int cols) {
      ExpertMatrix<bf16, typename quantization::None::WeightScale> m{};
      m.codes = make_blocks(static_cast<bf16 const*>(codes.data()), kLocal, rows, cols);
      m.rows = rows;
      m.cols = cols;
      return m;
    };
    typename Layer<Config>::Params p{.shape = shape_,
                                     .max_tokens_per_rank = max_tokens_,
                                     .placement = ExpertPlacement(shape_.num_experts, comm_.size(), PlacementStrategy::linear),
                                     .router = {shape_.num_experts, kTopK}};
    p.backend.capacity = capacity;
    p.backend.window.timeout_ms = timeout_ms;
    layer.emplace(comm_,
                  WeightsOf<Config, quantization::None>{matrix(w13_, 2 * kIntermediate, kHidden), matrix(w2_, kHidden, kIntermediate)}, p);
  }
  void bring_rows(int tokens, std::mt19937& random, Pattern pattern) {
    tokens_ = tokens;
    int const experts = kLocal * comm_.size();
    std::normal_distribution<float> normal;
    std::vector<bf16> x(std::size_t{kMaxTokens} * kHidden);
    std::vector<float> some(4096);
    for (float& v : some) v = normal(random);
    for (bf16& v : x) v = from_float<bf16>(some[random() % some.size()]);
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
    for (int t = 0; t < kMaxTokens; ++t) {
      std::vector<int> pool;
      for (int e = 0; e < experts; ++e) pool.push_back(e);
      for (int j = 0; j < kTopK; ++j) {
        auto const at = static_cast<std::size_t>(j);
        std::swap(pool[at], pool[at + random() % (pool.size() - at)]);
        int const owner = pattern == Pattern::own_rank ? comm_.rank() : (comm_.rank() + 1) % comm_.size();
        int id = pool[at];
        if (pattern == Pattern::gaps && random() % 3 == 0) id = -1;
        if (pattern == Pattern::one_expert) id = j == 0 ? experts - 1 : -1;
        if (pattern == Pattern::own_rank || pattern == Pattern::next_rank) id = owner * kLocal + (t + j) % kLocal;
        if (pattern == Pattern::none) id = -1;
        ids.push_back(id);
        weights.push_back(static_cast<float>(random() % 1000 + 1) / 1000.0F);
      }
    }
    stream_.synchronize();
    x_.upload(x);
    ids_.upload(ids);
    weights_.upload(weights);
    check_cuda(cudaDeviceSynchronize(), "upload");
  }

  comm::Nccl comm_;
  int max_tokens_;
  LayerShape shape_;
  TypedMemory<bf16> w13_, w2_, x_, out_[2];
  TypedMemory<std::int32_t> ids_;
  TypedMemory<float> weights_;
  CudaStream stream_;
  std::optional<Layer<Plain>> plain_;
  std::optional<Layer<Fused>> fused_;
  int tokens_ = 0;
  double norm_ = 0;
};

TEST(LayerArrivals, GivesTheBitsOfTheUnfusedLayer) {
  Subject s;
  constexpr Pattern kPatterns[] = {Pattern::uniform,  Pattern::gaps,      Pattern::one_expert,
                                   Pattern::own_rank, Pattern::next_rank, Pattern::none};
  constexpr int kMost[] = {kMaxTokens, 1, 40, 0, 200};
  for (unsigned round = 0; round < 60; ++round) {
    ASSERT_EQ(s.round(round, kPatterns[round % 6], kMost[round % 5]), "") << "round " << round;
  }
  EXPECT_GT(s.norm(), 0.0);
}

TEST(LayerArrivals, FollowsAGraph) {
  Subject s;
  s.bring_all(1, Pattern::uniform, 300);
  s.forward_fused();
  ASSERT_EQ(s.fused_error(), "");
  CudaGraph const graph(s.stream(), [&] {
    for (int i = 0; i < 3; ++i) s.forward_fused();
  });
  for (unsigned seed = 2; seed < 8; ++seed) {
    s.bring_all(seed, seed % 2 == 0 ? Pattern::gaps : Pattern::uniform, 300);
    s.forward_plain();
    graph.launch(s.stream());
    ASSERT_EQ(s.difference(), "") << "seed " << seed;
    ASSERT_EQ(s.fused_error(), "");
  }
}

/// One expert takes all rows; the capacity of its rank holds them exactly, and then not.
TEST(LayerArrivals, FillsAndOverflowsTheCapacity) {
  constexpr int kRows = 64;
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  Subject s(kRows + 1, kRows * size);
  for (unsigned seed = 0; seed < 4; ++seed) {
    s.bring_all(seed, Pattern::one_expert, kRows);
    s.forward_plain();
    s.forward_fused();
    ASSERT_EQ(s.difference(), "") << "full, seed " << seed;
    ASSERT_EQ(s.fused_error(), "");
    s.bring_all(seed, Pattern::one_expert, kRows + 1);
    s.forward_plain();
    s.forward_fused();
    ASSERT_EQ(s.difference(), "") << "over, seed " << seed;
    EXPECT_NE(s.fused_error().find("E_CAPACITY"), std::string::npos);
    EXPECT_NE(s.plain_error().find("E_CAPACITY"), std::string::npos);
  }
}

TEST(LayerArrivals, EndsARoundThatARankAbandons) {
  Subject s;
  if (s.size() == 1) GTEST_SKIP() << "one rank has no peers";
  for (unsigned seed = 0; seed < 3; ++seed) {
    s.bring_all(seed, Pattern::uniform, 100);
    if (s.rank() == s.size() - 1) {
      s.fused().abandon(s.stream());
      s.fused_error();
    } else {
      s.forward_fused();
      EXPECT_NE(s.fused_error().find(text("rank ", s.size() - 1)), std::string::npos);
    }
    s.bring_all(seed + 10, Pattern::uniform, 100);
    s.forward_plain();
    s.forward_fused();
    ASSERT_EQ(s.difference(), "");
    ASSERT_EQ(s.fused_error(), "");
  }
}

/// Last: it ends the group.
TEST(LayerArrivals, NamesARankThatStaysAway) {
  Subject s(kMaxTokens, 0, 1500);
  if (s.size() == 1) GTEST_SKIP() << "one rank has no peers";
  ASSERT_EQ(s.round(1, Pattern::uniform, 100), "");
  s.bring_all(2, Pattern::uniform, 100);
  if (s.rank() < s.size() - 1) {
    s.forward_fused();
    EXPECT_NE(s.fused_error().find(text("rank ", s.size() - 1)), std::string::npos);
  }
  MPI_Barrier(MPI_COMM_WORLD);  // the others tell the rank that stays away, in its window
}

}  // namespace
