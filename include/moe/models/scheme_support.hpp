// SPDX-License-Identifier: Apache-2.0
// models/scheme_support.hpp: how well the library supports each quantisation of the registry on each GPU: the best support level of its
// experts.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "moe/models/registry.hpp"
#include "moe/quantization/support_level.hpp"

namespace moe::registry {

struct SchemeSupport {
  std::string_view scheme;
  int architecture;  ///< compute capability, 80 for 8.0
  quantization::Support support = quantization::Support::none;
  std::string_view experts = "";  ///< the first experts policy with this support level; of those that emulate, the last
};

/// The architectures that the table has a column for.
inline constexpr std::array<int, 4> kArchitectures{80, 89, 90, 100};

/// The best support level among the registry's experts of the CUDA space.
template <class Quant>
SchemeSupport best_support(int architecture) {
  SchemeSupport best{.scheme = Quant::kName, .architecture = architecture};
  hana::for_each(cuda_experts, [&](auto type) {
    using Experts = typename decltype(type)::type;
    if constexpr (Experts::template supports_quantization<Quant>()) {
      if (quantization::Support const s = facts::support_on<Experts, Quant>(architecture);
          s > best.support || (s == best.support && s == quantization::Support::emulated)) {
        best.support = s;
        best.experts = Experts::kName;
      }
    }
  });
  return best;
}

/// Every scheme on every architecture, by scheme.
inline std::vector<SchemeSupport> scheme_support() {
  std::vector<SchemeSupport> out;
  hana::for_each(quantizations, [&](auto type) {
    for (int const architecture : kArchitectures) {
      out.push_back(best_support<typename decltype(type)::type>(architecture));
    }
  });
  return out;
}

}  // namespace moe::registry
