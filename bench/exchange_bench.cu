// SPDX-License-Identifier: Apache-2.0
// bench/exchange_bench.cu: dispatch and combine alone, against the ceiling of the same link in the same run.
//
//   exchange_bench [--ranks N] [--simulated] [--sections ceiling,ll,ht,scan,windows,soak] [--blocks 128] [--ht-blocks 8,16] [--quick]
//                  [--rounds N] [--json FILE]
//
// One process, one thread, one GPU per rank (or all ranks on one GPU: the same checks, but the times are meaningless). Every shape is
// checked (payload bytes against the host's quantisation, places, outputs of identity experts) before it is timed. Low latency: a CUDA
// graph of ten pairs, replayed back to back, slowest rank. High throughput: calls back to back in a stream, slowest rank.
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>

#include "bench/arguments.hpp"
#include "bench/bench_report.hpp"
#include "bench/exchange_peers.cuh"
#include "moe/core/cuda_graph.hpp"
#include "tests/multigpu/exchange_harness.cuh"
#include "tests/multigpu/nccl_ranks.cuh"

namespace {

using namespace moe_test;
using moe::check_cuda;
using moe::text;
using namespace moe::comm::detail;
using moe::detail::HighThroughputCalls;
using moe::detail::HighThroughputShape;
using moe::detail::LowLatencyCalls;
using moe::detail::LowLatencyShape;

// ---- The ceiling: equal bytes to every peer, no routing, no arithmetic.

enum class Move { put_stores, put_bulk, get_loads, get_bulk };
char const* name(Move m) {
  switch (m) {
    case Move::put_stores: return "put, stores";
    case Move::put_bulk: return "put, bulk";
    case Move::get_loads: return "get, loads";
    case Move::get_bulk: return "get, bulk";
  }
  return "?";
}
constexpr std::size_t kRounds = moe::comm::kWindowControlBytes;
constexpr std::size_t kArrive = kRounds + 4096;
constexpr std::size_t kSource = std::size_t{1} << 20;
constexpr int kBulkBytes = 14336;
constexpr int kBulkWarps = 12;

template <Move kMove>
__global__ void __launch_bounds__(512, 1) ceiling(moe::comm::WindowView const __grid_constant__ w, std::size_t bytes) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ std::uint64_t bar[kBulkWarps];
  int const tid = static_cast<int>(threadIdx.x);
  int const block = static_cast<int>(blockIdx.x);
  int const me = w.rank;
  int const R = w.size;
  std::size_t const destination = kSource + bytes * R;
  std::uint32_t const round = own<std::uint32_t>(w, kRounds)[block] + 1;
  auto meet = [&](std::uint32_t value) {
    __syncthreads();
    if (tid < R) {
      publish(at<std::uint32_t>(w, tid, kArrive) + me * 160 + block, value);
      wait_round(w, own<std::uint32_t>(w, kArrive) + tid * 160 + block, value, moe::comm::ExchangePhase::barrier, tid);
    }
    __syncthreads();
  };
  constexpr bool kGet = kMove == Move::get_loads || kMove == Move::get_bulk;
  meet(2 * round);
  for (int q = 1; q < R; ++q) {
    int const p = (me + q) % R;
    char const* const from = kGet ? w.peer[p] + kSource + me * bytes : w.peer[me] + kSource + p * bytes;
    char* const to = kGet ? w.peer[me] + destination + p * bytes : w.peer[p] + destination + me * bytes;
    if constexpr (kMove == Move::put_stores || kMove == Move::get_loads) {
      std::size_t const n = bytes / 16;
      std::size_t const stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
      std::size_t i = static_cast<std::size_t>(block) * blockDim.x + tid;
      auto const* s = reinterpret_cast<uint4 const*>(from);
      auto* d = reinterpret_cast<uint4*>(to);
      for (; i + 7 * stride < n; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          v[k] = load_peer(s + i + k * stride);
        }
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          store_peer(d + i + k * stride, v[k]);
        }
      }
      for (; i < n; i += stride) {
        store_peer(d + i, load_peer(s + i));
      }
    } else {
      int const warp = tid / 32;
      if (warp < kBulkWarps && tid % 32 == 0) {
        if (q == 1) {
          moe::ptx::barrier_init(&bar[warp], 1);
          moe::ptx::fence_shared_to_bulk();
        }
        static_assert(kBulkBytes % 16 == 0);
        unsigned char* const stage = shared + warp * kBulkBytes;
        std::size_t const pieces = (bytes + kBulkBytes - 1) / kBulkBytes;
        std::size_t const stride = static_cast<std::size_t>(gridDim.x) * kBulkWarps;
        std::size_t const first = static_cast<std::size_t>(block) + gridDim.x * static_cast<std::size_t>(warp);
        std::uint32_t phase = first < pieces ? static_cast<std::uint32_t>((q - 1) * ((pieces - first + stride - 1) / stride)) & 1U : 0;
        for (std::size_t i = first; i < pieces; i += stride) {
          int const n = static_cast<int>(min(static_cast<std::size_t>(kBulkBytes), bytes - i * kBulkBytes));
          moe::ptx::bulk_wait_read();
          moe::ptx::barrier_expect(&bar[warp], n);
          moe::ptx::bulk_load(stage, from + i * kBulkBytes, n, &bar[warp]);
          moe::ptx::barrier_wait(&bar[warp], phase);
          phase ^= 1;
          moe::ptx::bulk_store(to + i * kBulkBytes, stage, n);
          moe::ptx::bulk_commit();
        }
      }
    }
  }
  if constexpr (kMove == Move::put_bulk || kMove == Move::get_bulk) {
    moe::ptx::bulk_wait();
    moe::ptx::fence_bulk();
  }
  meet(2 * round + 1);
  if (tid == 0) {
    for (int b = block; b < 160; b += static_cast<int>(gridDim.x)) {
      own<std::uint32_t>(w, kRounds)[b] = round;
    }
  }
}

