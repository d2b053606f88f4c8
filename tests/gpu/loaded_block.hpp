// SPDX-License-Identifier: Apache-2.0
// tests/gpu/loaded_block.hpp: runs a loaded block of the CUDA space on rows of the host, also in a graph, for tests that
// g++ compiles.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "moe/comm/self.hpp"
#include "moe/core/array.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/runner/device/captured_sizes.hpp"

namespace moe_test {

/// The root mean square of the difference, relative to that of `want`.
inline double relative_error(std::vector<float> const& got, float const* want) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - want[i], 2);
    norm += std::pow(static_cast<double>(want[i]), 2);
  }
  return std::sqrt(error / norm);
}

/// The median over the rows of a row's relative error.
inline double median_row_error(std::vector<float> const& got, float const* want, std::int64_t rows) {
  std::vector<double> errors;
  std::int64_t const h = static_cast<std::int64_t>(got.size()) / rows;
  for (std::int64_t t = 0; t < rows; ++t) {
    errors.push_back(relative_error({got.begin() + t * h, got.begin() + (t + 1) * h}, want + t * h));
  }
  std::nth_element(errors.begin(), errors.begin() + rows / 2, errors.end());
  return errors[static_cast<std::size_t>(rows / 2)];
}
/// Of all rows together, and of the median row. A value of an intermediate row that lies between two codes may round the other way in the
/// kernel: a row that has one is off by some percent, which counts among few rows.
inline void expect_near(std::vector<float> const& got, float const* want, std::int64_t rows, double tolerance) {
  EXPECT_LT(relative_error(got, want), rows < 64 ? 3 * tolerance : tolerance) << rows << " rows";
  if (rows > 1) {
    EXPECT_LT(median_row_error(got, want, rows), tolerance) << rows << " rows";
  }
}

/// The block's output for `rows` rows at x. With 0 rows the rank takes part and gets nothing.
template <class Block>
std::vector<float> forward(Block& block, moe::bf16 const* x, std::int64_t rows) {
  using Cuda = moe::space::cuda;
  std::int64_t const h = block.runner().hidden();
  moe::Buffer<moe::bf16, Cuda> in(std::max<std::int64_t>(rows, 1) * h), out(in.size());
  moe::Memory<Cuda>::copy_from_host(in.data(), x, static_cast<std::size_t>(rows * h) * sizeof(moe::bf16));
  moe::Memory<Cuda>::fill(out.data(), 0xff, out.bytes());
  moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  block.forward(moe::make_rows(static_cast<moe::bf16 const*>(in.data()), rows, h), moe::make_rows(out.data(), rows, h));
  block.runner().wait();
  std::vector<moe::bf16> host(static_cast<std::size_t>(out.size()));
  out.copy_to_host(host.data());
  std::vector<float> wide;
  for (std::int64_t i = 0; i < rows * h; ++i) wide.push_back(moe::to_float(host[static_cast<std::size_t>(i)]));
  return wide;
}

/// A graph of the block has the bits of a call.
template <class Block>
void expect_graph_of_bits(moe::comm::Self<moe::space::cuda>& self, Block& block, moe::bf16 const* rows, std::int64_t count) {
  using Cuda = moe::space::cuda;
  std::vector<float> const want = forward(block, rows, count);
  std::int64_t const h = block.runner().hidden();
  moe::Buffer<moe::bf16, Cuda> x(count * h), y(x.size());
  x.copy_from_host(rows);
  moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  moe::runner::CapturedSizes<Cuda> graphs;
  std::vector<std::int64_t> const sizes{count};
  graphs.capture(self, sizes, moe::runner::capture_obstacle(block.runner()), [&](std::int64_t n, cudaStream_t stream) {
    block.forward(moe::make_rows(static_cast<moe::bf16 const*>(x.data()), n, h), moe::make_rows(y.data(), n, h), {}, stream);
  });
  moe::check_cuda(cudaMemset(y.data(), 0xff, static_cast<std::size_t>(y.bytes())), "cudaMemset");
  moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  moe::CudaStream stream;
  graphs.replay(count, stream);
  stream.synchronize();
  std::vector<moe::bf16> out(static_cast<std::size_t>(y.size()));
  y.copy_to_host(out.data());
  for (std::size_t i = 0; i < out.size(); ++i) ASSERT_EQ(moe::to_float(out[i]), want[i]) << i;
}

}  // namespace moe_test
