// SPDX-License-Identifier: Apache-2.0
// routing/caller_routing.hpp: routing that the caller did: ids and weights of a batch are checked and copied into a layer's arrays.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "moe/core/array.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/error.hpp"
#include "moe/core/space.hpp"
#include "moe/core/types.hpp"
#include "moe/routing/expert_mapping.hpp"
#include "moe/routing/row/route_args.hpp"
#include "moe/routing/row/router_config.hpp"
#include "moe/routing/row/score.hpp"

namespace moe::routing {

/// What is wrong with one slot of a caller's routing.
enum class SlotFault : std::int32_t { none, id_out_of_range, id_twice, weight_not_finite };

/// The first slot found wrong since the last report. Kernels write it, the host reads it; SlotFault::none: none.
struct CallerFault {
  std::int32_t kind = 0;  ///< SlotFault; -1 while a kernel writes the rest
  std::int32_t column = 0;
  std::int64_t row = 0;
  std::int64_t id = 0;
  std::int32_t num_ids = 0;
  float weight = 0.0F;
};

/// A view of the ids that the caller chose, [M, k], of int32 or int64. Which one is a value, so that one kernel serves both; ids are read
/// as int64 and checked before they are narrowed.
class GivenIds {
 public:
  GivenIds() = default;
  template <class Ids>
    requires std::is_convertible_v<Ids const&, Rows<std::int32_t const>>
  GivenIds(Ids const& ids) : GivenIds(static_cast<Rows<std::int32_t const>>(ids), false) {}
  template <class Ids>
    requires std::is_convertible_v<Ids const&, Rows<std::int64_t const>>
  GivenIds(Ids const& ids) : GivenIds(static_cast<Rows<std::int64_t const>>(ids), true) {}

  MOE_HD std::int64_t operator()(std::int64_t row, std::int64_t column) const {
    std::int64_t const i = row * stride_ + column;
    return wide_ ? static_cast<std::int64_t const*>(data_)[i] : static_cast<std::int32_t const*>(data_)[i];
  }
  std::int64_t extent(int dimension) const { return dimension == 0 ? rows_ : columns_; }
  std::int64_t stride(int dimension) const { return dimension == 0 ? stride_ : 1; }
  void const* data_handle() const { return data_; }
  std::int64_t element_bytes() const { return static_cast<std::int64_t>(wide_ ? sizeof(std::int64_t) : sizeof(std::int32_t)); }
  /// Rows [first, first + rows).
  GivenIds part(std::int64_t first, std::int64_t rows) const {
    GivenIds out = *this;
    if (data_ != nullptr) out.data_ = static_cast<std::byte const*>(data_) + first * stride_ * element_bytes();
    out.rows_ = rows;
    return out;
  }

 private:
  template <class View>
  GivenIds(View const& ids, bool wide)
      : data_(ids.data_handle()), rows_(ids.extent(0)), columns_(ids.extent(1)), stride_(ids.stride(0)), wide_(wide) {}

