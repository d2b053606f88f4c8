// SPDX-License-Identifier: Apache-2.0
// runner/device/blas_lt.hpp: y [M, N] = x [M, K] · wᵀ (+ bias) through cuBLASLt, with an algorithm for every number of rows chosen at
// construction. Plain host C++; needs cuBLAS's headers and libraries (CMake: moe::cublas).
#pragma once

#include <cublasLt.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <type_traits>
#include <vector>

#include "moe/core/buffer.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/core/types.hpp"
#include "moe/runner/primitives.hpp"

namespace moe::runner::device {

namespace detail {

inline void check_blas(cublasStatus_t status, char const* call) {
  if (status != CUBLAS_STATUS_SUCCESS) throw Error(ErrorCode::cuda, text(call, " failed: ", cublasLtGetStatusString(status)));
}

/// The cuBLASLt handle of the current device: one for the process, which threads share. It holds no workspace.
inline cublasLtHandle_t blas_lt_handle() {
  static std::mutex mutex;
  static std::vector<cublasLtHandle_t> handles;  // by device; never destroyed: layers may outlive static objects
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  std::lock_guard const lock(mutex);
  handles.resize(std::max(handles.size(), static_cast<std::size_t>(device) + 1), nullptr);
  cublasLtHandle_t& handle = handles[static_cast<std::size_t>(device)];
  if (handle == nullptr) check_blas(cublasLtCreate(&handle), "cublasLtCreate");
  return handle;
}

template <class T>
inline constexpr cudaDataType_t kBlasType = std::is_same_v<T, bf16>  ? CUDA_R_16BF
                                            : std::is_same_v<T, f16> ? CUDA_R_16F
                                                                     : CUDA_R_32F;

}  // namespace detail

/// One product with fixed weights. Sums are float32 in a fixed order: no algorithm that adds with atomics or reduces in a narrower type.
/// In and Out: float, bf16 or f16; Out is float or In. Memory of the arena: the workspace.
template <class In, class Out>
class BlasLtProduct {
 public:
  static_assert(std::is_same_v<Out, float> || std::is_same_v<In, Out>);
  static constexpr std::int64_t kWorkspaceBytes = std::int64_t{8} << 20;
  static constexpr std::int64_t kPerRowSize = 128;  ///< rows that the one algorithm of Sums::per_row is chosen for
  static constexpr std::int64_t kExactRows = 16;    ///< up to here each number of rows has its own algorithm: those for few take no other

  /// w [N, K] and bias [N] (or null) on the device, borrowed. A bias needs Out = float. E_UNSUPPORTED if cuBLASLt has no algorithm.
  BlasLtProduct(Rows<In const> w, float const* bias, Sums sums, std::int64_t max_rows, Arena<space::cuda>& arena)
      : w_(w), bias_(bias), handle_(detail::blas_lt_handle()), piece_rows_(max_rows) {
    using detail::check_blas;
    if (bias != nullptr && !std::is_same_v<Out, float>) {
      throw Error(ErrorCode::config, "linear: a bias is added to float32 outputs only");
    }
    check_blas(cublasLtMatmulDescInit(&desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescInit");
    cublasOperation_t const transposed = CUBLAS_OP_T;
    set(CUBLASLT_MATMUL_DESC_TRANSA, transposed);
    if (bias != nullptr) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias_);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_32F);
    }
    if (sums == Sums::per_row) {
      algorithms_.push_back(choose(kPerRowSize));  // also for fewer rows than that: an algorithm for 3 may not take 1
      while (piece_rows_ > kPerRowSize && !fits(piece_rows_)) {
        piece_rows_ = std::max(kPerRowSize, piece_rows_ / 2 / 8 * 8);  // a piece begins at a multiple of 16 bytes
      }
    } else {
      for (std::int64_t rows = 1;; rows = rows < kExactRows ? rows + 1 : 2 * rows) {
        algorithms_.push_back(choose(rows));
        if (rows >= max_rows) break;
      }
    }
    workspace_ = arena.template take<char>(kWorkspaceBytes);  // last: a constructor that throws takes nothing
  }

  /// Sums::per_row: whether cuBLASLt accepts its algorithm for 1 to kExactRows rows and for each doubling up to the rows of one call,
  /// which are taken for at least kPerRowSize: the answer is the same for all smaller max_rows.
  bool takes_all_rows() const {
    for (std::int64_t rows = 1; rows <= std::max(piece_rows_, kPerRowSize); rows = rows < kExactRows ? rows + 1 : 2 * rows) {
      if (!fits(rows)) return false;
    }
    return true;
  }

