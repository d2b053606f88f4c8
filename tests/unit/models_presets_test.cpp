// SPDX-License-Identifier: Apache-2.0
// tests/unit/models_presets_test.cpp: the rules allow every model of the catalogue, with the quantisation that its preset chooses, over
// each of the four backends, in both spaces.
#include <gtest/gtest.h>

#include <boost/hana/for_each.hpp>
#include <string_view>

#include "moe/models/catalog.hpp"
#include "moe/models/preset_cuda.hpp"
#include "moe/models/preset_host.hpp"
#include "moe/models/registry.hpp"

namespace {

namespace backends = moe::backends;
using moe::comm::Mpi;
using moe::comm::MpiShared;
using moe::models::PresetChoice;
using moe::models::PresetComposition;
using moe::registry::DeviceComm;
using moe::registry::DeviceWindow;

/// One assertion, whose error names the model and the backend.
template <class M, class Backend>
constexpr bool legal() {
  static_assert(PresetComposition<M, typename PresetChoice<M>::Quantization, Backend>::kLegal);
  return true;
}
/// The backends are those that the choice ranks.
template <class M, class... Backends>
constexpr int legal_over() {
  for (std::string_view name : {std::string_view(Backends::kName)...}) {
    if (moe::models::detail::rank_of(PresetChoice<M>::kDecode, name) == PresetChoice<M>::kDecode.size()) return 0;
    if (moe::models::detail::rank_of(PresetChoice<M>::kPrefill, name) == PresetChoice<M>::kPrefill.size()) return 0;
  }
  return (legal<M, Backends>() + ...);
}

TEST(Presets, EveryModelOfTheCatalogueIsLegalOverTheFourBackends) {
  int models = 0;
  boost::hana::for_each(moe::models::catalog, [&](auto type) {
    using M = typename decltype(type)::type;
    static_assert(legal_over<M, backends::NoExpertParallel<>, backends::AllToAllV<Mpi>, backends::LowLatency<MpiShared>,
                             backends::HighThroughput<MpiShared>>() == 4);
    static_assert(legal_over<M, backends::NoExpertParallel<moe::space::cuda>, backends::AllToAllV<DeviceComm>,
                             backends::LowLatency<DeviceWindow>, backends::HighThroughput<DeviceWindow>>() == 4);
    ++models;
  });
  EXPECT_EQ(models, 34);
}

/// What the rules refuse: experts of the host behind a backend of the device.
TEST(Presets, AWrongPresetIsNotLegal) {
  using M = moe::models::Qwen3_30B_A3B;
  using Wrong = moe::Composition<moe::models::PresetConfig<M, moe::space::cuda>, M::Router, PresetChoice<M>::Quantization,
                                 backends::NoExpertParallel<moe::space::cuda>, moe::experts::OneDnn>;
  static_assert(!Wrong::kLegal);
  EXPECT_STREQ(Wrong::reason(), moe::rules::SameSpace::kSentence);
}

}  // namespace
