// SPDX-License-Identifier: Apache-2.0
// examples/moe/host_mx.cpp: the host compositions with the microscaling schemes.
#include "examples/moe/run_host.hpp"

template moe_tool::JobResult moe_tool::run_host<moe::quantization::Mxfp8<>>(Job const&);
template moe_tool::JobResult moe_tool::run_host<moe::quantization::Mxfp4<>>(Job const&);
template moe_tool::JobResult moe_tool::run_host<moe::quantization::Mxfp4W4A16<>>(Job const&);
template moe_tool::JobResult moe_tool::run_host<moe::quantization::Nvfp4>(Job const&);
template moe_tool::JobResult moe_tool::run_host<moe::quantization::Nvfp4W4A16>(Job const&);
