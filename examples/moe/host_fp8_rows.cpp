// SPDX-License-Identifier: Apache-2.0
// examples/moe/host_fp8_rows.cpp: the host compositions with the row-scaled fp8 schemes.
#include "examples/moe/run_host.hpp"

template moe_tool::JobResult moe_tool::run_host<moe::quantization::Fp8PerTensor<>>(Job const&);
template moe_tool::JobResult moe_tool::run_host<moe::quantization::Fp8PerToken<>>(Job const&);
template moe_tool::JobResult moe_tool::run_host<moe::quantization::Fp8PerChannel<>>(Job const&);
