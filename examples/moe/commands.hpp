// SPDX-License-Identifier: Apache-2.0
// examples/moe/commands.hpp: the subcommands of the tool. Each function adds one; its callback throws moe::Error on failure.
#pragma once

#include <exception>

namespace CLI {
class App;
}

namespace moe_tool {

void add_layer(CLI::App& app);
void add_block(CLI::App& app);
void add_list(CLI::App& app);
void add_check(CLI::App& app);
void add_plan(CLI::App& app);
void add_quantize(CLI::App& app);
void add_serve_sim(CLI::App& app);

/// An error that was printed while all ranks were still running: mpirun ends the others as soon as one exits with a code.
struct Reported : std::exception {};

/// Prints one line on the first rank. Under mpirun it returns on the others only when the first has printed; MPI is started for that if
/// it is not running.
void report_error(char const* what);

/// Refuses more than one rank, as bad usage: all ranks would do the same work and write the same files. For a subcommand's callback.
void require_one_rank(char const* command);

}  // namespace moe_tool
