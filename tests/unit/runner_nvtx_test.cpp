// SPDX-License-Identifier: Apache-2.0
// tests/unit/runner_nvtx_test.cpp: NvtxProbe makes one range of each stage of a forward, in the domain "moe". This program is its own
// profiler: NVTX calls its functions.
#include "moe/runner/nvtx.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../numbers.hpp"
#include "moe/moe.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/runner.hpp"

namespace {

std::vector<std::string> seen;  // what NVTX was told
int domains = 0;                // that are open

nvtxDomainHandle_t create(char const* name) {
  ++domains;
  seen.push_back(std::string("domain ") + name);
  static char handle = 0;
  return reinterpret_cast<nvtxDomainHandle_t>(&handle);
}
void destroy(nvtxDomainHandle_t) { --domains; }
int push(nvtxDomainHandle_t, nvtxEventAttributes_t const* range) {
  seen.emplace_back(range->messageType == NVTX_MESSAGE_TYPE_ASCII ? range->message.ascii : "another type of message");
  return 0;
}
int pop(nvtxDomainHandle_t) {
  seen.emplace_back("end");
  return 0;
}

/// Puts the functions above where NVTX calls them.
int attach(NvtxGetExportTableFunc_t get) {
  auto const* const table = static_cast<NvtxExportTableCallbacks const*>(get(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned int count = 0;
  if (table == nullptr || table->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &count) == 0) return 0;
  auto const set = [&](unsigned int id, auto* function) {
    if (id < count) *functions[id] = reinterpret_cast<NvtxFunctionPointer>(function);
  };
  set(NVTX_CBID_CORE2_DomainCreateA, &create);
  set(NVTX_CBID_CORE2_DomainDestroy, &destroy);
  set(NVTX_CBID_CORE2_DomainRangePushEx, &push);
  set(NVTX_CBID_CORE2_DomainRangePop, &pop);
  return 1;
}

// NVTX looks there at its first call.
[[maybe_unused]] bool const listens = [] {
  InitializeInjectionNvtx2_fnptr = &attach;
  return true;
}();

using namespace moe;

struct Config : LayerDefaults {
  using Activation = activation::Silu;
};
struct Parts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using Scaling = runner::scaling::Factor;
};

TEST(Nvtx, ARangeOfEachStage) {
  constexpr int kHidden = 16, kIntermediate = 8, kExperts = 4, kRows = 3;
  using Layer = ModularKernel<Config, routing::AnyRouter, quantization::None, backends::NoExpertParallel<>, experts::Reference<float>>;
  experts::WeightStore<Config, quantization::None> store(kExperts, kHidden, kIntermediate, true);
  std::vector<float> const w = moe_test::numbers(1, 2 * kIntermediate * kHidden);
  for (int e = 0; e < kExperts; ++e) store.set_expert(e, w.data(), w.data());
  comm::Self<> self;
  Runner<Layer, Parts>::Params p{.layer = {.shape = {kHidden, kIntermediate, kExperts, 2, false},
                                           .max_tokens_per_rank = kRows,
                                           .placement = ExpertPlacement(kExperts, 1),
                                           .router = {.num_experts = kExperts, .topk = 2}}};
  p.gate.weight = make_rows(w.data(), kExperts, kHidden);
  p.scaling.routed = 2.0F;
  Runner<Layer, Parts> runner(self, store.view(), p);
  std::vector<float> const x = moe_test::numbers(2, kRows * kHidden);
  std::vector<float> y(x.size());
  auto const forward = [&](auto&& probe) {
    runner.forward(make_rows(x.data(), kRows, kHidden), make_rows(y.data(), kRows, kHidden), {}, {}, probe);
  };
  forward(NoProbe{});
  EXPECT_TRUE(seen.empty()) << "there are no ranges without a probe that makes them";
  {
    runner::NvtxProbe probe;
    forward(probe);
    EXPECT_EQ(domains, 1);
  }
  EXPECT_EQ(domains, 0);
  std::vector<std::string> const want{"domain moe", "route", "end",     "route", "end",    "dispatch", "end",
                                      "experts",    "end",   "combine", "end",   "finish", "end"};
  EXPECT_EQ(seen, want) << "the gate and the router are one stage each of the same name";
}

}  // namespace
