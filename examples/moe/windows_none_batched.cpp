// SPDX-License-Identifier: Apache-2.0
// examples/moe/windows_none_batched.cpp: the batched compositions over windows of host memory without quantisation.
#include "examples/moe/run_windows.hpp"

template moe_tool::JobResult moe_tool::run_windows<moe::quantization::None, moe::ActivationFormat::batched>(Job const&);
