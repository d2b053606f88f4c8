// SPDX-License-Identifier: Apache-2.0
// routing/route_permute.cuh: counts of slots per expert over all blocks of a launch, and where each block's slots begin.
//
// Slots are numbered in the order of tokens and every block routes consecutive tokens, so a slot's row is offset[expert] + slots of the
// expert in earlier blocks + its rank in its own block: stable in the slot number, whatever the order in which blocks ran. Blocks of a
// cluster write their counts into each other's shared memory. Clusters exchange sums through the workspace: every count is stored plus
// one, so that a word says itself whether it is there, and no flag, fence or second trip is needed. Two buffers take turns; each launch
// clears what the launch before it wrote.
#pragma once

#include <cstdint>

#include "moe/routing/permutation.hpp"
#include "moe/routing/route.hpp"
#include "moe/routing/route_warp.cuh"

namespace moe::routing::detail {

/// How the blocks of a launch exchange counts.
struct RoutingGrid {
  int cluster = 1;                     ///< blocks of a cluster
  bool large = false;                  ///< a block may have more than 255 tokens
  unsigned char* workspace = nullptr;  ///< of routing_workspace_bytes(), or null: one cluster, which needs none
};

/// The first words of the workspace.
struct WorkspaceHeader {
  unsigned turn;   ///< the buffer of the next launch, 0 or 1; it is all zeros
  unsigned dirty;  ///< bytes of the other one that are not
};
static_assert(sizeof(WorkspaceHeader) <= kHeaderBytes);

/// Counts of a block and of a cluster, as they travel. The width is chosen at run time: little code depends on it.
struct SmallCounts {
  using OfBlock = std::uint8_t;
  using OfCluster = std::uint16_t;
};
struct LargeCounts {
  using OfBlock = std::uint32_t;
  using OfCluster = std::uint32_t;
};

/// Shared memory of a block, in 4-byte words. 16-byte aligned parts.
struct RoutingShared {
  int header, sums, masks, before, gathered, parts, offsets, scratch, words;
};
MOE_HD inline RoutingShared routing_shared(int num_physical, int local_experts, RoutingGrid const& grid, int warps, int scratch_floats) {
  int const bins = histogram_bins(num_physical);
  RoutingShared s{};
  s.header = 0;
  s.sums = 4;  // of warps, for scan_offsets()
  s.masks = s.sums + kWarp;
  s.before = s.masks + bins;
  s.gathered = s.before + bins;
  s.parts = s.gathered + (grid.cluster == 1 ? 0 : grid.cluster * bins / (grid.large ? 1 : 4));
  s.offsets = s.parts + (grid.workspace == nullptr ? 0 : 2 * warps * kWarp);
  s.scratch = s.offsets + (local_experts + 1 + 3) / 4 * 4;
  s.words = s.scratch + warps * scratch_floats;
  return s;
}

__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
/// Stores 16 bytes at the place that `here` has in this block, in block `rank` of the cluster.
__device__ inline void store_in_block(void* here, int rank, uint4 v) {
#if __CUDA_ARCH__ >= 900
  auto const local = static_cast<unsigned>(__cvta_generic_to_shared(here));
  unsigned remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(remote), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}
__device__ inline std::uint16_t load_relaxed(std::uint16_t const* p) {
  std::uint16_t v;
  asm volatile("ld.relaxed.gpu.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline std::uint32_t load_relaxed(std::uint32_t const* p) {
  std::uint32_t v;
  asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline void store_relaxed(std::uint16_t* p, unsigned v) {
  asm volatile("st.relaxed.gpu.u16 [%0], %1;" ::"l"(p), "h"(static_cast<std::uint16_t>(v)) : "memory");
}
__device__ inline void store_relaxed(std::uint32_t* p, unsigned v) {
  asm volatile("st.relaxed.gpu.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

/// A thread's expert of a column of counts: slots of all blocks, and of those before this one.
struct BinSum {
  unsigned total = 0;
  unsigned before = 0;
};

/// Counts slots, first of a block's tiles of one token a warp, then of the whole launch.
class SlotCounter {
 public:
  __device__ SlotCounter(RoutingGrid const& grid, unsigned* shared, RoutingShared const& at, int num_physical)
      : grid_(grid),
        masks_(shared + at.masks),
        before_(shared + at.before),
        gathered_(shared + at.gathered),
        parts_(reinterpret_cast<BinSum*>(shared + at.parts)),
        header_(reinterpret_cast<WorkspaceHeader*>(shared + at.header)),
        bins_(histogram_bins(num_physical)) {}

  /// First of all; ends in __syncthreads().
  __device__ void clear() {
    for (int i = thread(); i < bins_; i += threads()) masks_[i] = before_[i] = 0;
    if (grid_.workspace != nullptr && thread() == 0) *header_ = *reinterpret_cast<WorkspaceHeader const*>(grid_.workspace);
    if (grid_.cluster > 1) cluster_arrive();  // its shared memory may be written to
    __syncthreads();
  }
  /// Lane `lane` of warp `warp` chose this expert, or none if it is negative.
  __device__ void add(int physical, int warp) {
    if (physical >= 0) atomicOr(&masks_[physical], 1U << warp);
  }
  /// Slots of the expert in this block before warp `warp` of this tile. Needs __syncthreads() after add().
  __device__ unsigned rank(int physical, int warp) const {
    return before_[physical] + static_cast<unsigned>(__popc(masks_[physical] & ((1U << warp) - 1)));
  }
  /// Closes a tile that another one follows.
  __device__ void next_tile() {
    __syncthreads();
    for (int i = thread(); i < bins_; i += threads()) {
      before_[i] += static_cast<unsigned>(__popc(masks_[i]));
      masks_[i] = 0;
    }
    __syncthreads();
  }
  /// This block's slots of an expert.
  __device__ unsigned in_block(int e) const { return before_[e] + static_cast<unsigned>(__popc(masks_[e])); }

  /// Calls visit(expert, slots in all blocks) once for every bin, each by one thread, and leaves slots in earlier blocks in before().
  template <class Visit>
  __device__ void sum_up(Visit const& visit) {
    if (grid_.large) {
      sum_up_as<LargeCounts>(visit);
    } else {
      sum_up_as<SmallCounts>(visit);
    }
  }
  __device__ unsigned before(int e) const { return before_[e]; }
  /// Last of all, after a __syncthreads(): leaves the workspace to the next launch. By now every block has read the header.
  __device__ void leave() const {
    if (grid_.workspace == nullptr || blockIdx.x != 0 || thread() != 0) return;
    unsigned const clusters = gridDim.x / static_cast<unsigned>(grid_.cluster);
    unsigned const width = grid_.large ? sizeof(LargeCounts::OfCluster) : sizeof(SmallCounts::OfCluster);
    *reinterpret_cast<WorkspaceHeader*>(grid_.workspace) = {header_->turn ^ 1U, clusters * static_cast<unsigned>(bins_) * width};
  }

 private:
  static __device__ int thread() { return static_cast<int>(threadIdx.x); }
  static __device__ int threads() { return static_cast<int>(blockDim.x); }
  __device__ int rank_in_cluster() const { return static_cast<int>(blockIdx.x) % grid_.cluster; }

  /// Writes this block's counts into every block of the cluster, 16 bytes a store.
  template <class Count>
  __device__ void push() {
    constexpr int kPerStore = 16 / static_cast<int>(sizeof(Count));
    int const stores = bins_ / kPerStore;
    auto* const mine = reinterpret_cast<Count*>(gathered_) + rank_in_cluster() * bins_;
    cluster_wait();
    for (int i = thread(); i < stores * grid_.cluster; i += threads()) {
      int const to = i / stores;
      int const first = (i - to * stores) * kPerStore;
      alignas(16) Count counts[kPerStore];
#pragma unroll
      for (int j = 0; j < kPerStore; ++j) counts[j] = static_cast<Count>(in_block(first + j));
      store_in_block(mine + first, to, *reinterpret_cast<uint4 const*>(counts));
    }
    cluster_arrive();
    cluster_wait();
  }
  template <class Count>
  __device__ BinSum in_cluster(int e) const {
    if (grid_.cluster == 1) return {in_block(e), 0};
    auto const* const counts = reinterpret_cast<Count const*>(gathered_) + e;
    BinSum sum;
    for (int r = 0; r < grid_.cluster; ++r) {
      unsigned const count = counts[r * bins_];
      sum.total += count;
      if (r < rank_in_cluster()) sum.before += count;
    }
    return sum;
  }

  template <class Counts, class Visit>
  __device__ void sum_up_as(Visit const& visit) {
    if (grid_.cluster > 1) {
      push<typename Counts::OfBlock>();
    } else {
      __syncthreads();  // rank() has been read
    }
    if (grid_.workspace != nullptr) {
      exchange<Counts>(visit);
      return;
    }
    for (int e = thread(); e < bins_; e += threads()) {
      BinSum const sum = in_cluster<typename Counts::OfBlock>(e);
      before_[e] = sum.before;
      visit(e, static_cast<int>(sum.total));
    }
  }

  /// Sums over clusters. Block r of a cluster publishes the r-th part of its bins.
  template <class Counts, class Visit>
  __device__ void exchange(Visit const& visit) {
    using OfCluster = typename Counts::OfCluster;
    int const clusters = static_cast<int>(gridDim.x) / grid_.cluster;
    int const mine = static_cast<int>(blockIdx.x) / grid_.cluster;
    int const part = bins_ / grid_.cluster;
    WorkspaceHeader const header = *header_;
    for (int e = thread(); e < bins_; e += threads()) {
      BinSum const sum = in_cluster<typename Counts::OfBlock>(e);
      before_[e] = sum.before;
      if (e / part == rank_in_cluster()) store_relaxed(word<OfCluster>(header.turn, mine, e), sum.total + 1);
    }
    int const all = static_cast<int>(blockIdx.x) * threads() + thread();
    for (unsigned i = static_cast<unsigned>(all) * 16; i < header.dirty; i += gridDim.x * blockDim.x * 16) {
      *reinterpret_cast<uint4*>(byte_of(header.turn ^ 1U, i)) = uint4{};
    }
    int const parts = threads() > bins_ ? threads() / bins_ : 1;  // threads that share a column
    for (int i = thread(); i < parts * bins_; i += threads()) {
      int const first = parts == 1 ? 0 : i / bins_;
      int const e = i - first * bins_;
      BinSum const sum = column<OfCluster>(header.turn, e, first, parts, clusters, mine);
      if (parts == 1) {
        before_[e] += sum.before;
        visit(e, static_cast<int>(sum.total));
      } else {
        parts_[i] = sum;
      }
    }
    if (parts == 1) return;
    __syncthreads();
    if (thread() >= bins_) return;
    BinSum sum;
    for (int i = thread(); i < parts * bins_; i += bins_) {
      sum.total += parts_[i].total;
      sum.before += parts_[i].before;
    }
    before_[thread()] += sum.before;
    visit(thread(), static_cast<int>(sum.total));
  }
  /// Every step-th row of a column, waiting for those that are not there yet.
  template <class Count>
  __device__ BinSum column(unsigned turn, int e, int first, int step, int clusters, int mine) const {
    constexpr int kAhead = 4;
    BinSum sum;
    for (int row = first; row < clusters; row += kAhead * step) {
      Count counts[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        counts[i] = row + i * step < clusters ? load_relaxed(word<Count>(turn, row + i * step, e)) : Count{1};
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        while (counts[i] == 0) counts[i] = load_relaxed(word<Count>(turn, row + i * step, e));
        sum.total += counts[i] - 1U;
        if (row + i * step < mine) sum.before += counts[i] - 1U;
      }
    }
    return sum;
  }
  /// The buffers lie in turns of 128 bytes, so that their places do not depend on the launch.
  __device__ unsigned char* byte_of(unsigned turn, unsigned i) const {
    return grid_.workspace + kHeaderBytes + std::int64_t{i} + (i & ~127U) + turn * 128;
  }
  template <class Count>
  __device__ Count* word(unsigned turn, int row, int e) const {
    return reinterpret_cast<Count*>(byte_of(turn, static_cast<unsigned>((row * bins_ + e) * static_cast<int>(sizeof(Count)))));
  }

  RoutingGrid grid_;
  unsigned* masks_;
  unsigned* before_;
  unsigned* gathered_;
  BinSum* parts_;
  WorkspaceHeader* header_;
  int bins_;
};

/// offsets[0 … n]: exclusive prefix of the counts in offsets[0 … n), each rounded up; visit(i, count, offset, end) for each, by one thread.
/// sums: kWarp words. Begins after, and ends in, __syncthreads().
template <class Visit>
__device__ inline void scan_offsets(std::int32_t* offsets, int n, int alignment, unsigned* sums, Visit const& visit) {
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int const warp = static_cast<int>(threadIdx.x) / kWarp;
  int const warps = static_cast<int>(blockDim.x) / kWarp;
  unsigned carry = 0;
  for (int start = 0; start < n; start += static_cast<int>(blockDim.x)) {
    int const i = start + static_cast<int>(threadIdx.x);
    int const count = i < n ? offsets[i] : 0;
    auto const rounded = static_cast<unsigned>(alignment == 1 ? count : (count + alignment - 1) / alignment * alignment);
    unsigned through = rounded;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      unsigned const other = __shfl_up_sync(kAllLanes, through, static_cast<unsigned>(step));
      if (lane >= step) through += other;
    }
    if (lane == kWarp - 1) sums[warp] = through;
    __syncthreads();
    unsigned const of_warp = lane < warps ? sums[lane] : 0;
    unsigned const earlier = __reduce_add_sync(kAllLanes, lane < warp ? of_warp : 0U);
    auto const end = static_cast<std::int32_t>(carry + earlier + through);
    carry += __reduce_add_sync(kAllLanes, of_warp);
    if (i < n) {
      offsets[i] = end - static_cast<std::int32_t>(rounded);
      visit(i, count, end - static_cast<std::int32_t>(rounded), end);
    }
    if (start + static_cast<int>(blockDim.x) < n) __syncthreads();  // sums are written again
  }
  if (threadIdx.x == 0) offsets[n] = static_cast<std::int32_t>(carry);
  __syncthreads();
}

}  // namespace moe::routing::detail
