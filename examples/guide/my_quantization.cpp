// SPDX-License-Identifier: Apache-2.0
// examples/guide/my_quantization.cpp: a quantisation of one's own: int8 with a scale for each 64 elements of activations and of weights.
#include "examples/guide/demo_layer.hpp"

// QuantizedRows<codec, group>: activations, one scale a group of a row.  BlockWeights<codec, rows, columns>: weights, one scale a block.
// ShapeMultiple<n>: hidden and intermediate must be multiples of n.
struct Int8Group64 : moe::quantization::QuantizedRows<moe::quantization::Int8Codec, 64>,
                     moe::quantization::BlockWeights<moe::quantization::Int8Codec, 1, 64>,
                     moe::quantization::ShapeMultiple<64> {
  static constexpr char const* kName = "int8_group64";
};

int main() {
  using Backend = moe::backends::NoExpertParallel<>;
  using Experts = moe::experts::Reference<>;
  auto const quantised = guide::run<guide::Router, Int8Group64, Backend, Experts>({8, 2});
  auto const exact = guide::run<guide::Router, moe::quantization::None, Backend, Experts>({8, 2});
  return guide::compare(quantised, exact, 0.05F);
}
