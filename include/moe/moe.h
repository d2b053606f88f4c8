/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * moe.h: the C interface of the library, in C99. It needs no header of CUDA, MPI or NCCL. The guide is docs/c.md.
 *
 * A group is the ranks that share a layer's experts. A runner is one layer on one rank: router, quantisation, exchange and experts, with
 * all memory taken when it is created. Arrays go in and out as DLTensor. Two kinds of library have these functions: libmoe, whose layers
 * have run-time dimensions, and a library that exports layers of moe_add_model_library (moe/c/export.hpp), whose dimensions are fixed.
 *
 * @par Notation
 * M: rows of this call on this rank. H: hidden size. I: intermediate size of one expert. E: experts of all ranks. E_local: experts of this
 * rank. k: experts that a token chooses. Z: zero experts. All arrays are row-major. Byte counts are bytes, times are milliseconds.
 *
 * @par Calls
 * Every function returns a moe_status, unless its comment says otherwise; MOE_OK is 0. After any other status moe_last_error() is one line
 * that names the argument, its value and what was expected. No exception crosses this interface. A call that returns an error has not
 * written its outputs, unless its comment says so. Every function that takes a pointer returns MOE_E_ARG for NULL, unless its comment
 * allows NULL.
 *
 * @par
 * Host space: a call returns when its work is done; `stream` must be NULL. CUDA space: a call enqueues on `stream` (a cudaStream_t; NULL:
 * the default stream) and returns. Errors that only the device sees come from moe_runner_check() or moe_runner_wait().
 *
 * @par CUDA graphs
 * moe_route(), moe_runner_weights_changed() and the forward functions may be called on a stream that is being captured, in any capture
 * mode, after a first call outside of a capture; moe_runner_check() too. moe_runner_wait(), moe_experts() and the forward functions of a
 * backend that reads counts on the host return MOE_E_STATE there and leave the capture valid. Do not create or destroy groups and runners
 * during a capture: they allocate and free memory, which ends it.
 *
 * @par Threads
 * Every function may be called from any thread. Different groups and runners may be used from different threads at the same time. One
 * runner runs one call at a time: a second call on a busy runner does nothing and returns MOE_E_STATE. The runners of a group of several
 * ranks share its communicator, so the same holds for the whole group. The last error is kept per thread.
 *
 * @par Life times
 * A C handle (moe_group_t, moe_runner_t) is a number, not an address: a destroyed or invalid one gives MOE_E_STATE or MOE_E_ARG. It may be
 * destroyed while another thread is in a call on it: the object is freed when that call returns. A runner keeps its group alive, so C
 * handles may be destroyed in any order. DLTensor structs and strings are read during the call only.
 *
 * @par
 * The arrays that weights and routers point to are borrowed, unless stated otherwise: they must stay valid, at the same address, until the
 * runner is destroyed, and on CUDA until the stream has passed its last call. moe_runner_get_info() says whether a runner has packed its
 * weights. If it has, weights and scales may be freed once moe_runner_create() has returned, unless moe_runner_weights_changed() will be
 * called; biases may not. Destroy a runner on a GPU before its device is reset.
 *
 * @par Structs
 * The first member of every struct is struct_size, which the initialisers (MOE_..._INIT) set. Start from the initialiser, not from zeros.
 * Members are only ever appended. A struct of an earlier version is accepted: members that it lacks have the initialiser's values, and a
 * function that fills it writes the members that it has. Any other size is MOE_E_ARG.
 */
#ifndef MOE_MOE_H_
#define MOE_MOE_H_

#include <stddef.h>
#include <stdint.h>

#include "moe/c/dlpack.h"

