// SPDX-License-Identifier: Apache-2.0
// examples/moe/host_inside.cpp: the host compositions whose experts route inside.
#include "examples/moe/run_host.hpp"

template moe_tool::JobResult moe_tool::run_inside<moe::quantization::None>(Job const&);
template moe_tool::JobResult moe_tool::run_inside<moe::quantization::Fp8Group<>>(Job const&);
