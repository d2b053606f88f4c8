// SPDX-License-Identifier: Apache-2.0
// c/export.hpp: the functions of moe.h over the layers of a model library, whose dimensions and policies their types fix.
//
//   #include <qwen3.hpp>                          // of moe_add_model_library(qwen3 ...)
//   #include <moe/c/export.hpp>
//   MOE_C_EXPORT(moe::c::Exported<Layer>)         // or several, or Exported<Layer, float, moe::bf16>: the types of LOGITS
//
// in one source of a library or program that links the model library and not libmoe. moe_runner_create() then makes the first exported
// layer with the dtype, quantisation, backend, experts and space of the request; a dimension, router or activation other than its type's
// is MOE_E_CONFIG. A preset's layers are its runners' (moe_add_model_library(qwen3 MODEL ...): qwen3::decode::Layer).
//
// moe_version(), moe_has() and groups over MPI and NCCL come from what the model library defines for its users. Without its CMake target,
// define MOE_C_VERSION (a string), MOE_C_HAS_ONEDNN, MOE_C_HAS_MPI and MOE_C_HAS_NCCL.
//
// g++ compiles the source for a library in the CUDA space, too. moe_route() routes on the host alone: a model library has the kernel of its
// own router for its own layer, not those of any router.
//
// A shared library of it exports more than moe_*: the standard library's instantiations and the layer's own functions are visible. CMake's
// moe_export_only_c(<target>) hides them, through the linker's version script cmake/libmoe.map, installed in share/cmake/moe.
#pragma once

#include <memory>
#include <string>

#include "moe/c/functions.hpp"
#include "moe/c/layer_runner.hpp"

namespace moe::c {

/// A layer, and the element types of router logits that its library was instantiated for (float without any).
template <class LayerT, class... Logits>
struct Exported {
  using Layer = LayerT;
  using Runner = LayerRunner<LayerT, Logits...>;
};
template <class LayerT>
struct Exported<LayerT> {
  using Layer = LayerT;
  using Runner = LayerRunner<LayerT, float>;
};

template <class... Exports>
std::unique_ptr<Runner> make_exported(Request const& r, bool& told) {
  std::unique_ptr<Runner> made;
  std::string known;
  auto const consider = [&]<class Export>(Export) {
    using Layer = typename Export::Layer;
    known += text(known.empty() ? "" : "; ", name_of(dtype_of<typename Layer::Config::Act>), ", ", Layer::Quant::kName, ", ",
                  Layer::Backend::kName, ", ", Layer::Experts::kName, " on ", Layer::Space::kName);
    bool const fits = r.device.space == Layer::Space::kKind && r.dtype == dtype_of<typename Layer::Config::Act> &&
                      r.quantization == Layer::Quant::kName && r.backend == Layer::Backend::kName &&
                      (r.experts.empty() || r.experts == Layer::Experts::kName);
    if (made == nullptr && fits) made = std::make_unique<typename Export::Runner>(r, told);
  };
  (consider(Exports{}), ...);
  if (made == nullptr) {
    throw Error(ErrorCode::config, text("config: ", name_of(r.dtype), ", ", r.quantization, ", ", r.backend, r.experts.empty() ? "" : ", ",
                                        r.experts, " on ", name(r.device.space), " is none of this library's layers: ", known));
  }
  return made;
}

}  // namespace moe::c

#define MOE_C_EXPORT(...)                                                                           \
  std::unique_ptr<moe::c::Runner> moe::c::make_runner(moe::c::Request const& request, bool& told) { \
    return moe::c::make_exported<__VA_ARGS__>(request, told);                                       \
  }
