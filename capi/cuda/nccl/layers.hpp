// SPDX-License-Identifier: Apache-2.0
// capi/cuda/nccl/layers.hpp: the policies of layers between GPUs, for the table and the sources that instantiate them.
#pragma once

#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/high_throughput.hpp"
#include "moe/backends/low_latency.hpp"
#include "moe/comm/nccl.hpp"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/experts/cuda_reference.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/quantization/schemes.hpp"

namespace moe_c {

using AllToAllV = moe::backends::AllToAllV<moe::comm::Nccl>;
using LowLatency = moe::backends::LowLatency<moe::comm::NcclSymmetric>;
using HighThroughput = moe::backends::HighThroughput<moe::comm::NcclSymmetric>;
using moe::experts::CudaReference;
using moe::experts::HopperContiguous;
using moe::experts::HopperMasked;
using moe::experts::HopperW4A16;
using None = moe::quantization::None;
using Fp8 = moe::quantization::Fp8Block<>;
using Fp8Rows = moe::quantization::Fp8PerToken<>;
using Int4Group32 = moe::quantization::WNa16<4, 32>;
using Int4Group64 = moe::quantization::WNa16<4, 64>;
using Int4Group128 = moe::quantization::Int4Group128;
using Mxfp4 = moe::quantization::Mxfp4W4A16<>;

}  // namespace moe_c
