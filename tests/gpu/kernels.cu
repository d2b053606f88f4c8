// SPDX-License-Identifier: Apache-2.0
// tests/gpu/kernels.cu: the kernels that no kernel library and no optimised test holds, with the types that layers use: compiled for what
// ptxas reports of them (kernel_registers.txt), linked nowhere.
#include "moe/backends/collective/device/all_to_all_v.cuh"
#include "moe/backends/collective/device/gather_exchange.cuh"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/backends/window/device/low_latency/fixed.cuh"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/monolithic.cuh"
#include "moe/models/deepseek.hpp"
#include "moe/models/gpt_oss.hpp"
#include "moe/models/longcat.hpp"
#include "moe/models/qwen.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/fixed_sizes.hpp"
#include "moe/runner/device/dense_shared.cuh"
#include "moe/runner/device/row_kernels.cuh"

namespace {
using Layer = moe::models::RuntimeLayer<moe::bf16, moe::bf16>;
using Fp8 = moe::quantization::Fp8Block<>;
using moe::quantization::None;
}  // namespace

namespace moe::routing {
template <class Model>
using FixedRow = RowRouter<typename Fixed<typename Model::Router, Model>::Config>;
template void FixedRow<models::DeepSeek_V3>::select<float>(RouteArgs<float> const&, Stream<space::cuda>) const;
template void FixedRow<models::DeepSeek_V2>::select<float>(RouteArgs<float> const&, Stream<space::cuda>) const;
template void FixedRow<models::Qwen3_30B_A3B>::select<float>(RouteArgs<float> const&, Stream<space::cuda>) const;
template void FixedRow<models::GptOss_120B>::select<float>(RouteArgs<float> const&, Stream<space::cuda>) const;
template void FixedRow<models::LongCat_Flash>::select<float>(RouteArgs<float> const&, Stream<space::cuda>) const;
template void take_routing<models::DeepSeek_V3::Router>(models::DeepSeek_V3::Router const&, CallerRouting const&, Stream<space::cuda>);
template void pass_logits<float>(RouteArgs<float> const&, Stream<space::cuda>);
}  // namespace moe::routing

namespace moe::runner {
template void RowKernels<space::cuda>::finish(FinishRows<bf16, bf16> const&, cudaStream_t);
template void RowKernels<space::cuda>::finish(FinishRows<bf16, float> const&, cudaStream_t);
template void RowKernels<space::cuda>::rms_norm(Rows<bf16 const>, float const*, float, float, Rows<bf16>, cudaStream_t);
template void RowKernels<space::cuda>::rms_norm(Rows<bf16 const>, float const*, float, float, Rows<float>, cudaStream_t);
template void RowKernels<space::cuda>::gelu(Rows<float>, cudaStream_t);
template void RowKernels<space::cuda>::sigmoid_gate(Rows<bf16 const>, float const*, Rows<float>, cudaStream_t);
template void RowKernels<space::cuda>::copy_columns(Rows<bf16 const>, Rows<bf16>, cudaStream_t);
namespace device {
template void small_product(SmallProduct<bf16, bf16, float>, SmallProductPlan const&, cudaStream_t);
template void small_product(SmallProduct<bf16, float, float>, SmallProductPlan const&, cudaStream_t);
template __global__ void activate_shared_kernel(ActivateShared<bf16>);
}  // namespace device
}  // namespace moe::runner

namespace moe::experts::detail {
template __global__ void requantize_rows(Fp8, SlotTable, std::int64_t, float*, Fp8::Payload<float>*, Fp8::Scale*);
template __global__ void normalised_product(SlotTable, float const*, float const*, float const*, std::int64_t, std::int64_t, float const*,
                                            float, float*);
template __global__ void sum_slots(SlotTable, float const*, std::int64_t, std::int64_t, bool, float*, std::int64_t);
}  // namespace moe::experts::detail

namespace moe::backends::detail {
using moe::detail::RoundView;
using moe::detail::WireRow;
template __global__ void localize_ids(LocalizeIdsArgs<std::int32_t>);
template __global__ void convert_rows(bf16 const*, std::int64_t, std::int64_t, bf16*, std::int64_t);
template __global__ void convert_rows(float const*, std::int64_t, std::int64_t, bf16*, std::int64_t);
template __global__ void plan_routes(RoundView, moe::detail::RoundOpening, RouteTable, std::int64_t, std::int32_t*);
template __global__ void pack_routes(PackRoutesArgs<Layer, None>);
template __global__ void pack_routes(PackRoutesArgs<Layer, Fp8>);
template __global__ void hide_rows(RoundView, WireRow<Layer, None>, std::int64_t, std::byte*);
}  // namespace moe::backends::detail

namespace moe::detail {
template __global__ void open_round(RoundView, RoundOpening);
template __global__ void check_round_headers(RoundView, RoundLayout, std::int64_t, bool);
template __global__ void sum_partial_rows(RoundView, PartialRows<bf16>, std::int64_t, std::int64_t, bf16*, std::int64_t);
template __global__ void sum_partial_rows(RoundView, PartialRows<float>, std::int64_t, std::int64_t, bf16*, std::int64_t);
template __global__ void pack_rows(PackRowsArgs<Layer, None>);
template __global__ void pack_rows(PackRowsArgs<Layer, Fp8>);
template __global__ void map_ids(MapIdsArgs<WireRow<Layer, None>>);
template __global__ void widen_partial(bf16 const*, std::int64_t, float*);
template LowLatencyFixed const& low_latency_fixed<models::DeepSeek_V3, false>();
template LowLatencyFixed const& low_latency_fixed<models::DeepSeek_V3, true>();
}  // namespace moe::detail
