// SPDX-License-Identifier: Apache-2.0
// routing/device/route_permute.cuh: counts of slots per expert over all blocks of a launch, and where each block's slots begin.
//
// Slots are numbered in the order of tokens and every block routes consecutive tokens, so a slot's row is offset[expert] + slots of the
// expert in earlier blocks + its rank in its own block: stable in the slot number, whatever the order in which blocks ran. Blocks of a
// cluster write their counts into each other's shared memory. Clusters exchange sums through the workspace: every count is stored plus one,
// so a word that is not zero has arrived, and no flag, fence or second round trip is needed. Two buffers alternate; each launch clears what
// the previous launch wrote.
#pragma once

#include <cstdint>
#include <cuda/ptx>

#include "moe/core/ptx/cluster.cuh"
#include "moe/core/ptx/mbarrier.cuh"
#include "moe/core/ptx/memory.cuh"
#include "moe/routing/device/route_warp.cuh"
#include "moe/routing/permutation.hpp"
#include "moe/routing/route.hpp"

namespace moe::routing::detail {

/// How the blocks of a launch exchange counts.
struct RoutingGrid {
  int cluster = 1;                     ///< blocks of a cluster
  bool large = false;                  ///< a cluster may have more than 254 tokens, or all of them more than 65535
  unsigned char* workspace = nullptr;  ///< of routing_workspace_bytes(), or null: one cluster, which needs none
};

/// The first words of the workspace.
struct WorkspaceHeader {
  unsigned turn;   ///< the buffer of the next launch, 0 or 1; it is all zeros
  unsigned dirty;  ///< bytes of the other buffer that are not zero
};
static_assert(sizeof(WorkspaceHeader) <= kHeaderBytes);

/// Counts packed for the exchange, kPer to a word. The width is chosen at run time, because little code depends on it.
struct SmallCounts {
  using Count = std::uint8_t;
  static constexpr int kPer = 4;
  static constexpr unsigned kOnes = 0x01010101U;
  static __device__ bool there(unsigned word) { return ((word - kOnes) & ~word & 0x80808080U) == 0; }
};
struct LargeCounts {
  using Count = std::uint32_t;
  static constexpr int kPer = 1;
  static constexpr unsigned kOnes = 1;
  static __device__ bool there(unsigned word) { return word != 0; }
};

/// Shared memory of a block, in 4-byte words. 16-byte aligned parts.
struct RoutingShared {
  int header, sums, masks, before, gathered, parts, offsets, scratch, words;
};
MOE_HD inline RoutingShared routing_shared(int num_physical, int local_experts, RoutingGrid const& grid, int warps, int scratch_floats) {
  int const bins = histogram_bins(num_physical);
  RoutingShared s{};
  s.header = 0;
  s.sums = 4;  // of warps, for scan_offsets(); before them the header and a barrier
  s.masks = s.sums + kWarp;
  s.before = s.masks + bins;
  s.gathered = s.before + bins;
  s.parts = s.gathered + (grid.cluster == 1 ? 0 : (grid.cluster * bins >> (grid.large ? 0 : 2)));
  s.offsets = s.parts + (grid.workspace == nullptr ? 0 : 4 * warps * kWarp);
  s.scratch = s.offsets + (local_experts + 3) / 4 * 4;
  s.words = s.scratch + warps * scratch_floats;
  return s;
}

// Barriers of clusters would wait for this block's earlier stores to global memory. Instead every block has a barrier in shared memory that
// counts the bytes that the others store.

/// Makes this block's barrier expect `bytes` bytes; one thread calls it.
__device__ inline void expect_bytes([[maybe_unused]] std::uint64_t* barrier, [[maybe_unused]] int bytes) {
#if __CUDA_ARCH__ >= 900
  cuda::ptx::mbarrier_init(barrier, 1);
  cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta, cuda::ptx::space_shared, barrier,
                                       static_cast<std::uint32_t>(bytes));
  cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
#endif
}

