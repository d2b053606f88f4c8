// SPDX-License-Identifier: Apache-2.0
// backends/window/device/high_throughput/tickets.cuh: which warp of which block moves which token.
#pragma once

#include "moe/backends/window/device/high_throughput/layout.hpp"
#include "moe/core/ptx/memory.cuh"

namespace moe::detail {

/// Assigns the tokens of a rank to warps, one at a time: each block has a range and a ticket counter. A warp whose range is used up
/// continues with the range that has the most tokens left. The position of a row does not depend on the warp that moves it.
class HighThroughputTickets {
 public:
  /// `next`: [blocks] key() | next token, or a value of an earlier round.
  __device__ HighThroughputTickets(std::uint64_t* next, std::uint32_t round, int tokens)
      : next_(next), round_(round), tokens_(tokens), blocks_(static_cast<int>(gridDim.x)) {
    take_from(static_cast<int>(blockIdx.x));
  }
  /// By one thread, after the row positions of the range's tokens are written and its block has synchronised: other blocks may now use it.
  __device__ void open_range(int first) const {
    __threadfence();
    ptx::store_relaxed_system(next_ + from_, key() | static_cast<std::uint32_t>(first));
  }
  /// Requests a token; pass the result, valid in lane 0, to take(). Separate from take() so that the warp can work meanwhile.
  __device__ std::uint64_t ask() const {
    bool const asks = threadIdx.x % 32 == 0;
    return asks ? atomicAdd(reinterpret_cast<unsigned long long*>(next_ + from_), 1ULL) : 0;
  }
  /// The requested token; if its range is used up, one of the range with most tokens left; -1: none is left. Called by a whole warp.
  __device__ int take(std::uint64_t ticket) {
#pragma unroll 1
    for (;; ticket = ask()) {
      ticket = __shfl_sync(0xffffffffU, ticket, 0);
      if (!is_open(ticket)) {
        continue;  // this block's range, which its first thread is about to open
      }
      if (int const t = token(ticket); t < last_) {
        return t;
      }
      std::uint32_t most = 0;  // the largest (tokens left, block)
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
      __threadfence();  // before the row positions of that range are read
    }
  }

 private:
  /// The upper bits of a word of this round; unlike those of other rounds and of words never written.
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
