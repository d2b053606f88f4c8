// SPDX-License-Identifier: Apache-2.0
// routing/device/route.cuh: launches the routing kernel in a shape chosen for the batch and the device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "moe/core/cuda_space.hpp"
#include "moe/core/device_facts.hpp"
#include "moe/routing/device/caller_routing.cuh"
#include "moe/routing/device/route_kernel.cuh"
#include "moe/routing/fixed_sizes.hpp"
#include "moe/routing/route.hpp"
#include "moe/routing/row/row_router.hpp"

namespace moe::fix {
[[gnu::used]] inline void include_moe_routing_device_route_cuh_or_link_a_model_library() {}
}  // namespace moe::fix

namespace moe::routing {
namespace detail {

/// A launch of blocks in clusters. Must outlive the use of its config, which points into it.
struct RoutingLaunch {
  std::array<cudaLaunchAttribute, 2> attributes{};
  cudaLaunchConfig_t config{};
  RoutingLaunch(RoutingTuning const& t, int shared_bytes, cudaStream_t stream) {
    config.gridDim = dim3(static_cast<unsigned>(t.blocks));
    config.blockDim = dim3(static_cast<unsigned>(t.warps * kWarp));
    config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = attributes.data();
    if (t.cluster > 1) {
      cudaLaunchAttribute& a = attributes[config.numAttrs++];
      a.id = cudaLaunchAttributeClusterDimension;
      a.val.clusterDim.x = static_cast<unsigned>(t.cluster);
      a.val.clusterDim.y = 1;
      a.val.clusterDim.z = 1;
    }
    if (t.barrier == GridBarrier::cooperative) {
      cudaLaunchAttribute& a = attributes[config.numAttrs++];
      a.id = cudaLaunchAttributeCooperative;
      a.val.cooperative = 1;
    }
  }
  RoutingLaunch(RoutingLaunch const&) = delete;
  RoutingLaunch& operator=(RoutingLaunch const&) = delete;
};

/// The capacity of a kernel on a device; the driver is asked once for each pair.
template <class Kernel>
RoutingCapacity measure_routing_capacity(Kernel* kernel, DeviceFacts const& device, int warps) {
  RoutingCapacity capacity;
  capacity.blocks[0] = device.num_sms;
  if (!device.has_clusters) return capacity;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cudaFuncSetAttribute");
  for (int i = 1; i < RoutingCapacity::kSizes; ++i) {
    RoutingLaunch const launch({1 << i, warps, 1 << i, GridBarrier::cluster}, 16 * 1024, nullptr);
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config) != cudaSuccess) {
      (void)cudaGetLastError();  // not of this size
      clusters = 0;
    }
    capacity.blocks[i] = std::min(clusters << i, device.num_sms / (1 << i) * (1 << i));
  }
  return capacity;
}

template <int V, class Config, class L>
RoutingCapacity routing_capacity(DeviceFacts const& device) {
  auto* const kernel = &routing_kernel<V, Config, L>;
  constexpr int kDevices = 64;
  struct Known {
    std::atomic<bool> ready{false};
    std::array<std::atomic<int>, RoutingCapacity::kSizes> blocks{};
  };
  static std::array<Known, kDevices> known;  // threads that measure at the same time store equal values
  if (device.device >= kDevices) return measure_routing_capacity(kernel, device, max_routing_warps(V));
  Known& k = known[static_cast<std::size_t>(device.device)];
  RoutingCapacity capacity;
  if (!k.ready.load(std::memory_order_acquire)) {
    capacity = measure_routing_capacity(kernel, device, max_routing_warps(V));
    for (std::size_t i = 0; i < k.blocks.size(); ++i) k.blocks[i].store(capacity.blocks[i], std::memory_order_relaxed);
    k.ready.store(true, std::memory_order_release);
  }
  for (std::size_t i = 0; i < k.blocks.size(); ++i) capacity.blocks[i] = k.blocks[i].load(std::memory_order_relaxed);
  return capacity;
}

