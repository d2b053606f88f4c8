// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/block_consumer.cuh: products and epilogues of the block-scaled fp8 kernel for many rows per expert. Rows of
// activations are the M side of wgmma, 64 per consumer warpgroup, and each weight box of 128 rows is its N side. So a thread's sums belong
// to two rows and one weight block, a step of K costs two scale factors instead of N / 4, and both epilogues stay within one warp.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/layer/epilogue.cuh"
#include "moe/experts/hopper/layer/mainloop.cuh"

namespace moe::hopper {

inline constexpr int kRowScaleCount = 132;  ///< row scales of a tile, from the multiple of 4 at or before its first row

/// Parameters: the layer's, with rows and their scales in sorted order and as tensor maps. Index 0 for GEMM1's rows, 1 for GEMM2's.
struct BlockParams {
  LayerParams base;
  CUtensorMap rows[2];    ///< [slots, H] or [slots, I] codes, boxes of 128 bytes × 64 rows
  CUtensorMap scales[2];  ///< [H / 128 or I / 128, slots], boxes of kRowScaleCount
  int scale_stride;       ///< from one block's scales to the next block's
};

inline constexpr int kScaleSteps = 128;  ///< the scales of a unit's two weight boxes come in chunks of at most this many steps of K
inline constexpr int kScaleChunks = 4;   ///< in shared memory at a time

/// Byte offsets in dynamic shared memory, from a 1024-byte aligned base. A stage: two weight boxes, rows, row scales.
template <int Stages>
struct BlockLayout {
  static constexpr int kRowScales = kWeightBytes + kBlockRows * 128;
  static constexpr int kStageBytes = kWeightBytes + kBlockRows * 128 + 1024;
  static constexpr int kStagingBytes = 64 * 128;  ///< of one warpgroup
  static constexpr int kStaging = Stages * kStageBytes;
  static constexpr int kScales = kStaging + 2 * kStagingBytes;
  static constexpr int kUnits = kScales + kScaleChunks * kScaleSteps * 8;
  static constexpr int kBarriers = kUnits + kUnitEntries * static_cast<int>(sizeof(Unit));
  static constexpr int kControl = kBarriers + (2 * Stages + 4 * kUnitEntries + 2 * kScaleChunks) * 8;
  static constexpr int kNumbers = kControl + static_cast<int>(sizeof(Control));
  static constexpr int kBytes = kNumbers + kUnitEntries * 4 + 1024;
  static_assert(kBytes <= kSharedMemoryLimit && kControl % 16 == 0);
};

/// Pointers into shared memory.
template <int Stages>
struct BlockShared : Shared<BlockLayout<Stages>, Stages> {
  using Base = Shared<BlockLayout<Stages>, Stages>;
  __device__ float2* scales(int chunk) const {
    return reinterpret_cast<float2*>(this->base + BlockLayout<Stages>::kScales) + chunk * kScaleSteps;
  }
  __device__ std::uint64_t* scales_full(int chunk) const { return Base::full(2 * Stages + 4 * kUnitEntries + chunk); }
  __device__ std::uint64_t* scales_empty(int chunk) const { return scales_full(kScaleChunks + chunk); }
};

/// What the consumers need of a unit. Every field comes from lane 0, so that the compiler knows it to be the same in all lanes: loops over
/// K then have no divergent control flow, and stages and descriptors stay in uniform registers.
struct ConsumerUnit {
  int phase;
  int first_row;
  int rows;
  int feature;
  int k_count;
  int entry;  ///< where the unit was announced
};
template <class Memory>
__device__ inline ConsumerUnit next_consumer_unit(Memory const& memory, RingState<kUnitEntries>& units) {
  wait_parity(memory.unit_full(units.stage), units.parity);
  Unit const* const from = memory.unit(units.stage);
  auto const same = [](int value) { return static_cast<int>(uniform(static_cast<std::uint32_t>(value))); };
  ConsumerUnit const unit{same(from->phase),   same(from->first_row), same(from->rows),
                          same(from->feature), same(from->k_count),   units.stage};
  arrive(memory.unit_empty(units.stage));
  units.advance();
  return unit;
}

/// total[c] += rows 64 group + [0, 64) of the tile times weight box c, over `steps` steps of K, at least one, with the box scales of
/// `chunk`. While one warpgroup scales its products and adds them to its sums, the other multiplies. (Turns
/// enforced by barriers were slower: docs/log/hopper.md, change 18.)
template <int Stages, int Cluster, class Memory>
__device__ inline void multiply_blocks(Memory const& memory, RingState<Stages>& ring, int group, int first_row, int chunk, int steps,
                                       float (&total)[2][64], float (&part)[64]) {
  using Layout = BlockLayout<Stages>;
  using Mma = Wgmma<MmaType::e4m3, 128>;
  int const thread = thread_index() & 127;
  std::uint32_t const memory_at = smem_address(memory.stage(0));
  std::uint32_t const row_at = memory_at + Layout::kRowScales +
                               static_cast<std::uint32_t>(4 * ((first_row & 3) + 64 * group + 16 * (thread >> 5) + ((thread & 31) >> 2)));
  std::uint32_t box_at = smem_address(memory.scales(chunk));
  std::uint32_t const base = descriptor_low(memory_at);
  std::uint32_t const a_offset = static_cast<std::uint32_t>(kWeightBytes / 16 + group * (8192 / 16));
  struct Scales {
    float low;  ///< of the thread's two rows
    float high;
    float2 box;
  };
  Scales next{};
  auto const open_stage = [&] {
    wait_parity(memory.full(ring.stage), ring.parity);
    std::uint32_t const rows = row_at + static_cast<std::uint32_t>(ring.stage * Layout::kStageBytes);
    next = {load_shared(rows), load_shared(rows + 32), load_shared_2(box_at)};
    box_at += 8;
  };
  auto const multiply = [&](std::uint32_t a, std::uint32_t b) {
    pin(part);
    wgmma_arrive();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Mma::run(part, descriptor(a + 2 * step), descriptor(b + 2 * step), step > 0 ? 1 : 0);
    }
    wgmma_commit();
  };
  auto const add = [&](float (&sum)[64], float low, float high) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      sum[4 * j + 0] = fmaf(part[4 * j + 0], low, sum[4 * j + 0]);
      sum[4 * j + 1] = fmaf(part[4 * j + 1], low, sum[4 * j + 1]);
      sum[4 * j + 2] = fmaf(part[4 * j + 2], high, sum[4 * j + 2]);
      sum[4 * j + 3] = fmaf(part[4 * j + 3], high, sum[4 * j + 3]);
    }
  };
  open_stage();
  std::uint32_t next_b = base + static_cast<std::uint32_t>(ring.stage * (Layout::kStageBytes / 16));
  for (int k = 0; k < steps; ++k) {
    int const current = ring.stage;
    std::uint32_t const b = next_b;
    std::uint32_t const a = b + a_offset;
    multiply(a, b);
    ring.advance();
    next_b = ring.stage == 0 ? base : b + Layout::kStageBytes / 16;  // now, not between this step's sums and the next step's products
    Scales const now = next;
    if (k + 1 < steps) open_stage();  // while the products run
    wgmma_wait<0>();
    pin(part);
    add(total[0], now.low * now.box.x, now.high * now.box.x);
    multiply(a, b + kWeightBytes / 32);
    wgmma_wait<0>();
    pin(part);
    __syncwarp();  // every lane has its row scales
    release_stage<Cluster, false>(memory, current);
    add(total[1], now.low * now.box.y, now.high * now.box.y);
  }
}

