// SPDX-License-Identifier: Apache-2.0
// examples/moe/compositions.hpp: every composition of the registry by the names of its policies, and whether this program has it. `moe list
// compositions` prints this table; `moe layer` and `moe block` run from it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moe_tool {

struct Job;
struct JobOptions;
struct JobResult;
using Runner = JobResult (*)(Job const&);

/// What a layer in the CUDA space includes besides the header of its router.
inline constexpr char const* kDeviceRouting = "moe/routing/device/route.cuh";

struct CompositionRow {
  std::string_view quantization;
  std::string_view backend;
  std::string_view space;  ///< of the backend
  std::string_view experts;
  std::string_view experts_space;
  char const* refused = nullptr;  ///< the sentence of the rule that forbids it
  Runner run = nullptr;           ///< runs a job with it; null: not in this program
  std::string builds{};           ///< how to build a composition that is in the library but not in this program
  std::string_view condition{};   ///< under which it works with the router of with_router()

  /// "yes", "not in this program" or "no".
  std::string_view answer() const { return refused != nullptr ? "no" : run != nullptr ? "yes" : "not in this program"; }
  /// Of an answer: the rule, how to build it, the condition; empty for a plain yes.
  std::string why() const;
};

/// The product of the registry's lists, quantisations outermost.
std::vector<CompositionRow> const& compositions();

/// The row, which has the run-time router, for the router of that name, with the answer of `moe check`.
CompositionRow with_router(CompositionRow row, std::string const& router);

/// Whether the experts of that name make the router's choice, so that a result has no routing.
bool routes_inside(std::string_view experts);

/// The runner of the composition that the options name. E_CONFIG with the rule's sentence for one that the rules forbid; E_UNSUPPORTED,
/// naming how to build it, for one that this program does not have.
Runner runner_of(JobOptions const& options);

}  // namespace moe_tool
