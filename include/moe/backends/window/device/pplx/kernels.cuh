// SPDX-License-Identifier: Apache-2.0
// backends/window/device/pplx/kernels.cuh: the kernels of Pplx: rows by (source, expert), packed by the receiver, returned to the slot of
// their choice. Spec 04 §9.
//
// Every returned row has a flag word of its own with the round, where the description counts arrivals by token: one writer a word, no
// reset, and a row that does not come names the rank that owes it.
#pragma once

#include "moe/backends/window/device/common/peer_rows.cuh"
#include "moe/backends/window/device/pplx/exchange.hpp"

namespace moe::detail {

struct PplxArguments {
  comm::WindowView window;
  PplxLayout at;
  PplxGroup group;
  PeerTokens tokens;
  ScaleRule rule;
  std::uint32_t tag = 0;
  std::uint32_t sent_tag = 0;  ///< tag, or refused_tag(tag)
  int max_tokens = 0, hidden = 0, topk = 0, num_experts = 0, local_experts = 0, scale_stride = 0;
  int parity = 0;
  bool send = true;
  bool receive = true;
  __nv_bfloat16* out = nullptr;  ///< [M][out_stride]
  std::int64_t out_stride = 0;
};

/// This lane's choice, and the first lane that made the same one.
struct ExpertChoice {
  int expert;  ///< rank * L + local; -1: none
  int first;
};
__device__ inline ExpertChoice expert_choice(PplxArguments const& a, int t, int lane) {
  int const e = lane < a.topk ? a.tokens.place(t * a.topk + lane) : -1;
  return {e, __ffs(__match_any_sync(0xffffffffU, e)) - 1};
}

/// `n` 16-byte units of this rank's memory by one warp.
__device__ inline void copy_units(uint4* to, uint4 const* from, int n, int lane) {
  constexpr int kBatch = 7;
#pragma unroll 1
  for (int u0 = 0; u0 < n; u0 += 32 * kBatch) {
    uint4 v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int const u = u0 + 32 * i + lane;
      if (u < n) {
        v[i] = comm::detail::load_peer(from + u);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int const u = u0 + 32 * i + lane;
      if (u < n) {
        to[u] = v[i];
      }
    }
  }
}

template <bool kFp8>
__global__ void __launch_bounds__(kPeerThreads, 1) pplx_dispatch(PplxArguments const __grid_constant__ a) {
  using namespace comm::detail;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ std::uint64_t loaded[kPeerThreads / 32];
  __shared__ int slot_of[kQuads][32];
  __shared__ int begin_of[kQuads];
  __shared__ int count_of[kQuads];
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const lane = tid % 32;
  int const warp = tid / 32;
  int const quad = tid / kQuadThreads;
  int const part = warp % (kQuadThreads / 32);
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
  int const R = w.size;
  int const me = w.rank;
  int const K = a.topk;
  int const L = a.local_experts;
  int const S = a.at.per_source;
  int const D = a.group.dp_size;
  int const row_bytes = kFp8 ? a.hidden : 2 * a.hidden;

  begin_dependent_kernel();
  std::uint32_t const round = next_round(w, a.send ? a.at.sent : a.at.received);
  int const M = a.tokens.count();
  std::uint64_t const* const counts = own<std::uint64_t>(w, a.at.counts_of(round));

  if (a.send) {
    std::uint32_t* const counters = own<std::uint32_t>(w, a.at.counters[a.parity]);
    int const values = part_values(a.hidden, kQuadThreads / 32);
    int const from = part * values;
    WarpStage<kFp8> stage(shared + warp * staged_bytes(kFp8, values), &loaded[warp], lane);
    // Ranks of a group share out its tokens.
#pragma unroll 1
    for (int t = me % D + D * (block + blocks * quad); t < M; t += D * blocks * kQuads) {
      ExpertChoice const choice = expert_choice(a, t, lane);
      int const owner = choice.expert >= 0 ? choice.expert / L : 0;
      std::size_t const batch = static_cast<std::size_t>(me * L + choice.expert - owner * L) * static_cast<std::size_t>(S);
      if (part == 0) {
        int slot = -1;
        if (choice.expert >= 0 && choice.first == lane) {
          slot = static_cast<int>(atomicAdd(&counters[choice.expert], 1U));
          at<std::int32_t>(w, owner, a.at.places[a.parity])[batch + slot] = t * K + lane;
        }
        slot_of[quad][lane] = slot;
      }
      stage.fill(a.tokens.x + t * a.tokens.x_stride + from, max(0, min(values, a.hidden - from)), a.rule, a.group.weight_first,
                 a.group.weight_first ? a.tokens.weights[t * K] : 1.0F);
      sync_quad(quad);
      int const slot = slot_of[quad][lane];
      std::size_t const row = batch + (slot >= 0 ? slot : 0);
      stage.store(slot < 0 ? nullptr : w.peer[owner] + a.at.rows[a.parity] + row * row_bytes + from * (kFp8 ? 1 : 2),
                  slot < 0 ? nullptr : w.peer[owner] + a.at.scales[a.parity] + (row * a.scale_stride + from / 128) * 4);
      sync_quad(quad);  // slot_of is free again
    }
    finish_stores();
    if (is_last_block(own<std::uint32_t>(w, a.at.arrived))) {
      ptx::fence_system();
#pragma unroll 1
      for (int e = tid; e < a.num_experts + R; e += kPeerThreads) {
        bool const expert = e < a.num_experts;
        int const owner = expert ? e / L : e - a.num_experts;
        std::uint32_t const n = expert ? ptx::load_relaxed_system(&counters[e]) : static_cast<std::uint32_t>(M);
        if (expert) {
          counters[e] = 0;
        }
        ptx::store_relaxed_system(at<std::uint64_t>(w, owner, a.at.counts_of(round)) + me * (L + 1) + (expert ? e % L : L),
                                  comm::count_word(round, a.sent_tag, n));
      }
    }
  }

  if (a.receive) {
#pragma unroll 1
    for (int pair = block * kQuads + quad; pair < L * R; pair += blocks * kQuads) {
      int const le = pair / R;
      int const source = pair % R;
      if (tid % kQuadThreads == 0) {
        int const begin = sum_counts(w, counts + le, L + 1, 0, source, round, a.tag);
        int const n = sum_counts(w, counts + le, L + 1, source, source + 1, round, a.tag);
        bool const good = begin >= 0 && n >= 0;
        ptx::fence_system();  // acquires what came with the words
        begin_of[quad] = begin;
        count_of[quad] = good ? n : 0;
        if (source == R - 1) {
          own<std::int32_t>(w, a.at.num_tokens[a.parity])[le] = good ? begin + n : 0;
        }
      }
      sync_quad(quad);
      int const n = count_of[quad];
      std::size_t const from = static_cast<std::size_t>(source * L + le) * static_cast<std::size_t>(S);
      std::size_t const to = static_cast<std::size_t>(le) * a.at.capacity + begin_of[quad];
#pragma unroll 1
      for (int i = part; i < n; i += kQuadThreads / 32) {
        copy_units(reinterpret_cast<uint4*>(own<char>(w, a.at.batch[a.parity]) + (to + i) * row_bytes),
                   reinterpret_cast<uint4 const*>(own<char>(w, a.at.rows[a.parity]) + (from + i) * row_bytes), row_bytes / 16, lane);
        if constexpr (kFp8) {
          std::uint32_t* const scales = own<std::uint32_t>(w, a.at.batch_scales[a.parity]) + (to + i) * (a.hidden / 128);
#pragma unroll 1
          for (int g = lane; g < a.hidden / 128; g += 32) {
            scales[g] = ptx::load_relaxed_system(own<std::uint32_t>(w, a.at.scales[a.parity]) + (from + i) * a.scale_stride + g);
          }
        }
        if (lane == 0) {
          own<std::int32_t>(w, a.at.origins[a.parity])[to + i] =
              source * a.max_tokens * K +
              static_cast<std::int32_t>(ptx::load_relaxed_system(own<std::uint32_t>(w, a.at.places[a.parity]) + from + i));
        }
      }
      sync_quad(quad);
    }
    if (D > 1 && block == 0 && tid < D && a.sent_tag == a.tag) {  // ranks that hold the same tokens bring the same number of them
      int const r = me - me % D + tid;
      int const n = sum_counts(w, counts + L, L + 1, r, r + 1, round, a.tag);
      if (n >= 0 && n != M && comm::word_tag(ptx::load_relaxed_system(counts + L + r * (L + 1))) == comm::refused_tag(a.tag)) {
        *own<std::uint32_t>(w, a.at.incomplete[a.parity]) = round;
      } else if (n >= 0 && n != M) {
        fail(w, ErrorCode::mismatch, comm::ExchangePhase::dispatch_counts, r, round, static_cast<std::uint32_t>(n),
             static_cast<std::uint32_t>(M));
      }
    }
  }
  __syncthreads();
  if (tid == 0) {
    if (a.send) {
      end_round(w, a.at.sent, round);
      if (block == 0) {
        *own<std::uint32_t>(w, a.at.round_of[a.parity]) = round;
      }
    }
    if (a.receive) {
      end_round(w, a.at.received, round);
    }
  }
}

/// Waits until the own word, which `peer` writes, is exactly `round`: a choice that no token made for long has an old word.
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

static __global__ void __launch_bounds__(kPeerThreads, 1) pplx_combine(PplxArguments const __grid_constant__ a) {
  using namespace comm::detail;
  __shared__ Terms terms[kQuads];
  __shared__ int rows_of[2048];
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const lane = tid % 32;
  int const quad = tid / kQuadThreads;
  int const thread = tid % kQuadThreads;
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
  int const K = a.topk;
  int const L = a.local_experts;
  int const D = a.group.dp_size;

  begin_dependent_kernel();
  std::uint32_t const round = *own<std::uint32_t>(w, a.at.round_of[a.parity]);
  PeerRefusals refusals;
  bool const watches = a.receive && block == 0 && tid < w.size;
  if (watches) {
    refusals.load(w, tid);
  }
  if (a.send) {
#pragma unroll 1
    for (int le = tid; le < L; le += kPeerThreads) {
      rows_of[le] = own<std::int32_t>(w, a.at.num_tokens[a.parity])[le];
    }
    __syncthreads();
    // Rows of all batches in one sequence, dealt to the quads.
    int next = block + blocks * quad;
    int first = 0;
#pragma unroll 1
    for (int le = 0; le < L; ++le) {
      int const n = rows_of[le];
#pragma unroll 1
      for (; next < first + n; next += blocks * kQuads) {
        std::size_t const row = static_cast<std::size_t>(le) * a.at.capacity + (next - first);
        int const origin = own<std::int32_t>(w, a.at.origins[a.parity])[row];
        int const source = origin / (a.max_tokens * K);
        int const place = origin % (a.max_tokens * K);
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
                reinterpret_cast<uint4*>(at<char>(w, r, a.at.returned[a.parity]) + static_cast<std::size_t>(place) * a.hidden * 2);
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
          publish(at<std::uint32_t>(w, group + thread, a.at.back[a.parity]) + place, round);
        }
      }
      first += n;
    }
  }
  if (a.receive) {
    // What a rank of the group did not send does not come back.
    bool const incomplete = D > 1 && *own<std::uint32_t>(w, a.at.incomplete[a.parity]) == round;
    int const M = incomplete ? 0 : a.tokens.count();
#pragma unroll 1
    for (int t = block + blocks * quad; t < M; t += blocks * kQuads) {
      int owner = 0;
      std::uint32_t refusal = 0;
      if (thread < 32) {
        ExpertChoice const choice = expert_choice(a, t, lane);
        bool const used = choice.expert >= 0;
        bool good = true;
        if (used && choice.first == lane) {
          owner = choice.expert / L;
          good = wait_exactly(w, own<std::uint32_t>(w, a.at.back[a.parity]) + t * K + lane, round, owner);
          refusal = load_refusal(w, owner, round);
        }
        bool const all = __all_sync(0xffffffffU, static_cast<int>(good)) != 0;
        unsigned const with = __ballot_sync(0xffffffffU, used);
        if (used) {
          int const i = __popc(with & ((1U << lane) - 1U));
          terms[quad].row[i] = own<char>(w, a.at.returned[a.parity]) +
                               (static_cast<std::size_t>(t) * K + choice.first) * static_cast<std::size_t>(a.hidden) * 2;
          terms[quad].weight[i] = a.group.weight_first ? 1.0F : a.tokens.weights[t * K + lane];
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

inline PplxCalls::PplxCalls(comm::WindowView const& window, PeerShape const& shape, PplxGroup const& group, PeerOptions const& options)
    : PeerCalls(window, shape, PplxLayout(shape, group), options), group_(group) {
  shape.check();
  expect_peer_device(shape);
  int const shared = quad_shared(shape);
  for (auto* kernel : {&pplx_dispatch<true>, &pplx_dispatch<false>}) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute");
    expect_resident(kernel, shape.name, shape.blocks, kPeerThreads, static_cast<std::size_t>(shared));
  }
  expect_resident(&pplx_combine, shape.name, shape.blocks, kPeerThreads, 0);
}

inline PplxArguments pplx_arguments(comm::WindowView const& window, PplxLayout const& at, PeerShape const& s, PplxGroup const& group,
                                    PeerTokens const& tokens, int parity, bool send, bool receive) {
  PplxArguments a;
  a.window = window;
  a.at = at;
  a.group = group;
  a.tokens = tokens;
  a.tag = s.tag().add(static_cast<std::uint64_t>(group.dp_size)).add(group.weight_first).value();
  a.sent_tag = a.tag;
  a.max_tokens = s.max_tokens;
  a.hidden = s.hidden;
  a.topk = s.topk;
  a.num_experts = s.num_experts;
  a.local_experts = s.local_experts();
  a.scale_stride = s.scale_stride();
  a.parity = parity;
  a.send = send;
  a.receive = receive;
  return a;
}

inline void PplxCalls::dispatch(ExchangeTokens const& in, int parity, cudaStream_t stream, bool send, bool receive,
                                std::uint32_t refused) const {
  if (refused != 0) {
    enqueue_refusal(window_, at_.sent, 1, kAllRanks, refused, stream);
  }
  PplxArguments a = pplx_arguments(window_, at_, shape_, group_, peer_tokens(in, options_), parity, send, receive);
  a.sent_tag = refused != 0 ? comm::refused_tag(a.tag) : a.tag;
  a.rule = options_.rule;
  launch_exchange(shape_.fp8 ? &pplx_dispatch<true> : &pplx_dispatch<false>, "pplx_dispatch", shape_.blocks, kPeerThreads,
                  static_cast<std::size_t>(quad_shared(shape_)), options_.programmatic, stream, a);
}

inline void PplxCalls::combine(ExchangeTokens const& in, __nv_bfloat16* out, std::int64_t out_stride, int parity, cudaStream_t stream,
                               bool send, bool receive) const {
  PplxArguments a = pplx_arguments(window_, at_, shape_, group_, peer_tokens(in, options_), parity, send, receive);
  a.out = out;
  a.out_stride = out_stride;
  launch_exchange(&pplx_combine, "pplx_combine", shape_.blocks, kPeerThreads, 0, options_.programmatic, stream, a);
}

inline void PplxCalls::refuse_combine(int parity, cudaStream_t stream, std::uint32_t code) const {
  enqueue_refusal(window_, at_.round_of[parity], 0, kAllRanks, code, stream);
  PplxArguments const a = pplx_arguments(window_, at_, shape_, group_, peer_tokens({}, options_), parity, true, false);
  launch_exchange(&pplx_combine, "pplx_combine", shape_.blocks, kPeerThreads, 0, options_.programmatic, stream, a);
}

inline void PplxCalls::round(float const* y, int parity, cudaStream_t stream) const {
  round_peer_rows<<<1024, 256, 0, stream>>>(y, PplxRowIsUsed{own<std::int32_t>(at_.num_tokens[parity]), at_.capacity},
                                            shape_.local_experts() * at_.capacity, shape_.hidden, outputs(parity));
  check_launch("round_peer_rows");
}

inline void PplxCalls::abandon(cudaStream_t stream) const {
  abandon_exchange<<<1, 32, 0, stream>>>(window_);
  check_launch("abandon_exchange");
}

}  // namespace moe::detail