/// The address at which a lane writes its part of four 8x8 matrices: rows 0-7 and 8-15 of 16-byte chunk `chunk`, then of the next; rows are
/// 128 bytes, chunks swizzled by the row.
__device__ inline std::uint32_t chunk_address(std::uint32_t base, int lane, int chunk) {
  int const row = (lane & 7) + (lane & 8);
  return base + static_cast<std::uint32_t>(row * 128 + (((chunk + (lane >> 4)) ^ (row & 7)) << 4));
}

/// Stores 64 rows × 128 features of the intermediate as e4m3 codes with one scale per row. v[4 j + 2 h + c] is feature 8 j + 2 (lane % 4) +
/// c of row lane / 4 + 8 h of the warp's 16. `first_row` is the sorted position of the warpgroup's first row, `rows` the number of valid
/// rows.
__device__ inline void store_block_codes(LayerParams const& p, int scale_stride, int first_row, int rows, int feature, float const (&v)[64],
                                         char* staging) {
  int const lane = thread_index() & 31;
  int const warp = (thread_index() & 127) >> 5;
  std::uint32_t const base = smem_address(staging) + static_cast<std::uint32_t>(warp) * 2048;
  float inverse[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float amax = 0.0F;
#pragma unroll
    for (int j = 0; j < 16; ++j) amax = fmaxf(amax, fmaxf(fabsf(v[4 * j + 2 * h]), fabsf(v[4 * j + 2 * h + 1])));
    amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 2));
    float const scale = fmaxf(e4m3_scale(amax), p.layer.scale_floor);
    inverse[h] = __fdividef(1.0F, scale);
    int const row = 16 * warp + (lane >> 2) + 8 * h;
    if ((lane & 3) == 0 && row < rows) {
      p.inter.scales[static_cast<long long>(feature / 128) * scale_stride + first_row + row] = scale;
    }
  }
  // A 16-bit element is a pair of codes; a lane's four codes of a chunk are features 2 q, 2 q + 1, 2 q + 8, 2 q + 9: reordered on reading.
