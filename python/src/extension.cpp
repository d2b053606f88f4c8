// SPDX-License-Identifier: Apache-2.0
// python/src/extension.cpp: the functions of moe.h under the ABI of apache-tvm-ffi, so that one library serves every version of Python.
#include <moe/moe.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>
#include <moe/c/argument_names.hpp>
#include <moe/c/overlap.hpp>

#include <array>
#include <cstdint>
#include <deque>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace ffi = tvm::ffi;

namespace {

/// What the package calls otherwise than moe.h.
constexpr std::array<moe::c::ArgumentName, 16> kNames{{{"max_tokens_per_rank", "max_tokens"},
                                                       {"activation_alpha", "alpha"},
                                                       {"activation_beta", "beta"},
                                                       {"activation_limit", "limit"},
                                                       {"activation_situ_gate", "situ_gate"},
                                                       {"activation_situ_up", "situ_up"},
                                                       {"fortran_communicator", "communicator"},
                                                       {"moe_group_create_mpi", "Group.mpi"},
                                                       {"moe_group_create_mpi_world", "Group.mpi"},
                                                       {"moe_group_create_nccl", "Group.nccl"},
                                                       {"moe_nccl_get_id", "Group.nccl_id"},
                                                       {"moe_runner_wait", "wait"},
                                                       {"moe_stream_wait", "wait"},
                                                       {"moe_runner_forward", "forward"},
                                                       {"moe_runner_forward_routed", "forward_routed"},
                                                       {"NULL", "None"}}};

/// A Python exception of moe/_errors.py with the text of the library, in the names of the package. `before`: what moe.h writes before the
/// names of this call's arguments and the package does not.
void require(moe_status status, std::string const& before = "") {
  if (status == MOE_OK) return;
  std::string text;
  moe::c::with_names_of_caller(moe_last_error(), kNames, [&](std::string_view piece) { text += piece; });
  if (std::size_t const at = text.find(": " + before); at != std::string::npos) text.erase(at + 2, before.size());
  throw ffi::Error(std::string("moe.") + moe_status_name(status), text, "");
}

/// An array argument; null for None.
DLTensor const* array(ffi::AnyView argument) { return argument == nullptr ? nullptr : argument.cast<DLTensor*>(); }

/// An integer of Python as 32 bits. E_ARG with its name if it does not fit: a plain conversion would change the value.
std::int32_t narrowed(std::string const& what, std::int64_t value) {
  using Limits = std::numeric_limits<std::int32_t>;
  if (value < Limits::min() || value > Limits::max()) {
    throw ffi::Error("moe.MOE_E_ARG",
                     "E_ARG: " + what + ": " + std::to_string(value) + " is out of range [" + std::to_string(Limits::min()) + ", " +
                         std::to_string(Limits::max()) + "]",
                     "");
  }
  return static_cast<std::int32_t>(value);
}

using Dictionary = ffi::Map<ffi::String, ffi::Any>;

/// Reads the members of a struct of moe.h from a dictionary. Absent keys leave a member as it is. The strings that members point to live
/// as long as this object.
class Members {
 public:
  /// before: what the package writes before the names of the members.
  Members(char const* what, Dictionary const& values, char const* before = "") : what_(what), before_(before), values_(values) {}

  void read(char const* key, std::int32_t& member) {
    std::int64_t value = member;
    assign<std::int64_t>(key, value);
    member = narrowed(std::string(before_) + key, value);
  }
  void read(char const* key, std::int64_t& member) { assign<std::int64_t>(key, member); }
  void read(char const* key, float& member) { assign<double>(key, member); }
  void read(char const* key, DLTensor const*& member) { assign<DLTensor*>(key, member); }
  void read(char const* key, char const*& member) {
    known_.emplace(key);
    if (auto const found = values_.find(key); found != values_.end()) {
      texts_.emplace_back(std::string((*found).second.cast<ffi::String>()));
      member = texts_.back().c_str();
    }
  }
  /// After all members were read: a key that names none of them is an error.
  void finish() const {
    for (auto const& [key, value] : values_) {
      if (known_.contains(std::string(key))) continue;
      std::string known;
      for (std::string const& one : known_) known += (known.empty() ? "" : ", ") + one;
      throw ffi::Error("moe.MOE_E_CONFIG", std::string("E_CONFIG: ") + what_ + ": '" + std::string(key) + "' is not known, known: " + known,
                       "");
    }
  }

