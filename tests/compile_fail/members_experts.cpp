// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/members_experts.cpp: experts, and their kernels, that lack one member each.
// errors: each
// expect: the policy lacks the member 'static constexpr char const* kName'
// expect: the policy lacks the member 'using Space'
// expect: the policy lacks the member 'struct Params'
// expect: the experts policy lacks the member 'static constexpr bool reads(ActivationFormat)'
// expect: the experts policy lacks the member 'static constexpr TopKReduction reduction(ActivationFormat)'
// expect: the experts policy lacks the member 'template <class Act, class Weight> static constexpr bool supports_element()'
// expect: the experts policy lacks the member 'template <class Activation> static constexpr bool supports_activation()'
// expect: the experts policy lacks the member 'template <class Quant> static constexpr bool supports_quantization()'
// expect: the experts policy lacks the member 'template <class Config, class Quant> static constexpr bool fits_shape()'
// expect: the experts policy lacks the member 'template <class Config, class Quant, ActivationFormat Format> class Kernel'
// expect: the experts kernel lacks the member 'using Output'
// expect: the experts kernel lacks the member 'Kernel(Shape<Config> const&, WeightsOf<Config, Quant> const&, int64_t max_rows,
// expect: the experts kernel lacks the member 'apply(
// expect: the kernel of experts that route inside lacks the member 'template <class Router> void route_with(Router const&)'
#include "../archetypes.hpp"
#include "../without_member.hpp"

using namespace moe_test;
using Complete = ArchetypeExperts<>;
MOE_WITHOUT(NoName, Complete, kName);
MOE_WITHOUT_TYPE(NoSpace, Complete, Space);
MOE_WITHOUT_TYPE(NoParams, Complete, Params);
MOE_WITHOUT(NoReads, Complete, reads);
MOE_WITHOUT(NoReduction, Complete, reduction);
MOE_WITHOUT(NoElement, Complete, supports_element);
MOE_WITHOUT(NoActivation, Complete, supports_activation);
MOE_WITHOUT(NoQuantization, Complete, supports_quantization);
MOE_WITHOUT(NoFitsShape, Complete, fits_shape);
MOE_WITHOUT_TYPE(NoKernel, Complete, Kernel);

template <class K>
MOE_WITHOUT_TYPE(NoOutput, K, Output);
template <class Kernel>
class NotBuilt : public Kernel {
 public:
#ifdef MOE_FIXED
  using Kernel::Kernel;
#endif
};
template <class K>
MOE_WITHOUT(NoApply, K, apply);
template <class K>
MOE_WITHOUT(NoRouteWith, K, route_with);
struct RoutesInside : ExpertsFacts {
  static constexpr bool kRoutesInside = true;
};

template <class E>
using ComposeExperts = Compose<ArchetypeRouter<>, ArchetypeQuantization<>, ArchetypeBackend<>, E>;
static_assert(sizeof(ComposeExperts<NoName>) > 0);
static_assert(sizeof(ComposeExperts<NoSpace>) > 0);
static_assert(sizeof(ComposeExperts<NoParams>) > 0);
static_assert(sizeof(ComposeExperts<NoReads>) > 0);
static_assert(sizeof(ComposeExperts<NoReduction>) > 0);
static_assert(sizeof(ComposeExperts<NoElement>) > 0);
static_assert(sizeof(ComposeExperts<NoActivation>) > 0);
static_assert(sizeof(ComposeExperts<NoQuantization>) > 0);
static_assert(sizeof(ComposeExperts<NoFitsShape>) > 0);
static_assert(sizeof(ComposeExperts<NoKernel>) > 0);
static_assert(sizeof(ComposeExperts<WithKernel<NoOutput>>) > 0);
static_assert(sizeof(ComposeExperts<WithKernel<NotBuilt>>) > 0);
static_assert(sizeof(ComposeExperts<WithKernel<NoApply>>) > 0);
static_assert(sizeof(ComposeExperts<WithKernel<NoRouteWith, ArchetypeExperts<RoutesInside>>>) > 0);
