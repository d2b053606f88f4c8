// SPDX-License-Identifier: Apache-2.0
// io/common_rows.hpp: experts that have most of their weights in common (WeightLayout::common_rows).
//
// ViTPose (VitPoseBackboneMoeMLP of transformers): fc1 [I, H] and fc2 [H - P, I] are all experts'; experts.e [P, I] gives the last P
// columns of a token's output. So expert e is an ordinary expert with w13 = fc1 and w2 = fc2 above experts.e, each with its bias.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "moe/core/error.hpp"
#include "moe/io/layer_description.hpp"
#include "moe/io/linear_reader.hpp"
#include "moe/io/one_line.hpp"
#include "moe/io/tensor_store.hpp"

namespace moe::io::detail {

[[noreturn]] inline void fail_common_rows(TensorStore const& store, std::string const& tensor, int e) {
  throw Error(ErrorCode::argument, one_line("missing expert weights: expert ", e, " ('", tensor, "' in '", store.label(), "')"));
}
/// `use`(name, rows, columns, first row, down) for the three linear layers of expert e.
template <class F>
void for_each_common_part(std::string const& root, LayerDescription const& d, int e, F const& use) {
  std::int64_t const h = d.hidden, i = d.intermediate, common = h - d.own_rows;
  use(root + "fc1", i, h, 0, false);
  use(root + "fc2", common, i, 0, true);
  use(text(root, "experts.", e), d.own_rows, i, common, true);
}
/// E_ARG if the file has more experts than the configuration.
inline void refuse_more_common_rows(TensorStore const& store, std::string const& root, LayerDescription const& d) {
  std::string const more = text(root, "experts.", d.router.num_experts, ".weight");
  if (!store.contains(more)) return;
  throw Error(ErrorCode::argument, one_line("unexpected expert weights: expert ", d.router.num_experts, " ('", more, "' in '",
                                            store.label(), "') is out of range [0, ", d.router.num_experts, ")"));
}
inline void check_common_rows(TensorStore const& store, std::string const& root, LayerDescription const& d, int e) {
  for_each_common_part(root, d, e, [&](std::string const& base, std::int64_t n, std::int64_t k, std::int64_t, bool) {
    if (!check_linear(store, base, n, k)) fail_common_rows(store, base + ".weight", e);
  });
}
template <class T>
void read_common_rows(TensorStore const& store, std::string const& root, LayerDescription const& d, int e, T* w13, T* w2) {
  for_each_common_part(root, d, e, [&](std::string const& base, std::int64_t n, std::int64_t k, std::int64_t row, bool down) {
    if (!read_linear(store, base, n, k, d.quantization, (down ? w2 : w13) + row * k)) fail_common_rows(store, base + ".weight", e);
  });
}
inline void read_common_bias(TensorStore const& store, std::string const& root, LayerDescription const& d, int e, float* b13, float* b2) {
  for_each_common_part(root, d, e, [&](std::string const& base, std::int64_t n, std::int64_t, std::int64_t row, bool down) {
    auto const t = store.find(base + ".bias");
    if (!t) fail_common_rows(store, base + ".bias", e);
    require_shape(*t, {n});
    t->file->read_elements(*t->info, 0, n, (down ? b2 : b13) + row);
  });
}

}  // namespace moe::io::detail
