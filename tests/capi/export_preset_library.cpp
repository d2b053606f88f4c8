// SPDX-License-Identifier: Apache-2.0
// tests/capi/export_preset_library.cpp: the functions of moe.h over the layers of a preset's library.
#include <moe/c/export.hpp>
#include <moe_test_preset.hpp>

using Decode = moe::c::Exported<moe_test_preset::decode::Layer>;
using Fp8 = moe::c::Exported<moe_test_preset::no_expert_parallel::fp8_block128::decode::Layer>;
MOE_C_EXPORT(Decode, Fp8)
