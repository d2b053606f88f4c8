// SPDX-License-Identifier: Apache-2.0
// examples/moe/commands.hpp: the subcommands of the tool. Each function adds one; its callback throws moe::Error on failure.
#pragma once

namespace CLI {
class App;
}

namespace moe_tool {

void add_layer(CLI::App& app);
void add_block(CLI::App& app);
void add_list(CLI::App& app);
void add_plan(CLI::App& app);
void add_quantize(CLI::App& app);

}  // namespace moe_tool
