// SPDX-License-Identifier: Apache-2.0
// examples/moe/rule_check.hpp: every rule that a composition breaks, by the names of its policies.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

namespace moe_tool {

/// What a composition names, in the order of ModularKernel's arguments.
using Names = std::array<std::string, 5>;
inline constexpr std::array<char const*, 5> kPositions{"Config", "Router", "Quantization", "Backend", "Experts"};

struct Rule {
  char const* name;
  char const* sentence;
};
struct RuleCheck {
  std::vector<Rule> broken;    ///< in the order in which a compiler would report them
  std::string_view space;      ///< of the experts; the backend is the one of that name in this space, if there is one
  std::string_view router;     ///< the model's own; "any" of run-time dimensions
  std::string_view condition;  ///< under which a composition of run-time dimensions works with this router; empty: none
};

/// E_CONFIG for a name that its position does not take.
RuleCheck check_composition(Names const& names);

}  // namespace moe_tool
