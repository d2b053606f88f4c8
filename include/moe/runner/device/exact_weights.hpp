// SPDX-License-Identifier: Apache-2.0
// runner/device/exact_weights.hpp: whether float32 weights can be multiplied in the rows' element without a loss: only if each of them is a
// value of it, as the weights of a checkpoint in bf16 are. Plain host C++.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iomanip>
#include <optional>
#include <string>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/core/types.hpp"

namespace moe::runner::device {

/// A weight that the narrower element cannot hold.
struct InexactWeight {
  std::int64_t row = 0;
  std::int64_t col = 0;
  float value = 0.0F;
};

/// "the weight [3, 17] = 0.100000001 is not a value of bf16".
inline std::string describe(InexactWeight const& w, DType element) {
  return text("the weight [", w.row, ", ", w.col, "] = ", std::setprecision(9), w.value, " is not a value of ", name(element));
}

/// Converts from[0, n) to T until the first value that T cannot hold; returns the number of values before it. Infinities and both zeros are
/// held; NaN is not, because T may lose its bits. Host memory.
template <class T>
std::int64_t convert_exactly(float const* from, std::int64_t n, T* to) {
  for (std::int64_t i = 0; i < n; ++i) {
    to[i] = from_float<T>(from[i]);
    if (!(to_float(to[i]) == from[i])) return i;
  }
  return n;
}

/// The weights [n, k] as T in `to`, in one pass that ends at the first that T cannot hold. read(first, count, rows): copies rows
/// [first, first + count) to host memory [count, k].
template <class T, class Read>
std::optional<InexactWeight> convert_exactly(std::int64_t n, std::int64_t k, Read const& read, std::vector<T>& to) {
  constexpr std::int64_t kAtOnce = std::int64_t{1} << 18;  // values, 1 MiB
  std::int64_t const most = std::clamp<std::int64_t>(kAtOnce / std::max<std::int64_t>(k, 1), 1, std::max<std::int64_t>(n, 1));
  std::vector<float> rows(static_cast<std::size_t>(most * k));
  to.resize(static_cast<std::size_t>(n * k));
  for (std::int64_t first = 0; first < n && k > 0; first += most) {
    std::int64_t const count = std::min(most, n - first);
    read(first, count, rows.data());
    std::int64_t const exact = convert_exactly(rows.data(), count * k, to.data() + first * k);
    if (exact < count * k) return InexactWeight{first + exact / k, exact % k, rows[static_cast<std::size_t>(exact)]};
  }
  return std::nullopt;
}

}  // namespace moe::runner::device
