// SPDX-License-Identifier: Apache-2.0
// examples/moe/compositions.cpp: the table of compositions, from the registry's lists, the rules, and what this program instantiates.
#include "examples/moe/compositions.hpp"

#include <type_traits>

#include "examples/moe/cuda/instances.hpp"
#include "moe/models/policy_table.hpp"
#include "moe/models/registry.hpp"

namespace moe_tool {
namespace {

namespace hana = boost::hana;
namespace registry = moe::registry;
using moe::text;

/// How to build a composition that this program leaves out. Experts that route inside include the routing kernel themselves.
template <class Backend, class Experts>
std::string own_program() {
  constexpr bool kNeedsRoute = std::is_same_v<typename Backend::Space, moe::space::cuda> && !moe::facts::routes_inside<Experts>();
  return text("a program that includes ", registry::include_of_backend<Backend>(), kNeedsRoute ? ", " : " and ",
              registry::include_of_experts<Experts>(), kNeedsRoute ? text(" and ", kDeviceRouting) : "",
              " builds it; `moe list policies` names the types");
}

template <class Quant, class Backend, class Experts>
void choose_host(CompositionRow& row) {
  constexpr bool kInside = moe::facts::routes_inside<Experts>();
  constexpr auto backend = hana::type_c<Backend>;
  if constexpr (decltype(hana::contains(registry::host_backends, backend))::value && !kInside) {
    row.run = &run_host<Quant>;
  } else if constexpr (decltype(hana::contains(registry::sample_quantizations, hana::type_c<Quant>))::value) {
    if constexpr (kInside) {
      row.run = &run_inside<Quant>;
    } else {
      row.run = &run_windows<Quant, Backend::kFormat>;
    }
  } else {
    row.builds = text(own_program<Backend, Experts>(), ". This one has ", kInside ? "experts that route inside" : "windows", " with ",
                      registry::names(registry::sample_quantizations), "; ", kInside ? "reference" : "all_to_all_v", " has every scheme");
  }
}

template <class Quant, class Backend, class Experts>
void choose_cuda(CompositionRow& row) {
  constexpr Needs needs = instance_needs<Quant, Backend, Experts>();
  if constexpr (needs == Needs::own_program) {
    row.builds = own_program<Backend, Experts>();
  } else if constexpr (kHas[static_cast<std::size_t>(needs)]) {
    row.run = cuda_runner<Quant, Backend, Experts>();
  } else {
    row.builds = what_builds();
  }
}

template <class Quant, class Backend, class Experts>
CompositionRow make_row() {
  CompositionRow row{.quantization = Quant::kName,
                     .backend = Backend::kName,
                     .space = Backend::Space::kName,
                     .experts = Experts::kName,
                     .experts_space = Experts::Space::kName,
                     .batched = Backend::kFormat == moe::ActivationFormat::batched,
                     .routes_inside = moe::facts::routes_inside<Experts>()};
  if constexpr (!std::is_same_v<typename Backend::Space, typename Experts::Space>) {
    row.refused = moe::rules::SameSpace::kSentence;  // the first rule: no need to judge the others
  } else {
    using Rules = registry::CompositionOf<registry::LayerFor<Backend, Experts>, Quant, Backend, Experts>;
    row.refused = Rules::reason();
    if constexpr (!Rules::kLegal) {
      // nothing runs it
    } else if constexpr (std::is_same_v<typename Backend::Space, moe::space::host>) {
      choose_host<Quant, Backend, Experts>(row);
    } else {
      choose_cuda<Quant, Backend, Experts>(row);
    }
  }
  return row;
}

template <class Quant>
void add_rows(std::vector<CompositionRow>& rows) {
  hana::for_each(registry::all_backends, [&](auto backend) {
    hana::for_each(registry::all_experts, [&](auto experts) {
      rows.push_back(make_row<Quant, typename decltype(backend)::type, typename decltype(experts)::type>());
    });
  });
}

}  // namespace

std::vector<CompositionRow> const& compositions() {
  static std::vector<CompositionRow> const all = [] {
    std::vector<CompositionRow> rows;
    hana::for_each(registry::quantizations, [&](auto quant) { add_rows<typename decltype(quant)::type>(rows); });
    return rows;
  }();
  return all;
}

bool routes_inside(std::string_view experts) {
  return registry::has_name(registry::host_experts_inside, experts) || registry::has_name(registry::cuda_experts_inside, experts);
}

Runner runner_of(JobOptions const& o) {
  for (CompositionRow const& row : compositions()) {
    if (row.quantization != o.quantization || row.backend != o.backend || row.space != o.device || row.experts != o.experts) {
      continue;
    }
    if (row.experts_space != row.space) {
      throw moe::Error(moe::ErrorCode::config, text("--experts ", o.experts, " needs --device ", row.experts_space));
    }
    if (row.refused != nullptr) {
      throw moe::Error(moe::ErrorCode::config, row.refused);
    }
    if (row.run == nullptr) {
      throw moe::Error(moe::ErrorCode::unsupported,
                       text("--quantization ", o.quantization, " with --experts ", o.experts, " and --backend ", o.backend, " on --device ",
                            o.device, ": not in this program: ", row.builds));
    }
    return row.run;
  }
  throw moe::Error(moe::ErrorCode::internal, text("the registry has no composition ", o.quantization, ", ", o.backend, ", ", o.experts));
}

}  // namespace moe_tool
