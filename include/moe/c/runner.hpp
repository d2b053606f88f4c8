// SPDX-License-Identifier: Apache-2.0
// c/runner.hpp: the object behind a moe_runner_t: one layer of any type, and what moe_runner_create() passes to the function
// that creates it.
#pragma once

#include <atomic>
#include <memory>
#include <string_view>

#include "moe/activation/activation.hpp"
#include "moe/c/group.hpp"
#include "moe/c/tensor.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/moe.h"
#include "moe/parallel/placement.hpp"
#include "moe/routing/row/router_config.hpp"

namespace moe::hopper {
class SharedWorkspace;
}

namespace moe::c {

/// Memory of the experts that runners can share; only those of CUDA know the type.
using Workspace = std::shared_ptr<hopper::SharedWorkspace>;

/// The arguments of one call; only either logits, or ids and weights.
struct Call {
  DLTensor const* hidden = nullptr;
  DLTensor const* logits = nullptr;
  DLTensor const* topk_ids = nullptr;
  DLTensor const* topk_weights = nullptr;
  DLTensor const* output = nullptr;
  moe_forward_options const* options = nullptr;  ///< checked, or null
  void* stream = nullptr;
};

class Runner {
 public:
  Runner() = default;
  Runner(Runner const&) = delete;
  Runner& operator=(Runner const&) = delete;
  virtual ~Runner() = default;
  virtual void forward(Call const& call) = 0;
  virtual void forward_routed(Call const& call) = 0;
  virtual void weights_changed(void* stream) = 0;
  virtual void check() = 0;
  virtual void wait(void* stream) = 0;
  /// All members but struct_size.
  virtual void describe(moe_runner_info& info) = 0;
  /// For a runner of that device whose moe_runner_config::workspace_of names this one; null if these experts share none. E_ARG.
  virtual Workspace workspace(Device asking) = 0;

  std::atomic<bool> busy{false};
  std::shared_ptr<Group> group;
};

/// moe_runner_config with every default resolved, in the library's types.
struct Request {
  moe_weights const* weights = nullptr;
  std::shared_ptr<Group> group;
  LayerShape shape{};
  std::int64_t max_tokens_per_rank = 0;
  routing::RouterConfig router{};
  bool external_router = false;
  activation::Any activation{};
  DType dtype = DType::f32;
  std::string_view quantization;
  std::string_view backend;
  std::string_view experts;  ///< empty: the fastest
  Device device{};
  int num_threads = 0;
  bool log = false;
  Workspace workspace;  ///< of another runner, or null

  ExpertPlacement placement() const { return {shape.num_experts, group->size()}; }
};

/// The layer of a request. Defined once in a library: by libmoe for run-time dimensions, by c/export.hpp for the layers of a model library.
/// Throws E_CONFIG, E_UNSUPPORTED or E_ARG; the construction of a layer tells the peers itself, `told` says that it has begun.
std::unique_ptr<Runner> make_runner(Request const& request, bool& told);

}  // namespace moe::c
