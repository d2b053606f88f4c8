// SPDX-License-Identifier: Apache-2.0
// examples/moe/windows_fp8_batched.cpp: the batched compositions over windows of host memory with fp8 by groups of a row.
#include "examples/moe/run_windows.hpp"

template moe_tool::JobResult moe_tool::run_windows<moe::quantization::Fp8Group<>, moe::ActivationFormat::batched>(Job const&);