/// Slots of an expert in all blocks, and in those before this one.
struct BinSum {
  unsigned total = 0;
  unsigned before = 0;
};
/// The same for all experts of a word of counts: two 16-bit sums per word here, or one sum if the word has one expert.
template <class Counts>
struct WordSum {
  static constexpr int kWords = (Counts::kPer + 1) / 2;
  unsigned total[kWords] = {};
  unsigned before[kWords] = {};
  /// Adds a word of counts plus one.
  __device__ void add(unsigned word, bool earlier) {
    word -= Counts::kOnes;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      unsigned const counts = Counts::kPer == 1 ? word : word >> (8 * i) & 0x00FF00FFU;
      total[i] += counts;
      if (earlier) before[i] += counts;
    }
  }
  __device__ void add(WordSum const& other) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      total[i] += other.total[i];
      before[i] += other.before[i];
    }
  }
  /// The sums of the word's e-th expert.
  __device__ BinSum of(int e) const {
    if (Counts::kPer == 1) return {total[0], before[0]};
    int const shift = e / 2 * 16;
    return {total[e % 2] >> shift & 0xFFFFU, before[e % 2] >> shift & 0xFFFFU};
  }
};

// Loops over experts run once or a few times. Unrolled, they would first compute their trip count by a division.

/// Counts slots: first of a block's iterations (a token per warp), then of the whole launch.
class SlotCounter {
 public:
  __device__ SlotCounter(RoutingGrid const& grid, unsigned* shared, RoutingShared const& at, int num_physical)
      : grid_(grid),
        masks_(shared + at.masks),
        before_(shared + at.before),
        gathered_(shared + at.gathered),
        parts_(shared + at.parts),
        header_(reinterpret_cast<WorkspaceHeader*>(shared + at.header)),
        barrier_(reinterpret_cast<std::uint64_t*>(shared + at.header + 2)),
        bins_(histogram_bins(num_physical)) {}