#pragma unroll
  for (int chunk = 0; chunk < 8; chunk += 2) {
    std::uint32_t word[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float const* const even = &v[8 * (chunk + i) + 2 * h];
        word[i][h] = pack_e4m3(even[0] * inverse[h], even[1] * inverse[h]) | (pack_e4m3(even[4] * inverse[h], even[5] * inverse[h]) << 16);
      }
    }
    store_matrix_x4(chunk_address(base, lane, chunk), word[0][0], word[0][1], word[1][0], word[1][1]);
  }
  __syncwarp();
  char* const inter = static_cast<char*>(p.inter.rows) + static_cast<long long>(first_row) * p.layer.intermediate + feature;
  int const chunk = lane & 7;
  uint4 raw[4];
#pragma unroll
  for (int pass = 0; pass < 4; ++pass) {
    int const local = 4 * pass + (lane >> 3);
    raw[pass] = load_shared_16(base + static_cast<std::uint32_t>(local * 128 + ((chunk ^ (local & 7)) << 4)));
  }
#pragma unroll
  for (int pass = 0; pass < 4; ++pass) {
    int const row = 16 * warp + 4 * pass + (lane >> 3);
    if (row < rows) {
      uint4 const pairs = raw[pass];
      uint4 const codes = make_uint4(__byte_perm(pairs.x, pairs.y, 0x5410), __byte_perm(pairs.z, pairs.w, 0x5410),
                                     __byte_perm(pairs.x, pairs.y, 0x7632), __byte_perm(pairs.z, pairs.w, 0x7632));
      *reinterpret_cast<uint4*>(inter + static_cast<long long>(row) * p.layer.intermediate + 16 * chunk) = codes;
    }
  }
  __syncwarp();
}

/// Stores 64 rows × up to 256 columns of the output, each row times its router weight, at the row of its slot. Lanes 0 to 15 pass the slot
/// and weight of row `lane` of their warp's 16.
template <class Output>
__device__ inline void store_block_rows(LayerParams const& p, SortedRow const& sorted, int rows, int feature, float const (&total)[2][64],
                                        char* staging) {
  int const lane = thread_index() & 31;
  int const warp = (thread_index() & 127) >> 5;
  std::uint32_t const base = smem_address(staging) + static_cast<std::uint32_t>(warp) * 2048;
  float const low = __shfl_sync(0xFFFFFFFFu, sorted.weight, lane >> 2);
  float const high = __shfl_sync(0xFFFFFFFFu, sorted.weight, (lane >> 2) + 8);
  Output* to[4];  // of this lane's chunk of rows lane / 8 + 4 i
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int const local = 4 * i + (lane >> 3);
    int const slot = __shfl_sync(0xFFFFFFFFu, sorted.slot, local);
    to[i] = 16 * warp + local < rows
                ? static_cast<Output*>(p.rows_out) + static_cast<long long>(slot) * p.align.hidden + feature + 8 * (lane & 7)
                : nullptr;
  }