  void const* data_ = nullptr;
  std::int64_t rows_ = 0;
  std::int64_t columns_ = 0;
  std::int64_t stride_ = 0;
  bool wide_ = false;
};

/// Ids and weights that the caller chose.
struct GivenRouting {
  GivenIds ids;               ///< [M, k]
  Rows<float const> weights;  ///< [M, k]
};

/// One batch. All arrays lie in the space of the layer; `mapping` is a host pointer to tables in that space.
struct CallerRouting {
  GivenIds given_ids;                      ///< [M, k] logical ids; kNoExpert: no expert
  Rows<float const> given_weights;         ///< [M, k]; ignored where there is no expert
  std::int64_t num_valid_rows = 0;         ///< rows at or past it are padding: not checked, id -1, weight 0
  std::int32_t const* num_rows = nullptr;  ///< CUDA space: [1] number of valid rows in device memory, or null
  Rows<std::int32_t> topk_ids;             ///< [M, k] out: logical ids
  Rows<float> topk_weights;                ///< [M, k] out
  std::int32_t* dispatched = nullptr;      ///< CUDA space: [M, k] out: physical ids of `mapping`, or null
  ExpertMapping const* mapping = nullptr;  ///< CUDA space
  LoadRecorder recorder = {};              ///< CUDA space: counts physical experts, with a mapping
  float* zero_expert_weights = nullptr;    ///< CUDA space, with a mapping: [M] out, as FusedRouting::zero_expert_weights
  RouteCounters* counters = nullptr;       ///< CUDA space: counts invalid slots
  CallerFault* fault = nullptr;            ///< CUDA space: memory that host and device see
};

namespace detail {

/// By its bits, so that no compiler option can drop the test.
MOE_HD inline bool is_finite(float value) { return (float_bits(value) & 0x7f800000) != 0x7f800000; }

/// The verdict on one slot. `twice`: an earlier slot of the row names the same expert.
MOE_HD inline SlotFault slot_fault(std::int64_t id, float weight, std::int32_t num_ids, bool twice) {
  if (id < kNoExpert || id >= num_ids) return SlotFault::id_out_of_range;
  if (id == kNoExpert) return SlotFault::none;
  if (twice) return SlotFault::id_twice;
  return is_finite(weight) ? SlotFault::none : SlotFault::weight_not_finite;
}

inline Error fault_error(CallerFault const& f) {
  std::string const at = text("[", f.row, ", ", f.column, "]: ");
  switch (static_cast<SlotFault>(f.kind)) {
    case SlotFault::id_twice: return Error(ErrorCode::argument, text("topk_ids", at, f.id, " occurs twice in its row"));
    case SlotFault::weight_not_finite: return Error(ErrorCode::argument, text("topk_weights", at, f.weight, " is not finite"));
    default: return Error(ErrorCode::argument, text("topk_ids", at, f.id, " is out of range [-1, ", f.num_ids, ")"));
  }
}

/// Ids that a caller may give: [0, E + zero experts).
template <class Router>
std::int32_t num_ids(Router const& router) {
  if constexpr (facts::resolves<Router>()) {
    return router.num_experts() + router.resolved().num_zero_experts;
  } else {
    return router.num_experts();
  }
}

}  // namespace detail

/// Refuses arrays that are not [rows, k]. E_ARG.
template <class Router>
void check_given(Router const& router, GivenIds const& ids, Rows<float const> weights, std::int64_t rows) {
  auto expect = [](char const* what, std::int64_t value, std::int64_t wanted) {
    if (value != wanted) throw Error(ErrorCode::argument, text(what, ": ", value, ", expected ", wanted));
  };
  expect("topk_ids: rows", ids.extent(0), rows);
  expect("topk_ids: width", ids.extent(1), router.topk());
  expect("topk_weights: rows", weights.extent(0), rows);
  expect("topk_weights: width", weights.extent(1), router.topk());
  moe::detail::check_rows("topk_ids", ids);
  moe::detail::check_rows("topk_weights", weights);
}

/// Host space. Throws E_ARG for the first invalid slot of a valid row: an id out of [-1, E + zero experts) or named twice in its row, a
/// weight that is not finite.
template <class Router>
void check_given_slots(Router const& router, GivenIds const& ids, Rows<float const> weights, std::int64_t num_valid_rows) {
  std::int32_t const num_ids = detail::num_ids(router);
  for (std::int64_t t = 0; t < num_valid_rows; ++t) {
    for (int j = 0; j < router.topk(); ++j) {
      std::int64_t const id = ids(t, j);
      bool twice = false;
      for (int i = 0; i < j; ++i) twice = twice || ids(t, i) == id;
      SlotFault const fault = detail::slot_fault(id, weights(t, j), num_ids, twice);
      if (fault != SlotFault::none) throw detail::fault_error({static_cast<std::int32_t>(fault), j, t, id, num_ids, weights(t, j)});
    }
  }
}

/// Host space. As check_given_slots(). Fills topk_ids and topk_weights only if all slots are valid.
template <class Router>
void take_routing(Router const& router, CallerRouting const& c, HostStream) {
  std::int64_t const rows = c.given_ids.extent(0);
  int const k = router.topk();
  check_given_slots(router, c.given_ids, c.given_weights, c.num_valid_rows);
  for (std::int64_t t = 0; t < rows; ++t) {
    for (int j = 0; j < k; ++j) {
      std::int32_t const id = t < c.num_valid_rows ? static_cast<std::int32_t>(c.given_ids(t, j)) : kNoExpert;
      c.topk_ids(t, j) = id;
      c.topk_weights(t, j) = id == kNoExpert ? 0.0F : c.given_weights(t, j);
    }
  }
}

/// Throws the error of a fault that a kernel recorded since the last call, if any. E_ARG.
inline void throw_caller_fault(CallerFault& shared) {
  std::atomic_ref<std::int32_t> kind(shared.kind);
  if (kind.load(std::memory_order_acquire) <= 0) return;
  CallerFault const fault = shared;
  kind.store(0, std::memory_order_release);
  throw detail::fault_error(fault);
}

/// CUDA space: one launch, capturable, no host synchronisation. An invalid slot becomes kNoExpert with weight 0, is counted in
/// RouteCounters::invalid_slots and recorded in `fault`. Also maps, records and takes zero experts out, as route_fused(). Defined in
/// routing/device/caller_routing.cuh.
template <class Router>
void take_routing(Router const& router, CallerRouting const& c, Stream<space::cuda> stream);

}  // namespace moe::routing
