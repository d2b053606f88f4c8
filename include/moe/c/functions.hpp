// SPDX-License-Identifier: Apache-2.0
// c/functions.hpp: the functions of moe.h. One translation unit of a library includes it; another one, or the same, defines
// moe::c::make_runner().
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>

#include "moe/c/config.hpp"
#include "moe/c/handles.hpp"
#include "moe/c/planning.hpp"
#include "moe/c/quantize.hpp"
#include "moe/c/routing.hpp"
#include "moe/c/runner.hpp"
#include "moe/c/status.hpp"
#include "moe/c/stream.hpp"
#include "moe/c/structs.hpp"
#include "moe/moe.h"

#ifdef MOE_C_HAS_MPI
#include "moe/comm/mpi.hpp"
#endif
#ifdef MOE_C_HAS_NCCL
#include "moe/comm/nccl.hpp"
#endif

#ifndef MOE_C_VERSION
#define MOE_C_VERSION "unknown"
#endif

namespace moe::c {

inline constexpr std::int64_t kDefaultDeadlineMs = 100'000;

/// Never destroyed: a runner that a program forgets may be used by its threads until the process ends.
inline HandleTable<Group>& groups() {
  static auto* const table = new HandleTable<Group>("group", 'G');
  return *table;
}
inline HandleTable<Runner>& runners() {
  static auto* const table = new HandleTable<Runner>("runner", 'R');
  return *table;
}
inline std::uint64_t number(void const* handle) { return reinterpret_cast<std::uintptr_t>(handle); }
// NOLINTBEGIN(performance-no-int-to-ptr): a C handle is a number that C sees as a pointer; nothing is read through it.
inline moe_group_t handle_of(std::shared_ptr<Group> group) { return reinterpret_cast<moe_group_t>(groups().insert(std::move(group))); }
inline moe_runner_t handle_of(std::shared_ptr<Runner> runner) {
  return reinterpret_cast<moe_runner_t>(runners().insert(std::move(runner)));
}
// NOLINTEND(performance-no-int-to-ptr)

inline std::int64_t deadline(std::int64_t timeout_ms) {
  if (timeout_ms < 0) throw Error(ErrorCode::argument, text("timeout_ms: ", timeout_ms, " is below 0"));
  return timeout_ms == 0 ? kDefaultDeadlineMs : timeout_ms;
}
[[noreturn]] inline void refuse_build(char const* what, char const* library) {
  throw Error(ErrorCode::unsupported, text(what, ": this library was built without ", library));
}

/// Stores a new group's C handle, or NULL if make() throws.
template <class Make>
moe_status create_group(moe_group_t* group, Make const& make) {
  return guard([&] {
    *not_null("group", group) = nullptr;
    *group = handle_of(make());
  });
}

/// Collective. The peers of a rank whose arguments are refused get E_PEER.
inline std::shared_ptr<Runner> create_runner(moe_runner_config const* config, moe_weights const* weights,
                                             std::shared_ptr<Group> const& group) {
  std::optional<Exclusive> alone;
  if (group->size() > 1) alone.emplace(group->busy, "group");
  bool told = false;
  try {
    moe_runner_config const c = checked("config", config);
    moe_weights const w = checked("weights", weights);
    Request request = request_of(c, w, group);
    if (c.workspace_of != nullptr) request.workspace = runners().find(number(c.workspace_of))->workspace(request.device);
    return make_runner(request, told);
  } catch (Error const& e) {
    if (!told) group->refuse(e.code());
    throw;
  } catch (...) {
    if (!told) group->refuse(ErrorCode::internal);
    throw;
  }
}

/// call(runner) while no other thread is in a call on the runner or, between ranks, on its group.
template <class Call>
moe_status with_runner(moe_runner_t handle, Call const& call) {
  return guard([&] {
    std::shared_ptr<Runner> const runner = runners().find(number(handle));
    Exclusive const alone(runner->busy, "runner");
    std::optional<Exclusive> alone_in_group;
    if (runner->group->size() > 1) alone_in_group.emplace(runner->group->busy, "group");
    call(*runner);
  });
}

/// E_STATE if this process has used the id.
inline void take_id(std::uint8_t const* id) {
  static std::mutex mutex;
  static auto* const used = new std::set<std::array<std::uint8_t, MOE_NCCL_ID_BYTES>>;
  std::array<std::uint8_t, MOE_NCCL_ID_BYTES> key{};
  std::memcpy(key.data(), id, key.size());
  std::lock_guard const lock(mutex);
  if (!used->insert(key).second) {
    throw Error(ErrorCode::state, "id: this process has used it for a group before; every group needs a new one of moe_nccl_get_id()");
  }
}

#ifdef MOE_C_HAS_MPI
inline std::shared_ptr<Group> group_over_mpi(MPI_Comm comm, std::int64_t timeout_ms) {
  return std::make_shared<GroupOver<comm::Mpi>>(comm, comm::Mpi::Params{.timeout_ms = deadline(timeout_ms)});
}
inline void check_mpi_runs() {
  int started = 0;
  int ended = 0;
  MPI_Initialized(&started);
  MPI_Finalized(&ended);
  if (started == 0 || ended != 0) {
    throw Error(ErrorCode::state, started == 0 ? "MPI: MPI_Init_thread() was not called" : "MPI: MPI_Finalize() was called");
  }
}
#endif

}  // namespace moe::c

