// SPDX-License-Identifier: Apache-2.0
// tests/archetypes.hpp: the archetypes in the tests' namespace, and macros that make a policy lack one member.
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

// MOE_WITHOUT(Name, Base, member): Name is Base without a member: a deleted function hides it, or a private type if the member is a type.
// MOE_CHANGE_WITHOUT: the same as a template on the base. With MOE_FIXED nothing is hidden.
#ifdef MOE_FIXED
#define MOE_HIDE(member)
#define MOE_HIDE_TYPE(member)
#else
#define MOE_HIDE(member) void member() = delete;
#define MOE_HIDE_TYPE(member) \
 private:                     \
  using member = void;
#endif
#define MOE_WITHOUT(Name, Base, member) \
  struct Name : Base {                  \
    using Hidden = Base;                \
    using Hidden::Hidden;               \
    MOE_HIDE(member)                    \
  }
#define MOE_WITHOUT_TYPE(Name, Base, member) \
  struct Name : Base {                       \
    using Hidden = Base;                     \
    using Hidden::Hidden;                    \
    MOE_HIDE_TYPE(member)                    \
  }
