/* SPDX-License-Identifier: Apache-2.0 */
/* tests/capi/older_header.c: a program built with the declarations of older versions of moe.h, which stand here as they were: it goes on
 * with today's library. Never change a declaration. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct {
  int32_t device_type;
  int32_t device_id;
} OldDevice;
typedef struct {
  void* data;
  OldDevice device;
  int32_t ndim;
  struct {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
  } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} OldTensor;
typedef struct {
  uint64_t struct_size;
  const OldTensor* w13;
  const OldTensor* w2;
  const OldTensor* w13_scale;
  const OldTensor* w2_scale;
  const OldTensor* w13_bias;
  const OldTensor* w2_bias;
} OldWeights;
/* The first version. */
typedef struct {
  uint64_t struct_size;
  int64_t hidden;
  int64_t intermediate;
  int32_t num_experts;
  int32_t topk;
  int64_t max_tokens_per_rank;
  const void* router;
  const char* activation;
  float activation_alpha;
  float activation_beta;
  float activation_limit;
  int32_t weight_on_input;
  const char* dtype;
  const char* quantization;
  const char* backend;
  const char* experts;
  int32_t num_threads;
  int32_t log;
} FirstConfig;
#define FIRST_CONFIG_INIT {sizeof(FirstConfig), 0, 0, 0, 0, 0, NULL, NULL, 1.702F, 1.0F, 0.0F, 0, NULL, NULL, NULL, NULL, 0, 0}
/* Before workspace_of. */
typedef struct {
  FirstConfig first;
  float activation_situ_gate;
  float activation_situ_up;
} SecondConfig;
typedef struct {
  uint64_t struct_size;
  OldDevice device;
  int32_t rank;
  int32_t size;
  int32_t num_local_experts;
  int32_t weights_packed;
  int64_t bytes;
  int64_t window_bytes;
  const char* dtype;
  const char* quantization;
  const char* backend;
  const char* experts;
} OldInfo;

int moe_experts(const void* config, const OldWeights* weights, const OldTensor* hidden, const OldTensor* topk_ids,
                const OldTensor* topk_weights, const OldTensor* output, void* stream);
int moe_group_create_self(void** group);
int moe_group_destroy(void* group);
int moe_runner_create(const void* config, const OldWeights* weights, void* group, void** runner);
int moe_runner_get_info(void* runner, OldInfo* info);
int moe_runner_destroy(void* runner);
const char* moe_last_error(void);

enum { HIDDEN = 4, INTERMEDIATE = 4, EXPERTS = 2 };

static OldTensor tensor(void* data, uint8_t code, int32_t ndim, int64_t* shape) {
  OldTensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = 1;
  t.ndim = ndim;
  t.dtype.code = code;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

static int ran(int status) {
  if (status != 0) fprintf(stderr, "%s\n", moe_last_error());
  return status == 0;
}

int main(void) {
  static float w13[EXPERTS * 2 * INTERMEDIATE * HIDDEN], w2[EXPERTS * HIDDEN * INTERMEDIATE];
  float hidden[HIDDEN] = {1, 1, 1, 1}, first[HIDDEN] = {0}, second[HIDDEN] = {0}, one = 1.0F;
  int32_t id = 1;
  int64_t s13[] = {EXPERTS, 2 * INTERMEDIATE, HIDDEN}, s2[] = {EXPERTS, HIDDEN, INTERMEDIATE}, row[] = {1, HIDDEN}, slot[] = {1, 1};
  OldTensor t13 = tensor(w13, 2, 3, s13), t2 = tensor(w2, 2, 3, s2), x = tensor(hidden, 2, 2, row), y = tensor(first, 2, 2, row);
  OldTensor ids = tensor(&id, 0, 2, slot), weight = tensor(&one, 2, 2, slot), z = tensor(second, 2, 2, row);
  OldWeights weights = {sizeof(OldWeights), NULL, NULL, NULL, NULL, NULL, NULL};
  /* What lies behind the older struct is not the library's to read. */
  struct {
    FirstConfig config;
    float behind[4];
  } old = {FIRST_CONFIG_INIT, {-1.0F, -1.0F, -1.0F, -1.0F}};
  struct {
    SecondConfig config;
    uint64_t behind[2];
  } later = {{FIRST_CONFIG_INIT, 4.0F, 25.0F}, {77, 77}};
  OldInfo info = {sizeof(OldInfo), {0, 0}, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL};
  void* group = NULL;
  void* runner = NULL;
  size_t i;
  if (sizeof(FirstConfig) != 112 || sizeof(SecondConfig) != 120) return 2;
  for (i = 0; i < sizeof w13 / sizeof *w13; ++i) w13[i] = 0.5F;
  for (i = 0; i < sizeof w2 / sizeof *w2; ++i) w2[i] = 1.0F;
  weights.w13 = &t13;
  weights.w2 = &t2;
  old.config.activation = "situ";
  if (!ran(moe_experts(&old.config, &weights, &x, &ids, &weight, &y, NULL))) return 3;
  later.config.first.struct_size = sizeof(SecondConfig);
  later.config.first.activation = "situ";
  if (!ran(moe_experts(&later.config, &weights, &x, &ids, &weight, &z, NULL))) return 4;
  /* gate = up = 2: 4 tanh(2/4) sigmoid(2) 25 tanh(2/25) = 3.2493, times the 4 columns of w2 */
  if (first[0] < 12.98F || first[0] > 13.01F || memcmp(first, second, sizeof first) != 0) return 5;

  old.config.hidden = HIDDEN;
  old.config.intermediate = INTERMEDIATE;
  old.config.num_experts = EXPERTS;
  old.config.topk = old.config.max_tokens_per_rank = 1;
  if (!ran(moe_group_create_self(&group)) || !ran(moe_runner_create(&old.config, &weights, group, &runner))) return 6;
  if (!ran(moe_runner_get_info(runner, &info)) || info.num_local_experts != EXPERTS || strcmp(info.experts, "onednn") != 0) return 7;
  if (info.struct_size != sizeof(OldInfo)) return 8;
  if (!ran(moe_runner_destroy(runner)) || !ran(moe_group_destroy(group))) return 9;
  printf("%f\n", first[0]);
  return 0;
}
