// SPDX-License-Identifier: Apache-2.0
// c/status.hpp: exceptions to statuses of moe.h, and the text of each thread's last error.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string_view>

#include "moe/c/argument_names.hpp"
#include "moe/core/error.hpp"
#include "moe/moe.h"

namespace moe::c {

/// The last error's text. Fixed memory: it can be written when the host has no more.
inline char* last_error() noexcept {
  static thread_local char text[4096] = "";
  return text;
}
inline constexpr std::size_t kLastErrorBytes = 4096;

/// Keeps the text, with the names that moe.h has for the arguments.
inline moe_status fail(moe_status status, std::string_view text) noexcept {
  std::size_t bytes = 0;
  with_names_of_caller(text, kNamesOfMoeH, [&](std::string_view piece) {
    std::size_t const count = std::min(piece.size(), kLastErrorBytes - 1 - bytes);
    std::memcpy(last_error() + bytes, piece.data(), count);
    bytes += count;
  });
  last_error()[bytes] = '\0';
  return status;
}

/// The codes of core/error.hpp in their order, after MOE_OK.
constexpr moe_status status_of(ErrorCode code) { return static_cast<moe_status>(static_cast<int>(code) + 1); }
static_assert(status_of(ErrorCode::config) == MOE_E_CONFIG && status_of(ErrorCode::argument) == MOE_E_ARG &&
              status_of(ErrorCode::unsupported) == MOE_E_UNSUPPORTED && status_of(ErrorCode::capacity) == MOE_E_CAPACITY &&
              status_of(ErrorCode::state) == MOE_E_STATE && status_of(ErrorCode::timeout) == MOE_E_TIMEOUT &&
              status_of(ErrorCode::peer) == MOE_E_PEER && status_of(ErrorCode::mismatch) == MOE_E_MISMATCH &&
              status_of(ErrorCode::cuda) == MOE_E_CUDA && status_of(ErrorCode::internal) == MOE_E_INTERNAL);

/// Calls f() and returns the status of what it throws: no exception leaves a function of moe.h.
template <class F>
moe_status guard(F const& f) noexcept {
  try {
    f();
    return MOE_OK;
  } catch (Error const& e) {
    return fail(status_of(e.code()), e.what());
  } catch (std::bad_alloc const&) {
    return fail(MOE_E_MEMORY, "E_MEMORY: the host is out of memory");
  } catch (std::exception const& e) {
    return fail(MOE_E_INTERNAL, e.what());
  } catch (...) {
    return fail(MOE_E_INTERNAL, "E_INTERNAL: an exception of an unknown type");
  }
}

template <class Pointer>
Pointer not_null(char const* what, Pointer pointer) {
  if (pointer == nullptr) throw Error(ErrorCode::argument, text(what, ": is NULL"));
  return pointer;
}

}  // namespace moe::c
