// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/arrivals_subject.cuh: a layer in one schedule with its dispatch, its combine or both beside the same layer without it, on
// the ranks of a test.
#pragma once

#include <gtest/gtest.h>
#include <mpi.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <type_traits>

#include "bench/random_experts.cuh"
#include "moe/activation/activation.hpp"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/core/cuda_graph.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/softmax_topk.hpp"
#include "tests/gpu/relative_error.hpp"
#include "tests/gpu/typed_memory.cuh"

namespace moe_test::arrivals {

using namespace moe;
using Window = comm::NcclSymmetric;

struct Plain : LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
};
struct Fused : Plain {
  static constexpr bool overlap_dispatch = true;
};
struct Completing : Plain {
  static constexpr bool overlap_combine = true;
};
struct Both : Fused {
  static constexpr bool overlap_combine = true;
};
using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
template <class Config, class P>
using LayerOf = ModularKernel<Config, Router, typename P::Quant, typename P::Backend, typename P::Experts>;
using None = quantization::None;
using Fp8 = quantization::Fp8Block<>;
constexpr int kLocal = 12, kIntermediate = 512, kTopK = 5, kMaxTokens = 700;

/// A quantisation, a backend and experts.
template <class Q, class B, class E>
struct Pair {
  using Quant = Q;
  using Backend = B;
  using Experts = E;
};

enum class Pattern { uniform, gaps, one_expert, own_rank, next_rank, none };
constexpr Pattern pattern_of(unsigned round) { return static_cast<Pattern>(round % 6); }

/// What differs between subjects. Rows expected of an expert decide the tiles; 0: those of a full batch, in fp8 128 rows.
struct Sizes {
  int hidden = 1024;
  int max_tokens = kMaxTokens;
  int capacity = 0;
  int timeout_ms = 20'000;
  int expected_rows = 0;
  int column_blocks = 4;     ///< HighThroughput
  bool masks = false;        ///< LowLatency
  bool deduplicate = false;  ///< LowLatency
};

/// The two layers of this rank, over the same weights. P: a Pair; FusedConfig: the configuration of the layer in one schedule.
template <class P, class FusedConfig = Fused>
class Subject {
  using Quant = typename P::Quant;
  template <class Config>
  using Layer = LayerOf<Config, P>;
  static_assert(facts::arrives<typename Layer<FusedConfig>::Exchange>() == FusedConfig::overlap_dispatch);
  static_assert(facts::completes<typename Layer<FusedConfig>::Exchange>() == FusedConfig::overlap_combine);
  static_assert(!facts::arrives<typename Layer<Plain>::Exchange>() && !facts::completes<typename Layer<Plain>::Exchange>());

 public:
  static constexpr bool kQuantised = !std::is_same_v<Quant, None>;
  explicit Subject(Sizes const& sizes = {})
      : comm_(connect()),
        sizes_(sizes),
        shape_{sizes.hidden, kIntermediate, kLocal * comm_.size(), kTopK, false},
        experts_(sizes.hidden, kIntermediate, kLocal, static_cast<std::uint64_t>(10 * comm_.rank())) {
    x_ = TypedMemory<bf16>(elements());
    ids_ = TypedMemory<std::int32_t>(std::size_t{kMaxTokens} * kTopK);
    weights_ = TypedMemory<float>(std::size_t{kMaxTokens} * kTopK);
    for (auto& out : out_) out = TypedMemory<bf16>(elements());
    build(plain_);
    build(fused_);
  }

