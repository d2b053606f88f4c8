// SPDX-License-Identifier: Apache-2.0
// backends/window/device/common/layout.hpp: the layout of the windows of all device exchanges, and what all require of their shapes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe/comm/symmetric_memory.hpp"
#include "moe/core/error.hpp"
#include "moe/core/types.hpp"

namespace moe::detail {

/// The most thread blocks of one exchange kernel; sizes the flags and round words.
inline constexpr int kMaxExchangeBlocks = 160;

/// The limits of one exchange's kernels.
struct ShapeLimits {
  char const* name;     ///< of the backend, for messages
  int ranks;            ///< most
  int hidden_multiple;  ///< hidden is a multiple of it, up to 16384
  int experts;          ///< most
};

template <class... What>
void require_shape(char const* name, bool ok, ErrorCode code, What const&... what) {
  if (!ok) {
    throw Error(code, text(name, ": ", what...));
  }
}

/// Checks what the shapes of all device exchanges have in common. E_CONFIG, E_UNSUPPORTED or E_CAPACITY, naming exchange and value.
template <class Shape>
void check_sizes(Shape const& s, ShapeLimits const& most) {
  auto const require = [&](bool ok, ErrorCode code, auto const&... what) { require_shape(most.name, ok, code, what...); };
  require(s.ranks >= 1 && s.ranks <= most.ranks, ErrorCode::unsupported, s.ranks, " ranks, at most ", most.ranks);
  require(s.max_tokens >= 1, ErrorCode::config, "max_tokens_per_rank ", s.max_tokens, " must be at least 1");
  require(s.hidden >= 1 && s.hidden % most.hidden_multiple == 0 && s.hidden <= 16384, ErrorCode::unsupported, "hidden ", s.hidden,
          " is not a multiple of ", most.hidden_multiple, " up to 16384");
  require(s.topk >= 1 && s.topk <= kMaxTopK, ErrorCode::config, "top_k ", s.topk, " is out of range [1, ", kMaxTopK, "]");
  require(s.num_experts >= 1 && s.num_experts % s.ranks == 0, ErrorCode::unsupported, s.num_experts, " experts do not divide by ", s.ranks,
          " ranks");
  require(s.num_experts <= most.experts, ErrorCode::unsupported, s.num_experts, " experts, at most ", most.experts);
  require(s.blocks >= 1 && s.blocks <= kMaxExchangeBlocks, ErrorCode::config, s.blocks, " blocks, at most ", kMaxExchangeBlocks);
  require(static_cast<std::int64_t>(s.max_tokens) * s.topk <= static_cast<std::int64_t>(comm::kCountMask), ErrorCode::capacity,
          s.max_tokens, " tokens x ", s.topk, " exceed the count word");
}

/// Allocates offsets in a window, each a multiple of 256 bytes.
class DeviceWindowOffsets {
 public:
  /// `begin`: the first free byte, a multiple of 256.
  explicit DeviceWindowOffsets(std::size_t begin = comm::kWindowControlBytes) : end_(begin) {}
  /// Allocates `count` elements of `each` bytes.
  std::size_t take(std::size_t each, std::int64_t count) {
    std::size_t const at = end_;
    end_ += (each * static_cast<std::size_t>(count) + 255) / 256 * 256;
    return at;
  }
  /// A round word for each block, so that a block may advance its own while other blocks still read theirs.
  std::size_t take_rounds() { return take(4, kMaxExchangeBlocks); }
  std::size_t bytes() const { return end_; }

 private:
  std::size_t end_;
};

}  // namespace moe::detail
