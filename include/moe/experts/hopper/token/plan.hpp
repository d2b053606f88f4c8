// SPDX-License-Identifier: Apache-2.0
// experts/hopper/token/plan.hpp: how the one-token kernel cuts its products into tasks and divides shared memory. Plain host C++.
#pragma once

#include <algorithm>

#include "moe/experts/hopper/common/problem.hpp"

namespace moe::hopper {

inline constexpr int kTokenWarps = 12;  ///< the most warps
inline constexpr int kTokenDepth = 2;   ///< buffers of a warp
inline constexpr int kTokenBuffer = 8192;
inline constexpr int kTokenSharedMemory = kSharedMemoryLimit - 2048;  ///< dynamic, at most; the rest is for declared variables
inline constexpr int kTokenSlots = 32;                                ///< the most experts of a token

/// How both products are cut into tasks. A task is one warp's work at a time: some whole rows of one expert or, if rows are long, the same
/// part of four rows. Index 0 is the first product, whose tasks have as many gate rows as up rows.
struct TokenPlan {
  int row_bytes[2];
  int rows[2];           ///< rows of a task, at most 16
  int unit_pairs;        ///< of a task of the first product: half of its rows are gate rows
  int piece_rows[2];     ///< rows of one copy, contiguous in memory
  int segments[2];       ///< parts of a row
  int segment_bytes[2];  ///< bytes of each part except the last, a multiple of 128
  float per_segment[2];  ///< 1 / segments
  float per_row[2];      ///< 1 / row pairs of a task, 1 / rows of a task
  float per_feature;     ///< 1 / intermediate
  int warps;             ///< 0: the kernel cannot take this shape
  int plane_bytes;       ///< bytes of one form of the vector, which is first in shared memory
  int raw_at, scales_at, parts_at, buffers_at;
  int bytes;  ///< dynamic shared memory
};

constexpr TokenPlan plan_token(LocalShape const& s, Scheme scheme, int workers) {
  bool const fp8 = is_fp8(scheme);
  TokenPlan p{};
  long long const products = static_cast<long long>(s.hidden) * s.topk * s.intermediate;
  int const columns = s.hidden / workers + 1;
  for (int i = 0; i < 2; ++i) {
    p.row_bytes[i] = (i == 0 ? s.hidden : s.intermediate) * (fp8 ? 1 : 2);
    constexpr int most = kTokenBuffer / 4;
    static_assert(most % 128 == 0 && most <= 2048, "half a warp holds the scales of a task's columns");
    p.segments[i] = (p.row_bytes[i] + most - 1) / most;
    p.segment_bytes[i] = ((p.row_bytes[i] + p.segments[i] - 1) / p.segments[i] + 127) / 128 * 128;
    p.segments[i] = (p.row_bytes[i] + p.segment_bytes[i] - 1) / p.segment_bytes[i];
    p.per_segment[i] = 1.0F / static_cast<float>(p.segments[i]);
    int const fit = kTokenBuffer / p.row_bytes[i];
    int rows = fit >= 16 ? 16 : i == 1 ? fit : fit >= 8 ? 8 : 4;
    if (i == 1 && rows > 0) {  // groups of columns of one size
      int const groups = (columns + rows - 1) / rows;
      rows = (columns + groups - 1) / groups;
    }
    p.rows[i] = p.segments[i] > 1 ? 4 : rows;
    p.piece_rows[i] = p.segments[i] > 1 ? 1 : i == 0 ? rows / 2 : rows;
    p.per_row[i] = 1.0F / static_cast<float>(i == 0 ? p.rows[0] / 2 : p.rows[1]);
  }
  p.unit_pairs = p.rows[0] / 2;
  p.per_feature = 1.0F / static_cast<float>(s.intermediate);
  int const vector = std::max(p.row_bytes[0], s.topk * p.row_bytes[1]);
  p.plane_bytes = (vector + 127) / 128 * 128;
  int const units = s.topk * s.intermediate / (p.rows[0] / 2) / workers + 1;
  int const groups = (2 * columns + 2) / p.rows[1] + 1;
  int const parts = 4 * std::max(units * p.segments[0] * p.rows[0], s.topk * groups * p.segments[1] * p.rows[1]);
  p.raw_at = p.plane_bytes * (fp8 ? 1 : 2);
  p.scales_at = p.raw_at + (fp8 ? 2 * s.hidden : 0);
  p.parts_at = p.scales_at + (fp8 ? (vector / 128 * 4 + 15) / 16 * 16 : 0);
  p.buffers_at = (p.parts_at + parts + 127) / 128 * 128;
  p.warps = std::clamp((kTokenSharedMemory - p.buffers_at) / (kTokenDepth * kTokenBuffer), 0, kTokenWarps);
  p.bytes = p.buffers_at + p.warps * kTokenDepth * kTokenBuffer;
  bool const fits = p.row_bytes[0] % 128 == 0 && p.row_bytes[1] % 128 == 0 && products < 1LL << 29;
  if (!fits || p.warps < 6) p.warps = 0;  // with few buffers the layer kernel is faster
  return p;
}

}  // namespace moe::hopper
