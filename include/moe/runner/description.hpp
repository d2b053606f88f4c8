// SPDX-License-Identifier: Apache-2.0
// runner/description.hpp: what a runner was built of, and why it computes as it does, in lines for a log.
#pragma once

#include <string>
#include <vector>

#include "moe/core/contract/facts.hpp"
#include "moe/core/error.hpp"
#include "moe/layer/options.hpp"
#include "moe/layer/schedule_choice.hpp"
#include "moe/runner/declaration.hpp"
#include "moe/runner/reduction.hpp"

namespace moe::runner {

/// "routed before the projection, then shared alone", or "none".
inline std::string describe(ReductionPlan const& plan) {
  std::string out;
  auto const add = [&](bool done, char const* what) {
    if (done) out += (out.empty() ? "" : ", then ") + std::string(what);
  };
  add(plan.routed_early, "routed output before the projection or norm");
  add(plan.shared_early, "shared output alone: the routed output is complete, or was summed before");
  add(plan.final, "routed and shared output together");
  add(plan.result_partial, "by the caller: the output is a term of a sum");
  return out.empty() ? "none" : out;
}

namespace detail {

/// ", of them the layer's arena A, the window W", or nothing if the layer does not say. A layer on the device behind rows in host memory
/// says what is on the device.
template <class Layer>
std::string layer_memory(Layer& layer) {
  if constexpr (requires { layer.memory(); }) {
    LayerMemory const memory = layer.memory();
    return text(", of them the layer's arena ", memory.arena, ", the window ", memory.window);
  } else if constexpr (requires { layer.device().memory(); }) {
    return layer_memory(layer.device());
  } else {
    return {};
  }
}

}  // namespace detail

/// Lines on a runner's composition, sums, sizes and memory.
template <class Runner>
std::vector<std::string> description(Runner& runner) {
  using Layer = typename Runner::Layer;
  std::vector<std::string> out;
  if constexpr (requires { typename Layer::Backend; }) {
    out.push_back(text("composition: quantization ", Layer::Quant::kName, ", backend ", Layer::Backend::kName, ", experts ",
                       Layer::Experts::kName, ", space ", Layer::Space::kName));
    if constexpr (facts::has_tuning<typename Layer::Kernel>()) {
      out.push_back(text("experts: ", Layer::Experts::kName, " ", runner.layer().kernel().tuning()));
    }
    std::string const schedule = describe_schedule(kScheduleOf<typename Layer::Config>, Layer::Backend::kName, Layer::Experts::kName,
                                                   Layer::Quant::kName, static_cast<int>(runner.max_rows()));
    if (!schedule.empty()) out.push_back("schedule: " + schedule);
  }
  if (std::string const gate = runner.gate_choice(); !gate.empty()) out.push_back("gate: " + gate);
  if (std::string const shared = runner.shared_choice(); !shared.empty()) out.push_back("shared experts: " + shared);
  out.push_back(text("sums over the TP group: ", describe(runner.reductions())));
  out.push_back(text("rows of a pass: at most ", runner.max_rows(), ", width ", runner.hidden()));
  if constexpr (detail::kPresent<typename Runner::Parts::Chunking>) {
    out.push_back("passes: as many on every rank as the rank with the most rows needs");
  }
  if constexpr (detail::kPresent<typename Runner::Parts::DualBatch>) {
    out.push_back(text("dual batch: ", runner.dual_batch_choice()));
    if (runner.can_split()) out.back() += "; two exchanges, the second for half of the rows";
  }
  out.push_back(text("memory besides the weights: runner and layer ", runner.bytes(), " bytes", detail::layer_memory(runner.layer())));
  return out;
}

}  // namespace moe::runner
