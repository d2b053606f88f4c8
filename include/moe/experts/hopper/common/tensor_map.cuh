// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/tensor_map.cuh: tensor maps made through the driver's entry point, so that nothing links against the driver
// library.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "moe/core/error.hpp"
#include "moe/experts/hopper/common/enqueue.cuh"

namespace moe::hopper {

namespace detail {

/// Encodes a map of [depth, rows, columns] elements with `row_bytes` from row to row; boxes of box_columns × box_rows.
inline CUtensorMap encode_map(void const* base, CUtensorMapDataType type, std::int64_t depth, std::int64_t rows, std::int64_t columns,
                              std::int64_t row_bytes, int box_columns, int box_rows, CUtensorMapSwizzle swizzle) {
  using Encode =
      CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*, cuuint64_t const*, cuuint32_t const*,
                   cuuint32_t const*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static Encode const encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess || entry == nullptr) {
      throw Error(ErrorCode::unsupported, "the driver has no cuTensorMapEncodeTiled, 12.0 or newer is needed");
    }
    return reinterpret_cast<Encode>(entry);
  }();
  cuuint64_t const sizes[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(depth)};
  cuuint64_t const strides[2] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(row_bytes * rows)};
  cuuint32_t const box[3] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows), 1};
  cuuint32_t const steps[3] = {1, 1, 1};
  CUtensorMap map{};
  CUresult const status = encode(&map, type, 3, const_cast<void*>(base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(ErrorCode::cuda,
                text("cuTensorMapEncodeTiled: error ", static_cast<int>(status), " for [", depth, ", ", rows, ", ", columns, "]"));
  }
  return map;
}

}  // namespace detail

/// Map of a row-major [depth, rows, columns] tensor of `element_bytes`-byte elements (1: e4m3, 2: bf16 or fp16, which are copied alike),
/// read in boxes of 128 bytes × `box_rows` rows in the 128-byte swizzle. Elements past a row or column bound read as zero and are not
/// fetched. E_ARG on misalignment (16 bytes for the base and the row).
inline CUtensorMap make_tensor_map(void const* base, int element_bytes, std::int64_t depth, std::int64_t rows, std::int64_t columns,
                                   int box_rows) {
  if (reinterpret_cast<std::uintptr_t>(base) % 16 != 0 || columns * element_bytes % 16 != 0) {
    throw Error(ErrorCode::argument,
                text("weights: address ", base, " or row of ", columns * element_bytes, " bytes is not a multiple of 16 bytes"));
  }
  return detail::encode_map(base, element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, depth, rows,
                            columns, columns * element_bytes, 128 / element_bytes, box_rows, CU_TENSOR_MAP_SWIZZLE_128B);
}

/// Map of float32 scales [blocks, columns], `stride` floats (a multiple of 4) from row to row, read in boxes of box_columns × 1. A box must
/// begin at a multiple of 16 bytes: at any other column the copy engine reports an illegal instruction.
inline CUtensorMap make_scale_map(float const* base, std::int64_t blocks, std::int64_t columns, std::int64_t stride, int box_columns) {
  return detail::encode_map(base, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 1, blocks, columns, stride * 4, box_columns, 1,
                            CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace moe::hopper
