/* SPDX-License-Identifier: Apache-2.0 */
/* examples/c/experts.c: the experts of one layer from C: a runner whose caller routes. cc experts.c $(pkg-config --cflags --libs moe) */
#include <moe/moe.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 4, HIDDEN = 64, INTERMEDIATE = 128, EXPERTS = 8, TOPK = 2 };

static void check(moe_status status) {
  if (status == MOE_OK) return;
  fprintf(stderr, "%s\n", moe_last_error()); /* "E_ARG: hidden: dtype is float64, expected float32" */
  exit(1);
}

/* A contiguous array in host memory; `code` is kDLFloat or kDLInt, elements have 32 bits. */
static DLTensor array(void* data, DLDataTypeCode code, int ndim, int64_t* shape) {
  DLTensor t = {0};
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = ndim;
  t.dtype.code = (uint8_t)code;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

int main(void) {
  static float w13[EXPERTS][2 * INTERMEDIATE][HIDDEN], w2[EXPERTS][HIDDEN][INTERMEDIATE]; /* borrowed: they outlive the runner */
  static float hidden[TOKENS][HIDDEN], output[TOKENS][HIDDEN], topk_weights[TOKENS][TOPK];
  static int32_t topk_ids[TOKENS][TOPK];
  for (int e = 0; e < EXPERTS; ++e) {
    for (int i = 0; i < 2 * INTERMEDIATE * HIDDEN; ++i) (&w13[e][0][0])[i] = 0.01F;
    for (int i = 0; i < HIDDEN * INTERMEDIATE; ++i) (&w2[e][0][0])[i] = 0.01F * (float)(e + 1);
  }
  for (int t = 0; t < TOKENS; ++t) {
    for (int h = 0; h < HIDDEN; ++h) hidden[t][h] = 1.0F;
    for (int k = 0; k < TOPK; ++k) {
      topk_ids[t][k] = 2 * t + k;
      topk_weights[t][k] = 0.5F;
    }
  }

  DLTensor w13_array = array(w13, kDLFloat, 3, (int64_t[]){EXPERTS, 2 * INTERMEDIATE, HIDDEN});
  DLTensor w2_array = array(w2, kDLFloat, 3, (int64_t[]){EXPERTS, HIDDEN, INTERMEDIATE});
  moe_weights weights = MOE_WEIGHTS_INIT;
  weights.w13 = &w13_array;
  weights.w2 = &w2_array;
  moe_runner_config config = MOE_RUNNER_CONFIG_INIT;
  config.hidden = HIDDEN;
  config.intermediate = INTERMEDIATE;
  config.num_experts = EXPERTS;
  config.topk = TOPK;
  config.max_tokens_per_rank = TOKENS;

  moe_group_t group = NULL;
  moe_runner_t runner = NULL;
  check(moe_group_create_self(&group));
  check(moe_runner_create(&config, &weights, group, &runner));
  DLTensor x = array(hidden, kDLFloat, 2, (int64_t[]){TOKENS, HIDDEN});
  DLTensor y = array(output, kDLFloat, 2, (int64_t[]){TOKENS, HIDDEN});
  DLTensor ids = array(topk_ids, kDLInt, 2, (int64_t[]){TOKENS, TOPK});
  DLTensor scores = array(topk_weights, kDLFloat, 2, (int64_t[]){TOKENS, TOPK});
  check(moe_runner_forward_routed(runner, &x, &ids, &scores, &y, NULL, NULL));
  for (int t = 0; t < TOKENS; ++t) printf("token %d: %f\n", t, output[t][0]);
  check(moe_runner_destroy(runner));
  check(moe_group_destroy(group));
  return output[3][0] > output[0][0] ? 0 : 1;
}
