/* SPDX-License-Identifier: Apache-2.0 */
/* tests/capi/export_cuda.h: a program's part in C that runs a layer of tests/capi/export_cuda_library.cpp. */
#ifndef MOE_TESTS_CAPI_EXPORT_CUDA_H_
#define MOE_TESTS_CAPI_EXPORT_CUDA_H_

#include <moe/moe.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Sizes, and arrays in the memory of a GPU. */
struct export_cuda_call {
  int32_t device;
  void* stream;
  int64_t hidden_size, intermediate_size, tokens;
  int32_t num_experts, topk;
  void *w13, *w2;        /* [E, 2I, H] and [E, H, I] bfloat16 */
  void* bias;            /* of the selection: [E] float32 */
  void *hidden, *logits; /* [T, H] bfloat16, [T, E] float32 */
  void *ids, *weights;   /* of the caller's routing: [T, k] int32 and float32 */
  void* output;          /* of moe_runner_forward(): [T, H] bfloat16 */
  void* routed;          /* of moe_runner_forward_routed(): likewise */
  const uint8_t* id;     /* of NCCL for a group of one rank over it; NULL: one without */
  moe_runner_info info;  /* written */
};

/* Sets what the layers of the library fix of their router. */
void export_cuda_router(moe_router_config* router);
/* Creates group and runner, calls both forward functions, waits, destroys both. The first status that is not MOE_OK. */
moe_status export_cuda_run(struct export_cuda_call* call);

#ifdef __cplusplus
}
#endif
#endif
