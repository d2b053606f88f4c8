/* SPDX-License-Identifier: Apache-2.0 */
/* moe.h: the C interface of the library, in C99. Needs no header of CUDA, MPI or NCCL. docs/c.md is the guide. */
#ifndef MOE_MOE_H_
#define MOE_MOE_H_

/*
 * Design
 *   A group is the ranks that share a layer's experts. A runner is one layer on one rank: router, quantisation, exchange and experts, with
 *   all memory taken when it is created. Arrays go in and out as DLTensor. The same functions are in libmoe, whose layers have run-time
 *   dimensions, and in a library that exports layers of moe_add_model_library (moe/c/export.hpp), whose dimensions are fixed.
 *
 * Calls
 *   Every function returns a moe_status; MOE_OK is 0. After any other status moe_last_error() is one line that names the argument, its
 *   value and what was expected. No exception crosses this interface. A call that returns an error has written no output that was asked
 *   for, unless its comment says so.
 *   Host space: a call returns when its work is done; `stream` must be NULL. CUDA space: a call enqueues on `stream` (a cudaStream_t;
 *   NULL: the default stream) and returns; errors that only the device sees come from moe_runner_check() or moe_runner_wait().
 *   CUDA graphs: moe_route(), moe_runner_weights_changed() and the forward functions may be called on a stream that is being captured, in
 *   any mode, after a first call outside of a capture; moe_runner_check() too. moe_runner_wait(), moe_experts(), and the forward functions
 *   of a backend that reads counts on the host, are MOE_E_STATE there; they leave the capture valid. Create and destroy groups and runners
 *   while nothing is captured: they take and free memory, which ends a capture.
 *
 * Threads
 *   Different handles may be used from different threads at the same time, and every function may be called from any thread. One runner
 *   runs one call at a time: a second call that meets it busy does nothing and returns MOE_E_STATE. Runners of a group of several ranks
 * share its communicator, so that the same holds for the group. The last error is per thread.
 *
 * Life times
 *   A handle is a number, no address: after it was destroyed, or if it never was one, every function answers MOE_E_STATE or MOE_E_ARG.
 *   Destroying a handle while another thread is in a call on it is allowed: the object dies when that call returns. A runner keeps its
 *   group alive: handles may be destroyed in any order. DLTensor structs and all strings are read during the call only. The arrays that
 *   weights and routers point to are borrowed, unless stated otherwise: they must live and stay where they are until the runner is
 *   destroyed, and on CUDA until the stream has passed its last call. moe_runner_get_info() says whether a runner has packed its weights:
 *   then weights and scales may be freed once moe_runner_create() has returned, but not biases, and not where
 *   moe_runner_weights_changed() will be called. A runner on a GPU must be destroyed before its device is reset.
 *
 * Structs
 *   The first member of every struct is struct_size, which the initialisers (MOE_..._INIT) set. Members are only ever appended. A struct of
 *   an earlier version is taken: members that it lacks are those of the initialiser, and a function that fills it writes those that it has.
 *   Any other size is MOE_E_ARG. Unset members are those of the initialiser; do not zero a struct instead.
 */

#include <stddef.h>
#include <stdint.h>

/*
 * DLPack's C types, from the specification https://dmlc.github.io/dlpack/latest/c_api.html (ABI version 1). The header dlpack/dlpack.h is
 * used where the include path has it, and may then be included before or after this one. Elsewhere the types that stand here are the same
 * ones, and its include guard is set, so that a copy included later under another path does not declare them again.
 */
