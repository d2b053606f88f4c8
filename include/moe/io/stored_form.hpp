// SPDX-License-Identifier: Apache-2.0
// io/stored_form.hpp: in which form a checkpoint stores a matrix of an expert, by the names and types of its tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "moe/io/expert_layout.hpp"
#include "moe/io/tensor_store.hpp"

namespace moe::io {

/// How a checkpoint stores a matrix.
enum class StoredForm : std::uint8_t { floats, fp8, int8, mxfp8, mxfp4, nvfp4, integers, other };

constexpr std::string_view name(StoredForm f) {
  constexpr std::string_view kNames[] = {"unquantised", "fp8", "int8", "mxfp8", "mxfp4", "nvfp4", "packed integers", "another form"};
  return kNames[static_cast<std::size_t>(f)];
}

namespace detail {

/// The codes of a matrix: its tensor, and of mxfp4 and mxfp8 the tensor of its exponents.
struct StoredCodes {
  StoredForm form = StoredForm::floats;
  StoredTensor codes;
  std::optional<StoredTensor> exponents;
};

/// E_ARG if the store has no such matrix.
inline StoredCodes find_codes(TensorStore const& store, StoredMatrix const& m) {
  auto const exponents = [&](StoredTensor const& codes, std::string const& tensor) {
    return StoredCodes{StoredForm::mxfp4, codes, store.at(tensor)};
  };
  if (auto const blocks = store.find(m.base + "_blocks")) return exponents(*blocks, m.base + "_scales");
  for (char const* suffix : {".qweight", ".weight_packed"}) {
    auto const w = store.find(m.base + suffix);
    if (!w) continue;
    if (w->info->dtype != FileDType::u8) return {StoredForm::integers, *w, {}};
    auto const s = store.find(m.base + ".weight_scale");
    bool const nvfp4 = store.contains(m.base + ".weight_global_scale") || (s && s->info->dtype == FileDType::f8_e4m3);
    return nvfp4 ? StoredCodes{StoredForm::nvfp4, *w, {}} : exponents(*w, m.base + ".weight_scale");
  }
  auto w = store.find(m.base + ".weight");
  if (!w) w = store.at(m.base);
  switch (w->info->dtype) {
    case FileDType::f8_e4m3: {
      auto const s = store.find(m.base + ".weight_scale");
      bool const exponents_of_groups = s && (s->info->dtype == FileDType::u8 || s->info->dtype == FileDType::f8_e8m0) && m.stack == 0 &&
                                       s->shape().size() == 2 && s->shape()[1] * 32 == m.cols;
      return exponents_of_groups ? StoredCodes{StoredForm::mxfp8, *w, s} : StoredCodes{StoredForm::fp8, *w, {}};
    }
    case FileDType::i8: return store.contains(m.base + ".scale") ? exponents(*w, m.base + ".scale") : StoredCodes{StoredForm::int8, *w, {}};
    case FileDType::u8: return {StoredForm::nvfp4, *w, {}};
    default: return {StoredForm::floats, *w, {}};
  }
}

}  // namespace detail

}  // namespace moe::io
