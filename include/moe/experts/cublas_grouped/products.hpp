// SPDX-License-Identifier: Apache-2.0
// experts/cublas_grouped/products.hpp: one product per expert through cuBLAS: rows [n, cols] times a weight matrix [rows, cols],
// transposed. Plain host C++; needs cuBLAS's header and library.
#pragma once

#include <cublas_v2.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "moe/core/buffer.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/core/types.hpp"

namespace moe::experts::cublas {

inline void check(cublasStatus_t status, char const* call) {
  if (status != CUBLAS_STATUS_SUCCESS) throw Error(ErrorCode::cuda, text(call, " failed: ", cublasGetStatusString(status)));
}

template <class T>
inline constexpr cudaDataType kDataType = std::is_same_v<T, bf16>  ? CUDA_R_16BF
                                          : std::is_same_v<T, f16> ? CUDA_R_16F
                                                                   : CUDA_R_32F;

/// y[r] = W_e x[r] for the rows of each group.
struct Product {
  std::int64_t rows;      ///< of a weight matrix
  std::int64_t cols;      ///< of a weight matrix and of x
  std::int64_t capacity;  ///< rows between the first rows of two consecutive experts, for rows in blocks
  void const* weights;    ///< [L, rows, cols]
  void const* x;
  void* y;
  void const* const* pointers;  ///< device [3, L]: weights, x and y of each group with rows
};

class Products {
 public:
  static constexpr std::int64_t kWorkspaceBytes = std::int64_t{32} << 20;  ///< what cuBLAS advises for sm_90

  /// E_CUDA if cuBLAS cannot be initialised.
  Products(std::int64_t num_experts, Arena<space::cuda>& arena)
      : num_experts_(num_experts),
        workspace_(arena.template take<char>(kWorkspaceBytes)),
        transpose_(size(), CUBLAS_OP_T),
        plain_(size(), CUBLAS_OP_N),
        rows_(size()),
        groups_(size()),
        cols_(size()),
        ones_(size(), 1),
        one_(size(), 1.0F),
        zero_(size(), 0.0F) {
    check(cublasCreate(&handle_), "cublasCreate");
    try {
      check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&counts_), size() * sizeof(std::int32_t), cudaHostAllocDefault), "cudaHostAlloc");
    } catch (...) {
      cublasDestroy(handle_);
      throw;
    }
  }
  Products(Products const&) = delete;
  Products& operator=(Products const&) = delete;
  ~Products() {
    cudaFreeHost(counts_);
    cublasDestroy(handle_);
  }

  /// Takes the groups of a call: device `counts` [L], read back unless the groups are `fixed` at `capacity` rows. Returns the total number
  /// of rows.
  std::int64_t begin(bool fixed, std::int64_t capacity, std::int32_t const* counts, cudaStream_t stream) {
    check(cublasSetStream(handle_, stream), "cublasSetStream");
    check(cublasSetWorkspace(handle_, workspace_, kWorkspaceBytes), "cublasSetWorkspace");  // cublasSetStream removes it
    fixed_ = fixed;
    num_groups_ = 0;
    if (fixed) return num_experts_ * capacity;
    check_cuda(cudaMemcpyAsync(counts_, counts, size() * sizeof(std::int32_t), cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    std::int64_t rows = 0;
    for (std::size_t e = 0; e < size(); ++e) {
      if (counts_[e] > 0) groups_[static_cast<std::size_t>(num_groups_++)] = counts_[e];
      rows += counts_[e];
    }
    return rows;
  }

  /// Enqueues one product of every group.
  template <class T>
  void run(Product const& p) {
    int const rows = static_cast<int>(p.rows);
    int const cols = static_cast<int>(p.cols);
    if (fixed_) {
      check(cublasGemmStridedBatchedEx(handle_, CUBLAS_OP_T, CUBLAS_OP_N, rows, static_cast<int>(p.capacity), cols, one_.data(), p.weights,
                                       kDataType<T>, cols, p.rows * p.cols, p.x, kDataType<T>, cols, p.capacity * p.cols, zero_.data(), p.y,
                                       kDataType<T>, rows, p.capacity * p.rows, static_cast<int>(num_experts_), CUBLAS_COMPUTE_32F,
                                       CUBLAS_GEMM_DEFAULT),
            "cublasGemmStridedBatchedEx");
      return;
    }
    auto const groups = static_cast<std::size_t>(num_groups_);
    std::fill_n(rows_.begin(), groups, rows);
    std::fill_n(cols_.begin(), groups, cols);
    check(cublasGemmGroupedBatchedEx(handle_, transpose_.data(), plain_.data(), rows_.data(), groups_.data(), cols_.data(), one_.data(),
                                     p.pointers, kDataType<T>, cols_.data(), p.pointers + num_experts_, kDataType<T>, cols_.data(),
                                     zero_.data(), const_cast<void* const*>(p.pointers + 2 * num_experts_), kDataType<T>, rows_.data(),
                                     num_groups_, ones_.data(), CUBLAS_COMPUTE_32F),
          "cublasGemmGroupedBatchedEx");
  }

 private:
  std::size_t size() const { return static_cast<std::size_t>(num_experts_); }

  std::int64_t num_experts_;
  void* workspace_;
  cublasHandle_t handle_ = nullptr;
  std::int32_t* counts_ = nullptr;  // pinned
  bool fixed_ = false;
  int num_groups_ = 0;
  std::vector<cublasOperation_t> transpose_, plain_;
  std::vector<int> rows_, groups_, cols_, ones_;
  std::vector<float> one_, zero_;
};

}  // namespace moe::experts::cublas