struct Options {
  int ranks = 0;
  bool simulated = false;
  bool quick = false;
  moe_bench::Names sections{"ceiling", "ll", "ht"};
  std::vector<int> blocks = {128};
  std::vector<int> ht_blocks = {16, 8};
  std::string json;
  int rounds = 100000;
  bool unfenced = false;  // combine announces its ready flag without a fence
};

class Bench {
 public:
  explicit Bench(Options const& o) : options_(o), group_(o.ranks, o.simulated, window_bytes(o), 4'000'000'000ULL) {
    if (!o.json.empty()) {
      json_ = std::fopen(o.json.c_str(), "w");
    }
  }
  ~Bench() {
    if (json_ != nullptr) {
      std::fclose(json_);
    }
  }

  static std::size_t window_bytes(Options const& o) { return o.simulated ? std::size_t{1} << 30 : std::size_t{5} << 30; }

  void clear() {
    group_.synchronize();
    for (int r = 0; r < group_.size(); ++r) {
      group_.use(r);
      check_cuda(cudaMemset(group_.view(r).peer[r] + moe::comm::kWindowControlBytes, 0, window_bytes(options_)), "cudaMemset");
      check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
  }

  /// Microseconds per call of `enqueue(rank, i)`, i counting calls, on the slowest rank: median over repeats; `spread` gets max - min.
  double time(int calls, int replays, bool graph, std::function<void(int, int)> const& enqueue, double* spread = nullptr) {
    int const R = group_.size();
    std::vector<moe::CudaGraph> graphs;
    for (int r = 0; graph && r < R; ++r) {
      group_.use(r);
      graphs.emplace_back(group_.stream(r), [&] {
        for (int i = 0; i < calls; ++i) enqueue(r, i);
      });
    }
    auto once = [&] {
      for (int i = 0; i < (graph ? 1 : calls); ++i) {
        for (int r = 0; r < R; ++r) {
          group_.use(r);
          if (graph) {
            graphs[static_cast<std::size_t>(r)].launch(group_.stream(r));
          } else {
            enqueue(r, i);
          }
        }
      }
    };
    std::deque<moe::CudaEvent> begin, end;
    for (int r = 0; r < R; ++r) {
      group_.use(r);
      begin.emplace_back();
      end.emplace_back();
    }
    std::vector<double> repeats;
    for (int k = 0; k < 4; ++k) {
      once();  // ranks start together, so the timed part does not include another rank's first launch
      for (int r = 0; r < R; ++r) {
        group_.use(r);
        begin[static_cast<std::size_t>(r)].record(group_.stream(r));
      }
      for (int i = 0; i < replays; ++i) {
        once();
      }
      double slowest = 0;
      for (int r = 0; r < R; ++r) {
        group_.use(r);
        end[static_cast<std::size_t>(r)].record(group_.stream(r));
      }
      group_.synchronize_and_check();
      for (int r = 0; r < R; ++r) {
        float const ms = end[static_cast<std::size_t>(r)].since(begin[static_cast<std::size_t>(r)]);
        slowest = std::max(slowest, 1e3 * ms / (static_cast<double>(calls) * replays));
      }
      if (k > 0) {
        repeats.push_back(slowest);
      }
    }
    auto const [median, width] = moe_bench::median_and_spread(repeats);
    if (spread != nullptr) *spread = width;
    return median;
  }

  template <Move kMove>
  double ceiling_time(std::size_t bytes, int blocks) {
    for (int r = 0; r < group_.size(); ++r) {
      group_.use(r);
      check_cuda(cudaFuncSetAttribute(&ceiling<kMove>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBulkWarps * kBulkBytes),
                 "cudaFuncSetAttribute");
    }
    std::size_t const shared = kMove == Move::put_bulk || kMove == Move::get_bulk ? kBulkWarps * kBulkBytes : 0;
    return time(8, bytes > (std::size_t{8} << 20) ? 2 : 10, true, [&](int r, int) {
      ceiling<kMove><<<static_cast<unsigned>(blocks), 512, shared, group_.stream(r)>>>(group_.view(r), bytes);
      check_cuda(cudaGetLastError(), "ceiling");
    });
  }
  void run_ceiling() {
    int const R = group_.size();
    std::printf("ceiling, us (GB/s out or in, per GPU), %d ranks\n", R);
    std::vector<std::size_t> sizes = {std::size_t{16} << 10, std::size_t{940} << 10, std::size_t{1792} << 10, std::size_t{20039680},
                                      std::size_t{38864896}};
    for (std::size_t bytes : sizes) {
      bytes = bytes / 1024 * 1024;
      if (options_.simulated && bytes > (std::size_t{2} << 20)) {
        continue;
      }
      clear();
      for (Move m : {Move::put_stores, Move::put_bulk, Move::get_loads, Move::get_bulk}) {
        std::printf("  %8zu KiB a peer, %-12s", bytes >> 10, name(m));
        std::vector<int> const all = bytes > (std::size_t{8} << 20) ? std::vector<int>{8, 16, 32, 128} : std::vector<int>{16, 128};
        for (int blocks : all) {
          if (options_.simulated && blocks > 8) {
            continue;
          }
          double us = 0;
          switch (m) {
            case Move::put_stores: us = ceiling_time<Move::put_stores>(bytes, blocks); break;
            case Move::put_bulk: us = ceiling_time<Move::put_bulk>(bytes, blocks); break;
            case Move::get_loads: us = ceiling_time<Move::get_loads>(bytes, blocks); break;
            case Move::get_bulk: us = ceiling_time<Move::get_bulk>(bytes, blocks); break;
          }
          double const rate = static_cast<double>(bytes) * (R - 1) / us * 1e-3;
          std::printf("  %3d: %7.1f (%5.1f)", blocks, us, rate);
          record(text("{\"section\":\"ceiling\",\"ranks\":", R, ",\"move\":\"", name(m), "\",\"bytes_per_peer\":", bytes,
                      ",\"blocks\":", blocks, ",\"us\":", us, ",\"gb_per_s\":", rate, "}"));
        }
        std::printf("\n");
        std::fflush(stdout);
      }
    }
  }

  struct LlCase {
    int hidden, topk, experts, tokens;
  };
  void run_low_latency(LlCase const& c, bool per_rank, bool fp8, int blocks, bool programmatic) {
    int const R = group_.size();
    LowLatencyShape s;
    s.ranks = R;
    s.max_tokens = options_.simulated ? std::min(c.tokens, 16) : 128;
    s.hidden = c.hidden;
    s.topk = c.topk;
    s.num_experts = c.experts;
    s.fp8 = fp8;
    s.per_rank = per_rank;
    s.blocks = blocks;
    int const M = std::min(c.tokens, s.max_tokens);
    if (LowLatencyCalls::window_bytes(s) > window_bytes(options_)) {
      std::printf("  window too small: %zu\n", LowLatencyCalls::window_bytes(s));
      return;
    }
    clear();
    std::vector<LowLatencyCalls> calls;
    std::vector<RankTokens> tokens;
    std::vector<RankBuffers> buffers;
    auto const y_rows = per_rank ? static_cast<std::size_t>(s.local_experts()) * static_cast<std::size_t>(s.capacity()) : 0;
    double remote = 0;
    for (int r = 0; r < R; ++r) {
      group_.use(r);
      calls.emplace_back(group_.view(r), s, moe::detail::ExchangeOptions{.programmatic = programmatic, .fenced = !options_.unfenced});
      tokens.push_back(make_tokens(r, M, c.hidden, c.topk, c.experts, R, Routing::uniform, 5));
      buffers.push_back(make_buffers(tokens.back(), c.hidden, s.local_experts(), y_rows));
      check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      for (int t = 0; t < M; ++t) {
        std::vector<bool> seen(static_cast<std::size_t>(R));
        for (int j = 0; j < c.topk; ++j) {
          int const dst = tokens.back().ids[static_cast<std::size_t>(t * c.topk + j)] / s.local_experts();
          remote += dst != r && !(per_rank && seen[static_cast<std::size_t>(dst)]) ? 1 : 0;
          seen[static_cast<std::size_t>(dst)] = true;
        }
      }
    }
    remote /= R;
    auto at = [](auto& v, int r) -> auto& { return v[static_cast<std::size_t>(r)]; };
    auto dispatch = [&](int r, int i) { at(calls, r).dispatch(at(buffers, r).in, at(buffers, r).num.data(), i & 1, group_.stream(r)); };
    auto combine = [&](int r, int i) {
      at(calls, r).combine(at(buffers, r).in, as_bf16(at(buffers, r).out), c.hidden, i & 1, group_.stream(r));
    };
    for (int i = 0; i < 2; ++i) {
      for (int r = 0; r < R; ++r) {
        group_.use(r);
        dispatch(r, i);
        auto const& k = at(calls, r);
        dim3 const grid(16, static_cast<unsigned>(s.local_experts()));
        identity_batched<<<grid, 128, 0, group_.stream(r)>>>(k.own<char>(k.layout().rows[i]), k.own<float>(k.layout().scales[i]),
                                                             per_rank ? k.own<std::int32_t>(k.layout().sources[i]) : nullptr,
                                                             at(buffers, r).num.data(), s.capacity(), c.hidden, fp8,
                                                             per_rank ? as_bf16(at(buffers, r).y) : k.outputs(i));
        if (per_rank) {
          k.reduce(as_bf16(at(buffers, r).y), i, 32, group_.stream(r));
        }
        combine(r, i);
      }
    }
    group_.synchronize_and_check();
    int const step = std::max(1, M / 8);
    for (int r = 0; r < R; ++r) {
      group_.use(r);
      auto why = check_low_latency_rows(at(calls, r), tokens, at(buffers, r), r, 1, 4 * step);
      if (why.empty()) {
        why = check_outputs<moe::quantization::ScaleFloor::amax_1e4>(at(tokens, r), at(buffers, r), r, c.hidden, c.topk, s.local_experts(),
                                                                     R, fp8, per_rank, step);
      }
      if (!why.empty()) {
        std::printf("  WRONG: %s\n", why.c_str());
        ++failures_;
        return;
      }
    }
    double spread = 0;
    double const pair = time(10, 20, true, [&](int r, int i) { dispatch(r, i), combine(r, i); }, &spread);
    double const d = time(20, 10, true, dispatch);
    double const m = time(20, 10, true, combine);
    double const row = fp8 ? c.hidden + c.hidden / 32.0 : 2.0 * c.hidden;
    std::printf(
        "  %4d %d/%d T=%3d %-10s %s blocks %3d%s  pair %6.1f (+-%.1f)  dispatch %6.1f (%5.1f GB/s)  combine %6.1f (%5.1f GB/s)  rows out "
        "%.0f\n",
        c.hidden, c.topk, c.experts, M, per_rank ? "per rank" : "per expert", fp8 ? "fp8 " : "bf16", blocks, programmatic ? " pdl" : "",
        pair, spread, d, remote * row / d * 1e-3, m, remote * 2 * c.hidden / m * 1e-3, remote);
    std::fflush(stdout);
    record(text("{\"section\":\"low_latency\",\"ranks\":", R, ",\"hidden\":", c.hidden, ",\"topk\":", c.topk, ",\"experts\":", c.experts,
                ",\"tokens\":", M, ",\"per_rank\":", per_rank, ",\"fp8\":", fp8, ",\"blocks\":", blocks, ",\"programmatic\":", programmatic,
                ",\"pair_us\":", pair, ",\"pair_spread_us\":", spread, ",\"dispatch_us\":", d, ",\"combine_us\":", m,
                ",\"rows_out\":", remote, "}"));
  }

  void run_high_throughput(int M, bool fp8, int blocks, moe::detail::HighThroughputTuning const& tuning, bool lists, bool scan = false) {
    int const R = group_.size();
    HighThroughputShape s;
    s.ranks = R;
    s.max_tokens = options_.simulated ? std::min(M, 256) : M;
    s.hidden = 7168;
    s.topk = 8;
    s.num_experts = 256;
    s.fp8 = fp8;
    s.lists = lists;
    s.alignment = lists ? 128 : 1;
    s.blocks = blocks;
    if (HighThroughputCalls::window_bytes(s) > window_bytes(options_)) {
      std::printf("  window too small: %zu\n", HighThroughputCalls::window_bytes(s));
      return;
    }
    M = s.max_tokens;
    clear();
    std::vector<HighThroughputCalls> calls;
    auto& tokens = large_;
    std::vector<RankBuffers> buffers;
    double remote = 0;
    for (int r = 0; r < R; ++r) {
      group_.use(r);
      calls.emplace_back(group_.view(r), s, !options_.simulated, tuning);
      if (static_cast<int>(large_.size()) <= r) {
        large_.push_back(make_tokens(r, M, s.hidden, s.topk, s.num_experts, R, Routing::uniform, 5));
      }
      buffers.push_back(make_buffers(large_[static_cast<std::size_t>(r)], s.hidden, s.local_experts(),
                                     lists ? static_cast<std::size_t>(s.list_size()) : 0));
      check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      for (int t = 0; t < M; ++t) {
        unsigned seen = 1U << r;
        for (int j = 0; j < s.topk; ++j) {
          unsigned const bit =
              1U << (large_[static_cast<std::size_t>(r)].ids[static_cast<std::size_t>(t * s.topk + j)] / s.local_experts());
          remote += (seen & bit) == 0 ? 1 : 0;
          seen |= bit;
        }
      }
    }
    remote /= R;
    auto at = [](auto& v, int r) -> auto& { return v[static_cast<std::size_t>(r)]; };
    auto dispatch = [&](int r, int i) { at(calls, r).dispatch(at(buffers, r).in, i & 1, group_.stream(r)); };
    auto cached = [&](int r, int i) { at(calls, r).dispatch(at(buffers, r).in, i & 1, group_.stream(r), i & 1); };
    auto combine = [&](int r, int i) {
      at(calls, r).combine(at(buffers, r).in, as_bf16(at(buffers, r).out), s.hidden, i & 1, group_.stream(r));
    };
    for (int i = 0; i < 2; ++i) {
      for (int r = 0; r < R; ++r) {
        group_.use(r);
        dispatch(r, i);
        auto const& k = at(calls, r);
        if (lists) {
          identity_listed<<<1024, 128, 0, group_.stream(r)>>>(k.own<char>(k.layout().rows[i]), k.own<float>(k.layout().scales[i]),
                                                              k.layout().scale_stride, k.own<std::int32_t>(k.layout().list[i]),
                                                              k.own<std::int32_t>(k.layout().summary[i]), s.hidden, fp8,
                                                              as_bf16(at(buffers, r).y));
          k.reduce(as_bf16(at(buffers, r).y), i, 1024, group_.stream(r));
        }
        combine(r, i);
      }
    }
    group_.synchronize_and_check();
    for (int r = 0; lists && r < R; ++r) {
      group_.use(r);
      auto why = check_high_throughput_rows(at(calls, r), tokens, r, 1, 1, std::max(1, M / 4));
      if (why.empty()) {
        why = check_outputs<moe::quantization::ScaleFloor::amax_1e10>(at(tokens, r), at(buffers, r), r, s.hidden, s.topk, s.local_experts(),
                                                                      R, fp8, true, std::max(1, M / 8));
      }
      if (!why.empty()) {
        std::printf("  WRONG: %s\n", why.c_str());
        ++failures_;
        return;
      }
    }
    double const d = time(4, 5, false, dispatch);
    double const c = scan ? 0 : time(4, 5, false, cached);
    double const m = scan ? 0 : time(4, 5, false, combine);
    double const row = fp8 ? s.hidden + s.hidden / 32.0 : 2.0 * s.hidden;
    std::printf(
        "  %5d tokens %s blocks %2d warps %2d pieces %5d %4d%s  dispatch %7.1f (%5.1f GB/s)  cached %7.1f (%5.1f GB/s)  combine %7.1f "
        "(%5.1f GB/s)\n",
        M, fp8 ? "fp8 " : "bf16", blocks, tuning.dispatch_warps, tuning.dispatch_piece, tuning.combine_piece, lists ? " lists" : "", d,
        remote * row / d * 1e-3, c, c > 0 ? remote * row / c * 1e-3 : 0, m, m > 0 ? remote * 2 * s.hidden / m * 1e-3 : 0);
    std::fflush(stdout);
    record(text("{\"section\":\"high_throughput\",\"ranks\":", R, ",\"tokens\":", M, ",\"fp8\":", fp8, ",\"blocks\":", blocks,
                ",\"warps\":", tuning.dispatch_warps, ",\"dispatch_piece\":", tuning.dispatch_piece,
                ",\"combine_piece\":", tuning.combine_piece, ",\"lists\":", lists, ",\"dispatch_us\":", d, ",\"cached_us\":", c,
                ",\"combine_us\":", m, ",\"rows_out\":", remote, "}"));
  }

  /// `rounds` pairs with random token counts, routings and delays on every rank; outputs are compared every 1000 rounds.
  void run_soak(int rounds, bool high) {
    int const R = group_.size();
    constexpr int kSets = 6;
    int const M = high ? 300 : 32;
    LowLatencyShape ls;
    ls.ranks = R;
    ls.max_tokens = M;
    ls.hidden = 1024;
    ls.topk = 6;
    ls.num_experts = 16 * R;
    ls.blocks = options_.simulated ? 12 : 64;
    HighThroughputShape hs;
    hs.ranks = R;
    hs.max_tokens = M;
    hs.hidden = ls.hidden;
    hs.topk = ls.topk;
    hs.num_experts = ls.num_experts;
    hs.alignment = 16;
    hs.blocks = options_.simulated ? 12 : 16;
    clear();
    std::vector<LowLatencyCalls> low;
    std::vector<HighThroughputCalls> ht;
    std::vector<std::vector<RankTokens>> tokens(static_cast<std::size_t>(R));
    std::vector<std::vector<RankBuffers>> buffers(static_cast<std::size_t>(R));
    std::vector<std::size_t> free_before(static_cast<std::size_t>(R));
    auto at = [](auto& v, int r) -> auto& { return v[static_cast<std::size_t>(r)]; };
    for (int r = 0; r < R; ++r) {
      group_.use(r);
      low.emplace_back(group_.view(r), ls, !options_.simulated);
      ht.emplace_back(group_.view(r), hs, !options_.simulated);
      for (int k = 0; k < kSets; ++k) {
        auto const routing = k == 4 ? Routing::with_gaps : k == 5 ? Routing::one_rank : Routing::uniform;
        at(tokens, r).push_back(make_tokens(r, M, ls.hidden, ls.topk, ls.num_experts, R, routing, 100 + static_cast<unsigned>(k)));
        at(buffers, r)
            .push_back(
                make_buffers(at(tokens, r).back(), ls.hidden, ls.local_experts(), high ? static_cast<std::size_t>(hs.list_size()) : 0));
      }
      check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      std::size_t total = 0;
      check_cuda(cudaMemGetInfo(&at(free_before, r), &total), "cudaMemGetInfo");
    }
    std::mt19937 g(1);
    auto const start = std::chrono::steady_clock::now();
    int good = 0;
    for (int i = 0; i < rounds; ++i) {
      bool const look = i % 1000 == 999 || i == rounds - 1;
      int const parity = i & 1;
      std::vector<int> set(static_cast<std::size_t>(R));
      for (int r = 0; r < R; ++r) {
        group_.use(r);
        at(set, r) = static_cast<int>(g() % kSets);
        RankBuffers& b = at(buffers, r)[static_cast<std::size_t>(at(set, r))];
        auto in = b.in;
        in.tokens = g() % 8 == 0 ? 0 : static_cast<int>(g() % static_cast<unsigned>(M + 1));
        at(tokens, r)[static_cast<std::size_t>(at(set, r))].tokens = in.tokens;
        auto const stream = group_.stream(r);
        if (g() % 4 == 0) {
          delay<<<1, 1, 0, stream>>>(g() % 20000);
        }
        if (high) {
          auto const& k = at(ht, r);
          k.dispatch(in, parity, stream);
          identity_listed<<<32, 128, 0, stream>>>(k.own<char>(k.layout().rows[parity]), k.own<float>(k.layout().scales[parity]),
                                                  k.layout().scale_stride, k.own<std::int32_t>(k.layout().list[parity]),
                                                  k.own<std::int32_t>(k.layout().summary[parity]), hs.hidden, true, as_bf16(b.y));
          k.reduce(as_bf16(b.y), parity, 64, stream);
          k.combine(in, as_bf16(b.out), hs.hidden, parity, stream);
        } else {
          auto const& k = at(low, r);
          k.dispatch(in, b.num.data(), parity, stream);
          identity_batched<<<dim3(4, static_cast<unsigned>(ls.local_experts())), 128, 0, stream>>>(
              k.own<char>(k.layout().rows[parity]), k.own<float>(k.layout().scales[parity]), nullptr, b.num.data(), ls.capacity(),
              ls.hidden, true, k.outputs(parity));
          k.combine(in, as_bf16(b.out), ls.hidden, parity, stream);
        }
      }
      if (!look) {
        if (i % 64 == 63) {
          group_.synchronize_and_check();  // the launch queue stays short
        }
        continue;
      }
      group_.synchronize_and_check();
      for (int r = 0; r < R; ++r) {
        group_.use(r);
        auto const& t = at(tokens, r)[static_cast<std::size_t>(at(set, r))];
        auto const& b = at(buffers, r)[static_cast<std::size_t>(at(set, r))];
        auto const why = high ? check_outputs<moe::quantization::ScaleFloor::amax_1e10>(t, b, r, hs.hidden, hs.topk, hs.local_experts(), R,
                                                                                        true, true, 7)
                              : check_outputs<moe::quantization::ScaleFloor::amax_1e4>(t, b, r, ls.hidden, ls.topk, ls.local_experts(), R,
                                                                                       true, false, 3);
        if (!why.empty()) {
          std::printf("  WRONG after %d rounds: %s\n", i + 1, why.c_str());
          ++failures_;
          return;
        }
      }
      ++good;
    }
    std::size_t grown = 0;
    for (int r = 0; r < R; ++r) {
      group_.use(r);
      std::size_t left = 0, total = 0;
      check_cuda(cudaMemGetInfo(&left, &total), "cudaMemGetInfo");
      grown = std::max(grown, at(free_before, r) > left ? at(free_before, r) - left : 0);
    }
    double const seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("soak %s: %d rounds on %d ranks in %.1f s, %d comparisons good, memory grew by %zu bytes\n",
                high ? "high throughput" : "low latency", rounds, R, seconds, good, grown);
    record(text("{\"section\":\"soak\",\"high_throughput\":", high, ",\"ranks\":", R, ",\"rounds\":", rounds, ",\"seconds\":", seconds,
                ",\"grown\":", grown, "}"));
  }

  void run() {
    auto const wanted = [&](char const* s) { return std::ranges::find(options_.sections, s) != options_.sections.end(); };
    bool const pdl = !options_.simulated;
    if (wanted("ceiling")) {
      run_ceiling();
    }
    if (wanted("ll")) {
      std::printf("low latency, us per call; pair: fp8 or bf16 dispatch + bf16 combine in a graph of ten\n");
      std::vector<LlCase> const all = {{7168, 8, 256, 128}, {7168, 8, 256, 64},  {7168, 8, 256, 8},   {7168, 8, 256, 1},
                                       {4096, 6, 256, 128}, {2048, 8, 128, 128}, {3584, 16, 896, 128}};
      for (int blocks : options_.blocks) {
        for (bool per_rank : {false, true}) {
          for (auto const& c : all) {
            run_low_latency(c, per_rank, true, blocks, pdl);
            if (c.hidden == 7168 && (c.tokens == 128 || c.tokens == 1) && !options_.quick) {
              run_low_latency(c, per_rank, true, blocks, false);
            }
          }
        }
      }
      run_low_latency(all[0], false, false, options_.blocks[0], pdl);
    }
    if (wanted("windows")) {
      failures_ += moe_bench::bench_peers(*this, pdl, options_.simulated);
    }
    if (wanted("soak")) {
      run_soak(options_.rounds, false);
      run_soak(options_.rounds / 5, true);
    }
    if (wanted("ht")) {
      std::printf("high throughput, us per call, 7168, 8 of 256\n");
      for (int blocks : options_.ht_blocks) {
        run_high_throughput(4096, true, blocks, {}, true);
        run_high_throughput(4096, true, blocks, {}, false);
        run_high_throughput(4096, false, blocks, {}, true);
        run_high_throughput(4096, false, blocks, {}, false);
        if (wanted("scan")) {
          for (int warps : {16, 12}) {
            for (int piece : {512, 16384}) {
              run_high_throughput(4096, true, blocks, {warps, piece, 1024}, false, true);
              run_high_throughput(4096, false, blocks, {warps, piece, 1024}, false, true);
            }
          }
        }
      }
    }
  }
  int failures() const { return failures_; }
  RankGroup& group() { return group_; }
  /// Bytes of a window.
  std::size_t room() const { return window_bytes(options_); }
  /// A line of the log.
  void record(std::string const& line) {
    if (json_ != nullptr) {
      std::fprintf(json_, "%s\n", line.c_str());
      std::fflush(json_);
    }
  }

 private:
  Options options_;
  RankGroup group_;
  std::FILE* json_ = nullptr;
  std::vector<RankTokens> large_;  ///< inputs of the high-throughput shapes
  int failures_ = 0;
};

/// Throws BadArgument.
Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    std::string const a = argv[i];
    auto next = [&] {
      std::string value = moe_bench::value_of(argc, argv, i);
      ++i;
      return value;
    };
    if (a == "--ranks") {
      o.ranks = moe_bench::count(a, next());
    } else if (a == "--simulated") {
      o.simulated = true;
    } else if (a == "--unfenced") {
      o.unfenced = true;
    } else if (a == "--quick") {
      o.quick = true;
    } else if (a == "--sections") {
      o.sections = moe_bench::known_names("section", next(), {"ceiling", "ll", "ht", "scan", "windows", "soak"});
    } else if (a == "--blocks") {
      o.blocks = moe_bench::counts(a, next());
    } else if (a == "--ht-blocks") {
      o.ht_blocks = moe_bench::counts(a, next());
    } else if (a == "--rounds") {
      o.rounds = moe_bench::count(a, next());
    } else if (a == "--json") {
      o.json = next();
    } else {
      moe_bench::refuse_name(
          "option", a, {"--ranks", "--simulated", "--unfenced", "--quick", "--sections", "--blocks", "--ht-blocks", "--rounds", "--json"});
    }
  }
  return o;
}

}  // namespace

int main(int argc, char** argv) try {
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  Options o = parse(argc, argv);
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU: nothing to measure\n");
    return 77;
  }
  if (o.ranks == 0) {
    o.ranks = o.simulated ? 8 : devices;
  }
  Bench bench(o);
  bench.run();
  return bench.failures() == 0 ? 0 : 1;
} catch (moe_bench::BadArgument const& error) {
  return moe_bench::refuse("exchange_bench", error);
} catch (std::exception const& e) {
  std::printf("error: %s\n", e.what());
  return 1;
}
