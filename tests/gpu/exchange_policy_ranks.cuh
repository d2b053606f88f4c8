// SPDX-License-Identifier: Apache-2.0
// tests/gpu/exchange_policy_ranks.cuh: ranks of any exchange policy on one GPU, driven by one thread: identity experts on the dispatched
// rows, outputs compared with the host, refusals.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "moe/backends/common/memory.hpp"
#include "moe/backends/window/device/common/window.hpp"
#include "moe/comm/completions.cuh"
#include "moe/comm/simulated_peers.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/quantization/fp8_group128.hpp"
#include "tests/expect_error.hpp"
#include "tests/multigpu/exchange_ranks.cuh"

namespace moe_test {

using moe::bf16;
using moe::comm::SimulatedGroup;
using moe::comm::SimulatedRank;
using moe::comm::SimulatedWindow;
using Fp8Transport = moe::quantization::Fp8Group<128, moe::quantization::ScaleFormat::f32, moe::quantization::ScaleFloor::amax_1e4>;
using Manager = moe::comm::WindowManager<SimulatedWindow>;

struct PolicyConfig : moe::LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  struct Activation {};
};

// ---- Identity experts on the dispatched rows.

template <class Payload>
__device__ float decoded(Payload const* row, float const* scales, int h) {
  if constexpr (sizeof(Payload) == 1) {
    __nv_fp8_e4m3 code;
    code.__x = row[h];
    return static_cast<float>(code) * scales[h / 128];
  } else {
    return __bfloat162float(row[h]);
  }
}
/// y[e][i] = row i of block e. One block per expert.
template <class Payload, class Partial>
__global__ void identity(moe::BatchedTokens<Payload, float> const t, moe::Blocks<Partial> const y) {
  int const e = static_cast<int>(blockIdx.x);
  auto const hidden = static_cast<int>(y.extent(2));
  int const groups = (hidden + 127) / 128;
  for (int i = 0; i < t.expert_num_tokens(e); ++i) {
    std::int64_t const at = e * y.extent(1) + i;
    std::int64_t const from = t.gather.extent(0) > 0 ? t.gather(e, i) : at;
    for (int h = static_cast<int>(threadIdx.x); h < hidden; h += static_cast<int>(blockDim.x)) {
      y.data_handle()[at * hidden + h] = moe::from_float<Partial>(
          __bfloat162float(__float2bfloat16_rn(decoded(t.rows.data_handle() + from * hidden, t.scales.data_handle() + from * groups, h))));
    }
  }
}
/// y[r] = row r times the sum of its weights, in choice order.
template <class Payload, class Partial>
__global__ void identity(moe::StandardTokens<Payload, float> const t, moe::Rows<Partial> const y) {
  auto const hidden = static_cast<int>(y.extent(1));
  std::int64_t const n = t.num_rows != nullptr ? *t.num_rows : t.rows.extent(0);
  for (std::int64_t r = blockIdx.x; r < n; r += gridDim.x) {
    for (int h = static_cast<int>(threadIdx.x); h < hidden; h += static_cast<int>(blockDim.x)) {
      float sum = 0.0F;
      for (int j = 0; j < t.topk_ids.extent(1); ++j) {
        if (t.topk_ids(r, j) >= 0) {
          float const v = decoded(t.rows.data_handle() + r * t.rows.stride(0), t.scales.data_handle() + r * t.scales.stride(0), h);
          sum = fmaf(t.topk_weights(r, j), __bfloat162float(__float2bfloat16_rn(v)), sum);
        }
      }
      y(r, h) = moe::from_float<Partial>(sum);
    }
  }
}
template <class Payload, class Partial>
void run_identity(moe::BatchedTokens<Payload, float> const& t, moe::Blocks<Partial> const& y, cudaStream_t s) {
  if (y.extent(0) > 0) identity<<<static_cast<unsigned>(y.extent(0)), 128, 0, s>>>(t, y);
}
template <class Payload, class Partial>
void run_identity(moe::StandardTokens<Payload, float> const& t, moe::Rows<Partial> const& y, cudaStream_t s) {
  identity<<<16, 128, 0, s>>>(t, y);
}

