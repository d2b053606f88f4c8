/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * c/dlpack.h: DLPack's C types, from the specification https://dmlc.github.io/dlpack/latest/c_api.html (ABI version 1). moe.h includes it.
 *
 * dlpack/dlpack.h is used where the include path has it, and may then be included before or after this header. Elsewhere the same types are
 * declared here, and DLPack's include guard is set, so that a copy included later under another path does not declare them again.
 */
#ifndef MOE_C_DLPACK_H_
#define MOE_C_DLPACK_H_

#include <stdint.h>

#ifndef DLPACK_DLPACK_H_
#ifdef __has_include
#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#endif
#endif
#endif
#ifndef DLPACK_DLPACK_H_
#define DLPACK_DLPACK_H_                           /**< Include guard of dlpack/dlpack.h, whose types are declared here. */
#define DLPACK_MAJOR_VERSION 1                     /**< DLPack's ABI version. */
#define DLPACK_MINOR_VERSION 0                     /**< DLPack's minor version: dtype codes are added with it. */
#define DLPACK_FLAG_BITMASK_READ_ONLY (1UL << 0UL) /**< A bit of DLManagedTensorVersioned::flags: the array must not be written. */
#define DLPACK_FLAG_BITMASK_IS_COPIED (1UL << 1UL) /**< A bit of DLManagedTensorVersioned::flags: the array is a copy. */
/** DLPack's version of a managed tensor. */
typedef struct {
  uint32_t major; /**< ABI version */
  uint32_t minor; /**< minor version */
} DLPackVersion;
/** DLPack's memory spaces. This interface takes arrays of kDLCPU and kDLCUDA. */
typedef enum {
  kDLCPU = 1,         /**< host memory */
  kDLCUDA = 2,        /**< memory of a GPU */
  kDLCUDAHost = 3,    /**< pinned host memory */
  kDLCUDAManaged = 13 /**< managed memory */
} DLDeviceType;
/** DLPack's device: a space and a number in it. */
typedef struct {
  DLDeviceType device_type; /**< memory space */
  int32_t device_id;        /**< CUDA's device number; 0 for the host */
} DLDevice;
/** DLPack's kinds of element; MOE_DL_... are later ones. */
typedef enum {
  kDLInt = 0U,          /**< signed integer */
  kDLUInt = 1U,         /**< unsigned integer, also of codes */
  kDLFloat = 2U,        /**< IEEE float */
  kDLOpaqueHandle = 3U, /**< opaque */
  kDLBfloat = 4U,       /**< bfloat16 */
  kDLComplex = 5U,      /**< complex */
  kDLBool = 6U          /**< boolean */
} DLDataTypeCode;
/** DLPack's element type. */
typedef struct {
  uint8_t code;   /**< DLDataTypeCode */
  uint8_t bits;   /**< bits of one lane */
  uint16_t lanes; /**< 1, except for packed elements */
} DLDataType;
/** DLPack's array. It does not own its memory. */
typedef struct {
  void* data;           /**< memory of the array, in the space of `device` */
  DLDevice device;      /**< where the memory is */
  int32_t ndim;         /**< number of dimensions */
  DLDataType dtype;     /**< element type */
  int64_t* shape;       /**< [ndim] extents */
  int64_t* strides;     /**< [ndim] in elements; NULL: contiguous, row-major */
  uint64_t byte_offset; /**< bytes from data to the first element */
} DLTensor;
/** DLPack's array with an owner, as exchanged before version 1. This interface does not use it. */
typedef struct DLManagedTensor {
  DLTensor dl_tensor;                            /**< the array */
  void* manager_ctx;                             /**< of the owner */
  void (*deleter)(struct DLManagedTensor* self); /**< frees the array; may be NULL */
} DLManagedTensor;
/** DLPack's array with an owner and a version. This interface does not use it. */
typedef struct DLManagedTensorVersioned {
  DLPackVersion version;                                  /**< of the producer */
  void* manager_ctx;                                      /**< of the owner */
  void (*deleter)(struct DLManagedTensorVersioned* self); /**< frees the array; may be NULL */
  uint64_t flags;                                         /**< DLPACK_FLAG_BITMASK_... */
  DLTensor dl_tensor;                                     /**< the array */
} DLManagedTensorVersioned;
#endif /* DLPACK_DLPACK_H_ */

#define MOE_DL_FLOAT8_E4M3FN 10  /**< DLDataType::code of float8_e4m3fn, in DLPack since version 1.1. */
#define MOE_DL_FLOAT8_E8M0FNU 14 /**< DLDataType::code of float8_e8m0fnu, in DLPack since version 1.1. */
#define MOE_DL_FLOAT4_E2M1FN 17  /**< DLDataType::code of float4_e2m1fn, in DLPack since version 1.1. */

#endif /* MOE_C_DLPACK_H_ */