extern "C" {

char const* moe_status_name(moe_status status) noexcept {
  static constexpr std::array<char const*, 12> kNames{"MOE_OK",         "MOE_E_CONFIG", "MOE_E_ARG",      "MOE_E_UNSUPPORTED",
                                                      "MOE_E_CAPACITY", "MOE_E_STATE",  "MOE_E_TIMEOUT",  "MOE_E_PEER",
                                                      "MOE_E_MISMATCH", "MOE_E_CUDA",   "MOE_E_INTERNAL", "MOE_E_MEMORY"};
  auto const i = static_cast<std::size_t>(status);
  return i < kNames.size() ? kNames[i] : "?";
}
char const* moe_last_error(void) noexcept { return moe::c::last_error(); }
char const* moe_version(void) noexcept { return MOE_C_VERSION; }
int32_t moe_abi_version(void) noexcept { return MOE_C_ABI_VERSION; }

int32_t moe_has(char const* feature) noexcept {
  [[maybe_unused]] auto const is = [&](char const* name) { return feature != nullptr && std::string_view(feature) == name; };
#ifdef MOE_HAS_CUDA
  if (is("cuda")) return 1;
#endif
#ifdef MOE_C_HAS_NCCL
  if (is("nccl")) return 1;
#endif
#ifdef MOE_C_HAS_MPI
  if (is("mpi")) return 1;
#endif
#ifdef MOE_C_HAS_ONEDNN
  if (is("onednn")) return 1;
#endif
  return 0;
}

// ---- Groups.

moe_status moe_group_create_self(moe_group_t* group) noexcept {
  return moe::c::create_group(group, [] { return std::make_shared<moe::c::GroupOfOne>(); });
}

moe_status moe_nccl_get_id([[maybe_unused]] uint8_t id[MOE_NCCL_ID_BYTES]) noexcept {
  return moe::c::guard([&] {
#ifdef MOE_C_HAS_NCCL
    static_assert(sizeof(ncclUniqueId) == MOE_NCCL_ID_BYTES);
    moe::c::not_null("id", id);
    ncclUniqueId const made = moe::comm::Nccl::unique_id();
    std::memcpy(id, &made, sizeof made);
#else
    moe::c::refuse_build("moe_nccl_get_id", "NCCL");
#endif
  });
}

moe_status moe_group_create_nccl(uint8_t const id[MOE_NCCL_ID_BYTES], int32_t rank, int32_t size, int64_t timeout_ms,
                                 moe_group_t* group) noexcept {
  return moe::c::create_group(group, [&]() -> std::shared_ptr<moe::c::Group> {
    moe::c::not_null("id", id);
    if (size < 1 || rank < 0 || rank >= size) {
      throw moe::Error(moe::ErrorCode::argument, moe::text("rank: ", rank, " of size ", size, ", expected a rank of [0, size)"));
    }
    [[maybe_unused]] std::int64_t const wait = moe::c::deadline(timeout_ms);
#ifdef MOE_C_HAS_NCCL
    moe::c::take_id(id);
    ncclUniqueId given;
    std::memcpy(&given, id, sizeof given);
    return std::make_shared<moe::c::GroupOver<moe::comm::Nccl>>(rank, size, given, moe::comm::Nccl::Params{.timeout_ms = wait});
#else
    moe::c::refuse_build("moe_group_create_nccl", "NCCL");
#endif
  });
}

moe_status moe_group_create_mpi([[maybe_unused]] int32_t fortran_communicator, [[maybe_unused]] int64_t timeout_ms,
                                moe_group_t* group) noexcept {
  return moe::c::create_group(group, [&]() -> std::shared_ptr<moe::c::Group> {
#ifdef MOE_C_HAS_MPI
    moe::c::check_mpi_runs();
    MPI_Comm comm = MPI_Comm_f2c(fortran_communicator);
    if (comm == MPI_COMM_NULL || comm == MPI_Comm{}) {  // the second is Open MPI's answer to a number that it never gave
      throw moe::Error(moe::ErrorCode::argument, moe::text("fortran_communicator: ", fortran_communicator, " is not a communicator"));
    }
    return moe::c::group_over_mpi(comm, timeout_ms);
#else
    moe::c::refuse_build("moe_group_create_mpi", "MPI");
#endif
  });
}

moe_status moe_group_create_mpi_world([[maybe_unused]] int64_t timeout_ms, moe_group_t* group) noexcept {
  return moe::c::create_group(group, [&]() -> std::shared_ptr<moe::c::Group> {
#ifdef MOE_C_HAS_MPI
    moe::c::check_mpi_runs();
    return moe::c::group_over_mpi(MPI_COMM_WORLD, timeout_ms);
#else
    moe::c::refuse_build("moe_group_create_mpi_world", "MPI");
#endif
  });
}

moe_status moe_group_get_rank(moe_group_t group, int32_t* rank, int32_t* size) noexcept {
  return moe::c::guard([&] {
    auto const found = moe::c::groups().find(moe::c::number(group));
    *moe::c::not_null("rank", rank) = found->rank();
    *moe::c::not_null("size", size) = found->size();
  });
}

moe_status moe_group_destroy(moe_group_t group) noexcept {
  return moe::c::guard([&] {
    if (group != nullptr) moe::c::groups().remove(moe::c::number(group));
  });
}

// ---- Runners.

moe_status moe_runner_create(moe_runner_config const* config, moe_weights const* weights, moe_group_t group,
                             moe_runner_t* runner) noexcept {
  return moe::c::guard([&] {
    *moe::c::not_null("runner", runner) = nullptr;
    *runner = moe::c::handle_of(moe::c::create_runner(config, weights, moe::c::groups().find(moe::c::number(group))));
  });
}

moe_status moe_runner_forward(moe_runner_t runner, DLTensor const* hidden, DLTensor const* router_logits, DLTensor const* output,
                              moe_forward_options const* options, void* stream) noexcept {
  return moe::c::with_runner(runner, [&](moe::c::Runner& r) {
    r.forward({.hidden = hidden, .logits = router_logits, .output = output, .options = options, .stream = stream});
  });
}

moe_status moe_runner_forward_routed(moe_runner_t runner, DLTensor const* hidden, DLTensor const* topk_ids, DLTensor const* topk_weights,
                                     DLTensor const* output, moe_forward_options const* options, void* stream) noexcept {
  return moe::c::with_runner(runner, [&](moe::c::Runner& r) {
    r.forward_routed(
        {.hidden = hidden, .topk_ids = topk_ids, .topk_weights = topk_weights, .output = output, .options = options, .stream = stream});
  });
}

moe_status moe_runner_weights_changed(moe_runner_t runner, void* stream) noexcept {
  return moe::c::with_runner(runner, [&](moe::c::Runner& r) { r.weights_changed(stream); });
}
moe_status moe_runner_check(moe_runner_t runner) noexcept {
  return moe::c::with_runner(runner, [](moe::c::Runner& r) { r.check(); });
}
moe_status moe_runner_wait(moe_runner_t runner, void* stream) noexcept {
  return moe::c::with_runner(runner, [&](moe::c::Runner& r) { r.wait(stream); });
}
moe_status moe_stream_wait(DLDevice device, void* stream, int64_t timeout_ms) noexcept {
  return moe::c::guard([&] { moe::c::wait_for_stream(device, stream, moe::c::deadline(timeout_ms)); });
}
moe_status moe_runner_get_info(moe_runner_t runner, moe_runner_info* info) noexcept {
  return moe::c::guard([&] {
    auto const found = moe::c::runners().find(moe::c::number(runner));
    moe::c::write_struct("info", info, [&](moe_runner_info& full) { found->describe(full); });
  });
}
moe_status moe_runner_destroy(moe_runner_t runner) noexcept {
  return moe::c::guard([&] {
    if (runner != nullptr) moe::c::runners().remove(moe::c::number(runner));
  });
}

moe_status moe_experts(moe_runner_config const* config, moe_weights const* weights, DLTensor const* hidden, DLTensor const* topk_ids,
                       DLTensor const* topk_weights, DLTensor const* output, void* stream) noexcept {
  return moe::c::guard([&] {
    moe_runner_config c = moe::c::checked("config", config);
    c.router = nullptr;
    auto fill = [](auto& value, char const* what, DLTensor const* t, int axis) {
      moe::c::not_null(what, t);
      if (t->ndim <= axis || t->shape == nullptr) moe::c::detail::refuse_shape(what, *t, moe::text("at least ", axis + 1, " dimensions"));
      if (value == 0) value = static_cast<std::remove_reference_t<decltype(value)>>(t->shape[axis]);
    };
    moe_weights const w = moe::c::checked("weights", weights);
    fill(c.hidden, "hidden", hidden, 1);
    fill(c.max_tokens_per_rank, "hidden", hidden, 0);
    fill(c.topk, "topk_ids", topk_ids, 1);
    fill(c.num_experts, "w13", w.w13, 0);
    if (c.max_tokens_per_rank == 0) c.max_tokens_per_rank = 1;  // no rows
    if (c.intermediate == 0) {
      fill(c.intermediate, "w13", w.w13, 1);
      if (moe::c::activation_of(c).gated()) c.intermediate /= 2;
    }
    if (moe::c::device_of("w13", *w.w13).space == moe::SpaceKind::cuda) {
      moe::c::refuse_capture<moe::space::cuda>("moe_experts()", stream, "takes memory and waits; create a runner before the capture");
    }
    auto const runner = moe::c::create_runner(&c, &w, std::make_shared<moe::c::GroupOfOne>());
    runner->forward_routed({.hidden = hidden, .topk_ids = topk_ids, .topk_weights = topk_weights, .output = output, .stream = stream});
    runner->wait(stream);
  });
}

// ---- Routing, quantisation, placement.

moe_status moe_route(moe_router_config const* router, DLTensor const* logits, DLTensor const* token_ids, DLTensor const* topk_ids,
                     DLTensor const* topk_weights, void* stream) noexcept {
  return moe::c::guard([&] { moe::c::route_any(moe::c::checked("router", router), logits, token_ids, topk_ids, topk_weights, stream); });
}

moe_status moe_get_quantized_layout(char const* quantization, int64_t rows, int64_t cols, moe_quantized_layout* layout) noexcept {
  return moe::c::guard([&] {
    moe::c::write_struct("layout", layout, [&](moe_quantized_layout& full) { moe::c::layout_of(quantization, rows, cols, full); });
  });
}
moe_status moe_quantize(char const* quantization, DLTensor const* matrix, DLTensor const* codes, DLTensor const* scales) noexcept {
  return moe::c::guard([&] { moe::c::quantize(quantization, matrix, codes, scales); });
}
moe_status moe_plan(moe_plan_config const* config, DLTensor const* load, DLTensor const* physical_to_logical,
                    DLTensor const* logical_to_physical, DLTensor const* replica_count) noexcept {
  return moe::c::guard(
      [&] { moe::c::plan(moe::c::checked("config", config), load, physical_to_logical, logical_to_physical, replica_count); });
}

}  // extern "C"
