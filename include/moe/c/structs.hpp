// SPDX-License-Identifier: Apache-2.0
// c/structs.hpp: the structs of moe.h in every size that they have had, so that programs built with an older moe.h go on.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "moe/c/status.hpp"
#include "moe/core/error.hpp"
#include "moe/moe.h"

namespace moe::c {

/// kSizes: the values of struct_size that a struct has had, ascending. A version that appends members puts the offset of the first of them
/// before the last entry, which is the present size. kInitial: the initialiser, which says what members are that the caller's version
/// lacks.
template <class Struct>
struct Versions;

template <>
struct Versions<moe_router_config> {
  static constexpr moe_router_config kInitial = MOE_ROUTER_CONFIG_INIT;
  static constexpr std::array kSizes{sizeof(moe_router_config)};
};
template <>
struct Versions<moe_weights> {
  static constexpr moe_weights kInitial = MOE_WEIGHTS_INIT;
  static constexpr std::array kSizes{sizeof(moe_weights)};
};
template <>
struct Versions<moe_runner_config> {
  static constexpr moe_runner_config kInitial = MOE_RUNNER_CONFIG_INIT;
  static constexpr std::array kSizes{offsetof(moe_runner_config, activation_situ_gate), offsetof(moe_runner_config, workspace_of),
                                     sizeof(moe_runner_config)};
};
template <>
struct Versions<moe_forward_options> {
  static constexpr moe_forward_options kInitial = MOE_FORWARD_OPTIONS_INIT;
  static constexpr std::array kSizes{sizeof(moe_forward_options)};
};
template <>
struct Versions<moe_runner_info> {
  static constexpr moe_runner_info kInitial = MOE_RUNNER_INFO_INIT;
  static constexpr std::array kSizes{sizeof(moe_runner_info)};
};
template <>
struct Versions<moe_quantized_layout> {
  static constexpr moe_quantized_layout kInitial = MOE_QUANTIZED_LAYOUT_INIT;
  static constexpr std::array kSizes{sizeof(moe_quantized_layout)};
};
template <>
struct Versions<moe_plan_config> {
  static constexpr moe_plan_config kInitial = MOE_PLAN_CONFIG_INIT;
  static constexpr std::array kSizes{sizeof(moe_plan_config)};
};

/// A copy, in today's size, of a struct that the caller filled: members that its version lacks are those of the initialiser. E_ARG if the
/// pointer is null or struct_size is none that this version knows.
template <class Struct>
Struct checked(char const* what, Struct const* given) {
  static_assert(std::is_trivially_copyable_v<Struct> && offsetof(Struct, struct_size) == 0);
  constexpr auto const& kSizes = Versions<Struct>::kSizes;
  static_assert(std::ranges::is_sorted(kSizes) && kSizes.back() == sizeof(Struct));
  not_null(what, given);
  std::uint64_t const size = given->struct_size;
  if (std::ranges::find(kSizes, size) == kSizes.end()) {
    std::string known;
    for (std::size_t const one : kSizes) known += text(known.empty() ? "" : one == kSizes.back() ? " and " : ", ", one);
    throw Error(ErrorCode::argument, text(what, ": struct_size is ", size, ", this library knows ", known,
                                          "; begin from its initialiser, with the moe.h of this library or an older one"));
  }
  Struct full = Versions<Struct>::kInitial;
  std::memcpy(&full, given, static_cast<std::size_t>(size));
  full.struct_size = sizeof(Struct);
  return full;
}

/// fill(members) writes a struct in today's size; the caller's gets the members that its version has, once fill() has returned.
template <class Struct, class Fill>
void write_struct(char const* what, Struct* out, Fill const& fill) {
  Struct full = checked<Struct>(what, out);
  std::uint64_t const size = out->struct_size;
  fill(full);
  full.struct_size = size;
  std::memcpy(out, &full, static_cast<std::size_t>(size));
}

}  // namespace moe::c