  /// Enqueues. No allocation and no synchronisation. x [M, K], y [M, N], M at most max_rows.
  void apply(Rows<In const> x, Rows<Out> y, cudaStream_t stream) const {
    for (std::int64_t first = 0; first < x.extent(0); first += piece_rows_) {
      std::int64_t const rows = std::min(piece_rows_, x.extent(0) - first);
      std::size_t const index = std::min(algorithms_.size() - 1, algorithm_of(rows));
      float const alpha = 1.0F;
      float const beta = 0.0F;
      Layouts const l(*this, rows, x.stride(0), y.stride(0));
      Out* const to = row_ptr(y, first);
      detail::check_blas(cublasLtMatmul(handle_, description(), &alpha, w_.data_handle(), l.w(), row_ptr(x, first), l.x(), &beta, to, l.y(),
                                        to, l.y(), &algorithms_[index], workspace_, kWorkspaceBytes, stream),
                         "cublasLtMatmul");
    }
  }

 private:
  /// cuBLAS sees columns: row-major [R, C] is column-major C × R.
  class Layouts {
   public:
    Layouts(BlasLtProduct const& p, std::int64_t rows, std::int64_t x_stride, std::int64_t y_stride) {
      std::int64_t const n = p.w_.extent(0);
      std::int64_t const k = p.w_.extent(1);
      init(w_, detail::kBlasType<In>, k, n, p.w_.stride(0));
      init(x_, detail::kBlasType<In>, k, rows, x_stride);
      init(y_, detail::kBlasType<Out>, n, rows, y_stride);
    }
    cublasLtMatrixLayout_t w() const { return const_cast<cublasLtMatrixLayoutOpaque_t*>(&w_); }
    cublasLtMatrixLayout_t x() const { return const_cast<cublasLtMatrixLayoutOpaque_t*>(&x_); }
    cublasLtMatrixLayout_t y() const { return const_cast<cublasLtMatrixLayoutOpaque_t*>(&y_); }

   private:
    static void init(cublasLtMatrixLayoutOpaque_t& layout, cudaDataType_t type, std::int64_t rows, std::int64_t cols, std::int64_t stride) {
      detail::check_blas(
          cublasLtMatrixLayoutInit(&layout, type, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(cols), stride),
          "cublasLtMatrixLayoutInit");
    }
    cublasLtMatrixLayoutOpaque_t w_, x_, y_;
  };

  /// Index of the algorithm: 1 to kExactRows rows, then up to twice, four times, … as many.
  static constexpr std::size_t algorithm_of(std::int64_t rows) {
    if (rows <= kExactRows) return static_cast<std::size_t>(rows - 1);
    return static_cast<std::size_t>(kExactRows - 1) + std::bit_width(static_cast<std::uint64_t>((rows - 1) / kExactRows));
  }

  cublasLtMatmulDesc_t description() const { return const_cast<cublasLtMatmulDescOpaque_t*>(&desc_); }

  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, T const& value) {
    detail::check_blas(cublasLtMatmulDescSetAttribute(&desc_, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
  }

  /// The algorithm for up to `rows` rows. Addresses and strides are known to be multiples of 16 bytes at most.
  cublasLtMatmulAlgo_t choose(std::int64_t rows) const {
    cublasLtMatmulPreferenceOpaque_t preference;
    detail::check_blas(cublasLtMatmulPreferenceInit(&preference), "cublasLtMatmulPreferenceInit");
    auto const prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      detail::check_blas(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value),
                         "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kWorkspaceBytes));
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    for (auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                           CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      prefer(attribute, static_cast<std::uint32_t>(kAlignment));
    }
    Layouts const l(*this, rows, w_.extent(1), w_.extent(0));
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    cublasStatus_t const status =
        cublasLtMatmulAlgoGetHeuristic(handle_, description(), l.w(), l.x(), l.y(), l.y(), &preference, 1, &result, &found);
    if (status != CUBLAS_STATUS_SUCCESS || found == 0) {
      throw Error(ErrorCode::unsupported, text("linear: cuBLASLt has no algorithm for ", rows, " rows, ", w_.extent(0), " outputs of ",
                                               w_.extent(1), " inputs: ", cublasLtGetStatusString(status)));
    }
    return result.algo;
  }

  /// Whether one call of the only algorithm can take this many rows: the partial sums of a split K must fit into the workspace.
  bool fits(std::int64_t rows) const {
    Layouts const l(*this, rows, w_.extent(1), w_.extent(0));
    cublasLtMatmulHeuristicResult_t result{};
    return cublasLtMatmulAlgoCheck(handle_, description(), l.w(), l.x(), l.y(), l.y(), &algorithms_[0], &result) == CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= static_cast<std::size_t>(kWorkspaceBytes);
  }

  Rows<In const> w_;
  float const* bias_;
  cublasLtHandle_t handle_;
  void* workspace_ = nullptr;
  cublasLtMatmulDescOpaque_t desc_{};
  std::int64_t piece_rows_;                       // of one call
  std::vector<cublasLtMatmulAlgo_t> algorithms_;  // by algorithm_of(rows); or one
};

}  // namespace moe::runner::device