/** Exports a function from a shared library. */
#if defined(__GNUC__)
#define MOE_API __attribute__((visibility("default")))
#else
#define MOE_API
#endif
/** noexcept in C++, nothing in C. */
#ifdef __cplusplus
#define MOE_NOEXCEPT noexcept
extern "C" {
#else
#define MOE_NOEXCEPT
#endif

/** Version of this interface. It changes when an existing function or struct changes its meaning; additions leave it as it is. */
#define MOE_C_ABI_VERSION 1

/* ---- Status ---- */

/** The result of a call. The codes are those of docs/errors.md, and MOE_E_MEMORY. */
typedef enum moe_status {
  MOE_OK = 0,            /**< success */
  MOE_E_CONFIG = 1,      /**< impossible combination of configuration values */
  MOE_E_ARG = 2,         /**< bad argument: null, dtype, device, shape, stride, range, alignment, struct_size */
  MOE_E_UNSUPPORTED = 3, /**< legal, but this build, device, backend or experts cannot do it */
  MOE_E_CAPACITY = 4,    /**< rows or bytes exceed a declared maximum */
  MOE_E_STATE = 5,       /**< call order: a destroyed handle, a busy runner or group, an id that was used */
  MOE_E_TIMEOUT = 6,     /**< a peer did not arrive within the deadline */
  MOE_E_PEER = 7,        /**< a peer is dead, or refused this call */
  MOE_E_MISMATCH = 8,    /**< ranks disagree about a value that must be the same */
  MOE_E_CUDA = 9,        /**< a CUDA or NCCL call failed */
  MOE_E_INTERNAL = 10,   /**< broken invariant of the library */
  MOE_E_MEMORY = 11      /**< the host is out of memory */
} moe_status;

/** The name of a status: "MOE_OK", "MOE_E_ARG", ...; "?" for any other number. The string is static. */
MOE_API const char* moe_status_name(moe_status status) MOE_NOEXCEPT;
/** The text of this thread's last call that did not return MOE_OK, such as "E_ARG: hidden: dtype is float32, expected bfloat16". Empty if
 * no call has failed; never NULL. Valid until this thread's next call that fails. */
MOE_API const char* moe_last_error(void) MOE_NOEXCEPT;

/** The version of the library, such as "0.3.0". The string is static. */
MOE_API const char* moe_version(void) MOE_NOEXCEPT;
/** MOE_C_ABI_VERSION that the library was built with; compare it with the header's. */
MOE_API int32_t moe_abi_version(void) MOE_NOEXCEPT;
/** 1 if this library was built with `feature`, one of "cuda", "nccl", "mpi", "onednn"; 0 if not, for any other name and for NULL. It does
 * not tell whether the machine has a GPU. */
MOE_API int32_t moe_has(const char* feature) MOE_NOEXCEPT;

/* ---- Groups ---- */

typedef struct moe_group_handle* moe_group_t;   /**< C handle of a group: a number, never dereferenced. NULL is not a valid one. */
typedef struct moe_runner_handle* moe_runner_t; /**< C handle of a runner: a number, never dereferenced. NULL is not a valid one. */

/** Creates a group of one rank, for either space, and stores its C handle in `*group`. Destroy it with moe_group_destroy(). */
MOE_API moe_status moe_group_create_self(moe_group_t* group) MOE_NOEXCEPT;

/** Size in bytes of the id of an NCCL group. */
#define MOE_NCCL_ID_BYTES 128
/** Writes a new id to host memory. One rank calls this and sends the id to the others by its own means. MOE_E_UNSUPPORTED in a library
 * built without NCCL. */
MOE_API moe_status moe_nccl_get_id(uint8_t id[MOE_NCCL_ID_BYTES]) MOE_NOEXCEPT;
/** Creates a group over NCCL, in the CUDA space. Collective: each of `size` ranks calls it with the same id, its own rank in [0, size) and
 * its own GPU, the current device (cudaSetDevice). timeout_ms is the deadline of every wait for other ranks; 0: 100 s; negative: MOE_E_ARG.
 * An id serves for one group: MOE_E_STATE if this process has used it before, also if that call failed. MOE_E_UNSUPPORTED in a library
 * built without NCCL. On an error `*group` is NULL. */
MOE_API moe_status moe_group_create_nccl(const uint8_t id[MOE_NCCL_ID_BYTES], int32_t rank, int32_t size, int64_t timeout_ms,
                                         moe_group_t* group) MOE_NOEXCEPT;
/** Creates a group over MPI, in the host space. Collective over the communicator, which is the result of MPI_Comm_c2f() (an MPI_Fint); the
 * group uses a duplicate. The caller calls MPI_Init_thread before (else MOE_E_STATE) and, once the group and its runners are destroyed,
 * MPI_Finalize. timeout_ms as in moe_group_create_nccl(). MOE_E_UNSUPPORTED in a library built without MPI. On an error `*group` is NULL.
 */
MOE_API moe_status moe_group_create_mpi(int32_t fortran_communicator, int64_t timeout_ms, moe_group_t* group) MOE_NOEXCEPT;
/** The same as moe_group_create_mpi(), over MPI_COMM_WORLD. */
MOE_API moe_status moe_group_create_mpi_world(int64_t timeout_ms, moe_group_t* group) MOE_NOEXCEPT;

/** Writes this rank's index in the group, in [0, size), and the number of its ranks. */
MOE_API moe_status moe_group_get_rank(moe_group_t group, int32_t* rank, int32_t* size) MOE_NOEXCEPT;
/** Destroys a C handle of a group. Its runners keep the group until they are destroyed. Not collective. NULL: does nothing. */
MOE_API moe_status moe_group_destroy(moe_group_t group) MOE_NOEXCEPT;

/* ---- Routers ---- */

/** A router, which turns logits into expert ids and weights (docs/semantics/routing.md). Strings take the names listed, NULL means the
 * first; an unknown name is MOE_E_CONFIG with a list of the known ones. Arrays are borrowed, contiguous, and in the runner's space. */
typedef struct moe_router_config {
  uint64_t struct_size;             /**< set by MOE_ROUTER_CONFIG_INIT */
  int32_t num_experts;              /**< E; 0: the runner's */
  int32_t topk;                     /**< k; 0: the runner's */
  const char* scoring;              /**< scores of logits: "softmax", "sigmoid", "sqrtsoftplus", "identity" */
  const char* order;                /**< scores of all experts, or of the chosen ones: "score_then_topk", "topk_then_score" */
  const char* selection;            /**< how experts are chosen: "topk", "hash_table", "sparsemixer" */
  const char* renorm;               /**< how the k weights are normalised: "none", "sum", "floor", "p_norm" */
  float renorm_eps;                 /**< "sum": added to the divisor; "floor": the least divisor */
  float renorm_p;                   /**< "p_norm": the order of the norm */
  float routed_scaling_factor;      /**< multiplies the weights */
  int32_t num_expert_group;         /**< groups of experts of which only the best are searched; 0: no groups */
  int32_t topk_group;               /**< groups kept */
  const char* group_score;          /**< score of a group: "max", "top2_sum" */
  float logit_softcap;              /**< c of c * tanh(logit / c); 0: off */
  float sparsemixer_eps;            /**< "sparsemixer": epsilon of the router jitter (docs/semantics/routing.md) */
  int32_t num_zero_experts;         /**< Z: logits E ... E+Z-1 choose an expert that computes nothing */
  const char* zero_expert;          /**< output of a zero expert: "identity" (its input), "none" (zeros) */
  const char* degenerate;           /**< a row without a finite logit: "uniform_first_k", "drop" */
  const DLTensor* correction_bias;  /**< [E + Z] float32, added to the scores for the selection only; or NULL */
  const DLTensor* per_expert_scale; /**< [E] float32, multiplies the weights; or NULL */
  const DLTensor* hash_table;       /**< [vocabulary, topk] int64 expert ids, for "hash_table"; else NULL */
} moe_router_config;
/** Initialiser of moe_router_config: softmax, top-k, no renormalisation. */
/* clang-format off */
#define MOE_ROUTER_CONFIG_INIT \
  {sizeof(moe_router_config), 0, 0, "softmax", "score_then_topk", "topk", "none", 1e-20F, 1.0F, 1.0F, 0, 0, "max", 0.0F, 0.01F, 0, \
   "identity", "uniform_first_k", NULL, NULL, NULL}
/* clang-format on */

/** Routes a batch: logits [M, E + Z] float32, bfloat16 or float16 -> topk_ids [M, k] int32, topk_weights [M, k] float32. token_ids [M]
 * int64 for "hash_table", else NULL. All arrays are on one device, the host or a GPU. Rows may have strides. router->num_experts and
 * router->topk must be set. MOE_E_UNSUPPORTED for arrays on a GPU in a library that routes on the host only. */
MOE_API moe_status moe_route(const moe_router_config* router, const DLTensor* logits, const DLTensor* token_ids, const DLTensor* topk_ids,
                             const DLTensor* topk_weights, void* stream) MOE_NOEXCEPT;

/* ---- Runners ---- */

/* clang-format off */
/**
 * The experts of this rank. E_local is w13's first extent, that of a linear placement: rank r of R owns the r-th part of the experts, E / R
 * each; the first E % R ranks have one more. All arrays are contiguous and on one device, which is where the runner runs. w13 has the gate
 * rows, then the up rows (2I), or I rows if the activation is not gated. A checkpoint whose gate and up rows alternate (gpt-oss: gate 0,
 * up 0, gate 1, ...) must be reordered before: the rows of w13, of its scales and its bias.
 *
 * @verbatim
   quantization           w13 [E_local, 2I, .]  w2 [E_local, H, .]  elements              scales of a matrix [N, K]: float32 unless stated
   "none"                 H                     I                   the runner's dtype    NULL
   "fp8_block128"         H                     I                   e4m3                  [E_local, ceil(N/128), ceil(K/128)]
   "fp8_per_token"        H                     I                   e4m3                  [E_local, N] or [E_local, N, 1]
   "fp8_per_channel"      H                     I                   e4m3                  [E_local, N] or [E_local, N, 1]
   "mxfp8"                H                     I                   e4m3                  [E_local, N, K/32], uint8 or float8_e8m0fnu
   "mxfp8_w8a16"          H                     I                   e4m3                  [E_local, N, K/32], uint8 or float8_e8m0fnu
   "int8_per_channel"     H                     I                   int8                  [E_local, N] or [E_local, N, 1]
   "int8_per_token"       H                     I                   int8                  [E_local, N] or [E_local, N, 1]
   "int4_group32"         H/2                   I/2                 int4                  [E_local, N, K/32]
   "int4_group64"         H/2                   I/2                 int4                  [E_local, N, K/64]
   "int4_group128"        H/2                   I/2                 int4                  [E_local, N, K/128]
   "int4_group128_zero"   H/2                   I/2                 int4                  [E_local, N, K/128, 2]: scale, zero point
   "mxfp4_w4a16"          H/2                   I/2                 e2m1                  [E_local, N, K/32], uint8 or float8_e8m0fnu
   "mxfp4_fp8"            H/2                   I/2                 e2m1                  [E_local, N, K/32], uint8 or float8_e8m0fnu
   "nvfp4_w4a16"          H/2                   I/2                 e2m1                  [E_local, 4 * ceil(N*K/64) + 4] uint8, see below

   e4m3: float8_e4m3fn or uint8.  int4: uint8, low nibble first; x = (code - 8) * scale, with zero points (code - zero) * scale.
   e2m1: uint8, low nibble first, or float4_e2m1fn x 2.
   @endverbatim
 *
 * "int4_group32_fp8", "int4_group64_fp8", "int4_group128_fp8" and "int4_group128_zero_fp8" have the arrays of the scheme without "_fp8".
 *
 * Scales multiply the codes. An int4 group that does not divide K is halved until it does, down to 32; moe_get_quantized_layout() gives the
 * sizes. nvfp4: an expert's e4m3 scales [N, K/16], zeros up to a multiple of 4 bytes, then the 4 bytes of its global scale, a float32 that
 * multiplies, too. Activations are quantised to e4m3 by "fp8_block128", "mxfp4_fp8" and the int4 schemes with "_fp8" (a scale for 128 of a
 * row), "mxfp8" (32) and "fp8_per_token" (the row), to int8 by "int8_per_token" (the row). moe_quantize() makes such arrays. In host memory
 * a scale that is not a number, or under which the largest code is not finite, is MOE_E_ARG.
 */
/* clang-format on */
typedef struct moe_weights {
  uint64_t struct_size;      /**< set by MOE_WEIGHTS_INIT */
  const DLTensor* w13;       /**< gate and up projections, as the table says; rows I or 2I */
  const DLTensor* w2;        /**< down projections, as the table says */
  const DLTensor* w13_scale; /**< scales of w13; NULL for "none" */
  const DLTensor* w2_scale;  /**< scales of w2; NULL for "none" */
  const DLTensor* w13_bias;  /**< [E_local, 2I] float32 ([E_local, I] without a gate), or NULL; both biases or none */
  const DLTensor* w2_bias;   /**< [E_local, H] float32, or NULL */
} moe_weights;
/** Initialiser of moe_weights. */
#define MOE_WEIGHTS_INIT {sizeof(moe_weights), NULL, NULL, NULL, NULL, NULL, NULL}

/** Configuration of a runner. A name that is NULL is the default stated; an unknown name is MOE_E_CONFIG with a list of the known ones. */
typedef struct moe_runner_config {
  uint64_t struct_size;            /**< set by MOE_RUNNER_CONFIG_INIT */
  int64_t hidden;                  /**< H */
  int64_t intermediate;            /**< I of one expert */
  int32_t num_experts;             /**< E of all ranks */
  int32_t topk;                    /**< k */
  int64_t max_tokens_per_rank;     /**< the most rows of one call on any rank */
  const moe_router_config* router; /**< NULL: the caller routes, and only moe_runner_forward_routed() works */
  const char* activation;          /**< "silu" (default), "gelu", "gelu_tanh", "swigluoai_halves" (gpt-oss: limit 7), "silu_clamped",
                                      "swiglu_step", "situ", and ungated "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul",
                                      "relu_no_mul". "swigluoai" is MOE_E_CONFIG: its gate and up rows alternate, see moe_weights */
  float activation_alpha;          /**< "swigluoai_halves": alpha of gate * sigmoid(alpha * gate) */
  float activation_beta;           /**< "swigluoai_halves": added to up */
  float activation_limit;          /**< bound of the activations that clamp; 0: no bound */
  int32_t weight_on_input;         /**< 1: the router weight multiplies an expert's input instead of its output */
  const char* dtype;               /**< of hidden and output: "float32", "bfloat16", "float16"; NULL: w13's, or "bfloat16" if quantised */
  const char* quantization;        /**< "none" (default), or a scheme of the table at moe_weights */
  const char* backend;             /**< "no_expert_parallel" (default in a group of one), "all_to_all_v" (default of others), "low_latency",
                                      "high_throughput" */
  const char* experts;             /**< NULL: the fastest for this device and quantisation; host: "onednn"; CUDA: "hopper_contiguous",
                                      "hopper_masked", "hopper_w4a16", "hopper_w8a16", "hopper_w4a8", "cuda_reference" */
  int32_t num_threads;             /**< host: threads of the experts, at most 4096; 0: OMP_NUM_THREADS, or all cores */
  int32_t log;                     /**< 1: print one line about the runner to stderr when it is created */
  float activation_situ_gate;      /**< of "situ": gate' = g tanh(gate / g) */
  float activation_situ_up;        /**< of "situ": up' = u tanh(up / u) */
  moe_runner_t workspace_of;       /**< CUDA: a runner of the same device whose experts' workspace this one shares; their calls take turns.
                                      Hopper's experts share; others ignore this. NULL: memory of its own */
} moe_runner_config;
/** Initialiser of moe_runner_config. */
#define MOE_RUNNER_CONFIG_INIT \
  {sizeof(moe_runner_config), 0, 0, 0, 0, 0, NULL, NULL, 1.702F, 1.0F, 0.0F, 0, NULL, NULL, NULL, NULL, 0, 0, 4.0F, 25.0F, NULL}

/** Optional arguments of a forward call. */
typedef struct moe_forward_options {
  uint64_t struct_size;      /**< set by MOE_FORWARD_OPTIONS_INIT */
  int64_t num_valid_rows;    /**< later rows are padding, their outputs are zeros; -1: all rows are valid */
  const DLTensor* token_ids; /**< [M] int64, for a router with a hash table; moe_runner_forward() only; else NULL */
  const DLTensor* num_rows;  /**< CUDA, "no_expert_parallel": [1] int32 on the device, the number of valid rows, read by a graph's replay;
                                or NULL */
} moe_forward_options;
/** Initialiser of moe_forward_options. */
#define MOE_FORWARD_OPTIONS_INIT {sizeof(moe_forward_options), -1, NULL, NULL}

/** Facts about a runner, from moe_runner_get_info(). Strings are static. */
typedef struct moe_runner_info {
  uint64_t struct_size;      /**< set by MOE_RUNNER_INFO_INIT */
  DLDevice device;           /**< where it runs: that of its weights */
  int32_t rank;              /**< this rank's index in the group */
  int32_t size;              /**< ranks of the group */
  int32_t num_local_experts; /**< E_local */
  int32_t weights_packed;    /**< 1: the runner has a copy of weights and scales, and the caller's may be freed; biases are borrowed */
  int64_t bytes;             /**< memory of the runner without the borrowed weights, the exchange's window included */
  int64_t window_bytes;      /**< the part of bytes that is the exchange's window; 0 without one */
  const char* dtype;         /**< of hidden and output */
  const char* quantization;  /**< name of the scheme */
  const char* backend;       /**< name of the backend */
  const char* experts;       /**< name of the experts */
} moe_runner_info;
/** Initialiser of moe_runner_info. */
#define MOE_RUNNER_INFO_INIT {sizeof(moe_runner_info), {kDLCPU, 0}, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL}

/** Creates a runner: allocates all memory that it will ever use. Collective over the group. In the CUDA space the current device must be
 * that of the weights, and the call waits for the device. A rank whose arguments are refused gets its own error, its peers MOE_E_PEER. On
 * an error `*runner` is NULL. MOE_E_CONFIG, MOE_E_ARG; MOE_E_UNSUPPORTED for what the library or device lacks. */
MOE_API moe_status moe_runner_create(const moe_runner_config* config, const moe_weights* weights, moe_group_t group,
                                     moe_runner_t* runner) MOE_NOEXCEPT;
/** The layer: hidden [M, H] and router_logits [M, E + Z] (float32, bfloat16 or float16) -> output [M, H]. Collective. M may be 0 and may
 * differ between ranks; more than max_tokens_per_rank is MOE_E_CAPACITY. Rows may have strides; the elements of a row are adjacent. CUDA:
 * rows start at multiples of 16 bytes. The call allocates no memory. options may be NULL.
 *
 * output must not share memory with other arrays of the call, with biases and arrays of the router, nor with weights and scales that were
 * not packed: MOE_E_ARG. The call can be captured in a CUDA graph, except for "all_to_all_v" with so many rows that it reads counts on the
 * host: MOE_E_STATE. MOE_E_STATE also if the runner has no router. */
MOE_API moe_status moe_runner_forward(moe_runner_t runner, const DLTensor* hidden, const DLTensor* router_logits, const DLTensor* output,
                                      const moe_forward_options* options, void* stream) MOE_NOEXCEPT;
/** The same as moe_runner_forward() with the caller's routing: topk_ids [M, k] int32 or int64, experts in [0, E), each at most once in a
 * row, or -1 for none; topk_weights [M, k] float32. Host: the first invalid id is MOE_E_ARG. CUDA: an invalid id counts as -1, and
 * moe_runner_check() reports it. */
MOE_API moe_status moe_runner_forward_routed(moe_runner_t runner, const DLTensor* hidden, const DLTensor* topk_ids,
                                             const DLTensor* topk_weights, const DLTensor* output, const moe_forward_options* options,
                                             void* stream) MOE_NOEXCEPT;
/** Call it after the bytes of the weights were replaced in place and before the next forward call: a runner that has packed them packs them
 * again, in stream order. The arrays are those that moe_runner_create() was given. */
MOE_API moe_status moe_runner_weights_changed(moe_runner_t runner, void* stream) MOE_NOEXCEPT;
/** Reports errors of calls that the stream has finished. Does not wait. */
MOE_API moe_status moe_runner_check(moe_runner_t runner) MOE_NOEXCEPT;
/** Waits for the stream, at most until the group's deadline even if a peer died, and reports errors of its calls. */
MOE_API moe_status moe_runner_wait(moe_runner_t runner, void* stream) MOE_NOEXCEPT;
/** Fills `*info`, whose struct_size must be set. */
MOE_API moe_status moe_runner_get_info(moe_runner_t runner, moe_runner_info* info) MOE_NOEXCEPT;
/** Destroys a runner. CUDA: the stream of its last call must have finished. NULL: does nothing. */
MOE_API moe_status moe_runner_destroy(moe_runner_t runner) MOE_NOEXCEPT;

/** Waits until the stream of a GPU has finished, for programs that do not call CUDA themselves. device: kDLCUDA and its number; stream: one
 * of that device, or NULL, the default stream. MOE_E_TIMEOUT after timeout_ms; 0: 100 s. MOE_E_STATE while the stream is being captured,
 * MOE_E_UNSUPPORTED in a library built without CUDA. */
MOE_API moe_status moe_stream_wait(DLDevice device, void* stream, int64_t timeout_ms) MOE_NOEXCEPT;

/** The experts of one call without a lasting runner: creates a runner of a group of one rank, runs moe_runner_forward_routed(), waits and
 * destroys it. For a first try or single calls; create a runner for repeated ones. hidden, intermediate, num_experts, topk and
 * max_tokens_per_rank of config are taken from the arrays where they are 0; its router is ignored. */
MOE_API moe_status moe_experts(const moe_runner_config* config, const moe_weights* weights, const DLTensor* hidden,
                               const DLTensor* topk_ids, const DLTensor* topk_weights, const DLTensor* output, void* stream) MOE_NOEXCEPT;

/* ---- Quantisation and placement, on the host ---- */

/** Shapes and dtypes of one matrix [rows, cols] in a scheme: codes [rows, code_cols], scales [scale_rows, scale_cols], 0 x 0 if the scheme
 * has none. From moe_get_quantized_layout(). */
typedef struct moe_quantized_layout {
  uint64_t struct_size;   /**< set by MOE_QUANTIZED_LAYOUT_INIT */
  int64_t code_cols;      /**< elements of code_dtype in a row of codes */
  int64_t scale_rows;     /**< rows of scales, or 0 */
  int64_t scale_cols;     /**< columns of scales, or 0 */
  DLDataType code_dtype;  /**< uint8 or int8; "none": {0, 0, 0}, the codes have the dtype of the source */
  DLDataType scale_dtype; /**< element of the scales; "none": {0, 0, 0} */
} moe_quantized_layout;
/** Initialiser of moe_quantized_layout. */
#define MOE_QUANTIZED_LAYOUT_INIT {sizeof(moe_quantized_layout), 0, 0, 0, {0, 0, 0}, {0, 0, 0}}

/** Fills `*layout` for a matrix [rows, cols] in a scheme. MOE_E_CONFIG for an unknown scheme or a size that it does not support. */
MOE_API moe_status moe_get_quantized_layout(const char* quantization, int64_t rows, int64_t cols,
                                            moe_quantized_layout* layout) MOE_NOEXCEPT;
/** Quantises weights in host memory: matrix [rows, cols] or [n, rows, cols], float32, bfloat16 or float16 -> codes and scales with the
 * shapes of moe_get_quantized_layout(), the same n in front, and the dtypes of the table at moe_weights. All arrays are contiguous. Scales
 * may have one dimension less: [n, rows] where a row has one. scales may be NULL for "none". MOE_E_CONFIG as moe_get_quantized_layout();
 * MOE_E_ARG. */
MOE_API moe_status moe_quantize(const char* quantization, const DLTensor* matrix, const DLTensor* codes,
                                const DLTensor* scales) MOE_NOEXCEPT;

/** Sizes of moe_plan(). */
typedef struct moe_plan_config {
  uint64_t struct_size; /**< set by MOE_PLAN_CONFIG_INIT */
  int32_t num_physical; /**< P: physical experts over all ranks, a multiple of num_ranks, at least E */
  int32_t num_ranks;    /**< ranks of the group */
  int32_t num_nodes;    /**< nodes of the ranks */
  int32_t num_groups;   /**< expert groups of the router */
} moe_plan_config;
/** Initialiser of moe_plan_config. */
#define MOE_PLAN_CONFIG_INIT {sizeof(moe_plan_config), 0, 1, 1, 1}

/** Places experts by their load (docs/semantics/eplb.md). All arrays are contiguous, in host memory. load [layers, E] float32, float64,
 * int32 or int64 -> physical_to_logical [layers, P] int32, logical_to_physical [layers, E, X] int32, padded with -1 (X at least the most
 * replicas of an expert; P - E + 1 always suffices), replica_count [layers, E] int32. The last two may be NULL. MOE_E_CONFIG, MOE_E_ARG. */
MOE_API moe_status moe_plan(const moe_plan_config* config, const DLTensor* load, const DLTensor* physical_to_logical,
                            const DLTensor* logical_to_physical, const DLTensor* replica_count) MOE_NOEXCEPT;

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* MOE_MOE_H_ */
