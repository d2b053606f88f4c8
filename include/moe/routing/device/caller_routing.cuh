// SPDX-License-Identifier: Apache-2.0
// routing/device/caller_routing.cuh: the kernel that checks, copies and maps routing that the caller did: one warp per row.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "moe/core/contract/facts.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/routing/caller_routing.hpp"
#include "moe/routing/device/route_warp.cuh"

namespace moe::routing {
namespace detail {

/// CallerRouting in the form that the kernel takes.
struct CallerRoutingCall {
  GivenIds given_ids;
  float const* given_weights;
  std::int64_t given_weights_stride;
  std::int64_t num_rows, valid_rows;
  std::int32_t const* num_rows_word;
  std::int32_t k, num_experts, num_ids;
  bool zero_experts_add;  // ZeroExpertKind::identity
  std::int32_t* ids;      // [num_rows, k]
  float* weights;
  std::int32_t* dispatched;
  ExpertMapping mapping;  // logical_to_physical null: none
  LoadRecorder recorder;
  float* zero_weights;
  unsigned long long* invalid_slots;
  CallerFault* fault;
};

/// Counts an invalid slot. The first one since the host's last look is written into its record.
__device__ inline void report_slot(CallerRoutingCall const& c, SlotFault kind, std::int64_t t, int j, std::int64_t id, float weight) {
  if (c.invalid_slots != nullptr) atomicAdd(c.invalid_slots, 1ULL);
  if (c.fault == nullptr || atomicCAS(&c.fault->kind, 0, -1) != 0) return;
  c.fault->row = t;
  c.fault->column = j;
  c.fault->id = id;
  c.fault->num_ids = c.num_ids;
  c.fault->weight = weight;
  __threadfence_system();  // the host reads the rest after the kind
  *static_cast<std::int32_t volatile*>(&c.fault->kind) = static_cast<std::int32_t>(kind);
}

inline constexpr int kCallerRoutingWarps = 8;

template <bool kMaps>
__global__ void __launch_bounds__(kWarp* kCallerRoutingWarps) caller_routing_kernel(__grid_constant__ CallerRoutingCall const c) {
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  bool const record = kMaps && c.recorder.load_counter != nullptr && (c.recorder.record == nullptr || *c.recorder.record != 0);
  std::int64_t valid = c.valid_rows;
  if (c.num_rows_word != nullptr) valid = min(valid, static_cast<std::int64_t>(max(*c.num_rows_word, 0)));
  bool const in_row = lane < c.k;

  for (std::int64_t t = std::int64_t{blockIdx.x} * kCallerRoutingWarps + threadIdx.x / kWarp; t < c.num_rows;
       t += std::int64_t{gridDim.x} * kCallerRoutingWarps) {
    bool const given = in_row && t < valid;
    std::int64_t const asked = given ? c.given_ids(t, lane) : std::int64_t{kNoExpert};
    float weight = given ? c.given_weights[t * c.given_weights_stride + lane] : 0.0F;

    // Lanes without an expert, or with an id that no expert has, get keys of their own, all below kNoExpert.
    auto id = static_cast<std::int32_t>(asked >= 0 && asked < c.num_ids ? asked : kNoExpert);
    unsigned const same = __match_any_sync(0xffffffffU, id >= 0 ? id : -2 - lane);
    bool const twice = (same & ((1U << lane) - 1U)) != 0;
    SlotFault const fault = slot_fault(asked, weight, c.num_ids, twice);
    if (fault != SlotFault::none) {
      report_slot(c, fault, t, lane, asked, weight);
      id = kNoExpert;
    }
    if (id == kNoExpert) weight = 0.0F;

    std::int64_t const slot = t * c.k + lane;
    if (in_row) c.ids[slot] = id;
    if (c.zero_weights != nullptr) {
      bool const zero = id >= c.num_experts;
      float const factor = warp_sum(zero && c.zero_experts_add ? weight : 0.0F);
      if (lane == 0) c.zero_weights[t] = factor;
      if (zero) {
        id = kNoExpert;
        weight = 0.0F;
      }
    }
    if (!in_row) continue;
    c.weights[slot] = weight;
    if constexpr (kMaps) {
      std::int32_t const physical = map_expert(c.mapping, id, t, lane, c.k);
      c.dispatched[slot] = physical;
      if (record && physical >= 0) atomicAdd(c.recorder.load_counter + physical, 1);
    }
  }
}

}  // namespace detail

template <class Router>
void take_routing(Router const& router, CallerRouting const& c, Stream<space::cuda> stream) {
  std::int64_t const rows = c.given_ids.extent(0);
  if (rows == 0) return;
  detail::CallerRoutingCall call{};
  call.given_ids = c.given_ids;
  call.given_weights = c.given_weights.data_handle();
  call.given_weights_stride = c.given_weights.stride(0);
  call.num_rows = rows;
  call.valid_rows = c.num_valid_rows;
  call.num_rows_word = c.num_rows;
  call.k = router.topk();
  call.num_experts = router.num_experts();
  call.num_ids = detail::num_ids(router);
  if constexpr (facts::resolves<Router>()) {
    call.zero_experts_add = router.resolved().zero_expert_kind == ZeroExpertKind::identity;
  }
  call.ids = c.topk_ids.data_handle();
  call.weights = c.topk_weights.data_handle();
  call.dispatched = c.dispatched;
  if (c.mapping != nullptr) call.mapping = *c.mapping;
  call.recorder = c.recorder;
  call.zero_weights = c.zero_expert_weights;
  static_assert(sizeof(RouteCounters::invalid_slots) == sizeof(unsigned long long));
  call.invalid_slots = c.counters == nullptr ? nullptr : reinterpret_cast<unsigned long long*>(&c.counters->invalid_slots);
  call.fault = c.fault;
  constexpr std::int64_t kMostBlocks = 1024;
  auto const blocks = static_cast<unsigned>(std::min(kMostBlocks, (rows + detail::kCallerRoutingWarps - 1) / detail::kCallerRoutingWarps));
  auto* const kernel = c.mapping != nullptr ? &detail::caller_routing_kernel<true> : &detail::caller_routing_kernel<false>;
  kernel<<<blocks, detail::kWarp * detail::kCallerRoutingWarps, 0, stream>>>(call);
  check_launch("caller routing kernel");
}

}  // namespace moe::routing
