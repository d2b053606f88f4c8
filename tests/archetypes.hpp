// SPDX-License-Identifier: Apache-2.0
// tests/archetypes.hpp: the archetypes in the tests' namespace, and compositions of them with one policy changed.
#pragma once

#include "moe/archetypes.hpp"

namespace moe_test {

using namespace moe;
using namespace moe::archetypes;

/// A layer of archetypes, except for the given policies.
template <class Router = ArchetypeRouter<>, class Quant = ArchetypeQuantization<>, class Backend = ArchetypeBackend<>,
          class Experts = ArchetypeExperts<>, class Config = Tiny>
using Compose = ModularKernel<Config, Router, Quant, Backend, Experts>;

/// A backend or experts that have another exchange or kernel.
template <template <class> class Change, class Backend = ArchetypeBackend<>>
struct WithExchange : Backend {
  template <class Config, class Quant, class Partial>
  class Exchange : public Change<typename Backend::template Exchange<Config, Quant, Partial>> {
   public:
    using Change<typename Backend::template Exchange<Config, Quant, Partial>>::Change;
  };
};
template <template <class> class Change, class Experts = ArchetypeExperts<>>
struct WithKernel : Experts {
  template <class Config, class Quant, ActivationFormat Format>
  class Kernel : public Change<typename Experts::template Kernel<Config, Quant, Format>> {
   public:
    using Change<typename Experts::template Kernel<Config, Quant, Format>>::Change;
  };
};

}  // namespace moe_test
