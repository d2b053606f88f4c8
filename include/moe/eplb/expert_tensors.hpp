// SPDX-License-Identifier: Apache-2.0
// eplb/expert_tensors.hpp: the arrays of one layer that hold a part of each of this rank's experts, as bytes that can be moved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "moe/core/array.hpp"
#include "moe/core/error.hpp"

namespace moe::eplb {

/// One array [L, …] of a rank: local expert s lies at data + s · stride, `bytes` long. Borrowed; in the memory space of the mover.
struct ExpertTensor {
  std::string name;
  std::byte* data = nullptr;
  std::int64_t slots = 0;   ///< L
  std::int64_t bytes = 0;   ///< of one expert
  std::int64_t stride = 0;  ///< bytes from one expert to the next
};

/// One layer's arrays, in the order in which they travel. Equal names and bytes on every rank.
using LayerTensors = std::vector<ExpertTensor>;

/// From an mdspan [L, …] whose elements are bytes of the wire. E_UNSUPPORTED if an expert's elements do not lie together.
template <class View>
ExpertTensor expert_tensor(std::string name, View const& view) {
  using Element = typename View::element_type;
  static_assert(View::rank() >= 1 && !std::is_const_v<Element>, "expert_tensor takes an array [L, ...] that can be written");
  constexpr auto kElement = static_cast<std::int64_t>(sizeof(Element));
  std::int64_t elements = 1;
  for (std::size_t r = View::rank() - 1; r > 0; --r) {
    auto const extent = static_cast<std::int64_t>(view.extent(r));
    if (extent > 1 && static_cast<std::int64_t>(view.stride(r)) != elements) {
      throw Error(ErrorCode::unsupported, text("EPLB cannot move ", name, ": dimension ", r, " has stride ", view.stride(r), ", expected ",
                                               elements, " so that one expert's elements lie together"));
    }
    elements *= extent;
  }
  auto const slots = static_cast<std::int64_t>(view.extent(0));
  auto const stride = static_cast<std::int64_t>(view.stride(0));
  if (slots > 1 && stride < elements) {
    throw Error(ErrorCode::unsupported, text("EPLB cannot move ", name, ": experts are ", stride, " elements apart, expected at least the ",
                                             elements, " of one expert"));
  }
  return {std::move(name), reinterpret_cast<std::byte*>(view.data_handle()), slots, elements * kElement, stride * kElement};
}

/// All arrays of a layer's weights: codes, scales, biases (experts::WeightStore, or any type with its visit_tensors()). Arrays without
/// elements are left out.
template <class Store>
LayerTensors expert_tensors(Store& store) {
  LayerTensors out;
  store.visit_tensors([&](char const* name, auto const& view) {
    ExpertTensor tensor = expert_tensor(name, view);
    if (tensor.bytes > 0) out.push_back(std::move(tensor));
  });
  return out;
}

}  // namespace moe::eplb
