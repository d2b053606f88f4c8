// SPDX-License-Identifier: Apache-2.0
// routing/permutation.hpp: the order in which grouped GEMMs read the slots: sorted by local expert, stable in the slot number.
#pragma once

#include <cstdint>

#include "moe/core/array.hpp"
#include "moe/core/error.hpp"

namespace moe::routing {

/// Arguments and output arrays of a call's permutation (docs/semantics/experts.md §5). Slot (t, j) has the number t * num_slots + j.
/// Pointers are borrowed, in the space that the router runs in. Nothing is computed if expert_offsets is null.
struct Permutation {
  int num_local_experts = 0;                  ///< L
  int num_local_shared = 0;                   ///< fused shared experts that run here, as local ids L … L+S-1: 0 or num_fused_shared
  std::int32_t const* expert_map = nullptr;   ///< [P] physical to local id, -1 elsewhere; null: they are the same
  int row_alignment = 1;                      ///< each expert's rows start at a multiple of it
  std::int64_t* expert_offsets = nullptr;     ///< [L+S+1] out: first row of each expert; the last is the number of rows
  std::int32_t* expert_num_tokens = nullptr;  ///< [L+S] out: rows of each expert, without alignment; or null
  std::int32_t* sorted_slots = nullptr;       ///< [permutation_rows()] out: the slot of each row; M * num_slots in alignment gaps
  std::int32_t* inverse = nullptr;            ///< [M * num_slots] out: the row of each slot, -1 where it has none here
};

/// Rows that sorted_slots must hold for M tokens: every slot, and the gaps of every expert.
MOE_HD constexpr std::int64_t permutation_rows(std::int64_t num_rows, int num_slots, int num_experts, int row_alignment) {
  std::int64_t const slots = num_rows * num_slots;
  std::int64_t const used = slots < num_experts ? slots : num_experts;  // an expert without rows has no gap
  return slots + used * (row_alignment - 1);
}

/// Refuses a permutation that cannot be computed: E_ARG, or E_CAPACITY past 2^31 rows.
inline void validate(Permutation const& p, std::int64_t num_rows, int num_slots, int num_physical, int num_fused_shared) {
  auto const refuse = [](ErrorCode code, auto const&... parts) { throw Error(code, text(parts...)); };
  auto const e_arg = ErrorCode::argument;
  if (p.num_local_experts < 1) refuse(e_arg, "num_local_experts: ", p.num_local_experts, " is below 1");
  if (p.expert_map == nullptr && p.num_local_experts != num_physical) {
    refuse(e_arg, "num_local_experts: ", p.num_local_experts, " of ", num_physical, " physical experts needs an expert_map");
  }
  if (p.num_local_shared != 0 && p.num_local_shared != num_fused_shared) {
    refuse(e_arg, "num_local_shared: ", p.num_local_shared, " is neither 0 nor num_fused_shared ", num_fused_shared);
  }
  if (p.row_alignment < 1) refuse(e_arg, "row_alignment: ", p.row_alignment, " is below 1");
  if (num_rows > 0 && (p.sorted_slots == nullptr || p.inverse == nullptr))
    refuse(e_arg, "sorted_slots and inverse: must be set with expert_offsets");
  std::int64_t const rows = permutation_rows(num_rows, num_slots, p.num_local_experts + p.num_local_shared, p.row_alignment);
  if (rows >= std::int64_t{1} << 31) refuse(ErrorCode::capacity, "sorted_slots: ", rows, " rows, at most 2^31 - 1");
}

/// The permutation on the host, by counting. physical_ids: [M, num_slots], the first k columns routed and mapped (-1: no expert), then the
/// fused shared experts. Rows at or past num_valid_rows are padding.
inline void permute_slots(Rows<std::int32_t const> physical_ids, int k, int num_physical, std::int64_t num_valid_rows,
                          Permutation const& p) {
  std::int64_t const rows = physical_ids.extent(0);
  int const slots = static_cast<int>(physical_ids.extent(1));
  int const experts = p.num_local_experts + p.num_local_shared;
  auto const local = [&](std::int64_t t, int j) -> int {
    std::int32_t const id = physical_ids(t, j);
    if (t >= num_valid_rows || id < 0) return -1;
    if (j >= k) return j - k < p.num_local_shared ? p.num_local_experts + j - k : -1;
    if (id >= num_physical) return -1;  // a zero expert
    return p.expert_map == nullptr ? id : p.expert_map[id];
  };
  auto const aligned = [&](std::int64_t n) { return (n + p.row_alignment - 1) / p.row_alignment * p.row_alignment; };
  for (int e = 0; e <= experts; ++e) p.expert_offsets[e] = 0;
  for (std::int64_t t = 0; t < rows; ++t) {
    for (int j = 0; j < slots; ++j) {
      int const e = local(t, j);
      if (e >= 0) ++p.expert_offsets[e];
    }
  }
  std::int64_t start = 0;
  for (int e = 0; e < experts; ++e) {
    std::int64_t const count = p.expert_offsets[e];
    if (p.expert_num_tokens != nullptr) p.expert_num_tokens[e] = static_cast<std::int32_t>(count);
    p.expert_offsets[e] = start;
    start += aligned(count);
    for (std::int64_t r = p.expert_offsets[e] + count; r < start; ++r) p.sorted_slots[r] = static_cast<std::int32_t>(rows * slots);
  }
  // Filling moves each offset past its rows, to the end of its expert; then they are put back.
  for (std::int64_t t = 0; t < rows; ++t) {
    for (int j = 0; j < slots; ++j) {
      int const e = local(t, j);
      std::int64_t const slot = t * slots + j;
      p.inverse[slot] = -1;
      if (e < 0) continue;
      p.inverse[slot] = static_cast<std::int32_t>(p.expert_offsets[e]);
      p.sorted_slots[p.expert_offsets[e]++] = static_cast<std::int32_t>(slot);
    }
  }
  for (int e = experts; e > 0; --e) p.expert_offsets[e] = aligned(p.expert_offsets[e - 1]);
  p.expert_offsets[0] = 0;
}

}  // namespace moe::routing
