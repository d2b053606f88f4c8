// SPDX-License-Identifier: Apache-2.0
// tests/mpi/eplb_runtime_schemes_test.cpp: experts move under runners that serve, in the common schemes of the registry and in int4 with
// zero points, with oneDNN where it computes the scheme: codes, scales and biases arrive together.
// moe-ranks: 2
#include <gtest/gtest.h>

#include "eplb_serving.hpp"

int wanted_thread_level() { return MPI_THREAD_MULTIPLE; }

namespace {

using namespace moe_test;

bool register_schemes() {
  using Backend = moe::backends::AllToAllV<moe::comm::Mpi>;
  ServingCases const cases{.topk = {3}, .modes = {MoveMode::pause, MoveMode::background}};
  auto const schemes = hana::append(moe::registry::common_quantizations, hana::type_c<moe::quantization::Int4Group128Zero>);
  hana::for_each(schemes, [&cases](auto type) {
    using Quant = typename decltype(type)::type;
    using OneDnn = moe::experts::OneDnn;
    if constexpr (moe::registry::CompositionOf<RegistryConfig, Quant, Backend, OneDnn>::kLegal) {
      register_serving<Quant, Backend, OneDnn>(__FILE__, __LINE__, cases);
    } else if constexpr (moe::registry::CompositionOf<RegistryConfig, Quant, Backend, moe::experts::Reference<float>>::kLegal) {
      register_serving<Quant, Backend, moe::experts::Reference<float>>(__FILE__, __LINE__, cases);
    }
  });
  return true;
}
[[maybe_unused]] bool const registered = register_schemes();

}  // namespace
