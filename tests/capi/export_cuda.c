/* SPDX-License-Identifier: Apache-2.0 */
/* tests/capi/export_cuda.c: a layer of a model library in the CUDA space, called from C with arrays on a GPU. */
#include "tests/capi/export_cuda.h"

#include <stddef.h>

/* A contiguous array on the call's GPU; elements of `bits` bits. */
static DLTensor array(const struct export_cuda_call* call, void* data, DLDataTypeCode code, uint8_t bits, int ndim, int64_t* shape) {
  DLTensor t = {0};
  t.data = data;
  t.device.device_type = kDLCUDA;
  t.device.device_id = call->device;
  t.ndim = ndim;
  t.dtype.code = (uint8_t)code;
  t.dtype.bits = bits;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

void export_cuda_router(moe_router_config* router) {
  router->scoring = "sigmoid";
  router->renorm = "sum";
  router->num_expert_group = 4;
  router->topk_group = 2;
  router->group_score = "top2_sum";
  router->routed_scaling_factor = 2.5F;
}

static moe_status create(const struct export_cuda_call* call, moe_group_t group, moe_runner_t* runner) {
  int64_t shape13[] = {call->num_experts, 2 * call->intermediate_size, call->hidden_size};
  int64_t shape2[] = {call->num_experts, call->hidden_size, call->intermediate_size};
  int64_t shape_bias[] = {call->num_experts};
  DLTensor w13 = array(call, call->w13, kDLBfloat, 16, 3, shape13), w2 = array(call, call->w2, kDLBfloat, 16, 3, shape2);
  DLTensor bias = array(call, call->bias, kDLFloat, 32, 1, shape_bias);
  moe_weights weights = MOE_WEIGHTS_INIT;
  moe_router_config router = MOE_ROUTER_CONFIG_INIT;
  moe_runner_config config = MOE_RUNNER_CONFIG_INIT;
  weights.w13 = &w13;
  weights.w2 = &w2;
  export_cuda_router(&router);
  router.correction_bias = &bias;
  config.hidden = call->hidden_size;
  config.intermediate = call->intermediate_size;
  config.num_experts = call->num_experts;
  config.topk = call->topk;
  config.max_tokens_per_rank = call->tokens;
  config.router = &router;
  config.backend = call->id == NULL ? "no_expert_parallel" : "all_to_all_v";
  return moe_runner_create(&config, &weights, group, runner);
}

static moe_status forward(const struct export_cuda_call* call, moe_runner_t runner) {
  int64_t shape[] = {call->tokens, call->hidden_size}, chosen[] = {call->tokens, call->topk};
  int64_t all[] = {call->tokens, call->num_experts};
  DLTensor hidden = array(call, call->hidden, kDLBfloat, 16, 2, shape), output = array(call, call->output, kDLBfloat, 16, 2, shape);
  DLTensor routed = array(call, call->routed, kDLBfloat, 16, 2, shape), logits = array(call, call->logits, kDLFloat, 32, 2, all);
  DLTensor ids = array(call, call->ids, kDLInt, 32, 2, chosen), weights = array(call, call->weights, kDLFloat, 32, 2, chosen);
  moe_status status = moe_runner_forward(runner, &hidden, &logits, &output, NULL, call->stream);
  if (status == MOE_OK) status = moe_runner_forward_routed(runner, &hidden, &ids, &weights, &routed, NULL, call->stream);
  return status == MOE_OK ? moe_runner_wait(runner, call->stream) : status;
}

moe_status export_cuda_run(struct export_cuda_call* call) {
  const moe_runner_info empty = MOE_RUNNER_INFO_INIT;
  moe_group_t group = NULL;
  moe_runner_t runner = NULL;
  moe_status status = call->id == NULL ? moe_group_create_self(&group) : moe_group_create_nccl(call->id, 0, 1, 20000, &group);
  moe_status ended;
  call->info = empty;
  if (status == MOE_OK) status = create(call, group, &runner);
  if (status == MOE_OK) status = moe_runner_get_info(runner, &call->info);
  if (status == MOE_OK) status = forward(call, runner);
  ended = moe_runner_destroy(runner);
  if (status == MOE_OK) status = ended;
  ended = moe_group_destroy(group);
  return status == MOE_OK ? ended : status;
}
