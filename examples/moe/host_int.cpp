// SPDX-License-Identifier: Apache-2.0
// examples/moe/host_int.cpp: the host compositions with the integer schemes.
#include "examples/moe/run_host.hpp"

template moe_tool::JobResult moe_tool::run_host<moe::quantization::Int8PerToken>(Job const&);
template moe_tool::JobResult moe_tool::run_host<moe::quantization::Int8PerChannel>(Job const&);
template moe_tool::JobResult moe_tool::run_host<moe::quantization::Int4Group128>(Job const&);
template moe_tool::JobResult moe_tool::run_host<moe::quantization::WNa16<4, 32>>(Job const&);