#pragma unroll
  for (int part = 0; part < 4; ++part) {  // of 64 columns
    if (feature + 64 * part >= p.align.hidden) break;
    float const* const v = &total[part / 2][32 * (part % 2)];
#pragma unroll
    for (int chunk = 0; chunk < 8; chunk += 2) {
      float const* const e = v + 4 * chunk;
      store_matrix_x4(chunk_address(base, lane, chunk), pack<Output>(e[0] * low, e[1] * low), pack<Output>(e[2] * high, e[3] * high),
                      pack<Output>(e[4] * low, e[5] * low), pack<Output>(e[6] * high, e[7] * high));
    }
    __syncwarp();
    uint4 chunks[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int const local = 4 * i + (lane >> 3);
      chunks[i] = load_shared_16(base + static_cast<std::uint32_t>(local * 128 + (((lane & 7) ^ (local & 7)) << 4)));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (to[i] != nullptr) *reinterpret_cast<uint4*>(to[i] + 64 * part) = chunks[i];
    }
    __syncwarp();
  }
}

/// One thread tells the other CTAs which rows of the intermediate are complete. Its fence takes 1000 to 2000 cycles; no consumer waits for
/// it.
template <class Memory>
__device__ void publish_blocks(LayerParams const& p, Memory const& memory) {
  RingState<kUnitEntries> units;
  while (true) {
    wait_parity(memory.unit_full(units.stage), units.parity);
    Unit const unit = *memory.unit(units.stage);
    if (unit.phase < 0) return;
    if (unit.phase == 0) {
      wait_parity(memory.stored(units.stage), units.parity);
      if (unit.rows > 0) {
        fence_device();
        atomicAdd(p.align.counters + unit.token_tile, 1);
      }
    }
    arrive(memory.unit_empty(units.stage));
    units.advance();
  }
}

/// A consumer warp has stored its part of a unit.
template <class Memory>
__device__ inline void arrive_stored(Memory const& memory, int entry) {
  __syncwarp();
  if (elect_one()) arrive(memory.stored(entry));
}

/// One unit of a warpgroup, products and epilogue. `chunk`: the next chunk of box scales. Columns: GEMM2's units are reported, too.
template <int Stages, int Cluster, class Activation, bool Columns, class Memory>
__device__ inline void consume_blocks(LayerParams const& p, int scale_stride, Memory const& memory, RingState<Stages>& ring,
                                      RingState<kScaleChunks>& chunk, ConsumerUnit const& unit, int group) {
  using Layout = BlockLayout<Stages>;
  int const thread = thread_index() & 127;
  int const first_row = unit.first_row + 64 * group;
  int const rows = unit.rows - 64 * group;
  bool const first = unit.phase == 0;
  auto const for_chunks = [&](auto body) {
    int left = unit.k_count;
    do {
      wait_parity(memory.scales_full(chunk.stage), chunk.parity);
      body(min(left, kScaleSteps));
      arrive(memory.scales_empty(chunk.stage));
      chunk.advance();
      left -= kScaleSteps;
    } while (left > 0);
  };
  if (rows > 0) {
    char* const staging = memory.base + Layout::kStaging + group * Layout::kStagingBytes;
    SortedRow sorted{0, 0.0F};
    int const own = 16 * (thread >> 5) + (thread & 31);
    if (!first && (thread & 31) < 16 && own < rows) sorted = p.align.sorted_rows[first_row + own];
    float total[2][64];
    float part[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      total[0][i] = 0.0F;
      total[1][i] = 0.0F;
      part[i] = 0.0F;
    }
    for_chunks([&](int steps) { multiply_blocks<Stages, Cluster>(memory, ring, group, unit.first_row, chunk.stage, steps, total, part); });
    if (first) {
      Activation const activation(p.layer.activation);
      if constexpr (Activation::kElementwise) {
#pragma unroll
        for (int i = 0; i < 64; i += 2) Activation::pair(total[0][i], total[0][i + 1], total[1][i], total[1][i + 1]);
      } else {
        activation.apply(total[0], total[1]);
      }
      store_block_codes(p, scale_stride, first_row, rows, unit.feature, total[0], staging);
    } else {
      store_block_rows<__nv_bfloat16>(p, sorted, rows, unit.feature, total, staging);
    }
  } else {
    for_chunks([&](int steps) { skip<Stages, Cluster, false>(memory, ring, steps); });
  }
  if (Columns || first) arrive_stored(memory, unit.entry);
}

}  // namespace moe::hopper
