// SPDX-License-Identifier: Apache-2.0
// examples/moe/router_name.hpp: the name that `moe list routers` has for a layer's router.
#pragma once

#include <string_view>

#include "moe/io/layer_description.hpp"

namespace moe_tool {

/// The first router of the registry whose type makes the layer's choices. "any", the router of run-time choices, if there is none.
std::string_view router_name(moe::io::LayerDescription const& description);

}  // namespace moe_tool
