// SPDX-License-Identifier: Apache-2.0
// bench/arguments.hpp: the names and numbers on a benchmark's command line. One that the program does not know ends it with exit code 2,
// before it looks for a GPU.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

namespace moe_bench {

inline constexpr int kBadArguments = 2;  // exit code

/// An argument that the program does not have: what the user wrote, and what is known.
struct BadArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Names = std::vector<std::string>;

/// The parts of "a,b,c".
inline Names split(std::string const& list) {
  Names out;
  std::stringstream in(list);
  for (std::string one; std::getline(in, one, ',');) out.push_back(one);
  return out;
}

/// Throws BadArgument: "shape x is unknown; known: a, b".
[[noreturn]] inline void refuse_name(std::string const& what, std::string const& name, Names const& known) {
  std::string text = what + " " + (name.empty() ? "\"\"" : name) + " is unknown; known: ";
  for (std::string const& k : known) text += (&k == known.data() ? "" : ", ") + k;
  throw BadArgument(text);
}
/// `name`, which must be one of the known ones.
inline std::string const& known_name(std::string const& what, std::string const& name, Names const& known) {
  if (std::find(known.begin(), known.end(), name) == known.end()) refuse_name(what, name, known);
  return name;
}
/// The parts of "a,b,c", each of which must be known. At least one.
inline Names known_names(std::string const& what, std::string const& list, Names const& known) {
  Names const names = split(list);
  if (names.empty()) refuse_name(what, list, known);
  for (std::string const& name : names) known_name(what, name, known);
  return names;
}

/// The shapes whose names contain `part`, or all of them for "all". At least one.
template <class Shape>
std::map<std::string, Shape> find_shapes(std::map<std::string, Shape> const& shapes, std::string const& part) {
  std::map<std::string, Shape> found;
  Names known{"all"};
  for (auto const& [name, shape] : shapes) {
    known.push_back(name);
    if (part == "all" || (!part.empty() && name.find(part) != std::string::npos)) found.emplace(name, shape);
  }
  if (found.empty()) refuse_name("shape", part, known);
  return found;
}

/// A whole number of at least `least`.
inline int count(std::string const& what, std::string const& text, int least = 1) {
  int n = 0;
  auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  if (error != std::errc() || end != text.data() + text.size() || n < least) {
    throw BadArgument(what + ": " + (text.empty() ? "\"\"" : text) + " is not a number from " + std::to_string(least));
  }
  return n;
}
/// The numbers of "1,8,64". At least one.
inline std::vector<int> counts(std::string const& what, std::string const& list, int least = 1) {
  std::vector<int> out;
  for (std::string const& one : split(list)) out.push_back(count(what, one, least));
  if (out.empty()) throw BadArgument(what + ": no number");
  return out;
}

/// What follows the option argv[i].
inline std::string value_of(int argc, char** argv, int i) {
  if (i + 1 == argc) throw BadArgument(std::string(argv[i]) + " has no value");
  return argv[i + 1];
}

/// Prints why the program ends; its exit code.
inline int refuse(char const* program, BadArgument const& error) {
  std::fprintf(stderr, "%s: %s\n", program, error.what());
  return kBadArguments;
}

}  // namespace moe_bench
