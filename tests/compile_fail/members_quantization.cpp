// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/members_quantization.cpp: quantisations that lack one member each.
// errors: each
// expect: the policy lacks the member 'static constexpr char const* kName'
// expect: the quantization lacks the member 'template <class Act> using Payload'
// expect: the quantization lacks the member 'using Scale'
// expect: the quantization lacks the member 'template <class Weight> using WeightCode'
// expect: the quantization lacks the member 'using WeightScale'
// expect: the quantization lacks the member 'static constexpr int64_t payload_cols(int64_t)'
// expect: the quantization lacks the member 'static constexpr int64_t scale_cols(int64_t)'
// expect: the quantization lacks the member 'static constexpr int64_t weight_code_cols(int64_t)'
// expect: the quantization lacks the member 'static constexpr int64_t weight_scale_count(int64_t rows, int64_t cols)'
// expect: the quantization lacks the member 'static constexpr bool supports(int64_t hidden, int64_t intermediate)'
// expect: the quantization lacks the member 'quantize_row<Act>(
// expect: the quantization lacks the member 'dequantize_row<Act>(
// expect: the quantization lacks the member 'quantize_weight<Weight>(
// expect: the quantization lacks the member 'dequantize_weight_row<Weight>(
#include "../archetypes.hpp"
#include "../without_member.hpp"

using namespace moe_test;
using Complete = ArchetypeQuantization<>;
MOE_WITHOUT(NoName, Complete, kName);
MOE_WITHOUT_TYPE(NoPayload, Complete, Payload);
MOE_WITHOUT_TYPE(NoScale, Complete, Scale);
MOE_WITHOUT_TYPE(NoWeightCode, Complete, WeightCode);
MOE_WITHOUT_TYPE(NoWeightScale, Complete, WeightScale);
MOE_WITHOUT(NoPayloadCols, Complete, payload_cols);
MOE_WITHOUT(NoScaleCols, Complete, scale_cols);
MOE_WITHOUT(NoWeightCodeCols, Complete, weight_code_cols);
MOE_WITHOUT(NoWeightScaleCount, Complete, weight_scale_count);
MOE_WITHOUT(NoSupports, Complete, supports);
MOE_WITHOUT(NoQuantizeRow, Complete, quantize_row);
MOE_WITHOUT(NoDequantizeRow, Complete, dequantize_row);
MOE_WITHOUT(NoQuantizeWeight, Complete, quantize_weight);
MOE_WITHOUT(NoDequantizeWeightRow, Complete, dequantize_weight_row);

template <class Quant>
using ComposeQuant = Compose<ArchetypeRouter<>, Quant>;
static_assert(sizeof(ComposeQuant<NoName>) > 0);
static_assert(sizeof(ComposeQuant<NoPayload>) > 0);
static_assert(sizeof(ComposeQuant<NoScale>) > 0);
static_assert(sizeof(ComposeQuant<NoWeightCode>) > 0);
static_assert(sizeof(ComposeQuant<NoWeightScale>) > 0);
static_assert(sizeof(ComposeQuant<NoPayloadCols>) > 0);
static_assert(sizeof(ComposeQuant<NoScaleCols>) > 0);
static_assert(sizeof(ComposeQuant<NoWeightCodeCols>) > 0);
static_assert(sizeof(ComposeQuant<NoWeightScaleCount>) > 0);
static_assert(sizeof(ComposeQuant<NoSupports>) > 0);
static_assert(sizeof(ComposeQuant<NoQuantizeRow>) > 0);
static_assert(sizeof(ComposeQuant<NoDequantizeRow>) > 0);
static_assert(sizeof(ComposeQuant<NoQuantizeWeight>) > 0);
static_assert(sizeof(ComposeQuant<NoDequantizeWeightRow>) > 0);
