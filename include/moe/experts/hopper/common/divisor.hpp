// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/divisor.hpp: division of integers by a number that many threads divide by. Plain C++.
#pragma once

#include <cstdint>

#include "moe/core/types.hpp"

namespace moe::hopper {

/// n / divisor for 0 ≤ n < 2^31 by one multiplication: Granlund and Montgomery, "Division by invariant integers using multiplication", with
/// the multiplier's 33rd bit as an addition.
class Divisor {
 public:
  Divisor() = default;
  /// 1 ≤ divisor < 2^31.
  MOE_HD constexpr explicit Divisor(int divisor) : multiplier_(0), shift_(0) {
    auto const d = static_cast<std::uint64_t>(divisor);
    while ((std::uint64_t{1} << shift_) < d) ++shift_;
    multiplier_ = static_cast<std::uint32_t>((((std::uint64_t{1} << shift_) - d) << 32) / d + 1);
  }
  MOE_HD constexpr int quotient(int n) const {
    auto const value = static_cast<std::uint32_t>(n);
    auto const high = static_cast<std::uint32_t>((static_cast<std::uint64_t>(value) * multiplier_) >> 32);
    return static_cast<int>((high + value) >> shift_);
  }

 private:
  std::uint32_t multiplier_;
  std::int32_t shift_;
};

}  // namespace moe::hopper
