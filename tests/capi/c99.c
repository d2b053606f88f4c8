/* SPDX-License-Identifier: Apache-2.0 */
/* tests/capi/c99.c: moe.h in C99, with dlpack/dlpack.h before it, after it or not there: one layer, one status. */
#ifdef DLPACK_BEFORE
#include <dlpack/dlpack.h>
#endif
#include <moe/moe.h>
#ifdef DLPACK_AFTER
#include <dlpack/dlpack.h>
#endif
#include <stdio.h>
#include <string.h>

#define TOKENS 2
#define HIDDEN 4
#define INTERMEDIATE 4
#define EXPERTS 2

static DLTensor tensor(void* data, uint8_t code, int32_t ndim, int64_t* shape) {
  DLTensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = ndim;
  t.dtype.code = code;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

int main(void) {
  static float w13[EXPERTS * 2 * INTERMEDIATE * HIDDEN], w2[EXPERTS * HIDDEN * INTERMEDIATE];
  float hidden[TOKENS * HIDDEN], output[TOKENS * HIDDEN], weights[TOKENS] = {1.0F, 0.5F};
  int32_t ids[TOKENS] = {0, 1};
  int64_t s13[] = {EXPERTS, 2 * INTERMEDIATE, HIDDEN}, s2[] = {EXPERTS, HIDDEN, INTERMEDIATE}, rows[] = {TOKENS, HIDDEN},
          slots[] = {TOKENS, 1};
  DLTensor t13 = tensor(w13, kDLFloat, 3, s13), t2 = tensor(w2, kDLFloat, 3, s2), x = tensor(hidden, kDLFloat, 2, rows);
  DLTensor y = tensor(output, kDLFloat, 2, rows), id = tensor(ids, kDLInt, 2, slots), weight = tensor(weights, kDLFloat, 2, slots);
  moe_runner_config config = MOE_RUNNER_CONFIG_INIT;
  moe_weights given = MOE_WEIGHTS_INIT;
  size_t i;
  if (sizeof(DLTensor) != 48 || sizeof(DLManagedTensorVersioned) != 80) return 3;
  for (i = 0; i < sizeof w13 / sizeof *w13; ++i) w13[i] = 0.5F;
  for (i = 0; i < sizeof w2 / sizeof *w2; ++i) w2[i] = 1.0F;
  for (i = 0; i < sizeof hidden / sizeof *hidden; ++i) hidden[i] = 1.0F;
  given.w13 = &t13;
  given.w2 = &t2;
  if (moe_experts(&config, &given, &x, &id, &weight, &y, NULL) != MOE_OK) {
    fprintf(stderr, "%s\n", moe_last_error());
    return 1;
  }
  /* gate = up = 2, silu(2) * 2 = 3.523188, times the 4 columns of w2 */
  if (output[0] < 14.0926F || output[0] > 14.0929F || output[HIDDEN] < 7.0463F || output[HIDDEN] > 7.0465F) return 2;
  y.dtype.bits = 16;
  if (moe_experts(&config, &given, &x, &id, &weight, &y, NULL) != MOE_E_ARG || strstr(moe_last_error(), "output") == NULL) return 4;
  printf("%s %f %f\n", moe_version(), output[0], output[HIDDEN]);
  return 0;
}