#ifndef DLPACK_DLPACK_H_
#ifdef __has_include
#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#endif
#endif
#endif
#ifndef DLPACK_DLPACK_H_
#define DLPACK_DLPACK_H_
#define DLPACK_MAJOR_VERSION 1
#define DLPACK_MINOR_VERSION 0
#define DLPACK_FLAG_BITMASK_READ_ONLY (1UL << 0UL)
#define DLPACK_FLAG_BITMASK_IS_COPIED (1UL << 1UL)
typedef struct {
  uint32_t major;
  uint32_t minor;
} DLPackVersion;
typedef enum { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13 } DLDeviceType;
typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;
typedef enum {
  kDLInt = 0U,
  kDLUInt = 1U,
  kDLFloat = 2U,
  kDLOpaqueHandle = 3U,
  kDLBfloat = 4U,
  kDLComplex = 5U,
  kDLBool = 6U
} DLDataTypeCode;
typedef struct {
  uint8_t code;   /* DLDataTypeCode */
  uint8_t bits;   /* of one lane */
  uint16_t lanes; /* 1 but for packed elements */
} DLDataType;
typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;       /* [ndim] */
  int64_t* strides;     /* [ndim] in elements; NULL: contiguous, row-major */
  uint64_t byte_offset; /* from data to the first element */
} DLTensor;
typedef struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(struct DLManagedTensor* self);
} DLManagedTensor;
typedef struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned* self);
  uint64_t flags;
  DLTensor dl_tensor;
} DLManagedTensorVersioned;
#endif /* DLPACK_DLPACK_H_ */

/* Codes of DLDataType that DLPack has since version 1.1. */
#define MOE_DL_FLOAT8_E4M3FN 10
#define MOE_DL_FLOAT8_E8M0FNU 14
#define MOE_DL_FLOAT4_E2M1FN 17

