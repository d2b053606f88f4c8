// SPDX-License-Identifier: Apache-2.0
// quantization/schemes.hpp: every quantisation scheme.
#pragma once

#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/fp8_group128.hpp"
#include "moe/quantization/fp8_per_channel.hpp"
#include "moe/quantization/fp8_per_tensor.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/int4_fp8.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/int8_group128.hpp"
#include "moe/quantization/int8_per_channel.hpp"
#include "moe/quantization/int8_per_token.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/mxfp4_fp8.hpp"
#include "moe/quantization/mxfp8.hpp"
#include "moe/quantization/none.hpp"
#include "moe/quantization/nvfp4.hpp"
#include "moe/quantization/w4a8.hpp"