  /// Brings rows of this rank; the same seed on all ranks.
  void bring(unsigned seed, Pattern pattern, int most) {
    std::mt19937 random(seed * 64 + static_cast<unsigned>(comm_.rank()));
    bring_rows(random_tokens(random, most), random, pattern);
  }
  /// Brings another number of the rows that are there, for other experts.
  void bring_ids(unsigned seed, Pattern pattern, int most) {
    std::mt19937 random(seed * 64 + static_cast<unsigned>(comm_.rank()));
    tokens_ = random_tokens(random, most);
    bring_slots(random, pattern);
  }
  void bring_all(unsigned seed, Pattern pattern, int tokens) {
    std::mt19937 random(seed * 64 + static_cast<unsigned>(comm_.rank()));
    bring_rows(tokens, random, pattern);
  }
  template <class Config>
  void forward(Layer<Config>& layer, int which) {
    check_cuda(cudaMemsetAsync(out_[which].data(), 0xff, out_[which].bytes(), stream_), "cudaMemsetAsync");
    layer.forward_routed(make_rows(static_cast<bf16 const*>(x_.data()), tokens_, sizes_.hidden),
                         make_rows(static_cast<std::int32_t const*>(ids_.data()), tokens_, kTopK),
                         make_rows(static_cast<float const*>(weights_.data()), tokens_, kTopK),
                         make_rows(out_[which].data(), tokens_, sizes_.hidden), {}, stream_);
  }
  void forward_plain() { forward(*plain_, 0); }
  void forward_fused() { forward(*fused_, 1); }
  /// The rows of this rank, for an exchange.
  auto routed() {
    return typename Layer<FusedConfig>::Exchange::Routed{make_rows(static_cast<bf16 const*>(x_.data()), tokens_, sizes_.hidden),
                                                         make_rows(static_cast<std::int32_t const*>(ids_.data()), tokens_, kTopK),
                                                         make_rows(static_cast<float const*>(weights_.data()), tokens_, kTopK), nullptr};
  }
  void clear_fused_output() { check_cuda(cudaMemsetAsync(out_[1].data(), 0xff, out_[1].bytes(), stream_), "cudaMemsetAsync"); }
  auto fused_output() { return make_rows(out_[1].data(), tokens_, sizes_.hidden); }
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
    auto const width = static_cast<std::size_t>(sizes_.hidden);
    std::size_t const n = static_cast<std::size_t>(tokens_) * width;
    double sum = 0;
    for (std::size_t i = 0; i < n; ++i) {
      sum += std::abs(static_cast<double>(to_float(a[i])));
      if (std::memcmp(&a[i], &b[i], sizeof a[i]) != 0) {
        return text("token ", i / width, " column ", i % width, ": fused ", to_float(b[i]), ", unfused ", to_float(a[i]), " of ", tokens_,
                    " tokens");
      }
    }
    if (!std::isfinite(sum)) return "the sums are not finite";
    norm_ += sum;
    return "";
  }
  double relative_difference() {
    stream_.synchronize();
    auto const rows = static_cast<std::size_t>(tokens_) * static_cast<std::size_t>(sizes_.hidden);
    return moe_test::relative_error(out_[1].download(), out_[0].download(), rows);
  }
  std::string round(unsigned seed, Pattern pattern, int most) {
    bring(seed, pattern, most);
    forward_plain();
    forward_fused();
    std::string const wrong = difference() + plain_error() + fused_error();
    return wrong;
  }
  double norm() const { return norm_; }
  Layer<FusedConfig>& fused() { return *fused_; }
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
  void build(std::optional<Layer<Config>>& layer) {
    typename Layer<Config>::Params p{.shape = shape_,
                                     .max_tokens_per_rank = sizes_.max_tokens,
                                     .placement = ExpertPlacement(shape_.num_experts, comm_.size(), PlacementStrategy::linear),
                                     .router = {shape_.num_experts, kTopK}};
    if constexpr (requires { p.backend.capacity; }) p.backend.capacity = sizes_.capacity;
    if constexpr (requires { p.backend.column_blocks; }) p.backend.column_blocks = sizes_.column_blocks;
    if constexpr (requires { p.backend.masks; }) {
      p.backend.masks = sizes_.masks;
      p.backend.deduplicate = sizes_.deduplicate;
    }
    p.backend.window.timeout_ms = sizes_.timeout_ms;
    p.experts.expected_rows = sizes_.expected_rows;
    layer.emplace(comm_, experts_.template view<Config>(), p);
  }
  std::size_t elements() const { return std::size_t{kMaxTokens} * static_cast<std::size_t>(sizes_.hidden); }
  static int random_tokens(std::mt19937& random, int most) {
    return most == 0 || random() % 7 == 0 ? 0 : static_cast<int>(random() % static_cast<unsigned>(most)) + 1;
  }
  void bring_rows(int tokens, std::mt19937& random, Pattern pattern) {
    tokens_ = tokens;
    std::normal_distribution<float> normal;
    std::vector<bf16> x(elements());
    std::vector<float> some(4096);
    for (float& v : some) v = normal(random);
    for (bf16& v : x) v = from_float<bf16>(some[random() % some.size()]);
    stream_.synchronize();
    x_.upload(x);
    bring_slots(random, pattern);
  }
  void bring_slots(std::mt19937& random, Pattern pattern) {
    int const experts = kLocal * comm_.size();
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
    ids_.upload(ids);
    weights_.upload(weights);
    check_cuda(cudaDeviceSynchronize(), "upload");
  }

  comm::Nccl comm_;
  Sizes sizes_;
  LayerShape shape_;
  moe_bench::RandomExperts<Quant> experts_;
  TypedMemory<bf16> x_, out_[2];
  TypedMemory<std::int32_t> ids_;
  TypedMemory<float> weights_;
  CudaStream stream_;
  std::optional<Layer<Plain>> plain_;
  std::optional<Layer<FusedConfig>> fused_;
  int tokens_ = 0;
  double norm_ = 0;
};