/// Identity experts in blocks of columns, which they tell when all rows are complete there.
struct Telling {
  moe::comm::Completions to{};
  unsigned* finished = nullptr;            ///< device [blocks], 0: thread blocks that have finished each block of columns
  int told = moe::comm::kMaxColumnBlocks;  ///< blocks that are told; the others are only written
  int late = -1;                           ///< before this block all wait `late_ns`
  std::uint64_t late_ns = 0;
  std::uint16_t const* watched = nullptr;  ///< an element of the combine's output that is 0xffff before; after the first block is told,
  std::uint32_t* seen = nullptr;           ///< whether it changed within a second
};

/// y[r] = row r times the sum of its weights, in choice order, block of columns by block. The combine may start beside it.
template <class Payload>
__global__ void identity_telling(moe::StandardTokens<Payload, float> const t, moe::Rows<moe::bf16> const y, Telling const a) {
  moe::ptx::launch_dependents();
  __shared__ bool last;
  auto const hidden = static_cast<int>(y.extent(1));
  auto const tid = static_cast<int>(threadIdx.x);
  std::int64_t const n = t.num_rows != nullptr ? *t.num_rows : t.rows.extent(0);
  auto const wait = [](std::uint64_t ns, auto const& over) {
    std::uint64_t const start = moe::ptx::now_ns();
    while (!over() && moe::ptx::now_ns() - start < ns) {
    }
    return over();
  };
  for (int b = 0; b < a.to.blocks; ++b) {
    if (b == a.late) wait(a.late_ns, [] { return false; });
    for (std::int64_t r = blockIdx.x; r < n; r += gridDim.x) {
      for (int h = b * a.to.columns + tid; h < min((b + 1) * a.to.columns, hidden); h += static_cast<int>(blockDim.x)) {
        float const v = decoded(t.rows.data_handle() + r * t.rows.stride(0), t.scales.data_handle() + r * t.scales.stride(0), h);
        float sum = 0.0F;
        for (int j = 0; j < t.topk_ids.extent(1); ++j) {
          if (t.topk_ids(r, j) >= 0) sum = fmaf(t.topk_weights(r, j), __bfloat162float(__float2bfloat16_rn(v)), sum);
        }
        y(r, h) = __float2bfloat16_rn(sum);
      }
    }
    __syncthreads();
    if (tid == 0) last = moe::ptx::increment_acq_rel_gpu(a.finished + b, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (last && tid < 32 && b < a.told) moe::comm::detail::complete_columns(a.to, b);
    if (b == 0 && a.watched != nullptr && blockIdx.x == 0 && tid == 0) {
      *a.seen = wait(1'000'000'000, [&] { return *static_cast<std::uint16_t const volatile*>(a.watched) != 0xffff; }) ? 1 : 0;
    }
  }
}
template <class Payload>
void run_telling(moe::StandardTokens<Payload, float> const& t, moe::Rows<moe::bf16> const& y, Telling const& telling, cudaStream_t s) {
  identity_telling<<<8, 128, 0, s>>>(t, y, telling);
}

template <class F>
void expect_error(moe::ErrorCode one, moe::ErrorCode other, F&& f) {
  try {
    f();
    ADD_FAILURE() << "no error, expected " << moe::name(one) << " or " << moe::name(other);
  } catch (moe::Error const& e) {
    EXPECT_TRUE(e.code() == one || e.code() == other) << e.what();
  }
}

struct RankSizes {
  int ranks = 4;
  int max_tokens = 8;
  int hidden = 512;
  int topk = 4;
  int experts = 16;
  moe::PlacementStrategy strategy = moe::PlacementStrategy::linear;
  bool on_input = false;
  std::optional<moe::ExpertPlacement> placement = std::nullopt;  ///< instead of one by `strategy`
};

/// All ranks of one exchange on this GPU, driven by this thread. The experts of an exchange with kCompletes tell their columns.
template <class Backend, class Quant = Fp8Transport, class Partial = bf16, class Config = PolicyConfig>
class Ranks {
 public:
  using Exchange = typename Backend::template Exchange<Config, Quant, Partial>;
  using Params = typename Backend::Params;
  static constexpr bool kBatched = Backend::kFormat == moe::ActivationFormat::batched;

  Ranks(RankSizes const& s, Params p, std::vector<Manager*> managers = {}, std::vector<SimulatedRank>* given = nullptr)
      : setup_(s), group_(s.ranks), placement_(s.placement.value_or(moe::ExpertPlacement(s.experts, s.ranks, s.strategy, true))) {
    p.blocks = 10;
    p.programmatic = false;
    for (int r = 0; r < s.ranks; ++r) {
      own_.emplace_back(group_, r);
    }
    for (int r = 0; r < s.ranks; ++r) {
      if (!managers.empty()) p.manager = managers[static_cast<std::size_t>(r)];
      arenas_.push_back(std::make_unique<moe::Arena<moe::space::cuda>>());
      exchanges_.push_back(std::make_unique<Exchange>(
          (given != nullptr ? *given : own_)[static_cast<std::size_t>(r)],
          moe::Shape<Config>(
              {.hidden = s.hidden, .intermediate = 128, .num_experts = s.experts, .topk = s.topk, .weight_on_input = s.on_input}),
          s.max_tokens, placement_, Quant{}, p, *arenas_.back()));
      streams_.push_back(std::make_unique<moe::CudaStream>());
      finished_.emplace_back(std::size_t{moe::comm::kMaxColumnBlocks}, 0);
    }
    moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  int size() const { return setup_.ranks; }
  Exchange& at(int r) { return *exchanges_[static_cast<std::size_t>(r)]; }
  cudaStream_t stream(int r) { return *streams_[static_cast<std::size_t>(r)]; }
  RankBuffers& buffer(int r) { return buffers_[static_cast<std::size_t>(r)]; }
  RankTokens& tokens(int r) { return tokens_[static_cast<std::size_t>(r)]; }
  RankTokens const& brought(int r) const { return tokens_[static_cast<std::size_t>(r)]; }

  void bring(unsigned seed, Routing routing = Routing::uniform, int tokens = -1) {
    tokens_.clear();
    buffers_.clear();
    for (int r = 0; r < setup_.ranks; ++r) {
      int const n = tokens >= 0 ? tokens : (static_cast<int>(seed) + 3 * r) % (setup_.max_tokens + 1);
      tokens_.push_back(make_tokens(r, n, setup_.hidden, setup_.topk, setup_.experts, setup_.ranks, routing, seed));
      buffers_.push_back(make_buffers(tokens_.back(), setup_.hidden, 1, 0));
    }
    moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void name_one_expert(int r, int expert) {
    auto& ids = tokens_[static_cast<std::size_t>(r)].ids;
    std::fill(ids.begin(), ids.end(), expert);
    moe::Memory<moe::space::cuda>::copy_from_host(buffer(r).ids.data(), ids.data(), 4 * ids.size());
  }
  /// Rank `to` holds the tokens of rank `from`.
  void copy_tokens(int from, int to) {
    tokens_[static_cast<std::size_t>(to)] = brought(from);
    buffers_[static_cast<std::size_t>(to)] = make_buffers(brought(from), setup_.hidden, 1, 0);
    moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  moe::RoutedTokens<bf16> in(int r, int tokens = -1) {
    auto const& b = buffer(r);
    int const n = tokens < 0 ? b.in.tokens : tokens;
    return {moe::make_rows(b.in.x, n, setup_.hidden), moe::make_rows(b.in.ids, n, setup_.topk),
            moe::make_rows(b.in.weights, n, setup_.topk)};
  }
  moe::Rows<bf16> out(int r) { return moe::make_rows(as_bf16(buffer(r).out), buffer(r).in.tokens, setup_.hidden); }
  void pair(int r) {
    auto const t = at(r).prepare(in(r), stream(r));
    if constexpr (moe::facts::completes<Exchange>()) {
      run_telling(t, at(r).expert_output(), telling(r, at(r).completions()), stream(r));
    } else {
      run_identity(t, at(r).expert_output(), stream(r));
    }
    at(r).finalize(out(r), stream(r));
  }
  Telling telling(int r, moe::comm::Completions const& to) { return {.to = to, .finished = finished_[static_cast<std::size_t>(r)].data()}; }
  void round() {
    for (int r = 0; r < size(); ++r) pair(r);
  }
  void synchronize() {
    for (auto const& s : streams_) s->synchronize();
  }
  void synchronize_and_check() {
    synchronize();
    for (int r = 0; r < size(); ++r) at(r).check();
  }
  /// Owner of an id, or -1.
  int owner(int id) const { return id >= 0 && id < setup_.experts ? placement_.owner(id) : -1; }
  /// "" or the first output that differs by more than `relative` of the sum of magnitudes (0: at all). Terms of the ranks in `dead` are
  /// omitted.
  std::string differs(int r, bool per_rank, float relative = 0.0F, std::uint64_t dead = 0, float absolute = 0.0F) {
    auto const& t = brought(r);
    auto const got = buffer(r).out.host();
    for (int token = 0; token < t.tokens; ++token) {
      auto x = std::vector<std::uint16_t>(t.x.begin() + static_cast<std::ptrdiff_t>(token) * setup_.hidden,
                                          t.x.begin() + static_cast<std::ptrdiff_t>(token + 1) * setup_.hidden);
      auto const weight = [&](int j) { return t.weights[static_cast<std::size_t>(token * setup_.topk + j)]; };
      auto const id = [&](int j) { return t.ids[static_cast<std::size_t>(token * setup_.topk + j)]; };
      if (setup_.on_input && kBatched) {
        for (auto& v : x) v = bf16_bits(weight(0) * bf16_value(v));
      }
      auto const row = wire_row<moe::quantization::ScaleFloor::amax_1e4>(x.data(), setup_.hidden, Quant::kQuantizesActivations);
      for (int h = 0; h < setup_.hidden; ++h) {
        float const v = row.values[static_cast<std::size_t>(h)];
        float want = 0.0F;
        float size = 0.0F;
        for (int rank : per_rank ? ranks_of(t, token) : std::vector<int>{-1}) {
          float part = 0.0F;
          for (int j = 0; j < setup_.topk; ++j) {
            int const o = owner(id(j));
            if (o < 0 || ((dead >> o) & 1U) != 0 || (per_rank && o != rank)) continue;
            float const w = setup_.on_input && kBatched ? 1.0F : weight(j);
            part = std::fma(w, v, part);
            size += std::fabs(w * v);
          }
          want = per_rank ? want + bf16_value(bf16_bits(part)) : part;
        }
        float const have =
            bf16_value(got[static_cast<std::size_t>(token) * static_cast<std::size_t>(setup_.hidden) + static_cast<std::size_t>(h)]);
        want = bf16_value(bf16_bits(want));
        if (relative == 0.0F ? have != want : !(std::fabs(have - want) <= relative * size + absolute)) {
          return moe::text("rank ", r, " output (", token, ", ", h, "): ", have, ", expected ", want, " of terms ", size);
        }
      }
    }
    return "";
  }
  void expect_good(bool per_rank, std::string const& what = "", float relative = 0.0F) {
    synchronize_and_check();
    for (int r = 0; r < size(); ++r) EXPECT_EQ(differs(r, per_rank, relative), "") << what;
  }
  /// Rank `refusing` refused the last round: every other rank throws that error once. All have reset the words that reported it.
  void expect_refusal(moe::ErrorCode code, int refusing, std::string const& what, std::string const& phase = "") {
    synchronize();
    std::string const sentence = moe::text("rank ", refusing, " ", what);
    for (int r = 0; r < size(); ++r) {
      if (r != refusing) {
        try {
          at(r).check();
          ADD_FAILURE() << "rank " << r << " was not told: " << sentence;
        } catch (moe::TransportError const& e) {
          EXPECT_EQ(e.code(), code) << e.what();
          EXPECT_EQ(e.rank(), r) << e.what();
          EXPECT_EQ(e.peer(), refusing) << e.what();
          EXPECT_EQ(std::string(e.message()).find(sentence + " ("), 0U) << e.what();
          EXPECT_TRUE(phase.empty() || e.phase() == phase) << e.what();
        }
      }
      EXPECT_NO_THROW(at(r).check()) << "rank " << r << ", " << sentence;  // once, and never its own
      auto const words =
          read_device<std::uint32_t>(at(r).window().peer(r, moe::comm::WindowControl::refused), 2 * moe::comm::kMaxWindowRanks);
      EXPECT_EQ(std::count(words.begin(), words.end(), 0U), static_cast<std::ptrdiff_t>(words.size())) << "rank " << r;
    }
  }
  /// A refusal that no host has read yet, then a missing rank.
  void expect_timeout_after_refusal() {
    bring(3, Routing::uniform, setup_.max_tokens);
    at(0).abandon(stream(0));
    for (int r = 1; r < size(); ++r) pair(r);
    synchronize();
    for (int r = 1; r < size(); ++r) pair(r);
    synchronize();
    for (int r = 1; r < size(); ++r) {
      try {
        at(r).check();
        ADD_FAILURE() << "rank " << r << " saw no failure";
      } catch (moe::TransportError const& e) {
        EXPECT_TRUE(e.code() == moe::ErrorCode::timeout || e.code() == moe::ErrorCode::peer) << e.what();
        EXPECT_EQ(std::string(e.message()).find("abandoned"), std::string::npos) << e.what();
        EXPECT_EQ(e.peer(), 0) << e.what();
      }
      expect_error(moe::ErrorCode::timeout, moe::ErrorCode::peer, [&] { at(r).prepare(in(r), stream(r)); });  // the group is unusable
    }
  }

 private:
  /// The ranks of a token in the order in which their sums are added.
  std::vector<int> ranks_of(RankTokens const& t, int token) const {
    std::vector<int> all;
    for (int r = 0; r < setup_.ranks; ++r) all.push_back(r);
    if (std::string_view(Backend::kName) == "one_sided") {  // as the choices name them
      auto const named = [&](int rank) {
        int j = 0;
        while (j < setup_.topk && owner(t.ids[static_cast<std::size_t>(token * setup_.topk + j)]) != rank) ++j;
        return j;
      };
      std::stable_sort(all.begin(), all.end(), [&](int a, int b) { return named(a) < named(b); });
    }
    return all;
  }
  RankSizes setup_;
  SimulatedGroup group_;
  std::vector<SimulatedRank> own_;
  moe::ExpertPlacement placement_;
  std::vector<std::unique_ptr<moe::Arena<moe::space::cuda>>> arenas_;
  std::vector<std::unique_ptr<Exchange>> exchanges_;
  std::vector<std::unique_ptr<moe::CudaStream>> streams_;
  std::vector<RankTokens> tokens_;
  std::vector<RankBuffers> buffers_;
  std::vector<DeviceArray<unsigned>> finished_;
};

/// What a layer counts as the window of each rank's exchange is the formula of backends/common/memory.hpp, and less than 1 MiB of flags and
/// counts.
template <class Run>
void expect_window(Run&& run, std::int64_t formula, std::string const& what) {
  for (int r = 0; r < run.size(); ++r) {
    auto const bytes = static_cast<std::int64_t>(moe::facts::window_bytes(run.at(r)));
    EXPECT_GT(bytes, formula) << what << ", rank " << r;
    EXPECT_LT(bytes, formula + (1 << 20)) << what << ", rank " << r;
  }
}
/// Sizes whose rows take far more than the flags and counts.
inline RankSizes memory_sizes() { return {.max_tokens = 256, .hidden = 2048}; }
inline moe::backends::DeviceExchangeSize memory_size() {
  RankSizes const s = memory_sizes();
  return {s.ranks, s.max_tokens, s.topk, s.experts / s.ranks, s.hidden, true};
}

}  // namespace moe_test
