// SPDX-License-Identifier: Apache-2.0
// backends/window/device/high_throughput/tickets.cuh: which warp of which block moves which token.
#pragma once

#include "moe/backends/window/device/high_throughput/layout.hpp"
#include "moe/core/ptx/memory.cuh"

namespace moe::detail {

/// The tokens of a rank, handed out one at a time: each block has a range and a ticket, and a warp whose range is used up goes on with the
/// range that has most left. The place of a row does not depend on who moves it.
class HighThroughputTickets {
 public:
  /// `next`: [blocks] key() | next token, or what an earlier round left.
  __device__ HighThroughputTickets(std::uint64_t* next, std::uint32_t round, int tokens)
      : next_(next), round_(round), tokens_(tokens), blocks_(static_cast<int>(gridDim.x)) {
    take_from(static_cast<int>(blockIdx.x));
  }
  /// One thread, when the places of the range's tokens are written and its block has met: other blocks may take from it now.
  __device__ void open_range(int first) const {
    __threadfence();
    ptx::store_relaxed_system(next_ + from_, key() | static_cast<std::uint32_t>(first));
  }
  /// Asks for a token; the answer, which counts in lane 0, is for take(). Apart so that a warp can work on meanwhile.
  __device__ std::uint64_t ask() const {
    bool const asks = threadIdx.x % 32 == 0;
    return asks ? atomicAdd(reinterpret_cast<unsigned long long*>(next_ + from_), 1ULL) : 0;
  }
  /// The token that was asked for, or that of another range; -1: none is left. By a whole warp.
  __device__ int take(std::uint64_t ticket) {
#pragma unroll 1
    for (;; ticket = ask()) {
      ticket = __shfl_sync(0xffffffffU, ticket, 0);
      if (!is_open(ticket)) {
        continue;  // the own range, which the first thread opens right now
      }
      if (int const t = token(ticket); t < last_) {
        return t;
      }
      std::uint32_t most = 0;  // tokens left, block
#pragma unroll 1
      for (int b = static_cast<int>(threadIdx.x) % 32; b < blocks_; b += 32) {
        std::uint64_t const seen = ptx::load_relaxed_system(next_ + b);
        int const left = first_token(tokens_, b + 1, blocks_) - token(seen);
        if (is_open(seen) && left > 0) {
          most = max(most, (static_cast<std::uint32_t>(left) << 8) | static_cast<std::uint32_t>(b));
        }
      }
      most = __reduce_max_sync(0xffffffffU, most);
      if (most == 0) {
        return -1;
      }
      take_from(static_cast<int>(most & 0xffU));
      __threadfence();  // before the places of that range are read
    }
  }

 private:
  /// The first bits of a word of this round: no word of another round begins with them, nor one that was never written.
  __device__ std::uint64_t key() const { return static_cast<std::uint64_t>(round_) << 32 | 0x80000000U; }
  __device__ bool is_open(std::uint64_t ticket) const { return ticket >> 31 == key() >> 31; }
  __device__ static int token(std::uint64_t ticket) { return static_cast<int>(ticket & 0x7fffffffU); }
  __device__ void take_from(int block) {
    from_ = block;
    last_ = first_token(tokens_, block + 1, blocks_);
  }

  std::uint64_t* next_;
  std::uint32_t round_;
  int tokens_, blocks_;
  int from_ = 0;  ///< range that this warp takes from
  int last_ = 0;  ///< its end
};
static_assert(kMaxExchangeBlocks <= 256);

}  // namespace moe::detail
