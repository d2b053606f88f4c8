// SPDX-License-Identifier: Apache-2.0
// io/expert_layout.hpp: what the layouts of expert weights share: names of projections, where a matrix lies, changes of order.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "moe/io/layer_description.hpp"

namespace moe::io {

namespace detail {

/// True where the experts of text and of image tokens lie in one list, the text tokens' first: ERNIE-4.5-VL as it is released and as
/// save_pretrained writes it. As transformers' modules name them, each set has a root of its own.
inline bool in_one_list(LayerDescription const& d, std::string_view root) { return d.tokens != Tokens::all && !root.ends_with("_moe."); }

/// The names of the projections of one feed-forward network; gate is empty if it has none.
struct ProjectionNames {
  std::string_view gate, up, down;
};
inline constexpr std::array kProjectionNames{
    ProjectionNames{"gate_proj", "up_proj", "down_proj"},
    ProjectionNames{"w1", "w3", "w2"},
    ProjectionNames{"linear", "linear_v", "linear_1"},
    ProjectionNames{"fc1", "fc3", "fc2"},
    ProjectionNames{"linear_gate", "up_proj", "down_proj"},  // shared experts of hy_v4, as transformers writes them
    ProjectionNames{"", "up_proj", "down_proj"},
    ProjectionNames{"", "wi", "wo"},
    ProjectionNames{"", "fc1", "fc2"},  // NLLB-MoE
};

/// out[cols, rows] = in[rows, cols] transposed.
template <class T>
void transpose(T const* in, std::int64_t rows, std::int64_t cols, T* out) {
  constexpr std::int64_t kSide = 32;
  for (std::int64_t i0 = 0; i0 < rows; i0 += kSide) {
    for (std::int64_t j0 = 0; j0 < cols; j0 += kSide) {
      for (std::int64_t i = i0; i < std::min(rows, i0 + kSide); ++i) {
        for (std::int64_t j = j0; j < std::min(cols, j0 + kSide); ++j) out[j * rows + i] = in[i * cols + j];
      }
    }
  }
}

/// rows g0, u0, g1, u1, … become g0, g1, …, u0, u1, …
template <class T>
void deinterleave_rows(T* m, std::int64_t rows, std::int64_t cols) {
  std::vector<T> const in(m, m + rows * cols);
  for (std::int64_t r = 0; r < rows; ++r) {
    std::int64_t const to = r % 2 == 0 ? r / 2 : rows / 2 + r / 2;
    std::copy_n(in.data() + r * cols, cols, m + to * cols);
  }
}

}  // namespace detail

/// A matrix of one expert as it lies in a checkpoint.
struct StoredMatrix {
  std::string base;                 ///< name of the tensor, without ".weight"
  bool down = false;                ///< of w2, else of w13
  std::int64_t row = 0;             ///< its first row in w13
  std::int64_t rows = 0, cols = 0;  ///< [out, in]
  std::int64_t index = 0;           ///< number `index` of a tensor [stack, …]; stack 0: a tensor of its own
  std::int64_t stack = 0;
  bool interleaved = false;   ///< even rows gate, odd rows up
  std::int64_t all_rows = 0;  ///< of the w13 or w2 that it is a part of
};
/// The matrices of one expert with their all_rows.
inline std::vector<StoredMatrix> with_all_rows(std::vector<StoredMatrix> matrices) {
  std::int64_t last[2] = {0, 0};
  for (StoredMatrix const& m : matrices) last[m.down] = std::max(last[m.down], m.row + m.rows);
  for (StoredMatrix& m : matrices) m.all_rows = last[m.down];
  return matrices;
}

}  // namespace moe::io
