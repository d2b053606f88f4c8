// SPDX-License-Identifier: Apache-2.0
// tests/golden/quantization_golden.hpp: reads the quantisation reference files and compares bit for bit.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "golden_dir.hpp"
#include "moe/io/safetensors.hpp"

namespace moe_test {

/// True if the reference file is here: the selection in tests/data leaves the large ones out.
inline bool has_quant_file(std::string const& name) { return std::filesystem::exists(golden_dir() / "quant" / (name + ".safetensors")); }

inline moe::io::SafetensorsFile quant_file(std::string const& name) {
  return moe::io::SafetensorsFile(golden_dir() / "quant" / (name + ".safetensors"));
}

/// Equal bits; all NaNs are equal. Reports the first difference only.
template <class T>
testing::AssertionResult same_bits(std::vector<T> const& got, std::vector<T> const& want) {
  if (got.size() != want.size()) return testing::AssertionFailure() << got.size() << " elements, expected " << want.size();
  for (std::size_t i = 0; i < got.size(); ++i) {
    bool same = got[i] == want[i];
    if constexpr (std::is_same_v<T, float>) {
      same = std::bit_cast<std::uint32_t>(got[i]) == std::bit_cast<std::uint32_t>(want[i]) || (std::isnan(got[i]) && std::isnan(want[i]));
    }
    if (!same)
      return testing::AssertionFailure() << "element " << i << " of " << got.size() << ": " << +got[i] << ", expected " << +want[i];
  }
  return testing::AssertionSuccess();
}

/// All rows of a matrix through a scheme's activation half.
template <class Scheme>
struct QuantizedMatrix {
  using Code = typename Scheme::template Payload<float>;
  std::vector<Code> q;
  std::vector<typename Scheme::Scale> scale;
  std::vector<float> dq;

  template <class Act>
  QuantizedMatrix(Scheme const& scheme, std::vector<Act> const& x, std::int64_t rows, std::int64_t cols)
      : q(static_cast<std::size_t>(rows * Scheme::payload_cols(cols))),
        scale(static_cast<std::size_t>(rows * Scheme::scale_cols(cols))),
        dq(x.size()) {
    for (std::int64_t r = 0; r < rows; ++r) {
      Code* const row = q.data() + r * Scheme::payload_cols(cols);
      auto* const row_scale = scale.data() + r * Scheme::scale_cols(cols);
      scheme.template quantize_row<Act>(x.data() + r * cols, cols, row, row_scale);
      scheme.template dequantize_row<Act>(row, row_scale, cols, dq.data() + r * cols);
    }
  }
};

/// A matrix through a scheme's weight half.
template <class Scheme>
struct QuantizedWeight {
  using Code = typename Scheme::template WeightCode<float>;
  std::vector<Code> q;
  std::vector<typename Scheme::WeightScale> scale;
  std::vector<float> dq;

  QuantizedWeight(Scheme const& scheme, std::vector<float> const& w, std::int64_t rows, std::int64_t cols)
      : q(static_cast<std::size_t>(rows * Scheme::weight_code_cols(cols))),
        scale(static_cast<std::size_t>(Scheme::weight_scale_count(rows, cols))),
        dq(w.size()) {
    scheme.template quantize_weight<float>(w.data(), rows, cols, q.data(), scale.data());
    for (std::int64_t r = 0; r < rows; ++r) {
      scheme.template dequantize_weight_row<float>(q.data(), scale.data(), rows, cols, r, dq.data() + r * cols);
    }
  }
};

}  // namespace moe_test