template <int V, class Config, class L>
void launch_routing(Config const& cfg, RoutingCall<L> call, RoutingTuning const* chosen, DeviceFacts const& device, cudaStream_t stream) {
  auto* const kernel = &routing_kernel<V, Config, L>;
  bool const permute = call.permutation.expert_offsets != nullptr;
  int const locals = permute ? call.permutation.num_local_experts + call.permutation.num_local_shared : 0;
  RoutingTuning const tuning = chosen != nullptr ? *chosen
                                                 : choose_routing_tuning(call.num_rows, cfg.num_experts + cfg.num_zero_experts,
                                                                         routing_capacity<V, Config, L>(device), permute);
  std::int64_t const most_iterations = (std::int64_t{call.num_rows} + tuning.warps - 1) / tuning.warps;
  std::int64_t const tokens = (most_iterations + tuning.blocks - 1) / tuning.blocks * tuning.warps;  // of a block
  int const iterations = (call.valid_rows + tuning.warps - 1) / tuning.warps;
  call.block_iterations = (iterations + tuning.blocks - 1) / tuning.blocks;
  call.grid.cluster = tuning.cluster;
  call.grid.large = (tuning.barrier == GridBarrier::cooperative ? tokens * tuning.cluster : tokens) > kSmallCount || call.num_rows > 65535;
  if (tuning.barrier != GridBarrier::cooperative) call.grid.workspace = nullptr;
  int const bytes = 4 * routing_shared(call.num_physical, locals, call.grid, tuning.warps, call.scratch_floats).words;
  if (bytes > device.max_shared_bytes) {
    throw Error(ErrorCode::unsupported,
                text("routing kernel: ", bytes, " bytes of shared memory, the device has ", device.max_shared_bytes));
  }
  if (bytes > 48 * 1024) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
  }
  RoutingLaunch const launch(tuning, bytes, stream);
  check_cuda(cudaLaunchKernelEx(&launch.config, kernel, cfg, call), "routing kernel");
}

template <class Config, class L>
void launch_routing_for(Config const& cfg, RoutingCall<L> const& call, RoutingTuning const* tuning, DeviceFacts const& device,
                        cudaStream_t stream) {
  if constexpr (kHasFixedSizes<Config>) {  // one kernel serves every call
    launch_routing<lane_values(Config::num_experts + Config::num_zero_experts)>(cfg, call, tuning, device, stream);
  } else {
    switch (lane_values(cfg.num_experts + cfg.num_zero_experts)) {
      case 1: return launch_routing<1>(cfg, call, tuning, device, stream);
      case 2: return launch_routing<2>(cfg, call, tuning, device, stream);
      case 4: return launch_routing<4>(cfg, call, tuning, device, stream);
      case 8: return launch_routing<8>(cfg, call, tuning, device, stream);
      case 16: return launch_routing<16>(cfg, call, tuning, device, stream);
      default: return launch_routing<32>(cfg, call, tuning, device, stream);
    }
  }
}

}  // namespace detail

