// SPDX-License-Identifier: Apache-2.0
// backends/window/device/common/layout.hpp: layout of the windows of all device exchanges.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe/comm/symmetric_memory.hpp"

namespace moe::detail {

/// The most thread blocks of one exchange kernel; sizes the flags and round words.
inline constexpr int kMaxExchangeBlocks = 160;

/// Allocates offsets in a window, each a multiple of 256 bytes.
class WindowPlaces {
 public:
  /// `begin`: the first free byte, a multiple of 256.
  explicit WindowPlaces(std::size_t begin = comm::kWindowControlBytes) : end_(begin) {}
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