 private:
  template <class Read, class Member>
  void assign(char const* key, Member& member) {
    known_.emplace(key);
    if (auto const found = values_.find(key); found != values_.end()) member = static_cast<Member>((*found).second.cast<Read>());
  }

  char const* what_;
  char const* before_;
  Dictionary values_;
  std::deque<std::string> texts_;
  std::set<std::string> known_;
};

/// The stream of a call: the given one, or with -1 the one that the caller's framework has made current for the array's device.
void* stream_of(DLTensor const* tensor, std::int64_t stream) {
  if (tensor->device.device_type != kDLCUDA) {
    return nullptr;
  }
  return stream == -1 ? TVMFFIEnvGetStream(tensor->device.device_type, tensor->device.device_id) : reinterpret_cast<void*>(stream);
}

/// C handles travel through Python as integers; 0 is one that close() has freed. The library checks others: a stale one is an error,
/// not a crash.
template <class Handle>
Handle handle(std::int64_t number) {
  if (number == 0) {
    bool const group = std::is_same_v<Handle, moe_group_t>;
    throw ffi::Error("moe.MOE_E_STATE", std::string("E_STATE: ") + (group ? "group" : "runner") + ": it was closed", "");
  }
  return reinterpret_cast<Handle>(number);
}

ffi::String version() { return moe_version(); }
std::int64_t abi_version() { return moe_abi_version() == MOE_C_ABI_VERSION ? moe_abi_version() : -moe_abi_version(); }
bool has(ffi::String feature) { return moe_has(feature.c_str()) != 0; }

// ---- Groups ----

std::int64_t group_self() {
  moe_group_t group = nullptr;
  require(moe_group_create_self(&group));
  return reinterpret_cast<std::int64_t>(group);
}

ffi::Bytes nccl_id() {
  std::array<std::uint8_t, MOE_NCCL_ID_BYTES> id{};
  require(moe_nccl_get_id(id.data()));
  return ffi::Bytes(reinterpret_cast<char const*>(id.data()), id.size());
}

std::int64_t group_nccl(ffi::Bytes id, std::int64_t rank, std::int64_t size, std::int64_t timeout_ms) {
  if (id.size() != MOE_NCCL_ID_BYTES) {
    throw ffi::Error("moe.MOE_E_ARG", "E_ARG: id: " + std::to_string(id.size()) + " bytes, expected " + std::to_string(MOE_NCCL_ID_BYTES),
                     "");
  }
  moe_group_t group = nullptr;
  require(moe_group_create_nccl(reinterpret_cast<std::uint8_t const*>(id.data()), narrowed("rank", rank), narrowed("size", size),
                                timeout_ms, &group));
  return reinterpret_cast<std::int64_t>(group);
}

std::int64_t group_mpi(std::int64_t fortran_communicator, std::int64_t timeout_ms) {
  moe_group_t group = nullptr;
  require(moe_group_create_mpi(narrowed("communicator", fortran_communicator), timeout_ms, &group));
  return reinterpret_cast<std::int64_t>(group);
}

std::int64_t group_mpi_world(std::int64_t timeout_ms) {
  moe_group_t group = nullptr;
  require(moe_group_create_mpi_world(timeout_ms, &group));
  return reinterpret_cast<std::int64_t>(group);
}

std::int64_t group_rank(std::int64_t group) {
  std::int32_t rank = 0;
  std::int32_t size = 0;
  require(moe_group_get_rank(handle<moe_group_t>(group), &rank, &size));
  return rank;
}

std::int64_t group_size(std::int64_t group) {
  std::int32_t rank = 0;
  std::int32_t size = 0;
  require(moe_group_get_rank(handle<moe_group_t>(group), &rank, &size));
  return size;
}

void group_destroy(std::int64_t group) { require(moe_group_destroy(handle<moe_group_t>(group))); }

// ---- Routers ----

void read_router(Members& members, moe_router_config& config) {
  members.read("num_experts", config.num_experts);
  members.read("topk", config.topk);
  members.read("scoring", config.scoring);
  members.read("order", config.order);
  members.read("selection", config.selection);
  members.read("renorm", config.renorm);
  members.read("renorm_eps", config.renorm_eps);
  members.read("renorm_p", config.renorm_p);
  members.read("routed_scaling_factor", config.routed_scaling_factor);
  members.read("num_expert_group", config.num_expert_group);
  members.read("topk_group", config.topk_group);
  members.read("group_score", config.group_score);
  members.read("logit_softcap", config.logit_softcap);
  members.read("sparsemixer_eps", config.sparsemixer_eps);
  members.read("num_zero_experts", config.num_zero_experts);
  members.read("zero_expert", config.zero_expert);
  members.read("degenerate", config.degenerate);
  members.read("correction_bias", config.correction_bias);
  members.read("per_expert_scale", config.per_expert_scale);
  members.read("hash_table", config.hash_table);
  members.finish();
}

void route(Dictionary router, DLTensor* logits, ffi::AnyView token_ids, DLTensor* ids, DLTensor* weights, std::int64_t stream) {
  moe_router_config config = MOE_ROUTER_CONFIG_INIT;
  Members members("router", router);
  read_router(members, config);
  require(moe_route(&config, logits, array(token_ids), ids, weights, stream_of(logits, stream)), "router.");
}

// ---- Runners ----

std::int64_t runner_create(Dictionary settings, Dictionary arrays, ffi::AnyView router, std::int64_t group) {
  moe_runner_config config = MOE_RUNNER_CONFIG_INIT;
  Members members("runner", settings);
  members.read("hidden", config.hidden);
  members.read("intermediate", config.intermediate);
  members.read("num_experts", config.num_experts);
  members.read("topk", config.topk);
  members.read("max_tokens_per_rank", config.max_tokens_per_rank);
  members.read("activation", config.activation);
  members.read("activation_alpha", config.activation_alpha);
  members.read("activation_beta", config.activation_beta);
  members.read("activation_limit", config.activation_limit);
  members.read("activation_situ_gate", config.activation_situ_gate);
  members.read("activation_situ_up", config.activation_situ_up);
  members.read("weight_on_input", config.weight_on_input);
  members.read("dtype", config.dtype);
  members.read("quantization", config.quantization);
  members.read("backend", config.backend);
  members.read("experts", config.experts);
  members.read("num_threads", config.num_threads);
  members.read("log", config.log);
  std::int64_t workspace_of = 0;
  members.read("workspace_of", workspace_of);
  if (workspace_of != 0) config.workspace_of = handle<moe_runner_t>(workspace_of);
  members.finish();

  moe_weights weights = MOE_WEIGHTS_INIT;
  Members weight_members("weights", arrays);
  weight_members.read("w13", weights.w13);
  weight_members.read("w2", weights.w2);
  weight_members.read("w13_scale", weights.w13_scale);
  weight_members.read("w2_scale", weights.w2_scale);
  weight_members.read("w13_bias", weights.w13_bias);
  weight_members.read("w2_bias", weights.w2_bias);
  weight_members.finish();

  moe_router_config router_config = MOE_ROUTER_CONFIG_INIT;
  Members router_members("router", router == nullptr ? Dictionary() : router.cast<Dictionary>(), "router.");
  read_router(router_members, router_config);
  config.router = router == nullptr ? nullptr : &router_config;

  moe_runner_t runner = nullptr;
  require(moe_runner_create(&config, &weights, handle<moe_group_t>(group), &runner));
  return reinterpret_cast<std::int64_t>(runner);
}

/// The library checks shape, dtype and device. Returns the stream of the call, which wait() and close() need: for -1 this function
/// looks it up, and Python would need another call for it.
std::int64_t forward_routed(std::int64_t runner, DLTensor* hidden, DLTensor* ids, DLTensor* weights, DLTensor* output,
                            std::int64_t stream) {
  void* const on = stream_of(hidden, stream);
  require(moe_runner_forward_routed(handle<moe_runner_t>(runner), hidden, ids, weights, output, nullptr, on));
  return reinterpret_cast<std::int64_t>(on);
}

/// For an input that runs in pieces: the library sees one piece at a time, and the output of one may be the input of the next.
void refuse_overlap(DLTensor* output, DLTensor* hidden, DLTensor* ids, DLTensor* weights) {
  for (auto const& [what, read] : {std::pair<char const*, DLTensor*>{"hidden", hidden}, {"topk_ids", ids}, {"topk_weights", weights}}) {
    if (moe::c::overlap(moe::c::bytes_of(*output), moe::c::bytes_of(*read))) {
      throw ffi::Error("moe.MOE_E_ARG", "E_ARG: " + moe::c::overlap_text(what), "");
    }
  }
}

/// Returns the stream, too.
std::int64_t forward(std::int64_t runner, DLTensor* hidden, DLTensor* logits, DLTensor* output, ffi::AnyView token_ids,
                     std::int64_t stream) {
  moe_forward_options options = MOE_FORWARD_OPTIONS_INIT;
  options.token_ids = array(token_ids);
  void* const on = stream_of(hidden, stream);
  require(moe_runner_forward(handle<moe_runner_t>(runner), hidden, logits, output, &options, on));
  return reinterpret_cast<std::int64_t>(on);
}

/// As forward_routed, of which the first `num_valid_rows` rows count (-1: all), or num_rows[0] where that is given.
void forward_routed_rows(std::int64_t runner, DLTensor* hidden, DLTensor* ids, DLTensor* weights, DLTensor* output,
                         std::int64_t num_valid_rows, ffi::AnyView num_rows, std::int64_t stream) {
  moe_forward_options options = MOE_FORWARD_OPTIONS_INIT;
  options.num_valid_rows = num_valid_rows;
  options.num_rows = array(num_rows);
  require(moe_runner_forward_routed(handle<moe_runner_t>(runner), hidden, ids, weights, output, &options, stream_of(hidden, stream)));
}

void runner_weights_changed(std::int64_t runner, std::int64_t stream) {
  require(moe_runner_weights_changed(handle<moe_runner_t>(runner), reinterpret_cast<void*>(stream)));
}
void runner_check(std::int64_t runner) { require(moe_runner_check(handle<moe_runner_t>(runner))); }
void runner_wait(std::int64_t runner, std::int64_t stream) {
  require(moe_runner_wait(handle<moe_runner_t>(runner), reinterpret_cast<void*>(stream)));
}
/// Waits for a stream of a GPU, for arrays of frameworks that do not order their work after the stream. timeout_ms 0: 100 s.
void stream_wait(std::int64_t device, std::int64_t stream, std::int64_t timeout_ms) {
  require(moe_stream_wait({kDLCUDA, narrowed("device", device)}, reinterpret_cast<void*>(stream), timeout_ms));
}
void runner_destroy(std::int64_t runner) { require(moe_runner_destroy(handle<moe_runner_t>(runner))); }

Dictionary runner_info(std::int64_t runner) {
  moe_runner_info info = MOE_RUNNER_INFO_INIT;
  require(moe_runner_get_info(handle<moe_runner_t>(runner), &info));
  Dictionary out;
  out.Set("device_type", static_cast<std::int64_t>(info.device.device_type));
  out.Set("device_id", static_cast<std::int64_t>(info.device.device_id));
  out.Set("rank", static_cast<std::int64_t>(info.rank));
  out.Set("size", static_cast<std::int64_t>(info.size));
  out.Set("num_local_experts", static_cast<std::int64_t>(info.num_local_experts));
  out.Set("weights_packed", info.weights_packed != 0);
  out.Set("bytes", info.bytes);
  out.Set("window_bytes", info.window_bytes);
  out.Set("dtype", ffi::String(info.dtype));
  out.Set("quantization", ffi::String(info.quantization));
  out.Set("backend", ffi::String(info.backend));
  out.Set("experts", ffi::String(info.experts));
  return out;
}

// ---- Quantisation and placement ----

/// [code columns, scale rows, scale columns, code, bits, lanes of the codes' dtype, and of the scales'].
ffi::Array<std::int64_t> quantized_layout(ffi::String scheme, std::int64_t rows, std::int64_t cols) {
  moe_quantized_layout layout = MOE_QUANTIZED_LAYOUT_INIT;
  require(moe_get_quantized_layout(scheme.c_str(), rows, cols, &layout));
  return {layout.code_cols,        layout.scale_rows,       layout.scale_cols,       layout.code_dtype.code,  layout.code_dtype.bits,
          layout.code_dtype.lanes, layout.scale_dtype.code, layout.scale_dtype.bits, layout.scale_dtype.lanes};
}

void quantize(ffi::String scheme, DLTensor* matrix, DLTensor* codes, ffi::AnyView scales) {
  require(moe_quantize(scheme.c_str(), matrix, codes, array(scales)));
}

void plan(Dictionary settings, DLTensor* load, DLTensor* physical_to_logical, ffi::AnyView logical_to_physical,
          ffi::AnyView replica_count) {
  moe_plan_config config = MOE_PLAN_CONFIG_INIT;
  Members members("plan", settings);
  members.read("num_physical", config.num_physical);
  members.read("num_ranks", config.num_ranks);
  members.read("num_nodes", config.num_nodes);
  members.read("num_groups", config.num_groups);
  members.finish();
  require(moe_plan(&config, load, physical_to_logical, array(logical_to_physical), array(replica_count)));
}

// ---- Arrays ----

/// A tensor over the memory of another one, which lives as long.
struct View {
  explicit View(ffi::Tensor const& of) : tensor(of) {
    managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    managed.dl_tensor = *of.GetDLTensorPtr();
    managed.manager_ctx = this;
    managed.deleter = [](DLManagedTensorVersioned* self) { delete static_cast<View*>(self->manager_ctx); };
  }
  ffi::Tensor tensor;
  std::vector<std::int64_t> shape;
  DLManagedTensorVersioned managed{};
};

/// The bytes of a tensor under another dtype of the same size: for element types that numpy cannot hand over by DLPack.
ffi::Tensor reinterpret(ffi::Tensor tensor, std::int64_t code, std::int64_t bits) {
  auto* const view = new View(tensor);
  view->managed.dl_tensor.dtype = {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits), 1};
  return ffi::Tensor::FromDLPackVersioned(&view->managed);
}

