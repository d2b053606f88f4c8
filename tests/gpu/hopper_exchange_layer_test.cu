// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_exchange_layer_test.cu: whole layers over LowLatency and HighThroughput, between simulated ranks on one GPU, with the
// Hopper experts and the reference ones, against one rank that holds all experts.
#include <gtest/gtest.h>

#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "tests/gpu/exchange_layers.cuh"

namespace {

using namespace moe;
namespace exchange_layers = moe_test::exchange_layers;
using High = exchange_layers::HighThroughput;
using Low = exchange_layers::LowLatency;
using exchange_layers::RankMajor;

template <class Backend, class Experts>
void layers_equal_one_rank(typename Backend::Params params, char const* what, double tolerance = 1e-2) {
  exchange_layers::layers_equal_one_rank<quantization::Fp8Block<>, Backend, Experts>(params, what, tolerance);
}

using experts::CudaReference;
using experts::HopperContiguous;
using experts::HopperMasked;

TEST(ExchangeLayer, HopperMaskedReadsEveryLayout) {
  layers_equal_one_rank<Low, HopperMasked>({}, "a row for each expert, outputs written into the window");
  layers_equal_one_rank<Low, HopperMasked>({.zero_copy = false}, "outputs copied");
  layers_equal_one_rank<Low, HopperMasked>({.deduplicate = true}, "a row for each rank, gathered by index");
  layers_equal_one_rank<Low, HopperMasked>({.masks = true}, "masks: rows at fixed places, gathered by index");
  layers_equal_one_rank<Low, HopperMasked>({.combine = backends::CombineFormat::fp8}, "outputs in e4m3", 5e-2);
  layers_equal_one_rank<Low, HopperMasked>({.deduplicate = true, .combine = backends::CombineFormat::logfmt}, "LogFMT sums", 3e-2);
}
TEST(ExchangeLayer, CudaReferenceReadsEveryLayout) {
  layers_equal_one_rank<Low, CudaReference>({}, "a row for each expert");
  layers_equal_one_rank<Low, CudaReference>({.deduplicate = true}, "a row for each rank, gathered by index");
  layers_equal_one_rank<Low, CudaReference>({.masks = true}, "masks");
}
TEST(ExchangeLayer, StandardFormat) {
  layers_equal_one_rank<RankMajor, HopperContiguous>({}, "rank major");
  layers_equal_one_rank<High, HopperContiguous>({}, "high throughput");
  layers_equal_one_rank<High, CudaReference>({}, "high throughput, float outputs");
}

}  // namespace
