// SPDX-License-Identifier: Apache-2.0
// examples/moe/main.cpp: the command-line tool. Exit code 0 done, 1 a run-time error, 2 bad usage; every error is one line on stderr.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "examples/moe/commands.hpp"
#include "moe/core/error.hpp"

namespace {

/// CLI11 words some errors over several lines.
std::string one_line(std::string message) {
  for (char& c : message) {
    if (c == '\n' || c == '\r') {
      c = ' ';
    }
  }
  return message;
}

/// Under mpirun an error that all ranks agree on is printed by the first.
bool first_rank() {
  char const* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  return rank == nullptr || std::string(rank) == "0";
}

int fail(char const* what, int exit_code) {
  if (first_rank()) {
    std::fprintf(stderr, "moe: %s\n", one_line(what).c_str());
  }
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"moe: runs, lists, plans and quantises mixture-of-experts layers", "moe"};
  app.set_version_flag("--version", MOE_VERSION);
  app.require_subcommand(1);
  moe_tool::add_layer(app);
  moe_tool::add_block(app);
  moe_tool::add_list(app);
  moe_tool::add_plan(app);
  moe_tool::add_quantize(app);
  try {
    app.parse(argc, argv);
    return 0;
  } catch (CLI::ParseError const& e) {
    if (e.get_exit_code() == 0) {
      return app.exit(e);
    }  // --help, --version
    return fail(e.what(), 2);
  } catch (moe::Error const& e) {
    return fail(e.what(), 1);
  } catch (std::exception const& e) {
    return fail(e.what(), 1);
  }
}
