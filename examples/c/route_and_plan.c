/* SPDX-License-Identifier: Apache-2.0 */
/* examples/c/route_and_plan.c: routes a batch, then places the experts by the load that the routing gave. */
#include <moe/moe.h>
#include <stdio.h>

enum { TOKENS = 32, EXPERTS = 8, TOPK = 2, SLOTS = 10, RANKS = 2 };

static DLTensor matrix(void* data, DLDataTypeCode code, int64_t* shape) {
  DLTensor t = {0};
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = 2;
  t.dtype.code = (uint8_t)code;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

int main(void) {
  float logits[TOKENS][EXPERTS], topk_weights[TOKENS][TOPK];
  int32_t topk_ids[TOKENS][TOPK], load[1][EXPERTS] = {{0}}, slots[1][SLOTS];
  for (int t = 0; t < TOKENS; ++t) {
    for (int e = 0; e < EXPERTS; ++e) logits[t][e] = e == 3 ? 2.0F : (float)((t * 5 + e * 3) % 7) / 7.0F; /* expert 3 is hot */
  }
  DLTensor in = matrix(logits, kDLFloat, (int64_t[]){TOKENS, EXPERTS}), ids = matrix(topk_ids, kDLInt, (int64_t[]){TOKENS, TOPK});
  DLTensor scores = matrix(topk_weights, kDLFloat, (int64_t[]){TOKENS, TOPK});
  moe_router_config router = MOE_ROUTER_CONFIG_INIT; /* softmax, then the k largest */
  router.num_experts = EXPERTS;
  router.topk = TOPK;
  router.renorm = "sum";
  if (moe_route(&router, &in, NULL, &ids, &scores, NULL) != MOE_OK) {
    fprintf(stderr, "%s\n", moe_last_error());
    return 1;
  }
  for (int t = 0; t < TOKENS; ++t) {
    for (int k = 0; k < TOPK; ++k) ++load[0][topk_ids[t][k]];
  }

  DLTensor loads = matrix(load, kDLInt, (int64_t[]){1, EXPERTS}), places = matrix(slots, kDLInt, (int64_t[]){1, SLOTS});
  moe_plan_config plan = MOE_PLAN_CONFIG_INIT;
  plan.num_physical = SLOTS;
  plan.num_ranks = RANKS;
  if (moe_plan(&plan, &loads, &places, NULL, NULL) != MOE_OK) {
    fprintf(stderr, "%s\n", moe_last_error());
    return 1;
  }
  int copies = 0;
  for (int s = 0; s < SLOTS; ++s) {
    copies += slots[0][s] == 3;
    printf("physical expert %d on rank %d: expert %d\n", s, s / (SLOTS / RANKS), slots[0][s]);
  }
  return copies > 1 ? 0 : 1; /* the hot expert has replicas */
}
