// SPDX-License-Identifier: Apache-2.0
// backends/window/device/pplx/combine.cuh: outputs returned to the slot of their choice, and their sums. docs/semantics/exchange.md §9.
//
// Every returned row has its own flag word with the round. A flag has one writer and needs no reset, and a missing row shows which rank
// did not send it.
#pragma once

#include "moe/backends/window/device/pplx/dispatch.cuh"

namespace moe::detail {

/// Waits until this rank's word, which `peer` writes, equals `round`: a slot that was not used for many rounds holds an old round.
static __device__ __noinline__ bool wait_exactly(comm::WindowView const& w, std::uint32_t const* p, std::uint32_t round, int peer) {
  std::uint64_t start = 0;
  for (unsigned i = 0;; ++i) {
    std::uint32_t const seen = ptx::load_acquire_system(p);
    if (seen == round) {
      return true;
    }
    if (i % 256 == 0) {
      start = i == 0 ? ptx::now_ns() : start;
      if (comm::detail::should_give_up(w, comm::ExchangePhase::combine_rows, peer, round, seen, start)) {
        return false;
      }
    }
  }
}

/// All quads, one row each: the rows of all batches form one sequence, distributed over the quads. Each row goes to the slot of its choice
/// on every rank of its source's group, then sets that slot's flag word. `rows_of`: shared memory, [L].
__device__ inline void return_rows(PplxMove const& a, int* rows_of, std::uint32_t round) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const quad = tid / kQuadThreads;
  int const thread = tid % kQuadThreads;
  int const blocks = static_cast<int>(gridDim.x);
  int const L = a.local_experts;
  int const D = a.group.dp_size;
#pragma unroll 1
  for (int le = tid; le < L; le += kPeerThreads) {
    rows_of[le] = own<std::int32_t>(w, a.at.num_tokens[a.parity])[le];
  }
  __syncthreads();

  int next = static_cast<int>(blockIdx.x) + blocks * quad;
  int first = 0;
#pragma unroll 1
  for (int le = 0; le < L; ++le) {
    int const n = rows_of[le];
#pragma unroll 1
    for (; next < first + n; next += blocks * kQuads) {
      std::size_t const row = static_cast<std::size_t>(le) * a.at.capacity + (next - first);
      int const origin = own<std::int32_t>(w, a.at.origins[a.parity])[row];
      int const source = origin / (a.max_tokens * a.topk);
      int const slot = origin % (a.max_tokens * a.topk);
      int const group = source - source % D;
      uint4 const* const y = reinterpret_cast<uint4 const*>(own<char>(w, a.at.outputs[a.parity]) + row * a.hidden * 2);
      constexpr int kBatch = 7;
#pragma unroll 1
      for (int u0 = thread; u0 < a.hidden / 8; u0 += kQuadThreads * kBatch) {
        uint4 v[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (u0 + i * kQuadThreads < a.hidden / 8) {
            v[i] = y[u0 + i * kQuadThreads];
          }
        }
#pragma unroll 1
        for (int r = group; r < group + D; ++r) {
          uint4* const to =
              reinterpret_cast<uint4*>(at<char>(w, r, a.at.returned[a.parity]) + static_cast<std::size_t>(slot) * a.hidden * 2);
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            if (u0 + i * kQuadThreads < a.hidden / 8) {
              store_peer(to + u0 + i * kQuadThreads, v[i]);
            }
          }
        }
      }
      sync_quad(quad);
      if (thread < D) {
        publish(at<std::uint32_t>(w, group + thread, a.at.back[a.parity]) + slot, round);
      }
    }
    first += n;
  }
}

/// All quads, one token each: the first warp waits for the rows of its choices, one per lane, and lists them; then the quad adds them.
__device__ inline void sum_tokens(PplxMove const& a, Terms (&terms)[kQuads], std::uint32_t round) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const lane = tid % 32;
  int const quad = tid / kQuadThreads;
  int const thread = tid % kQuadThreads;
  int const blocks = static_cast<int>(gridDim.x);
  // Rows that a rank of the group did not send are not returned.
  bool const incomplete = a.group.dp_size > 1 && *own<std::uint32_t>(w, a.at.incomplete[a.parity]) == round;
  int const M = incomplete ? 0 : a.tokens.count();
#pragma unroll 1
  for (int t = static_cast<int>(blockIdx.x) + blocks * quad; t < M; t += blocks * kQuads) {
    int owner = 0;
    std::uint32_t refusal = 0;
    if (thread < 32) {
      ExpertChoice const choice = expert_choice(a, t, lane);
      bool const used = choice.expert >= 0;
      bool good = true;
      if (used && choice.first == lane) {
        owner = choice.expert / a.local_experts;
        good = wait_exactly(w, own<std::uint32_t>(w, a.at.back[a.parity]) + t * a.topk + lane, round, owner);
        refusal = load_refusal(w, owner, round);
      }
      bool const all = __all_sync(0xffffffffU, static_cast<int>(good)) != 0;
      unsigned const with = __ballot_sync(0xffffffffU, used);
      if (used) {
        int const i = __popc(with & ((1U << lane) - 1U));
        terms[quad].row[i] = own<char>(w, a.at.returned[a.parity]) +
                             (static_cast<std::size_t>(t) * a.topk + choice.first) * static_cast<std::size_t>(a.hidden) * 2;
        terms[quad].weight[i] = a.group.weight_first ? 1.0F : a.tokens.weights[t * a.topk + lane];
      }
      if (lane == 0) {
        terms[quad].count = all ? __popc(with) : 0;
      }
    }
    sync_quad(quad);

    sum_terms(terms[quad], 0, a.hidden, a.out + t * a.out_stride);
    report_refusal(w, refusal, comm::ExchangePhase::combine_rows, owner, round);
    sync_quad(quad);
  }
}

static __global__ void __launch_bounds__(kPeerThreads, 1) pplx_combine(PplxMove const __grid_constant__ a) {
  using namespace comm::detail;
  __shared__ Terms terms[kQuads];
  __shared__ int rows_of[2048];
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);

  begin_dependent_kernel();
  std::uint32_t const round = *own<std::uint32_t>(w, a.at.round_of[a.parity]);
  PeerRefusals refusals;
  bool const watches = a.receive && blockIdx.x == 0 && tid < w.size;
  if (watches) {
    refusals.load(w, tid);
  }

  if (a.send) {
    return_rows(a, rows_of, round);
  }
  if (a.receive) {
    sum_tokens(a, terms, round);
    if (watches) {
      refusals.report_combine(w, tid, round);
    }
  }
}

/// Whether a row of the batches exists.
struct PplxRowIsUsed {
  std::int32_t const* num_tokens;  ///< [L]
  int capacity;
  __device__ bool operator()(int row) const { return row % capacity < num_tokens[row / capacity]; }
};

}  // namespace moe::detail
