// SPDX-License-Identifier: Apache-2.0
// examples/moe/main.cpp: the command-line tool. Exit code 0 done, 1 a run-time error, 2 bad usage; every error is one line on stderr.
#include <CLI/CLI.hpp>
#include <exception>

#include "examples/moe/commands.hpp"

namespace {

int fail(char const* what, int exit_code) {
  moe_tool::report_error(what);
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
  } catch (moe_tool::Reported const&) {
    return 1;
  } catch (std::exception const& e) {
    return fail(e.what(), 1);
  }
}