/// `count` rows of a matrix from row `first` on.
ffi::Tensor rows(ffi::Tensor tensor, std::int64_t first, std::int64_t count) {
  auto* const view = new View(tensor);
  DLTensor& piece = view->managed.dl_tensor;
  std::int64_t const stride = piece.strides == nullptr ? piece.shape[1] : piece.strides[0];
  piece.byte_offset += static_cast<std::uint64_t>(first * stride * (piece.dtype.bits / 8));
  view->shape.assign({count, piece.shape[1]});
  piece.shape = view->shape.data();
  return ffi::Tensor::FromDLPackVersioned(&view->managed);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(version, version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(abi_version, abi_version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(has, has);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(group_self, group_self);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nccl_id, nccl_id);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(group_nccl, group_nccl);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(group_mpi, group_mpi);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(group_mpi_world, group_mpi_world);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(group_rank, group_rank);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(group_size, group_size);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(group_destroy, group_destroy);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(route, route);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(runner_create, runner_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward_routed, forward_routed);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward_routed_rows, forward_routed_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward, forward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(refuse_overlap, refuse_overlap);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(runner_weights_changed, runner_weights_changed);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(runner_check, runner_check);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(runner_wait, runner_wait);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(runner_destroy, runner_destroy);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(stream_wait, stream_wait);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(runner_info, runner_info);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantized_layout, quantized_layout);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize, quantize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(reinterpret, reinterpret);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rows, rows);
