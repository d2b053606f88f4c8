// SPDX-License-Identifier: Apache-2.0
// core/error.hpp: the error model (docs/errors.md). Every error names the value and the bound.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace moe {

/// The kind of a failure, which tells what the caller can do about it.
enum class ErrorCode : std::uint8_t {
  config,       ///< E_CONFIG: impossible combination of configuration values; raised at construction
  argument,     ///< E_ARG: bad argument of a call (shape, dtype, range, alignment, null); nothing was launched
  unsupported,  ///< E_UNSUPPORTED: legal request that this backend, experts kernel or device cannot run
  capacity,     ///< E_CAPACITY: rows or bytes exceed a declared maximum
  state,        ///< E_STATE: call order violated
  timeout,      ///< E_TIMEOUT: a peer did not arrive within the deadline
  peer,         ///< E_PEER: a peer is known dead, excluded, or has aborted the call
  mismatch,     ///< E_MISMATCH: ranks disagree about a value that must be identical
  cuda,         ///< E_CUDA: a CUDA or NCCL call failed
  internal,     ///< E_INTERNAL: broken invariant
};

/// "E_CONFIG", "E_ARG", …
constexpr std::string_view name(ErrorCode code) {
  constexpr std::array<std::string_view, 10> names{"E_CONFIG",  "E_ARG",  "E_UNSUPPORTED", "E_CAPACITY", "E_STATE",
                                                   "E_TIMEOUT", "E_PEER", "E_MISMATCH",    "E_CUDA",     "E_INTERNAL"};
  return names[static_cast<std::size_t>(code)];
}

/// Joins its arguments into one string: text("width ", w, ", expected ", h).
template <class... Parts>
std::string text(Parts const&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

/// Where an error was raised. Not std::source_location, which clang 14 lacks.
struct SourceLocation {
  char const* file = "";
  int line = 0;
  static constexpr SourceLocation current(char const* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

/// The one exception type of the library. what() is "<code>: <message>": the parameter, its value and the constraint.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, std::string const& message, SourceLocation where = SourceLocation::current())
      : std::runtime_error(text(name(code), ": ", message)), code_(code), message_(message), where_(where) {}

  ErrorCode code() const { return code_; }
  /// The message without its code.
  std::string const& message() const { return message_; }
  SourceLocation const& where() const { return where_; }

 private:
  ErrorCode code_;
  std::string message_;
  SourceLocation where_;
};

/// An error of a transport: which rank saw it, which peer it concerns, in which phase ("dispatch", "combine", …) and round.
class TransportError : public Error {
 public:
  TransportError(ErrorCode code, int rank, int peer, std::string phase, std::uint64_t round, std::string const& message,
                 SourceLocation where = SourceLocation::current())
      : Error(code, text(message, " (rank ", rank, ", peer ", peer, ", phase ", phase, ", round ", round, ")"), where),
        rank_(rank),
        peer_(peer),
        phase_(std::move(phase)),
        round_(round) {}

  int rank() const { return rank_; }
  int peer() const { return peer_; }
  std::string const& phase() const { return phase_; }
  std::uint64_t round() const { return round_; }

 private:
  int rank_;
  int peer_;
  std::string phase_;
  std::uint64_t round_;
};

/// The error that call() throws, if it throws one. A TransportError comes back as an Error: its code and text, not its fields.
template <class Call>
std::optional<Error> error_of(Call&& call) {
  try {
    call();
  } catch (Error const& e) {
    return e;
  }
  return std::nullopt;
}

}  // namespace moe
