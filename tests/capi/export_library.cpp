// SPDX-License-Identifier: Apache-2.0
// tests/capi/export_library.cpp: the functions of moe.h over a model library, as a source of a program or of a shared library.
#include <moe/c/export.hpp>
#include <moe_test_models.hpp>

using Layer = moe::ModularKernel<moe_test::SmallConfig, moe_test::SmallRouter, moe::quantization::None, moe::backends::NoExpertParallel<>,
                                 moe::experts::OneDnn>;
using Exports = moe::c::Exported<Layer, float, moe::bf16>;
MOE_C_EXPORT(Exports)
