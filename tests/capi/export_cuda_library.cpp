// SPDX-License-Identifier: Apache-2.0
// tests/capi/export_cuda_library.cpp: the functions of moe.h over a preset's library in the CUDA space, as the source of a shared library.
#include <load_deepseek.hpp>
#include <moe/c/export.hpp>

using Alone = moe::c::Exported<load_deepseek::no_expert_parallel::none::decode::Layer>;
#ifdef MOE_C_HAS_NCCL
using OverNccl = moe::c::Exported<load_deepseek::all_to_all_v::none::decode::Layer>;
MOE_C_EXPORT(Alone, OverNccl)
#else
MOE_C_EXPORT(Alone)
#endif
