// SPDX-License-Identifier: Apache-2.0
// examples/moe/host_sample_int4_fp8.cpp: the sample of host compositions with int4 weights and rows of e4m3 in groups of 128.
#include "examples/moe/run_host.hpp"

template moe_tool::JobResult moe_tool::run_sample<moe::quantization::Int4Fp8<32>>(Job const&);
template moe_tool::JobResult moe_tool::run_sample<moe::quantization::Int4Fp8<64>>(Job const&);
template moe_tool::JobResult moe_tool::run_sample<moe::quantization::Int4Fp8<128>>(Job const&);
template moe_tool::JobResult moe_tool::run_sample<moe::quantization::Int4Fp8<32, true>>(Job const&);
template moe_tool::JobResult moe_tool::run_sample<moe::quantization::Int4Fp8<64, true>>(Job const&);
template moe_tool::JobResult moe_tool::run_sample<moe::quantization::Int4Fp8<128, true>>(Job const&);
