// SPDX-License-Identifier: Apache-2.0
// examples/moe/host_fp8_blocks.cpp: the host compositions with the group- and block-scaled fp8 schemes.
#include "examples/moe/run_host.hpp"

template moe_tool::JobResult moe_tool::run_host<moe::quantization::Fp8Group<>>(Job const&);
template moe_tool::JobResult moe_tool::run_host<moe::quantization::Fp8Block<>>(Job const&);
