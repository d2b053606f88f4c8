// SPDX-License-Identifier: Apache-2.0
// parallel/workspace.hpp: bytes that each transport's fixed buffers take, and the check that they fit before anything is allocated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "moe/core/error.hpp"

namespace moe {

/// The parameters of a transport's buffer sizes. num_physical is P, with replicas: buffers sized by logical experts would be too small.
struct WorkspaceShape {
  std::int64_t max_tokens_per_rank = 0;  ///< T_max, rows
  std::int64_t hidden = 0;               ///< H, elements (multiple of 128)
  std::int64_t num_physical = 0;         ///< P
  std::int64_t ep_size = 1;              ///< R
  std::int64_t topk = 0;                 ///< k
  std::int64_t num_slots = 1;            ///< staging slots: 2 for dual-batch overlap
  std::int64_t row_bytes = 0;  ///< bytes of one dispatched row with its scales (pplx: hidden + scale bytes; one_sided: hidden + scales)
};

namespace detail {
constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }
}  // namespace detail

/// low_latency: slots · 2 parities · [max(T·dispatch, P·T·combine) send + max(P·T·dispatch, P·T·combine) receive + align128(4P)].
/// Messages: dispatch 16 + max(2H, H + 4H/128), combine 4H/128 + 2H bytes.
constexpr std::int64_t low_latency_bytes(WorkspaceShape const& s) {
  std::int64_t const scales = 4 * (s.hidden / 128);
  std::int64_t const dispatch = detail::round_up(16 + std::max(2 * s.hidden, s.hidden + scales), 16);
  std::int64_t const combine = scales + 2 * s.hidden;
  std::int64_t const tokens = s.max_tokens_per_rank;
  std::int64_t const send = std::max(tokens * dispatch, s.num_physical * tokens * combine);
  std::int64_t const receive = std::max(s.num_physical * tokens * dispatch, s.num_physical * tokens * combine);
  return s.num_slots * 2 * (send + receive + detail::round_up(4 * s.num_physical, 128));
}

/// pplx, bytes of one rank pair: the larger of dispatch (count words and T·L rows of round16(row + 4)) and combine (fp32 rows).
constexpr std::int64_t pplx_pair_bytes(WorkspaceShape const& s) {
  std::int64_t const local = s.num_physical / s.ep_size;
  std::int64_t const header = 16 + detail::round_up(4 * local, 16);
  std::int64_t const rows = s.max_tokens_per_rank * local;
  return header + rows * std::max(detail::round_up(s.row_bytes + 4, 16), detail::round_up(4 * s.hidden, 16));
}

/// pplx, all pairs of one rank.
constexpr std::int64_t pplx_bytes(WorkspaceShape const& s) { return s.num_slots * s.ep_size * pplx_pair_bytes(s); }

/// one_sided: pad128(control words) + pad128(R·T·payload) + pad128(R·T·combine); payload = row + ids and weights (8k), combine = 2H.
constexpr std::int64_t one_sided_bytes(WorkspaceShape const& s) {
  std::int64_t const tokens = s.max_tokens_per_rank;
  std::int64_t const control = 4 * (2 + 4 * s.ep_size + 2 * tokens * s.topk);
  std::int64_t const payload = s.row_bytes + 8 * s.topk;
  return s.num_slots * (detail::round_up(control, 128) + detail::round_up(s.ep_size * tokens * payload, 128) +
                        detail::round_up(s.ep_size * tokens * 2 * s.hidden, 128));
}

/// all-gather/reduce-scatter over a window: 2 parities · R·T_max rows of (payload + 2H) bytes.
constexpr std::int64_t allgather_bytes(WorkspaceShape const& s) {
  return s.num_slots * 2 * s.ep_size * s.max_tokens_per_rank * (s.row_bytes + 2 * s.hidden);
}

/// Largest max_tokens_per_rank whose `bytes(shape)` is at most `limit`; 0 if none. `bytes` grows with max_tokens_per_rank.
template <class Bytes>
constexpr std::int64_t largest_max_tokens(WorkspaceShape shape, std::int64_t limit, Bytes&& bytes) {
  std::int64_t fits = 0;
  std::int64_t too_many = shape.max_tokens_per_rank + 1;
  while (too_many - fits > 1) {
    shape.max_tokens_per_rank = fits + (too_many - fits) / 2;
    (bytes(shape) <= limit ? fits : too_many) = shape.max_tokens_per_rank;
  }
  return fits;
}

/// E_CONFIG with the bytes needed and the largest max_tokens_per_rank that fits, if `bytes(shape)` exceeds `limit` (the smaller of
/// free memory and what the transport can address, bytes).
template <class Bytes>
void check_workspace(std::string_view backend, WorkspaceShape const& shape, std::int64_t limit, Bytes&& bytes) {
  std::int64_t const needed = bytes(shape);
  if (needed <= limit) return;
  throw Error(ErrorCode::config, text(backend, " workspace: ", needed, " bytes needed, ", limit,
                                      " available, for max_tokens_per_rank = ", shape.max_tokens_per_rank, ", hidden = ", shape.hidden,
                                      ", P = ", shape.num_physical, ", ep_size = ", shape.ep_size,
                                      "; the largest max_tokens_per_rank that fits is ", largest_max_tokens(shape, limit, bytes)));
}

}  // namespace moe