#if defined(__GNUC__)
#define MOE_API __attribute__((visibility("default")))
#else
#define MOE_API
#endif
#ifdef __cplusplus
#define MOE_NOEXCEPT noexcept
extern "C" {
#else
#define MOE_NOEXCEPT
#endif

/* Version of this interface. It changes when an existing function or struct changes its meaning; additions leave it as it is. */
#define MOE_C_ABI_VERSION 1

/* ---- Status ---- */

typedef enum moe_status {
  MOE_OK = 0,
  MOE_E_CONFIG = 1,      /* impossible combination of configuration values */
  MOE_E_ARG = 2,         /* bad argument: null, dtype, device, shape, stride, range, alignment, struct_size */
  MOE_E_UNSUPPORTED = 3, /* legal, but this build, device, backend or experts cannot do it */
  MOE_E_CAPACITY = 4,    /* rows or bytes exceed a declared maximum */
  MOE_E_STATE = 5,       /* call order: a destroyed handle, a busy runner or group, an id that was used */
  MOE_E_TIMEOUT = 6,     /* a peer did not arrive within the deadline */
  MOE_E_PEER = 7,        /* a peer is dead, or refused this call */
  MOE_E_MISMATCH = 8,    /* ranks disagree about a value that must be the same */
  MOE_E_CUDA = 9,        /* a CUDA or NCCL call failed */
  MOE_E_INTERNAL = 10,   /* broken invariant of the library */
  MOE_E_MEMORY = 11      /* the host is out of memory */
} moe_status;

/* "MOE_OK", "MOE_E_ARG", ...; "?" for any other number. */
MOE_API const char* moe_status_name(moe_status status) MOE_NOEXCEPT;
/* The text of this thread's last call that did not return MOE_OK: "E_ARG: hidden: dtype is float32, expected bfloat16". Empty before the
 * first. Valid until this thread's next call that fails; never NULL. */
MOE_API const char* moe_last_error(void) MOE_NOEXCEPT;

/* "0.3.0": the version of the library. */
MOE_API const char* moe_version(void) MOE_NOEXCEPT;
/* MOE_C_ABI_VERSION of the library; compare it with the header's. */
MOE_API int32_t moe_abi_version(void) MOE_NOEXCEPT;
/* 1 if this library was built with "cuda", "nccl", "mpi" or "onednn"; 0 if it was not, or for any other name. It does not tell whether a
 * GPU is there. */
MOE_API int32_t moe_has(const char* feature) MOE_NOEXCEPT;

/* ---- Groups ---- */

/* Opaque. NULL is no handle. */
typedef struct moe_group_handle* moe_group_t;
typedef struct moe_runner_handle* moe_runner_t;

/* A group of one rank, for either space. */
MOE_API moe_status moe_group_create_self(moe_group_t* group) MOE_NOEXCEPT;

/* Size in bytes of the id of an NCCL group. */
#define MOE_NCCL_ID_BYTES 128
/* Writes a new id: one rank makes it and hands it to the others by its own means. MOE_E_UNSUPPORTED without NCCL. */
MOE_API moe_status moe_nccl_get_id(uint8_t id[MOE_NCCL_ID_BYTES]) MOE_NOEXCEPT;
/* Collective over `size` ranks that hold the same id, each its own GPU: the device that is current (cudaSetDevice). timeout_ms: of every
 * wait for other ranks, 0: 100 s. An id serves for one group: MOE_E_STATE if this process has used it before (also if that call failed). */
MOE_API moe_status moe_group_create_nccl(const uint8_t id[MOE_NCCL_ID_BYTES], int32_t rank, int32_t size, int64_t timeout_ms,
                                         moe_group_t* group) MOE_NOEXCEPT;
/* Collective over an MPI communicator, given as MPI_Comm_c2f() gives it (an MPI_Fint); it is duplicated. The caller runs MPI_Init_thread
 * and, after the group and its runners were destroyed, MPI_Finalize. Host space. MOE_E_UNSUPPORTED without MPI. */
MOE_API moe_status moe_group_create_mpi(int32_t fortran_communicator, int64_t timeout_ms, moe_group_t* group) MOE_NOEXCEPT;
/* The same over MPI_COMM_WORLD. */
MOE_API moe_status moe_group_create_mpi_world(int64_t timeout_ms, moe_group_t* group) MOE_NOEXCEPT;

MOE_API moe_status moe_group_get_rank(moe_group_t group, int32_t* rank, int32_t* size) MOE_NOEXCEPT;
/* NULL: does nothing. */
MOE_API moe_status moe_group_destroy(moe_group_t group) MOE_NOEXCEPT;

/* ---- Routers ---- */

/* A router: logits to expert ids and weights (docs/semantics/routing.md). Strings are the names listed; arrays are borrowed and lie in the
 * runner's space. */
typedef struct moe_router_config {
  uint64_t struct_size;
  int32_t num_experts;         /* 0: the runner's */
  int32_t topk;                /* 0: the runner's */
  const char* scoring;         /* "softmax", "sigmoid", "sqrtsoftplus", "identity" */
  const char* order;           /* "score_then_topk", "topk_then_score" */
  const char* selection;       /* "topk", "hash_table", "sparsemixer" */
  const char* renorm;          /* of the k weights: "none", "sum", "floor", "p_norm" */
  float renorm_eps;            /* added by "sum", the least divisor of "floor" */
  float renorm_p;              /* of "p_norm" */
  float routed_scaling_factor; /* multiplies the weights */
  int32_t num_expert_group;    /* 0: no groups */
  int32_t topk_group;          /* groups kept */
  const char* group_score;     /* "max", "top2_sum" */
  float logit_softcap;         /* 0: off */
  float sparsemixer_eps;
  int32_t num_zero_experts;         /* logits E ... E+Z-1 choose an expert that computes nothing */
  const char* zero_expert;          /* what it gives: "identity" (its input), "none" (zeros) */
  const char* degenerate;           /* a row with no finite logit: "uniform_first_k", "drop" */
  const DLTensor* correction_bias;  /* [E + Z] float32, for the choice only; or NULL */
  const DLTensor* per_expert_scale; /* [E] float32, multiplies the weights; or NULL */
  const DLTensor* hash_table;       /* [vocabulary, topk] int64 expert ids, for "hash_table" */
} moe_router_config;
/* clang-format off */
#define MOE_ROUTER_CONFIG_INIT \
  {sizeof(moe_router_config), 0, 0, "softmax", "score_then_topk", "topk", "none", 1e-20F, 1.0F, 1.0F, 0, 0, "max", 0.0F, 0.01F, 0, \
   "identity", "uniform_first_k", NULL, NULL, NULL}
/* clang-format on */

/* Routes a batch: logits [M, E + Z] float32, bfloat16 or float16 -> topk_ids [M, k] int32, topk_weights [M, k] float32. token_ids [M] int64
 * for "hash_table", else NULL. Rows may have strides. router->num_experts and router->topk must be set. */
MOE_API moe_status moe_route(const moe_router_config* router, const DLTensor* logits, const DLTensor* token_ids, const DLTensor* topk_ids,
                             const DLTensor* topk_weights, void* stream) MOE_NOEXCEPT;

/* ---- Runners ---- */

/* clang-format off */
/*
 * The experts of this rank: E_local = w13's first extent, those of a linear placement (rank r of R owns the r-th part of the experts, E / R
 * each; the first E % R ranks have one more). All arrays are contiguous and of one device, which is where the runner runs. I is the
 * intermediate width; w13 has the gate rows, then the up rows (2I), or I rows if the activation is not gated. A checkpoint whose gate and
 * up rows alternate (gpt-oss: gate 0, up 0, gate 1, ...) must be sorted before: rows of w13, of its scales and its bias.
 *
 *   quantization     w13 [E_local, 2I, .]  w2 [E_local, H, .]  elements                    scales of a matrix [N, K]: float32 unless stated
 *   "none"           H                     I                   the runner's dtype          NULL
 *   "fp8_block128"   H                     I                   float8_e4m3fn or uint8      [E_local, ceil(N/128), ceil(K/128)]
 *   "fp8_per_token"  H                     I                   float8_e4m3fn or uint8      [E_local, N] or [E_local, N, 1]
 *   "int4_group32"   H/2                   I/2                 uint8, low nibble first:    [E_local, N, K/32]
 *   "int4_group64"   H/2                   I/2                 x = (code - 8) * scale      [E_local, N, K/64]
 *   "int4_group128"  H/2                   I/2                                             [E_local, N, K/128]
 *   "mxfp4_w4a16"    H/2                   I/2                 uint8, low nibble first,    [E_local, N, K/32], uint8 or float8_e8m0fnu
 *                                                              or float4_e2m1fn x 2
 *
 * An int4 group that does not divide K is halved until it does, down to 32; moe_get_quantized_layout() gives the sizes. Scales multiply.
 * "fp8_..." quantise the activations too (groups of 128, or one scale a row). moe_quantize() makes such arrays.
 */
/* clang-format on */
typedef struct moe_weights {
  uint64_t struct_size;
  const DLTensor* w13;
  const DLTensor* w2;
  const DLTensor* w13_scale;
  const DLTensor* w2_scale;
  const DLTensor* w13_bias; /* [E_local, 2I] float32, or NULL; both biases or none */
  const DLTensor* w2_bias;  /* [E_local, H] float32, or NULL */
} moe_weights;
#define MOE_WEIGHTS_INIT {sizeof(moe_weights), NULL, NULL, NULL, NULL, NULL, NULL}

/* What a runner is. A name that is NULL is the default stated; unknown names are MOE_E_CONFIG with a list of the known ones. */
typedef struct moe_runner_config {
  uint64_t struct_size;
  int64_t hidden;                  /* H */
  int64_t intermediate;            /* I of one expert */
  int32_t num_experts;             /* E of all ranks */
  int32_t topk;                    /* k */
  int64_t max_tokens_per_rank;     /* the most rows of one call on any rank */
  const moe_router_config* router; /* NULL: external, the caller routes and only moe_runner_forward_routed() works */
  const char* activation;          /* "silu" (default), "gelu", "gelu_tanh", "swigluoai_halves" (gpt-oss: limit 7), "silu_clamped",
                                      "swiglu_step", "situ", and ungated "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul",
                                      "relu_no_mul". "swigluoai" is refused: its gate and up rows alternate, see moe_weights */
  float activation_alpha;          /* constants of the activations that have them */
  float activation_beta;
  float activation_limit;     /* 0: none */
  int32_t weight_on_input;    /* 1: the router weight multiplies an expert's input instead of its output */
  const char* dtype;          /* of hidden and output: "float32", "bfloat16", "float16"; NULL: w13's, or "bfloat16" if quantised */
  const char* quantization;   /* "none" (default), or a scheme of the table above */
  const char* backend;        /* "no_expert_parallel" (default in a group of one), "all_to_all_v" (default of others), "low_latency",
                                 "high_throughput" */
  const char* experts;        /* NULL: the fastest that this device and quantisation have; host: "onednn"; CUDA: "hopper_contiguous",
                                 "hopper_masked", "hopper_w4a16", "cuda_reference" */
  int32_t num_threads;        /* host: threads of the experts, at most 4096; 0: OMP_NUM_THREADS, or all cores */
  int32_t log;                /* 1: one line about the runner to stderr when it was created */
  float activation_situ_gate; /* of "situ": gate' = g tanh(gate / g) */
  float activation_situ_up;   /* of "situ": up' = u tanh(up / u) */
  moe_runner_t workspace_of;  /* CUDA: a runner of the same device whose experts' workspace this one uses, too: their calls take turns.
                                 Hopper's experts share; others ignore this. NULL: memory of its own */
} moe_runner_config;
#define MOE_RUNNER_CONFIG_INIT \
  {sizeof(moe_runner_config), 0, 0, 0, 0, 0, NULL, NULL, 1.702F, 1.0F, 0.0F, 0, NULL, NULL, NULL, NULL, 0, 0, 4.0F, 25.0F, NULL}

/* Arguments of a call that may be left out. */
typedef struct moe_forward_options {
  uint64_t struct_size;
  int64_t num_valid_rows;    /* rows at or past it are padding and give zeros; -1: all rows are valid */
  const DLTensor* token_ids; /* [M] int64, for a router with a hash table; moe_runner_forward() only */
  const DLTensor* num_rows;  /* CUDA, "no_expert_parallel": [1] int32 on the device, rows that count, so that a graph follows it */
} moe_forward_options;
#define MOE_FORWARD_OPTIONS_INIT {sizeof(moe_forward_options), -1, NULL, NULL}

/* About a runner. Strings live as long as the library. */
typedef struct moe_runner_info {
  uint64_t struct_size;
  DLDevice device;
  int32_t rank;
  int32_t size;
  int32_t num_local_experts;
  int32_t weights_packed; /* 1: the runner has a copy of weights and scales, and the caller's may be freed; biases are borrowed */
  int64_t bytes;          /* that the runner holds besides the weights, the window included */
  int64_t window_bytes;   /* of them, in the window of an exchange */
  const char* dtype;
  const char* quantization;
  const char* backend;
  const char* experts;
} moe_runner_info;
#define MOE_RUNNER_INFO_INIT {sizeof(moe_runner_info), {kDLCPU, 0}, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL}

/* Collective over the group. Takes all memory that the runner will ever use. In the CUDA space the current device must be that of the
 * weights, and the call waits for the device. On an error *runner is NULL. */
MOE_API moe_status moe_runner_create(const moe_runner_config* config, const moe_weights* weights, moe_group_t group,
                                     moe_runner_t* runner) MOE_NOEXCEPT;
/* Collective. hidden [M, H] and router_logits [M, E + Z] (float32, bfloat16 or float16) -> output [M, H]. Elements of output share no
 * memory with other arrays of the call, with biases and arrays of the router, nor with weights and scales that were not packed: MOE_E_ARG.
 * M may be 0 and differ between ranks. Rows may have strides, elements of a row are adjacent. CUDA: rows start at multiples of 16 bytes. No
 * allocation. Can be captured in a CUDA graph, but not "all_to_all_v" with so many rows that it reads counts on the host (MOE_E_STATE).
 * options: may be NULL. */
MOE_API moe_status moe_runner_forward(moe_runner_t runner, const DLTensor* hidden, const DLTensor* router_logits, const DLTensor* output,
                                      const moe_forward_options* options, void* stream) MOE_NOEXCEPT;
/* The same with routing that the caller did: topk_ids [M, k] int32 or int64, experts of [0, E), or -1 for none, each at most once in
 * a row; topk_weights [M, k] float32. Host: the first bad slot is MOE_E_ARG. CUDA: a bad slot counts as none, and moe_runner_check()
 * reports it.
 */
MOE_API moe_status moe_runner_forward_routed(moe_runner_t runner, const DLTensor* hidden, const DLTensor* topk_ids,
                                             const DLTensor* topk_weights, const DLTensor* output, const moe_forward_options* options,
                                             void* stream) MOE_NOEXCEPT;
/* The bytes of the weights were replaced in place: a runner that has packed them packs again, in stream order. Before the next call. */
MOE_API moe_status moe_runner_weights_changed(moe_runner_t runner, void* stream) MOE_NOEXCEPT;
/* Reports errors of calls that the stream has finished; waits for nothing. */
MOE_API moe_status moe_runner_check(moe_runner_t runner) MOE_NOEXCEPT;
/* Waits for the stream, within the deadline even if a peer died, and reports errors. */
MOE_API moe_status moe_runner_wait(moe_runner_t runner, void* stream) MOE_NOEXCEPT;
MOE_API moe_status moe_runner_get_info(moe_runner_t runner, moe_runner_info* info) MOE_NOEXCEPT;
/* NULL: does nothing. CUDA: the stream of its last call must have finished. */
MOE_API moe_status moe_runner_destroy(moe_runner_t runner) MOE_NOEXCEPT;

/* Waits until the stream of a GPU has finished, for programs that call no CUDA themselves. device: of kDLCUDA; stream: one of it, or NULL,
 * the default stream. timeout_ms: 0: 100 s, then MOE_E_TIMEOUT. MOE_E_STATE while the stream is being captured, MOE_E_UNSUPPORTED without
 * CUDA. */
MOE_API moe_status moe_stream_wait(DLDevice device, void* stream, int64_t timeout_ms) MOE_NOEXCEPT;

/* One call without a runner to keep: creates one of a group of one rank, runs moe_runner_forward_routed(), waits and destroys it. For a
 * try, or for single calls; create a runner for repeated ones. hidden, intermediate, num_experts, topk and max_tokens_per_rank of config
 * are taken from the arrays where they are 0. */
MOE_API moe_status moe_experts(const moe_runner_config* config, const moe_weights* weights, const DLTensor* hidden,
                               const DLTensor* topk_ids, const DLTensor* topk_weights, const DLTensor* output, void* stream) MOE_NOEXCEPT;

/* ---- Quantisation and placement, on the host ---- */

/* Arrays of one matrix [rows, cols] in a scheme: codes [rows, code_cols], scales [scale_rows, scale_cols]; 0 x 0 if it has none. */
typedef struct moe_quantized_layout {
  uint64_t struct_size;
  int64_t code_cols;
  int64_t scale_rows;
  int64_t scale_cols;
  DLDataType code_dtype; /* as moe_quantize() describes them; "none": of the source */
  DLDataType scale_dtype;
} moe_quantized_layout;
#define MOE_QUANTIZED_LAYOUT_INIT {sizeof(moe_quantized_layout), 0, 0, 0, {0, 0, 0}, {0, 0, 0}}

/* MOE_E_CONFIG for an unknown scheme or a size that it cannot take. */
MOE_API moe_status moe_get_quantized_layout(const char* quantization, int64_t rows, int64_t cols,
                                            moe_quantized_layout* layout) MOE_NOEXCEPT;
/* Host memory. matrix [rows, cols] or [n, rows, cols], float32, bfloat16 or float16, contiguous -> codes and scales of that layout, with
 * the same n in front; the dtypes of the table at moe_weights. Scales of "fp8_per_token" may also be [n, rows]. */
MOE_API moe_status moe_quantize(const char* quantization, const DLTensor* matrix, const DLTensor* codes,
                                const DLTensor* scales) MOE_NOEXCEPT;

/* The slots, groups, nodes and ranks of moe_plan(). */
typedef struct moe_plan_config {
  uint64_t struct_size;
  int32_t num_physical; /* P slots over all ranks, a multiple of num_ranks, at least E */
  int32_t num_ranks;
  int32_t num_nodes;
  int32_t num_groups; /* groups of the router */
} moe_plan_config;
#define MOE_PLAN_CONFIG_INIT {sizeof(moe_plan_config), 0, 1, 1, 1}

/* Places experts by their load (docs/semantics/eplb.md). Host memory, contiguous. load [layers, E] float32, float64, int32 or int64 ->
 * physical_to_logical [layers, P] int32, logical_to_physical [layers, E, X] int32, padded with -1 (X at least the most replicas of an
 * expert; P - E + 1 always suffices), replica_count [layers, E] int32. The last two may be NULL. */
MOE_API moe_status moe_plan(const moe_plan_config* config, const DLTensor* load, const DLTensor* physical_to_logical,
                            const DLTensor* logical_to_physical, const DLTensor* replica_count) MOE_NOEXCEPT;

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* MOE_MOE_H_ */
