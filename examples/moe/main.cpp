// SPDX-License-Identifier: Apache-2.0
// examples/moe/main.cpp: the command-line tool. Exit code 0 done, 1 a run-time error, 2 bad usage; every error is one line on stderr.
#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <iostream>
#include <new>
#include <sstream>
#include <string>
#include <system_error>

#include "examples/moe/commands.hpp"
#include "examples/moe/refusal.hpp"
#include "moe/core/error.hpp"

namespace {

int fail(std::string const& what, int exit_code) {
  moe_tool::report_error(what.c_str());
  return exit_code;
}

/// 0, or 1 if what was printed is lost: the disk is full, or there is no standard output.
int flush_output() {
  errno = 0;  // std::cout.flush() writes what the C library holds, too
  std::cout.flush();
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.good()) {
    return 0;
  }
  return fail(moe::text("standard output cannot be written", errno != 0 ? ": " + std::generic_category().message(errno) : ""), 1);
}

/// The error of an option that the subcommand does not have; empty if there is none. CLI11 names a required option that is missing first,
/// even if it is missing because its name was mistyped.
std::string unknown_option(CLI::App const& command) {
  for (std::string const& word : command.remaining()) {
    if (word.size() < 2 || word[0] != '-') continue;
    std::string known;
    for (CLI::Option const* option : command.get_options()) {
      if (option->get_lnames().empty()) continue;
      known += (known.empty() ? "--" : ", --") + option->get_lnames().front();
    }
    return moe::text("unknown option \"", word, "\"; options of ", command.get_name(), ": ", known);
  }
  return {};
}

/// The error of an option before another option, whose name CLI11 took for the value; empty if there is none.
std::string missing_value(CLI::App const& command) {
  for (CLI::Option const* option : command.get_options()) {
    for (std::string const& word : option->results()) {
      if (word.starts_with("--") && command.get_option_no_throw(word) != nullptr) {
        return moe::text(option->get_name(), ": no value before ", word, ", expected ", option->get_type_name());
      }
    }
  }
  return {};
}

/// The error of a word that is no option; empty if there is none.
std::string unexpected_argument(CLI::App const& command) {
  auto const words = command.remaining();
  if (words.empty()) return {};
  std::string taken;
  for (CLI::Option const* option : command.get_options()) {
    if (option->get_positional()) taken += moe::text(taken.empty() ? "" : ", ", option->get_name());
  }
  return moe::text("unexpected argument \"", words[0], "\"; ", command.get_name(), " takes ",
                   taken.empty() ? "options alone" : "options and, once: " + taken);
}

/// The text between two parts of a text; empty if they are not there.
std::string between(std::string const& text, std::string const& before, std::string const& after) {
  std::size_t const begin = text.find(before), first = begin + before.size();
  std::size_t const end = begin == std::string::npos ? begin : text.find(after, first);
  return end == std::string::npos ? std::string{} : text.substr(first, end - first);
}

/// CLI11's errors of an option without its value, of one that is given twice, and of a flag that is given a value, in the form of all
/// others; empty for other errors.
std::string wrong_count(CLI::ParseError const& e) {
  std::string const said = moe::text(e.what(), '\n');
  if (std::string const type = between(said, " required ", " missing\n"); !type.empty()) {
    return moe::text(between(said, "", ": "), ": no value, expected ", type);
  }
  if (std::string const count = between(said, ": At Most 1 required but received ", "\n"); !count.empty()) {
    return moe::text(between(said, "", ": "), ": given ", count, " times, expected once");
  }
  if (std::string const flag = between(said, "Could not convert: ", " = "); !flag.empty()) {
    return moe::text(flag, ": ", moe_tool::refusal(between(said, " = ", "\n"), "no value, true or false"));
  }
  return {};
}

/// "what is required: ...", with the description of the positional argument that is missing; else the text of CLI11.
std::string missing_argument(CLI::App const& command, CLI::ParseError const& e) {
  std::string text = e.what();
  for (CLI::Option const* option : command.get_options()) {
    if (option->get_positional() && text == option->get_name() + " is required") return text + ": " + option->get_description();
  }
  return text;
}

/// The error of the command line. If the subcommand is missing, CLI11 does not say which word was given instead.
std::string usage_error(CLI::App const& app, CLI::ParseError const& e) {
  if (!app.get_subcommands().empty()) {
    CLI::App const& command = *app.get_subcommands().front();
    for (std::string const& found : {missing_value(command), wrong_count(e), unknown_option(command), unexpected_argument(command)}) {
      if (!found.empty()) return found;
    }
    return missing_argument(command, e);
  }
  std::string known;
  for (CLI::App const* command : app.get_subcommands([](CLI::App const*) { return true; })) {
    known += (known.empty() ? "" : ", ") + command->get_name();
  }
  auto const words = app.remaining();
  if (words.empty()) {
    return moe::text("a subcommand is required; known: ", known);
  }
  return moe::text("unknown ", words[0].starts_with('-') ? "option" : "subcommand", " \"", words[0], "\"; known subcommands: ", known);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"moe: runs, lists, plans and quantises mixture-of-experts layers", "moe"};
  app.set_version_flag("--version", MOE_VERSION);
  app.require_subcommand(1);
  moe_tool::add_layer(app);
  moe_tool::add_block(app);
  moe_tool::add_list(app);
  moe_tool::add_check(app);
  moe_tool::add_plan(app);
  moe_tool::add_quantize(app);
  moe_tool::add_serve_sim(app);
  try {
    app.parse(argc, argv);
    return flush_output();
  } catch (CLI::ParseError const& e) {
    if (e.get_exit_code() == 0) {
      std::ostringstream text;
      app.exit(e, text, text);
      std::cout << text.str();
      return flush_output();
    }  // --help, --version
    return fail(usage_error(app, e), 2);
  } catch (moe_tool::Reported const&) {
    return 1;
  } catch (std::bad_alloc const&) {
    return fail("E_CAPACITY: memory does not suffice for sizes like these", 1);
  } catch (std::exception const& e) {
    return fail(e.what(), 1);
  }
}
