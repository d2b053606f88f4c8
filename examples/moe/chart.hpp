// SPDX-License-Identifier: Apache-2.0
// examples/moe/chart.hpp: bars and columns of block characters, and the progress bar.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace moe_tool {

/// A horizontal bar in eighths of a cell, `width` cells for `largest`.
inline std::string bar(std::int64_t value, std::int64_t largest, int width) {
  constexpr std::array<char const*, 8> eighths{"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  std::int64_t const cells = largest == 0 ? 0 : value * 8 * width / largest;
  std::string out;
  for (std::int64_t i = 0; i < cells / 8; ++i) out += "█";
  return out + eighths[static_cast<std::size_t>(cells % 8)];
}

/// A column one line high: an eighth of `largest` for each step, rounded up.
inline char const* column(double value, double largest) {
  constexpr std::array<char const*, 9> columns{" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  double const eighths = largest > 0 ? std::ceil(value / largest * 8) : 0;
  return columns[static_cast<std::size_t>(std::clamp(eighths, 0.0, 8.0))];
}

/// Columns of a series; more than `width` values are averaged in runs.
inline std::string columns(std::vector<double> const& values, std::size_t width) {
  std::size_t const n = std::min(width, values.size());
  std::vector<double> means;
  for (std::size_t i = 0; i < n; ++i) {
    std::size_t const first = i * values.size() / n, last = (i + 1) * values.size() / n;
    double sum = 0;
    for (std::size_t at = first; at < last; ++at) sum += values[at];
    means.push_back(sum / static_cast<double>(last - first));
  }
  double const largest = means.empty() ? 0 : *std::max_element(means.begin(), means.end());
  std::string out;
  for (double mean : means) out += column(mean, largest);
  return out;
}

/// A bar on standard error that grows with the work, on a terminal only, and is erased at the end.
class ProgressBar {
 public:
  ProgressBar(std::string what, std::int64_t total, bool shown)
      : what_(std::move(what)), total_(total), shown_(shown && isatty(STDERR_FILENO) != 0) {}
  ProgressBar(ProgressBar const&) = delete;
  ProgressBar& operator=(ProgressBar const&) = delete;
  ~ProgressBar() {
    if (drawn_ >= 0) std::fprintf(stderr, "\r\033[K");
  }
  void show(std::int64_t done) {
    std::int64_t const permille = done * 1000 / total_;
    if (!shown_ || permille == drawn_) return;
    drawn_ = permille;
    constexpr int kWidth = 40;
    std::string cells = bar(done, total_, kWidth);
    std::fprintf(stderr, "\r\033[K%s %lld / %lld %s", what_.c_str(), static_cast<long long>(done), static_cast<long long>(total_),
                 cells.c_str());
    std::fflush(stderr);
  }

 private:
  std::string what_;
  std::int64_t total_;
  bool shown_;
  std::int64_t drawn_ = -1;
};

}  // namespace moe_tool