  /// Call first. Needs __syncthreads() before add().
  __device__ void clear() {
#pragma unroll 1
    for (int i = thread(); i < bins_; i += threads()) masks_[i] = before_[i] = 0;
    if (grid_.workspace != nullptr && thread() == 0) *header_ = *reinterpret_cast<WorkspaceHeader const*>(grid_.workspace);
    if (grid_.cluster == 1) return;
    if (thread() == 0)
      expect_bytes(barrier_,
                   (grid_.cluster - 1) * bins_ * static_cast<int>(grid_.large ? sizeof(LargeCounts::Count) : sizeof(SmallCounts::Count)));
    ptx::cluster_arrive_relaxed();  // others may write here
  }
  /// Lane `lane` of warp `warp` chose this expert, or none if it is negative.
  __device__ void add(int physical, int warp) {
    if (physical >= 0) atomicOr(&masks_[physical], 1U << warp);
  }
  /// Slots of the expert in this block before warp `warp` of this iteration. Needs __syncthreads() after add().
  __device__ unsigned rank(int physical, int warp) const {
    return before_[physical] + static_cast<unsigned>(__popc(masks_[physical] & ((1U << warp) - 1)));
  }
  /// Ends an iteration that is not the last.
  __device__ void next_iteration() {
    __syncthreads();
#pragma unroll 1
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
  /// Call last, after a __syncthreads(): prepares the workspace for the next launch. By now every block has read the header.
  __device__ void leave() const {
    if (grid_.workspace == nullptr || blockIdx.x != 0 || thread() != 0) return;
    unsigned const clusters = gridDim.x / static_cast<unsigned>(grid_.cluster);
    unsigned const words = static_cast<unsigned>(bins_ / (grid_.large ? LargeCounts::kPer : SmallCounts::kPer));
    *reinterpret_cast<WorkspaceHeader*>(grid_.workspace) = {header_->turn ^ 1U, clusters * words * 4};
  }

 private:
  static __device__ int thread() { return static_cast<int>(threadIdx.x); }
  static __device__ int threads() { return static_cast<int>(blockDim.x); }

  /// Writes this block's counts into every block of the cluster, 16 bytes per store, one warp per target block.
  template <class Count>
  __device__ void push() {
    constexpr int kPerStore = 16 / static_cast<int>(sizeof(Count));
    auto* const mine = reinterpret_cast<Count*>(gathered_) + ptx::rank_in_cluster() * bins_;
#pragma unroll 1
    for (int e = thread(); e < bins_; e += threads()) mine[e] = static_cast<Count>(in_block(e));
    __syncthreads();
    ptx::cluster_wait();
#pragma unroll 1
    for (int to = thread() / kWarp; to < grid_.cluster; to += threads() / kWarp) {
#pragma unroll 1
      for (int e = thread() % kWarp * kPerStore; e < bins_; e += kWarp * kPerStore) {
        if (to != ptx::rank_in_cluster())
          ptx::store_remote_16(mine + e, barrier_, static_cast<std::uint32_t>(to), *reinterpret_cast<uint4 const*>(mine + e));
      }
    }
    ptx::barrier_wait_cluster(barrier_);
  }
  template <class Count>
  __device__ BinSum in_cluster(int e) const {
    int const rank = ptx::rank_in_cluster();
    if (grid_.cluster == 1) return {in_block(e), 0};
    auto const* const counts = reinterpret_cast<Count const*>(gathered_) + e;
    constexpr int kAhead = 8;
    BinSum sum;
#pragma unroll 1
    for (int first = 0; first < grid_.cluster; first += kAhead) {
#pragma unroll
      for (int r = first; r < first + kAhead; ++r) {
        unsigned const count = r < grid_.cluster ? counts[r * bins_] : 0U;
        sum.total += count;
        if (r < rank) sum.before += count;
      }
    }
    return sum;
  }

  template <class Counts, class Visit>
  __device__ void sum_up_as(Visit const& visit) {
    if (grid_.cluster > 1) {
      push<typename Counts::Count>();
    } else {
      __syncthreads();  // rank() has been read
    }
    if (grid_.workspace != nullptr) {
      exchange<Counts>(visit);
      return;
    }
#pragma unroll 1
    for (int e = thread(); e < bins_; e += threads()) {
      BinSum const sum = in_cluster<typename Counts::Count>(e);
      before_[e] = sum.before;
      visit(e, static_cast<int>(sum.total));
    }
  }

  /// Sums over clusters. Block r of a cluster publishes the r-th part of its words.
  template <class Counts, class Visit>
  __device__ void exchange(Visit const& visit) {
    constexpr int kPer = Counts::kPer;
    using Sum = WordSum<Counts>;
    int const words = bins_ / kPer;
    int const mine = ptx::cluster_in_grid();
    int const first_word = (words * ptx::rank_in_cluster()) / grid_.cluster;
    int const end_word = (words * (ptx::rank_in_cluster() + 1)) / grid_.cluster;
    WorkspaceHeader const header = *header_;
#pragma unroll 1
    for (int w = thread(); w < words; w += threads()) {
      unsigned counts = Counts::kOnes;
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        BinSum const sum = in_cluster<typename Counts::Count>(w * kPer + i);
        before_[w * kPer + i] = sum.before;
        counts += sum.total << (8 * i);
      }
      if (w >= first_word && w < end_word) ptx::store_relaxed_gpu(word(header.turn, mine, words, w), counts);
    }
    auto const all = static_cast<unsigned>(blockIdx.x * blockDim.x + threadIdx.x);
#pragma unroll 1
    for (unsigned i = all * 16; i < header.dirty; i += gridDim.x * blockDim.x * 16) {
      *reinterpret_cast<uint4*>(byte_of(header.turn ^ 1U, i)) = uint4{};
    }
    int const clusters = static_cast<int>(gridDim.x) / grid_.cluster;
    int const parts = threads() > words ? threads() / words : 1;  // threads that share a column
    auto const finish = [&](int w, Sum const& sum) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        BinSum const bin = sum.of(i);
        before_[w * kPer + i] += bin.before;
        visit(w * kPer + i, static_cast<int>(bin.total));
      }
    };
    auto* const sums = reinterpret_cast<Sum*>(parts_);
