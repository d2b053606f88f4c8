// SPDX-License-Identifier: Apache-2.0
// tests/packed_definition.hpp: the block of packed_checkpoint.hpp by its definition, in double: softmax over all experts, the two largest,
// renormalised, and the shared expert with its sigmoid gate.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "moe/core/types.hpp"
#include "moe/io/host_layer_weights.hpp"
#include "moe/quantization/none.hpp"

namespace moe_test {

/// A row as the scheme stores it.
template <class Quant>
void store_row(std::vector<double>& row) {
  auto const n = static_cast<std::int64_t>(row.size());
  std::vector<float> values(row.begin(), row.end());
  std::vector<typename Quant::template Payload<float>> codes(static_cast<std::size_t>(Quant::payload_cols(n)));
  std::vector<typename Quant::Scale> scales(static_cast<std::size_t>(Quant::scale_cols(n)));
  Quant const quant{};
  quant.template quantize_row<float>(values.data(), n, codes.data(), scales.data());
  quant.template dequantize_row<float>(codes.data(), scales.data(), n, values.data());
  row.assign(values.begin(), values.end());
}

/// m v, m [n, width of v].
inline std::vector<double> product(float const* m, std::vector<double> const& v, std::int64_t n) {
  std::vector<double> y(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < y.size(); ++i) {
    for (std::size_t j = 0; j < v.size(); ++j) y[i] += static_cast<double>(m[i * v.size() + j]) * v[j];
  }
  return y;
}
/// w2 (silu(gate) up), from a row that is stored in the scheme Rows, as is the intermediate one.
template <class Rows>
std::vector<double> expert(float const* w13, float const* w2, std::vector<double> row, std::int64_t width) {
  auto const h = static_cast<std::int64_t>(row.size());
  store_row<Rows>(row);
  auto const gu = product(w13, row, 2 * width);
  std::vector<double> a(static_cast<std::size_t>(width));
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = gu[i] / (1.0 + std::exp(-gu[i])) * gu[a.size() + i];
  store_row<Rows>(a);
  return product(w2, a, h);
}

/// Experts in double from the weights as they are read in float32. Rows: the scheme of the rows of the routed experts; SharedRows: of the
/// shared expert.
template <class Rows, class SharedRows, class X>
std::vector<float> definition(moe::io::HostLayerWeights<float> const& w, std::vector<X> const& x, std::int64_t rows) {
  std::int64_t const h = w.description.hidden, width = w.intermediate, experts = w.description.router.num_experts;
  std::vector<float> out(static_cast<std::size_t>(rows * h));
  for (std::int64_t t = 0; t < rows; ++t) {
    std::vector<double> row(static_cast<std::size_t>(h)), sum(row.size());
    for (std::size_t i = 0; i < row.size(); ++i) row[i] = moe::to_float(x[static_cast<std::size_t>(t * h) + i]);
    auto const add = [&](double weight, std::vector<double> const& y) {
      for (std::size_t i = 0; i < y.size(); ++i) sum[i] += weight * y[i];
    };
    auto const logits = product(w.router_weight.data(), row, experts);
    std::vector<std::pair<double, std::int64_t>> order;
    for (std::int64_t e = 0; e < experts; ++e) order.emplace_back(-logits[static_cast<std::size_t>(e)], e);
    std::sort(order.begin(), order.end());
    double const second = std::exp(order[0].first - order[1].first), both = 1.0 + second;
    for (std::size_t j : {0U, 1U}) {
      std::int64_t const e = order[j].second;
      add((j == 0 ? 1.0 : second) / both, expert<Rows>(w.w13.data() + e * 2 * width * h, w.w2.data() + e * h * width, row, width));
    }
    if (w.shared.count > 0) {
      double const z = product(w.shared.gate.data(), row, 1)[0];
      add(1.0 / (1.0 + std::exp(-z)), expert<SharedRows>(w.shared.w13.data(), w.shared.w2.data(), row, w.shared.intermediate));
    }
    std::copy(sum.begin(), sum.end(), out.begin() + t * h);
  }
  return out;
}
template <class Rows, class X>
std::vector<float> definition(moe::io::HostLayerWeights<float> const& w, std::vector<X> const& x, std::int64_t rows) {
  return definition<Rows, Rows, X>(w, x, rows);
}

}  // namespace moe_test
