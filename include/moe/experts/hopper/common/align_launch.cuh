// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/align_launch.cuh: the parameters that all kernels share, made from a call's arguments, and the launches around a
// layer kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "moe/core/error.hpp"
#include "moe/experts/hopper/common/align.cuh"
#include "moe/experts/hopper/common/enqueue.cuh"
#include "moe/experts/hopper/common/problem.hpp"
#include "moe/experts/hopper/common/reduce.cuh"

namespace moe::hopper {

/// One call in the form that the engines use.
struct Request {
  LayerCall const& call;
  std::int32_t const* batch_counts;  ///< null: standard format
  int capacity;
  void* workspace;
  bool batched() const { return batch_counts != nullptr; }
  /// Slots per token: rows of a batch are slots already.
  LocalShape rows_of(LocalShape shape) const {
    if (batched()) shape.topk = 1;
    return shape;
  }
};

namespace detail {

template <class T>
inline T* at(void* workspace, std::int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
}

/// Checks what every call needs: E_ARG.
inline void check_request(Request const& r) {
  for (void const* pointer : {r.call.x, static_cast<void const*>(r.call.out), static_cast<void const*>(r.workspace)}) {
    if (pointer == nullptr || reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) {
      throw Error(ErrorCode::argument, text("address ", pointer, " of x, out or workspace is null or not a multiple of 16 bytes"));
    }
  }
  if (r.call.max_tokens < 0) throw Error(ErrorCode::argument, text("max_tokens ", r.call.max_tokens, " is negative"));
}
/// Checks the standard format: E_ARG without ids or weights.
inline void check_routing(LayerCall const& call) {
  if (call.max_tokens > 0 && (call.topk_ids == nullptr || call.topk_weights == nullptr)) {
    throw Error(ErrorCode::argument, "topk_ids or topk_weights is null");
  }
}

/// E_CAPACITY for more slots than the kernels count. The message begins with `who`.
inline void check_slots(char const* who, std::int64_t slots) {
  if (slots >= std::int64_t{1} << 31) throw Error(ErrorCode::capacity, text(who, ": ", slots, " slots, at most 2^31 - 1"));
}

/// Multiprocessors of the current device; E_UNSUPPORTED unless it is a Hopper.
inline int hopper_multiprocessors() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  cudaDeviceProp facts{};
  check_cuda(cudaGetDeviceProperties(&facts, device), "cudaGetDeviceProperties");
  check_device(device, facts.name, facts.major, facts.minor);
  return facts.multiProcessorCount;
}

/// The slots of a call and the work list in the workspace; `shape`: the layer's. The engine sets the plan's sizes.
template <class Workspace>
inline AlignArgs align_args(Request const& r, LocalShape const& shape, Workspace const& w, int tile_rows) {
  AlignArgs a{};
  a.ids = r.batched() ? nullptr : r.call.topk_ids;
  a.weights = r.call.topk_weights;
  a.id_gap = slot_gap(r.call.id_stride, shape.topk);
  a.weight_gap = slot_gap(r.call.weight_stride, shape.topk);
  a.num_tokens = r.call.num_tokens;
  a.counts = r.batch_counts;
  a.capacity = r.capacity;
  a.max_tokens = r.call.max_tokens;
  a.topk = r.rows_of(shape).topk;
  a.per_token = Divisor(a.topk);
  a.num_experts = shape.num_experts;
  a.hidden = shape.hidden;
  a.plan.tile_rows = tile_rows;
  a.plan.max_units = static_cast<int>(std::min<long long>(Workspace::kMaxSplitUnits, Workspace::kPartialBytes / 4 / (256LL * tile_rows)));
  a.plan.tiles = at<TokenTile>(r.workspace, w.tiles);
  a.control = at<Control>(r.workspace, w.control);
  a.next_unit = at<int>(r.workspace, w.control) + 64;
  a.counters = at<int>(r.workspace, w.counters);
  a.max_tiles = static_cast<int>(w.max_tiles);
  a.sorted_rows = at<SortedRow>(r.workspace, w.sorted_rows);
  return a;
}

/// `quantizers`: number of clusters besides the one that sorts.
inline void launch_align(AlignArgs const& a, int quantizers, cudaStream_t stream) {
  allow_shared_memory<align_kernel<kAlignCluster>>(align_smem_bytes(1024));
  launch(align_kernel<kAlignCluster>, kAlignCluster * (1 + quantizers), kAlignThreads, align_smem_bytes(a.num_experts), kAlignCluster,
         stream, a);
}

/// Sums `rows` over the slots of each token into `out`.
template <class Output>
inline void launch_reduce(AlignArgs const& a, void const* rows, void* out, int workers, cudaStream_t stream) {
  long long const chunks = static_cast<long long>(a.max_tokens) * (a.hidden / 8);
  int const grid = static_cast<int>(std::min<long long>((chunks + 255) / 256, 8LL * workers));
  ReduceArgs<Output> const args{.rows = static_cast<Output const*>(rows),
                                .ids = SlotIds(a.ids, a.id_gap),
                                .num_tokens = a.num_tokens,
                                .max_tokens = a.max_tokens,
                                .topk = a.topk,
                                .num_experts = a.num_experts,
                                .hidden = a.hidden,
                                .out = static_cast<Output*>(out)};
  launch(reduce_kernel<Output>, grid, 256, 0, 1, stream, args);
}

}  // namespace detail

}  // namespace moe::hopper
