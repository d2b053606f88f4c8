// SPDX-License-Identifier: Apache-2.0
// models/preset_host.hpp: presets in the host space: float32 rows, weights in the model's element, oneDNN for the products.
#pragma once

#include "moe/experts/onednn.hpp"
#include "moe/models/preset.hpp"
#include "moe/runner/host/primitives.hpp"

namespace moe::models {

template <>
struct PresetSpace<space::host> {
  template <class Model>
  struct Config : Model {
    using Act = float;
  };
  template <class Model>
  using Router = typename Model::Router;
  template <class Quant, class Backend>
  using Experts = experts::OneDnn;
  template <class Weight, class, class>
  using Shared = runner::shared::Separate<experts::OneDnn, Weight>;
};

}  // namespace moe::models