template <class Router, class L>
void route_fused(Router const& router, FusedRouting<L> const& f, Stream<space::cuda> stream) {
  using namespace detail;
  auto const& cfg = router.config();
  RouteArgs<L> const& a = f.args;
  check_fused(resolve(cfg), f);
  std::int64_t const rows = a.logits.extent(0);
  bool const permute = f.permutation.expert_offsets != nullptr;
  require(rows * cfg.num_slots() < std::int64_t{1} << 31, ErrorCode::capacity, "router_logits: ", rows, " rows of ", cfg.num_slots(),
          " slots, at most 2^31 - 1 slots");
  if (rows == 0) {
    if (!permute) return;
    std::size_t const n = static_cast<std::size_t>(f.permutation.num_local_experts + f.permutation.num_local_shared);
    check_cuda(cudaMemsetAsync(f.permutation.expert_offsets, 0, (n + 1) * sizeof(std::int64_t), stream), "cudaMemsetAsync");
    if (f.permutation.expert_num_tokens == nullptr) return;
    check_cuda(cudaMemsetAsync(f.permutation.expert_num_tokens, 0, n * sizeof(std::int32_t), stream), "cudaMemsetAsync");
    return;
  }
  DeviceFacts const device = device_facts();
  int const n = cfg.num_experts + cfg.num_zero_experts;
  RoutingCall<L> call{};
  call.logits = a.logits.data_handle();
  call.logits_stride = a.logits.stride(0);
  call.num_rows = static_cast<std::int32_t>(rows);
  call.valid_rows = static_cast<std::int32_t>(a.num_valid_rows);
  call.valid_rows_word = f.num_valid_rows;
  call.token_ids = a.token_ids;
  call.ids = a.topk_ids.data_handle();
  call.ids_stride = a.topk_ids.stride(0);
  call.weights = a.topk_weights.data_handle();
  call.weights_stride = a.topk_weights.stride(0);
  call.shared_weights = a.shared_weights.data_handle();
  call.shared_stride = call.shared_weights == nullptr ? 0 : a.shared_weights.stride(0);
  static_assert(sizeof(RouteCounters::degenerate_rows) == sizeof(unsigned long long));
  call.degenerate_rows = a.counters == nullptr ? nullptr : reinterpret_cast<unsigned long long*>(&a.counters->degenerate_rows);
  if (f.mapping != nullptr) call.mapping = *f.mapping;
  call.num_physical = f.mapping != nullptr ? f.mapping->num_physical : cfg.num_experts;
  call.recorder = f.recorder;
  call.logical_ids = f.logical_ids;
  call.logical_stride = f.logical_stride == 0 ? cfg.topk : f.logical_stride;
  call.zero_weights = f.zero_expert_weights;
  call.permutation = f.permutation;
  call.grid.workspace = static_cast<unsigned char*>(f.workspace);
  int const size = cfg.num_expert_group > 1 ? cfg.num_experts / cfg.num_expert_group : 0;
  int const lanes = size / lane_values(n);
  bool const in_registers = lanes * lane_values(n) == size && (lanes & (lanes - 1)) == 0;
  call.scratch_floats = size == 0 || (in_registers && lanes > 0) ? 0 : cfg.num_experts + cfg.num_expert_group;
  using Config = std::remove_cvref_t<decltype(cfg)>;
  if constexpr (kMayBeSigmoidGroups<Config>) {
    bool const aligned =
        reinterpret_cast<std::uintptr_t>(call.logits) % 16 == 0 && call.logits_stride * static_cast<std::int64_t>(sizeof(L)) % 16 == 0;
    if (aligned && is_sigmoid_groups(resolve(cfg))) {
      call.scratch_floats = SigmoidGroups::kScratchFloats;
      return launch_routing<SigmoidGroups::kValues>(SigmoidGroupsConfig<Config>{cfg}, call, f.tuning, device, stream);
    }
  }
  launch_routing_for(cfg, call, f.tuning, device, stream);
}

namespace detail {

static __global__ void name_shared_kernel(SharedCopies const copies, int num_experts, int k, Rows<std::int32_t> const topk_ids,
                                          Rows<std::int32_t> const logical_ids) {
  int const fused = static_cast<int>(topk_ids.extent(1)) - k;
  std::int64_t const at = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at >= topk_ids.extent(0) * fused) return;
  std::int64_t const t = at / fused;
  int const j = static_cast<int>(at % fused);
  std::int32_t& id = topk_ids(t, k + j);
  logical_ids(t, k + j) = id;
  if (id >= 0) id = shared_id(copies, num_experts, fused, t, j);
}

}  // namespace detail

[[gnu::used]] inline void name_shared(SharedCopies const& copies, int num_experts, int k, Rows<std::int32_t> topk_ids,
                                      Rows<std::int32_t> logical_ids, Stream<space::cuda> stream) {
  constexpr int kThreads = 256;
  std::int64_t const slots = topk_ids.extent(0) * (topk_ids.extent(1) - k);
  if (slots == 0) return;
  detail::name_shared_kernel<<<static_cast<unsigned>((slots + kThreads - 1) / kThreads), kThreads, 0, stream>>>(copies, num_experts, k,
                                                                                                                topk_ids, logical_ids);
  check_launch("name_shared kernel");
}

template <class Config>
template <class L>
void RowRouter<Config>::select(RouteArgs<L> const& a, Stream<space::cuda> stream) const {
  FusedRouting<L> f;
  f.args = a;
  route_fused(*this, f, stream);
}

}  // namespace moe::routing
