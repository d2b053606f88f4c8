// SPDX-License-Identifier: Apache-2.0
// experts/hopper/tensor_map.cuh: tensor maps made through the driver's entry point, so that nothing links against the driver library.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "moe/experts/hopper/enqueue.cuh"

namespace moe::hopper {

/// Map of a row-major [depth, rows, columns] tensor of `element_bytes`-byte elements (1: e4m3, 2: bf16 or fp16, which are copied alike),
/// read in boxes of 128 bytes × `box_rows` rows in the 128-byte swizzle. What lies past a row or column bound reads as zero and is not
/// fetched. E_ARG on misalignment (16 bytes for the base and the row).
inline CUtensorMap make_tensor_map(void const* base, int element_bytes, std::int64_t depth, std::int64_t rows, std::int64_t columns,
                                   int box_rows) {
  if (reinterpret_cast<std::uintptr_t>(base) % 16 != 0 || columns * element_bytes % 16 != 0) {
    throw Error(ErrorCode::argument,
                text("weights: address ", base, " or row of ", columns * element_bytes, " bytes is not a multiple of 16 bytes"));
  }
  using Encode =
      CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*, cuuint64_t const*, cuuint32_t const*,
                   cuuint32_t const*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
             "cuTensorMapEncodeTiled");
  if (found != cudaDriverEntryPointSuccess || entry == nullptr) {
    throw Error(ErrorCode::unsupported, "the driver has no cuTensorMapEncodeTiled, 12.0 or newer is needed");
  }
  auto const encode = reinterpret_cast<Encode>(entry);
  cuuint64_t const sizes[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(depth)};
  cuuint64_t const strides[2] = {static_cast<cuuint64_t>(columns * element_bytes), static_cast<cuuint64_t>(columns * rows * element_bytes)};
  cuuint32_t const box[3] = {static_cast<cuuint32_t>(128 / element_bytes), static_cast<cuuint32_t>(box_rows), 1};
  cuuint32_t const steps[3] = {1, 1, 1};
  CUtensorMap map{};
  CUresult const status = encode(&map, element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
                                 const_cast<void*>(base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(ErrorCode::cuda,
                text("cuTensorMapEncodeTiled: error ", static_cast<int>(status), " for [", depth, ", ", rows, ", ", columns, "]"));
  }
  return map;
}

}  // namespace moe::hopper
