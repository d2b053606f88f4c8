// SPDX-License-Identifier: Apache-2.0
// examples/moe/host_sample_int4.cpp: the sample of host compositions with int4 weights in further groups and with zero points.
#include "examples/moe/run_host.hpp"

template moe_tool::JobResult moe_tool::run_sample<moe::quantization::WNa16<4, 64>>(Job const&);
template moe_tool::JobResult moe_tool::run_sample<moe::quantization::WNa16<4, 32, true>>(Job const&);
template moe_tool::JobResult moe_tool::run_sample<moe::quantization::WNa16<4, 64, true>>(Job const&);
template moe_tool::JobResult moe_tool::run_sample<moe::quantization::Int4Group128Zero>(Job const&);
