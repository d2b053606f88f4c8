// SPDX-License-Identifier: Apache-2.0
// layer/options.hpp: arguments of a layer's calls besides the arrays.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "moe/core/array.hpp"
#include "moe/core/error.hpp"

namespace moe {

/// The stages of forward(). A layer has the first four, in order; a runner also has the others, each where its parts need it.
enum class Phase : std::uint8_t {
  route,     ///< gate, what precedes the experts, and router
  dispatch,  ///< quantise and send
  experts,
  combine,
  shared,     ///< shared experts, or their launch beside the routed ones
  finish,     ///< what follows the layer: projection, scaling, zero experts, adding the shared output
  reduction,  ///< sums over the TP group, and the restoring of its rows
};
inline constexpr std::size_t kNumPhases = 7;
constexpr std::string_view name(Phase phase) {
  constexpr std::array<std::string_view, kNumPhases> names{"route", "dispatch", "experts", "combine", "shared", "finish", "reduction"};
  return names[static_cast<std::size_t>(phase)];
}

/// A probe that measures nothing. A real probe has begin(Phase) and end(Phase), which are called on the host around each stage. Stages do
/// not nest.
struct NoProbe {
  void begin(Phase) {}
  void end(Phase) {}
};

/// Tells a probe of a stage that lasts as long as this object.
template <class Probe>
class Timed {
 public:
  Timed(Probe& probe, Phase phase) : probe_(probe), phase_(phase) { probe_.begin(phase_); }
  Timed(Timed const&) = delete;
  Timed& operator=(Timed const&) = delete;
  ~Timed() { probe_.end(phase_); }

 private:
  Probe& probe_;
  Phase phase_;
};

/// Ranks [first, first + ranks) of a placement whose rows are the same, as those of a TP group.
struct SameRows {
  int first = 0;
  int ranks = 0;
};

/// Memory that a layer holds on this rank besides its weights, in bytes.
struct LayerMemory {
  std::size_t arena = 0;   ///< in the layer's arena
  std::size_t window = 0;  ///< this rank's part of the window that the exchange maps; layers of one shape may share it (WindowManager)
};

/// Arguments that may differ from call to call besides the arrays.
struct ForwardOptions {
  std::int64_t num_valid_rows = -1;         ///< rows at or past it are padding and give zero rows; -1: all rows are valid
  std::int64_t const* token_ids = nullptr;  ///< [M], for hash routing, in the layer's space
  Rows<float> shared_weights = {};          ///< [M, S] out: weights of jointly normalised shared experts; or no rows
  /// Rows of one sequence; the call holds one sequence after the other. Only a router with an expert_capacity (Switch) reads it, and needs
  /// it where a call has more rows than an expert takes. 0: not known.
  std::int64_t sequence_length = 0;
  /// CUDA space: [1] number of valid rows, at most M, in device memory, so that a captured graph follows it. Output rows past it are zero
  /// or not written, and their routing is undefined. For backends whose exchange takes it (no_expert_parallel), else E_UNSUPPORTED.
  std::int32_t const* num_rows = nullptr;
};

/// E_ARG on a number of valid rows that a call of `rows` rows cannot have.
inline void check_valid_rows(ForwardOptions const& options, std::int64_t rows) {
  if (options.num_valid_rows < -1 || options.num_valid_rows > rows) {
    throw Error(ErrorCode::argument,
                text("num_valid_rows: ", options.num_valid_rows, " is out of range [0, ", rows, "], or -1 for all rows"));
  }
}

}  // namespace moe