#pragma unroll 1
    for (int i = thread(); i < parts * words; i += threads()) {
      int const first = parts == 1 ? 0 : i / words;
      int const w = i - first * words;
      Sum const sum = column<Counts>(header.turn, w, words, first, parts, clusters, mine);
      if (parts == 1) {
        finish(w, sum);
      } else {
        sums[i] = sum;
      }
    }
    __syncthreads();
    if (parts == 1 || thread() >= words) return;
    Sum sum;
#pragma unroll 1
    for (int i = thread(); i < parts * words; i += words) sum.add(sums[i]);
    finish(thread(), sum);
  }
  /// Sums every step-th row of a column; waits for words that have not arrived.
  template <class Counts>
  __device__ WordSum<Counts> column(unsigned turn, int w, int words, int first, int step, int clusters, int mine) const {
    constexpr int kAhead = 5;
    WordSum<Counts> sum;
#pragma unroll 1
    for (int row = first; row < clusters; row += kAhead * step) {
      unsigned counts[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        counts[i] = row + i * step < clusters ? ptx::load_relaxed_gpu(word(turn, row + i * step, words, w)) : Counts::kOnes;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        while (!Counts::there(counts[i])) counts[i] = ptx::load_relaxed_gpu(word(turn, row + i * step, words, w));
        sum.add(counts[i], row + i * step < mine);
      }
    }
    return sum;
  }
  /// The two buffers alternate every 128 bytes, so that their addresses do not depend on the launch.
  __device__ unsigned char* byte_of(unsigned turn, unsigned i) const {
    return grid_.workspace + kHeaderBytes + std::int64_t{i} + (i & ~127U) + turn * 128;
  }
  __device__ unsigned* word(unsigned turn, int row, int words, int w) const {
    return reinterpret_cast<unsigned*>(byte_of(turn, static_cast<unsigned>(row * words + w) * 4));
  }

  RoutingGrid grid_;
  unsigned* masks_;
  unsigned* before_;
  unsigned* gathered_;
  unsigned* parts_;
  WorkspaceHeader* header_;
  std::uint64_t* barrier_;
  int bins_;
};

/// Replaces the counts in offsets[0 … n) by the exclusive prefix sums of the rounded-up counts; one thread calls visit(i, count, offset,
/// end) for each. sums: kWarp words. Needs a __syncthreads() before it and ends with one.
template <class Visit>
__device__ inline void scan_offsets(std::int32_t* offsets, int n, int alignment, unsigned* sums, Visit const& visit) {
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  int const warp = static_cast<int>(threadIdx.x) / kWarp;
  int const warps = static_cast<int>(blockDim.x) / kWarp;
  unsigned carry = 0;
#pragma unroll 1
  for (int start = 0; start < n; start += static_cast<int>(blockDim.x)) {
    int const i = start + static_cast<int>(threadIdx.x);
    bool const busy = start + warp * kWarp < n;  // a warp without experts only waits
    int const count = i < n ? offsets[i] : 0;
    auto const rounded = static_cast<unsigned>(alignment == 1 ? count : (count + alignment - 1) / alignment * alignment);
    unsigned through = rounded;
    if (busy) {
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) {
        unsigned const other = __shfl_up_sync(kAllLanes, through, static_cast<unsigned>(step));
        if (lane >= step) through += other;
      }
    }
    if (lane == kWarp - 1) sums[warp] = through;
    __syncthreads();
    if (busy) {
      unsigned const of_warp = lane < warps ? sums[lane] : 0;
      auto const end = static_cast<std::int32_t>(carry + __reduce_add_sync(kAllLanes, lane < warp ? of_warp : 0U) + through);
      if (i < n) {
        offsets[i] = end - static_cast<std::int32_t>(rounded);
        visit(i, count, end - static_cast<std::int32_t>(rounded), end);
      }
      if (start + static_cast<int>(blockDim.x) < n) carry += __reduce_add_sync(kAllLanes, of_warp);
    }
    __syncthreads();
  }
}

}  // namespace moe::routing::detail
