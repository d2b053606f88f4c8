// SPDX-License-Identifier: Apache-2.0
// tests/capi/arguments.hpp: valid arguments of every call of moe.h, for cases that break one of them.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/capi/tensors.hpp"

namespace moe_test {

/// The status, and that the text names every part.
inline void expect_refused(moe_status status, moe_status expected, std::vector<std::string> const& parts) {
  std::string const said = moe_last_error();
  EXPECT_EQ(status, expected) << said;
  for (std::string const& part : parts) EXPECT_NE(said.find(part), std::string::npos) << "no \"" << part << "\" in: " << said;
}

/// Valid arguments of every call, which a case breaks.
struct Arguments {
  Arguments() {
    config = a.config();
    router = MOE_ROUTER_CONFIG_INIT;
    router.num_experts = config.num_experts;
    router.topk = config.topk;
    config.router = &router;
    weights = a.view();
    options = MOE_FORWARD_OPTIONS_INIT;
    hidden = a.hidden.tensor();
    logits = a.logits.tensor();
    ids = a.ids.tensor();
    topk_weights = a.weights.tensor();
    output = a.output.tensor();
    w13 = a.w13.tensor();
    w2 = a.w2.tensor();
    weights.w13 = &w13;
    weights.w2 = &w2;
    EXPECT_EQ(moe_group_create_self(&group), MOE_OK);
  }
  ~Arguments() {
    moe_runner_destroy(runner);
    moe_runner_destroy(second);
    moe_group_destroy(group);
  }
  Arguments(Arguments const&) = delete;
  Arguments& operator=(Arguments const&) = delete;
  /// A runner of the same arguments, beside `runner`.
  moe_runner_t another() {
    EXPECT_EQ(moe_runner_create(&config, &weights, group, &second), MOE_OK) << moe_last_error();
    return second;
  }
  moe_status create() { return moe_runner_create(&config, &weights, group, &runner); }

  LayerArrays<float> a;
  moe_runner_config config{};
  moe_router_config router{};
  moe_weights weights{};
  moe_forward_options options{};
  DLTensor hidden{}, logits{}, ids{}, topk_weights{}, output{}, w13{}, w2{};
  std::int64_t shape[3] = {};    // for a case to fill
  std::int64_t strides[3] = {};  // the same
  Array<float> spare{{8, 256, 64}};
  moe_group_t group = nullptr;
  moe_runner_t runner = nullptr;
  moe_runner_t second = nullptr;
};

struct Case {
  char const* name;
  std::function<void(Arguments&)> spoil;
  moe_status status;
  std::vector<std::string> parts;
};
inline void run(std::vector<Case> const& cases, std::function<moe_status(Arguments&)> const& call) {
  Arguments good;
  EXPECT_EQ(call(good), MOE_OK) << moe_last_error();
  for (Case const& one : cases) {
    SCOPED_TRACE(one.name);
    Arguments arguments;
    one.spoil(arguments);
    expect_refused(call(arguments), one.status, one.parts);
  }
}

}  // namespace moe_test
