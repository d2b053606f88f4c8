// SPDX-License-Identifier: Apache-2.0
// examples/moe/placement.hpp: where the experts of `moe layer` and `moe block` lie.
#pragma once

#include "examples/moe/job.hpp"

namespace moe_tool {

/// Sets the job's placement, and its maps where experts have replicas or a file says where they lie. job.moe is set. E_ARG naming the file
/// and what is wrong with it, E_CONFIG for expert slots that do not divide over the ranks.
void place_experts(Job& job);
/// E_CONFIG, with the nearest numbers of replicas that fit, unless experts and replicas divide over the ranks.
void check_slots(int num_experts, int replicas, int ranks);

}  // namespace moe_tool