/// One expert takes `tokens` rows of each rank, more than fit: both layers say so and give the same bits.
template <class S>
void overflow_the_capacity(S& s, unsigned seed, int tokens) {
  s.bring_all(seed, Pattern::one_expert, tokens);
  s.forward_plain();
  s.forward_fused();
  EXPECT_EQ(s.difference(), "") << "over, seed " << seed;
  EXPECT_NE(s.fused_error().find("E_CAPACITY"), std::string::npos);
  EXPECT_NE(s.plain_error().find("E_CAPACITY"), std::string::npos);
}
/// One expert takes all rows; the capacity of its rank holds them exactly, and then not.
template <class S>
void fill_and_overflow_the_capacity() {
  constexpr int kRows = 64;
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  S s({.max_tokens = kRows + 1, .capacity = kRows * size});
  for (unsigned seed = 0; seed < 4; ++seed) {
    s.bring_all(seed, Pattern::one_expert, kRows);
    s.forward_plain();
    s.forward_fused();
    ASSERT_EQ(s.difference(), "") << "full, seed " << seed;
    ASSERT_EQ(s.fused_error(), "");
    overflow_the_capacity(s, seed, kRows + 1);
  }
}

/// One token, room for one row: it fits from one rank, and is refused from two. In bf16 the unfused layer takes its kernel for one token,
/// whose sums have another order.
template <class S>
void hold_one_row_in_room_for_one() {
  S s({.max_tokens = 1, .capacity = 1, .column_blocks = 1});
  for (unsigned seed = 0; seed < 6; ++seed) {
    s.bring_all(seed, Pattern::one_expert, s.rank() == static_cast<int>(seed) % s.size() ? 1 : 0);
    s.forward_plain();
    s.forward_fused();
    if constexpr (S::kQuantised) {
      ASSERT_EQ(s.difference(), "") << "one row, seed " << seed;
    } else {
      ASSERT_LT(s.relative_difference(), 1e-2) << "one row, seed " << seed;
    }
    ASSERT_EQ(s.plain_error() + s.fused_error(), "");
    if (s.size() == 1) continue;
    overflow_the_capacity(s, seed, 1);
  }
}

template <class S>
void end_a_round_that_a_rank_abandons() {
  S s;
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

/// Rounds with new experts and numbers of tokens, one to four of them in a row before the last is compared. MOE_FUSED_ROUNDS asks for more
/// than 200.
template <class S>
void give_the_same_bits_in_random_rounds() {
  char const* const wanted = std::getenv("MOE_FUSED_ROUNDS");
  int const rounds = wanted == nullptr ? 200 : std::atoi(wanted);
  constexpr int kMost = 200, kRowsFor = 64;
  S s({.max_tokens = kMost});
  unsigned seed = 0;
  for (int done = 0; done < rounds; ++seed) {
    Pattern const pattern = pattern_of(seed);
    if (seed % kRowsFor == 0) {
      s.bring(seed, pattern, kMost);
    } else {
      s.bring_ids(seed, pattern, kMost);
    }
    for (unsigned i = 0; i <= seed / 7 % 4; ++i, ++done) s.forward_fused();
    s.forward_plain();
    ASSERT_EQ(s.difference() + s.plain_error() + s.fused_error(), "") << "round " << done << ", seed " << seed;
  }
  EXPECT_GT(s.norm(), 0.0);
}

/// Ends the group.
template <class P, class FusedConfig = Fused>
void name_a_rank_that_stays_away() {
  Subject<P, FusedConfig> s({.timeout_ms = 1500});
  if (s.size() == 1) GTEST_SKIP() << "one rank has no peers";
  ASSERT_EQ(s.round(1, Pattern::uniform, 100), "");
  s.bring_all(2, Pattern::uniform, 100);
  if (s.rank() < s.size() - 1) {
    s.forward_fused();
    EXPECT_NE(s.fused_error().find(text("rank ", s.size() - 1)), std::string::npos);
  }
  MPI_Barrier(MPI_COMM_WORLD);  // the others tell the rank that stays away, in its window
}

}  // namespace moe_test::arrivals
