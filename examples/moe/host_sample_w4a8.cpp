// SPDX-License-Identifier: Apache-2.0
// examples/moe/host_sample_w4a8.cpp: the sample of host compositions with 4-bit weights with 8-bit rows, and with mxfp8 weights alone.
#include "examples/moe/run_host.hpp"

template moe_tool::JobResult moe_tool::run_sample<moe::quantization::W4A8Fp8>(Job const&);
template moe_tool::JobResult moe_tool::run_sample<moe::quantization::W4A8<moe::quantization::Fp8Codec<>, 32>>(Job const&);
template moe_tool::JobResult moe_tool::run_sample<moe::quantization::W4A8Int8>(Job const&);
template moe_tool::JobResult moe_tool::run_sample<moe::quantization::Mxfp4W4A8<>>(Job const&);
template moe_tool::JobResult moe_tool::run_sample<moe::quantization::Mxfp4Fp8<>>(Job const&);
template moe_tool::JobResult moe_tool::run_sample<moe::quantization::Mxfp8W8A16<>>(Job const&);
