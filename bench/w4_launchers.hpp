// SPDX-License-Identifier: Apache-2.0
// bench/w4_launchers.hpp: the kernels with 4- or 8-bit weights by the name of their scheme. A program links moe_hopper_kernels.
#pragma once

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "moe/experts/hopper/w4/a8/problem.hpp"

namespace moe_bench {

inline constexpr moe::hopper::W4Scheme kW4Schemes[] = {
    moe::hopper::W4Scheme::int4,    moe::hopper::W4Scheme::int4_zero,    moe::hopper::W4Scheme::mxfp4,
    moe::hopper::W4Scheme::int4_32, moe::hopper::W4Scheme::int4_32_zero, moe::hopper::W4Scheme::nvfp4,
    moe::hopper::W4Scheme::int8,    moe::hopper::W4Scheme::fp8,          moe::hopper::W4Scheme::mxfp8};

inline std::optional<moe::hopper::W4Scheme> find_w4_scheme(std::string_view wanted) {
  auto const* const found = std::find_if(std::begin(kW4Schemes), std::end(kW4Schemes), [&](auto scheme) { return wanted == name(scheme); });
  return found == std::end(kW4Schemes) ? std::nullopt : std::optional(*found);
}
inline std::vector<std::string> w4_scheme_names() {
  std::vector<std::string> names;
  for (moe::hopper::W4Scheme const scheme : kW4Schemes) names.emplace_back(name(scheme));
  return names;
}

/// get.operator()<S>() of the scheme.
template <class Get>
moe::hopper::W4Launcher of_scheme(moe::hopper::W4Scheme scheme, Get const& get) {
  using enum moe::hopper::W4Scheme;
  switch (scheme) {
    case int4: return get.template operator()<int4>();
    case int4_zero: return get.template operator()<int4_zero>();
    case mxfp4: return get.template operator()<mxfp4>();
    case int4_32: return get.template operator()<int4_32>();
    case int4_32_zero: return get.template operator()<int4_32_zero>();
    case nvfp4: return get.template operator()<nvfp4>();
    case int8: return get.template operator()<int8>();
    case fp8: return get.template operator()<fp8>();
    case mxfp8: return get.template operator()<mxfp8>();
  }
  return nullptr;
}
inline moe::hopper::W4Launcher launcher_of(moe::hopper::W4Scheme scheme) {
  return of_scheme(scheme, [&]<moe::hopper::W4Scheme S>() { return moe::hopper::w4_launcher<S>(); });
}
/// The same with any activation.
inline moe::hopper::W4Launcher any_launcher_of(moe::hopper::W4Scheme scheme) {
  return of_scheme(scheme, [&]<moe::hopper::W4Scheme S>() { return moe::hopper::w4_any_launcher<S>(); });
}

/// The same under rows of e4m3 (W4A8Layer); null for a scheme that has no such kernels.
inline moe::hopper::w4a8::Launcher fp8_launcher_of(moe::hopper::W4Scheme scheme) {
  using enum moe::hopper::W4Scheme;
  switch (scheme) {
    case mxfp4: return &moe::hopper::w4a8::launch_layer<mxfp4, false>;
    case int4: return &moe::hopper::w4a8::launch_layer<int4, false>;
    case int4_zero: return &moe::hopper::w4a8::launch_layer<int4_zero, false>;
    case int4_32: return &moe::hopper::w4a8::launch_layer<int4_32, false>;
    case int4_32_zero: return &moe::hopper::w4a8::launch_layer<int4_32_zero, false>;
    default: return nullptr;
  }
}

}  // namespace moe_bench
