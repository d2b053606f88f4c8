// SPDX-License-Identifier: Apache-2.0
// comm/nccl_device_api.hpp: NCCL's device header, without the warnings of its own functions: a toolkit that holds NCCL is searched without
// being a system folder to the host compiler. g++ alone compiles its host declarations, nvcc its device functions too.
#pragma once

#include <nccl.h>

#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#endif
#include <nccl_device.h>
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
