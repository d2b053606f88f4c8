// SPDX-License-Identifier: Apache-2.0
// tests/unit/models_registry_test.cpp: values derived from the registry: the facts of backends, the rules over device windows, the table
// of policies, how each scheme runs on each architecture.
#include "moe/models/registry.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>
#include <tuple>

#include "moe/models/policy_table.hpp"
#include "moe/models/scheme_support.hpp"
#include "moe/quantization/support_level.hpp"

namespace {

namespace hana = boost::hana;
namespace registry = moe::registry;
namespace quantization = moe::quantization;
using quantization::Support;

TEST(Registry, FactsOfABackendAreThoseOfItsPolicy) {
  int count = 0;
  hana::for_each(registry::all_backends, [&](auto type) {
    using Backend = typename decltype(type)::type;
    static_assert(Backend::kFacts.name == std::string_view(Backend::kName));
    static_assert(Backend::kFacts.batched == (Backend::kFormat == moe::ActivationFormat::batched));
    EXPECT_EQ(registry::backend_facts(Backend::kName), Backend::kFacts);
    ++count;
  });
  EXPECT_EQ(count, 20);
  EXPECT_EQ(registry::backend_facts("allgather_reduce_scatter"), moe::kDefaultBackend);
}

using Window = registry::DeviceWindow;
template <class T, class Quant, class Backend, class Experts>
using Rules = registry::CompositionOf<registry::RuntimeLayer<T, T>, Quant, Backend, Experts>;

TEST(Registry, DeviceWindowsCarryBf16AndE4m3) {
  hana::for_each(registry::cuda_window_backends, [](auto type) {
    using Backend = typename decltype(type)::type;
    using Experts = moe::experts::CudaReference;
    using moe::bf16;
    EXPECT_STREQ((Rules<float, quantization::None, Backend, Experts>::reason()), moe::rules::BackendCarriesElement::kSentence);
    EXPECT_STREQ((Rules<moe::f16, quantization::None, Backend, Experts>::reason()), moe::rules::BackendCarriesElement::kSentence);
    EXPECT_STREQ((Rules<bf16, quantization::Int8PerToken, Backend, Experts>::reason()), moe::rules::BackendCarriesQuantization::kSentence);
    EXPECT_STREQ((Rules<bf16, quantization::Mxfp8<>, Backend, Experts>::reason()), moe::rules::BackendCarriesQuantization::kSentence);
    static_assert(Rules<bf16, quantization::None, Backend, Experts>::kLegal);
    static_assert(Rules<bf16, quantization::Fp8Block<>, Backend, Experts>::kLegal);
    static_assert(Rules<bf16, quantization::Int4Group128, Backend, Experts>::kLegal, "weights alone do not travel");
    static_assert(std::is_same_v<typename registry::LayerFor<Backend, Experts>::Act, bf16>);
    static_assert(moe::facts::returns_element<Backend, bf16>() && moe::facts::returns_element<Backend, float>());
    static_assert(!moe::facts::returns_element<Backend, moe::f16>());
  });
  static_assert(Rules<float, quantization::None, moe::backends::LowLatency<moe::comm::MpiShared>, moe::experts::OneDnn>::kLegal);
  static_assert(
      std::is_same_v<registry::LayerFor<moe::backends::AllToAllV<registry::DeviceComm>, moe::experts::CudaReference>::Act, float>);
}

TEST(Registry, ExpertsThatRouteInside) {
  EXPECT_EQ(registry::names(hana::concat(registry::host_experts_inside, registry::cuda_experts_inside)),
            "monolithic_reference, monolithic_cuda_reference");
  auto const legal = [](auto backends, auto experts) {
    using Experts = typename decltype(+experts[hana::size_c<0>])::type;
    hana::for_each(backends, [](auto type) {
      using Backend = typename decltype(type)::type;
      char const* const reason =
          registry::CompositionOf<registry::LayerFor<Backend, Experts>, quantization::None, Backend, Experts>::reason();
      if (Backend::kFacts.transport != moe::Transport::all_to_all) {
        EXPECT_EQ(reason, nullptr) << Backend::kName;
      } else if (Backend::kFormat == moe::ActivationFormat::standard) {
        EXPECT_STREQ(reason, moe::rules::MonolithicTransport::kSentence) << Backend::kName;
      } else {
        EXPECT_STREQ(reason, moe::rules::ActivationFormatMatches::kSentence) << Backend::kName;
      }
    });
  };
  legal(registry::all_host_backends, registry::host_experts_inside);
  legal(registry::all_cuda_backends, registry::cuda_experts_inside);
}

TEST(Registry, PolicyTable) {
  std::set<std::tuple<std::string_view, std::string_view, std::string_view>> seen;
  std::filesystem::path const include = std::filesystem::path(MOE_TEST_DATA) / "../../include";
  for (registry::PolicyRow const& row : registry::policy_table()) {
    EXPECT_TRUE(seen.insert({row.kind, row.name, row.space}).second) << row.name << " twice";
    for (std::string rest = row.include; !rest.empty();) {  // "a and b"
      std::size_t const end = std::min(rest.find(" and "), rest.size());
      EXPECT_TRUE(std::filesystem::is_regular_file(include / rest.substr(0, end))) << row.name << ": " << row.include;
      rest.erase(0, end + 5);
    }
    EXPECT_EQ(row.type.find("moe::registry::"), std::string::npos) << row.type;
    EXPECT_EQ(row.include.ends_with(".cuh"), row.space == "cuda") << row.include;
    EXPECT_EQ(row.include.find("moe/comm/") == 0, row.type.find("moe::comm::") != std::string::npos) << row.type << ": " << row.include;
    if (row.name == "low_latency_rank_major" && row.space == "cuda") {
      EXPECT_EQ(row.type, "moe::backends::LowLatencyRankMajor<moe::comm::NcclSymmetric>");
      EXPECT_EQ(row.include, "moe/comm/nccl_symmetric.cuh and moe/backends/window/device/low_latency.cuh");
    }
    if (row.name == "naive" && row.space == "cuda") {
      EXPECT_EQ(row.type, "moe::backends::Naive<moe::comm::Nccl>");
      EXPECT_EQ(row.include, "moe/comm/nccl.hpp and moe/backends/collective/device/naive.cuh");
    }
    if (row.name == "monolithic_reference") {
      std::string const argument = row.type.find("<float>") == std::string::npos ? "" : "float";  // clang leaves out defaults
      EXPECT_EQ(row.type, "moe::experts::Monolithic<moe::experts::Reference<" + argument + ">>");
      EXPECT_EQ(row.include, "moe/experts/monolithic.hpp and moe/experts/reference.hpp");
    }
  }
  EXPECT_EQ(seen.size(), 16U + 31U + 20U + 11U);
}

Support support(std::string_view scheme, int architecture, std::string_view experts) {
  for (registry::SchemeSupport const& s : registry::scheme_support()) {
    if (s.scheme == scheme && s.architecture == architecture) {
      EXPECT_EQ(s.experts, experts) << scheme << " on sm_" << architecture;
      return s.support;
    }
  }
  return Support::none;
}

TEST(Registry, SchemesOnArchitecturesAreWhatTheExpertsSay) {
  EXPECT_EQ(support("none", 80, "cublas_grouped"), Support::native);
  EXPECT_EQ(support("none", 90, "cublas_grouped"), Support::native);
  EXPECT_EQ(support("fp8_block128", 90, "hopper_contiguous"), Support::native);
  EXPECT_EQ(support("fp8_per_token", 90, "hopper_contiguous"), Support::native);
  EXPECT_EQ(support("fp8_per_token", 89, "cuda_reference"), Support::emulated);
  EXPECT_EQ(support("fp8_block128", 100, "cuda_reference"), Support::emulated);
  EXPECT_EQ(support("fp8_group128", 90, "cuda_reference"), Support::emulated) << "no Hopper kernel has weights in groups";
  EXPECT_EQ(support("int8_per_token", 90, "hopper_contiguous"), Support::native);
  EXPECT_EQ(support("int8_per_token", 80, "cuda_reference"), Support::emulated);
  EXPECT_EQ(support("int8_per_channel", 90, "hopper_w8a16"), Support::converted) << "weights in int8 alone";
  EXPECT_EQ(support("int8_per_channel", 89, "cuda_reference"), Support::emulated);
  EXPECT_EQ(support("fp8_per_channel", 90, "hopper_w8a16"), Support::converted);
  EXPECT_EQ(support("mxfp8_w8a16", 90, "hopper_w8a16"), Support::converted);
  EXPECT_EQ(support("int4_group128", 90, "hopper_w4a16"), Support::converted);
  EXPECT_EQ(support("int4_group128", 80, "cuda_reference"), Support::emulated);
  EXPECT_EQ(support("mxfp4_w4a16", 90, "hopper_w4a16"), Support::converted);
  EXPECT_EQ(support("mxfp4_w4a16", 80, "cuda_reference"), Support::emulated);
  for (char const* scheme : {"int4_group64", "int4_group32_zero", "int4_group64_zero", "int4_group128_zero"}) {
    EXPECT_EQ(support(scheme, 90, "hopper_w4a16"), Support::converted);
  }
  for (char const* scheme : {"mxfp4_fp8", "int4_group32_fp8", "int4_group64_fp8", "int4_group128_fp8", "int4_group32_zero_fp8",
                             "int4_group64_zero_fp8", "int4_group128_zero_fp8"}) {
    EXPECT_EQ(support(scheme, 90, "hopper_w4a8"), Support::converted);
    EXPECT_EQ(support(scheme, 89, "cuda_reference"), Support::emulated);
  }
  for (char const* scheme : {"w4a8_fp8", "w4a8_fp8_group32", "w4a8_int8", "mxfp4_w4a8", "mxfp4", "nvfp4"}) {
    EXPECT_EQ(support(scheme, 90, "hopper_w4a16"), Support::emulated) << "rows in codes, multiplied as bf16";
  }
  EXPECT_EQ(support("mxfp8", 90, "hopper_w8a16"), Support::emulated);
  for (int const architecture : registry::kArchitectures) {
    if (architecture == 90) continue;
    for (char const* scheme : {"w4a8_fp8", "w4a8_fp8_group32", "w4a8_int8", "mxfp4_w4a8", "mxfp4", "nvfp4", "mxfp8"}) {
      EXPECT_EQ(support(scheme, architecture, "cuda_reference"), Support::emulated) << scheme << " on " << architecture;
    }
  }
  EXPECT_EQ(registry::best_support<quantization::None>(75).support, Support::none);
}

}  // namespace
