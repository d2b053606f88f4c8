// SPDX-License-Identifier: Apache-2.0
// backends/window/host/low_latency_params.hpp: the options of LowLatency in the host space, and the rank-major layout there.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>

#include "moe/backends/common/combine_format.hpp"
#include "moe/backends/low_latency.hpp"
#include "moe/backends/window/host/standard.hpp"

namespace moe::backends::detail {

template <class Window>
  requires std::same_as<typename Window::Space, space::host>
struct LowLatencyParams<Window> {
  /// One row travels for each (token, rank). The receiver distributes it to its experts and sums their weighted outputs before it returns
  /// them: fewer bytes, one more rounding to the experts' output type. The same on all ranks.
  bool deduplicate = false;
  /// The format in which outputs travel; the same on all ranks. If not plain, the expert's rank codes and the summing rank decodes.
  CombineFormat combine = CombineFormat::plain;
  /// Experts write into the window and every rank reads its rows there, so that outputs are not copied. The same on all ranks. E_ARG with a
  /// CombineFormat other than plain, E_UNSUPPORTED with deduplicate.
  bool zero_copy = false;
  /// A rank that misses the deadline, or whose process ends, is masked instead of ending the group: the others neither wait for it nor send
  /// to it, and leave out its experts' terms. The same on all ranks.
  bool masks = false;
  int num_buffer_sets = 1;                         ///< dispatches whose receive half may be outstanding at once; the same on all ranks
  typename Window::Params window{};                ///< of the exchange's own window
  comm::WindowManager<Window>* manager = nullptr;  ///< owns the window and shares it among layers of one shape; null: own window
};

/// Checks the options. E_CONFIG, E_ARG, E_UNSUPPORTED.
template <class Window>
void check_params(LowLatencyParams<Window> const& p) {
  if (p.num_buffer_sets < 1 || p.num_buffer_sets > 16) {
    throw Error(ErrorCode::config, text("num_buffer_sets: ", p.num_buffer_sets, " is out of range [1, 16]"));
  }
  if (p.zero_copy && p.combine != CombineFormat::plain) {
    throw Error(ErrorCode::argument, text("zero_copy: outputs that travel as ", name(p.combine), " must be coded first"));
  }
  if (p.zero_copy && p.deduplicate) {
    throw Error(ErrorCode::unsupported, "zero_copy: needs one row for each (token, expert)");
  }
}

/// The options that ranks compare first, so that ranks with different options get an error.
template <class Window>
std::string contract_name(LowLatencyParams<Window> const& p) {
  bool const coded = p.combine != CombineFormat::plain;
  return text("low_latency", p.deduplicate ? "+dedup" : "", p.zero_copy ? "+zero_copy" : "", p.masks ? "+masks" : "", coded ? "+" : "",
              coded ? name(p.combine) : "");
}

/// Offsets of a buffer set's parts in the window.
struct LowLatencyOffsets {
  std::size_t rounds = 0;
  std::size_t returned_flag = 0;          // u32 [rank], 64 bytes apart
  std::array<std::size_t, 2> counts{};    // u64 [max_local][rank]; deduplicated: [rank]
  std::array<std::size_t, 2> received{};  // messages [max_local][rank][T_max]; deduplicated: [rank][T_max]
  std::array<std::size_t, 2> returned{};  // outputs [T_max k], deduplicated [T_max min(k, R)]; zero copy: i32, the row at the expert's rank
  std::array<std::size_t, 2> outputs{};   // zero copy only, by record: Partial [max_local][C][H]
};

/// The latest operation, and the most dispatches, of any buffer set on any rank. Read it between two barriers.
template <class BufferSets>
std::array<std::uint32_t, 2> latest_of(BufferSets const& buffer_sets) {
  std::array<std::uint32_t, 2> latest = buffer_sets[0].rounds->latest();
  for (auto const& s : buffer_sets) {
    std::array<std::uint32_t, 2> const theirs = s.rounds->latest();
    for (std::size_t i = 0; i < 2; ++i) {
      latest[i] = comm::round_reached(theirs[i], latest[i]) ? theirs[i] : latest[i];
    }
  }
  return latest;
}

template <class Window>
  requires std::same_as<typename Window::Space, space::host>
struct LowLatencyRankMajorParams<Window> {
  struct type {
    std::int64_t max_recv_rows = 0;                  ///< 0: the workspace has the worst case, R T_max rows
    typename Window::Params window{};                ///< of the exchange's own window
    comm::WindowManager<Window>* manager = nullptr;  ///< owns the window and shares it among layers of one shape; null: own window
  };
};

/// Rank major. Any scheme, any placement.
template <class Window, class Config, class Quant, class Partial>
  requires std::same_as<typename Window::Space, space::host>
class LowLatencyExchange<Window, Config, Quant, Partial, ActivationFormat::standard>
    : public moe::detail::HostStandardExchange<LowLatencyRankMajor<Window>, moe::detail::RowTransport::workspace, Config, Quant, Partial> {
 public:
  using moe::detail::HostStandardExchange<LowLatencyRankMajor<Window>, moe::detail::RowTransport::workspace, Config, Quant,
                                          Partial>::HostStandardExchange;
};

}  // namespace moe::backends::detail
