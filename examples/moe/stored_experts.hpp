// SPDX-License-Identifier: Apache-2.0
// examples/moe/stored_experts.hpp: the experts of a job's checkpoint as it stores them, for a scheme that is the checkpoint's own.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "examples/moe/job.hpp"
#include "moe/io/expert_loader.hpp"
#include "moe/io/progress_line.hpp"
#include "moe/models/loaded_parts.hpp"

namespace moe_tool {

/// Where the checkpoint stores `Quant`, codes and scales go into the layer's memory as they are. Else, or where ranks have parts of
/// experts, nothing is found: weights are read in float32 and quantised. The job must outlive it.
template <class Quant, class Weight>
class StoredExperts {
 public:
  static constexpr bool kUnquantised = moe::io::ExpertLoader<Quant, Weight>::kUnquantised;

  explicit StoredExperts(Job const& job) : job_(job) {
    if (job.moe.moe_tp_size > 1) return;
    moe::io::ExpertReader reader = layer_loader(job).experts();
    if (Loader::stores(*job.store, job.description, reader)) reader_.emplace(std::move(reader));
  }
  bool found() const { return reader_.has_value(); }
  /// The function that a block fills its store with; none if nothing was found.
  template <class Store>
  std::function<void(Store&)> fill() const {
    if (!found()) return {};
    return [this](Store& store) {
      Loader const loader(*job_.store, job_.description, *reader_, store.quantization());
      moe::models::read_into<typename Store::Space>(store, loader, local_experts(job_), 0, expert_progress(job_));
    };
  }

 private:
  using Loader = moe::io::ExpertLoader<Quant, Weight>;
  Job const& job_;
  std::optional<moe::io::ExpertReader> reader_;
};

/// `lines`, and where the codes of a scheme are from.
template <class Quant>
std::vector<std::string> with_experts_line(std::vector<std::string> lines, bool stored) {
  if constexpr (!StoredExperts<Quant, float>::kUnquantised) {
    lines.push_back(moe::text("experts in ", Quant::kName, stored ? ": the checkpoint's codes" : ": quantised from float32"));
  }
  return lines;
}

}  // namespace moe_tool
