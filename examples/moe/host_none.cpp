// SPDX-License-Identifier: Apache-2.0
// examples/moe/host_none.cpp: the host compositions without quantisation.
#include "examples/moe/run_host.hpp"

template moe_tool::JobResult moe_tool::run_host<moe::quantization::None>(Job const&);
