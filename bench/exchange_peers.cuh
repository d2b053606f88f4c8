// SPDX-License-Identifier: Apache-2.0
// bench/exchange_peers.cuh: the part of exchange_bench that measures OneSided, TwoSided and Pplx, beside the main backends in the same run.
#pragma once

#include <cstdio>

#include "tests/multigpu/window_harness.cuh"

namespace moe_bench {

/// What one line of the report describes.
struct PeerCase {
  int hidden, topk, experts, tokens;
  bool fp8;
  int blocks;
  bool graph;  ///< pairs in a graph of ten, else calls back to back
};

/// Checks, then times one backend. `bench` gives group(), time(), clear(), record() and room(), the bytes of a window. False: wrong.
template <class Peer, class Bench>
bool bench_peer(Bench& bench, PeerCase const& c, bool programmatic) {
  using namespace moe_test;
  auto& group = bench.group();
  int const R = group.size();
  PeerShape const s{Peer::kName, R, c.tokens, c.hidden, c.topk, c.experts, c.fp8, c.blocks};
  if (Peer::window_bytes(s) > bench.room()) {
    std::printf("  %-9s window too small: %zu\n", Peer::kName, Peer::window_bytes(s));
    return true;
  }
  bench.clear();
  std::vector<typename Peer::Calls> calls;
  std::vector<RankTokens> tokens;
  std::vector<RankBuffers> buffers;
  double remote = 0;
  for (int r = 0; r < R; ++r) {
    group.use(r);
    calls.push_back(Peer::calls(group.view(r), s, programmatic));
    tokens.push_back(make_tokens(r, c.tokens, c.hidden, c.topk, c.experts, R, Routing::uniform, 5));
    buffers.push_back(make_buffers(tokens.back(), c.hidden, s.local_experts(), 0));
    moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    for (int t = 0; t < c.tokens; ++t) {
      std::vector<bool> seen(static_cast<std::size_t>(R));
      for (int j = 0; j < c.topk; ++j) {
        int const to = tokens.back().ids[static_cast<std::size_t>(t * c.topk + j)] / s.local_experts();
        remote += to != r && (Peer::kOrder == SumOrder::choices || !seen[static_cast<std::size_t>(to)]) ? 1 : 0;
        seen[static_cast<std::size_t>(to)] = true;
      }
    }
  }
  remote /= R;
  auto at = [](auto& v, int r) -> auto& { return v[static_cast<std::size_t>(r)]; };
  auto dispatch = [&](int r, int i) { Peer::dispatch(at(calls, r), at(buffers, r).in, i & 1, group.stream(r)); };
  auto combine = [&](int r, int i) { Peer::combine(at(calls, r), at(buffers, r).in, as_bf16(at(buffers, r).out), i & 1, group.stream(r)); };
  for (int i = 0; i < 2; ++i) {
    for (int r = 0; r < R; ++r) {
      group.use(r);
      dispatch(r, i);
      Peer::experts(at(calls, r), i, group.stream(r), 64);
      combine(r, i);
    }
  }
  group.synchronize_and_check();
  int const step = std::max(1, c.tokens / 8);
  for (int r = 0; r < R; ++r) {
    group.use(r);
    auto why = check_rows(calls, tokens, r, 1, 4 * step);
    why = why.empty() ? check_sums(s, Peer::kOrder, at(tokens, r), at(buffers, r), r, step) : why;
    if (!why.empty()) {
      std::printf("  WRONG: %s %s\n", Peer::kName, why.c_str());
      return false;
    }
  }
  double spread = 0;
  int const n = c.graph ? 10 : 4;
  double const pair = bench.time(n, c.graph ? 20 : 5, c.graph, [&](int r, int i) { dispatch(r, i), combine(r, i); }, &spread);
  double const d = bench.time(2 * n, c.graph ? 10 : 5, c.graph, dispatch, nullptr);
  double const m = pair - d;
  double const row = c.fp8 ? c.hidden + c.hidden / 32.0 : 2.0 * c.hidden;
  std::printf(
      "  %-9s %4d %d/%d T=%4d %s blocks %3d  pair %7.1f (+-%.1f)  dispatch %7.1f (%5.1f GB/s)  the rest %7.1f (%5.1f GB/s)  rows out "
      "%.0f\n",
      Peer::kName, c.hidden, c.topk, c.experts, c.tokens, c.fp8 ? "fp8 " : "bf16", c.blocks, pair, spread, d, remote * row / d * 1e-3, m,
      remote * 2 * c.hidden / m * 1e-3, remote);
  std::fflush(stdout);
  bench.record(moe::text("{\"section\":\"", Peer::kName, "\",\"ranks\":", R, ",\"hidden\":", c.hidden, ",\"topk\":", c.topk,
                         ",\"experts\":", c.experts, ",\"tokens\":", c.tokens, ",\"fp8\":", c.fp8, ",\"blocks\":", c.blocks,
                         ",\"graph\":", c.graph, ",\"pair_us\":", pair, ",\"pair_spread_us\":", spread, ",\"dispatch_us\":", d,
                         ",\"rows_out\":", remote, "}"));
  return true;
}

/// All shapes of the section. Returns the number of wrong results.
template <class Bench>
int bench_peers(Bench& bench, bool programmatic, bool simulated) {
  using namespace moe_test;
  std::printf("one-sided, two-sided, pplx: us per call; up to 128 tokens in a graph of ten pairs\n");
  int wrong = 0;
  auto run = [&]<class Peer>(PeerCase c) {
    c.tokens = simulated ? std::min(c.tokens, 16) : c.tokens;
    c.blocks = simulated ? 12 : c.blocks;
    wrong += bench_peer<Peer>(bench, c, programmatic) ? 0 : 1;
  };
  for (int tokens : {128, 8, 1}) {
    for (int blocks : {64, 128}) {
      run.template operator()<OneSidedPeer>({7168, 8, 256, tokens, true, blocks, true});
      run.template operator()<PplxPeer>({7168, 8, 256, tokens, true, blocks, true});
    }
    run.template operator()<TwoSidedPeer>({7168, 8, 256, tokens, true, 32, true});
  }
  for (bool fp8 : {true, false}) {
    for (int blocks : {32, 64}) {
      run.template operator()<OneSidedPeer>({7168, 8, 256, 4096, fp8, blocks, false});
      run.template operator()<TwoSidedPeer>({7168, 8, 256, 4096, fp8, blocks, false});
    }
  }
  return wrong;
}

}  // namespace moe_bench
