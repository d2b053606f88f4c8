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

/// The schedule of a preset is the one that the table has for the tokens of the phase which prefers the backend, so plain.
template <class M, class Backend, class Experts>
constexpr bool in_chosen_schedule(moe::models::Phase phase) {
  using Quant = typename PresetChoice<M>::Quantization;
  constexpr moe::LayerSchedule kSchedule = moe::models::kPresetSchedule<M, Quant, Backend>;
  using Config = typename PresetComposition<M, Quant, Backend>::Config;
  static_assert(std::is_same_v<typename PresetComposition<M, Quant, Backend>::Experts, Experts>);
  return kSchedule == moe::choose_schedule(Backend::kName, Experts::kName, Quant::kName, moe::models::tokens_of(phase)) &&
         moe::kScheduleOf<Config> == kSchedule && kSchedule == moe::LayerSchedule{} &&
         std::is_same_v<Config, moe::models::PresetConfig<M, moe::space::cuda>>;
}

TEST(Presets, TheScheduleIsTheOneThatWasMeasuredToBeTheFastest) {
  using moe::models::Phase;
  using moe::models::detail::phase_of;
  using M = moe::models::DeepSeek_V3;
  using Decode = backends::LowLatency<DeviceWindow>;
  using Prefill = backends::HighThroughput<DeviceWindow>;
  static_assert(phase_of<M, Decode>() == Phase::decode && phase_of<M, Prefill>() == Phase::prefill);
  static_assert(phase_of<moe::models::Qwen3_30B_A3B, backends::NoExpertParallel<>>() == Phase::prefill);
  static_assert(moe::models::tokens_of(Phase::decode).most < moe::models::tokens_of(Phase::prefill).least);
  static_assert(in_chosen_schedule<M, Decode, moe::experts::HopperMasked>(Phase::decode));
  static_assert(in_chosen_schedule<M, Prefill, moe::experts::HopperContiguous>(Phase::prefill));
  static_assert(in_chosen_schedule<moe::models::Qwen3_30B_A3B, Decode, moe::experts::HopperMasked>(Phase::decode));
  static_assert(in_chosen_schedule<moe::models::GptOss_120B, Prefill, moe::experts::HopperW4A16>(Phase::prefill));
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
