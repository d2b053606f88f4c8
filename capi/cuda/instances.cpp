// SPDX-License-Identifier: Apache-2.0
// capi/cuda/instances.cpp: the rows of the table for one GPU: the Hopper experts where they take the request, cuda_reference elsewhere.
#include "capi/instances.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/experts/cuda_reference.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/schemes.hpp"

namespace moe_c {
namespace {

namespace quantization = moe::quantization;
using moe::experts::CudaReference;
using moe::experts::HopperContiguous;
using moe::experts::HopperW4A16;

std::string wrong_device(moe::c::Request const& r) {
  int major = 0;
  int minor = 0;
  moe::check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, r.device.id), "cudaDeviceGetAttribute");
  moe::check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, r.device.id), "cudaDeviceGetAttribute");
  return major == 9 && minor == 0 ? "" : moe::text("cuda:", r.device.id, " is sm_", major, minor, ", needs sm_90");
}
std::string wrong_size(char const* what, std::int64_t value, int multiple) {
  return value % multiple == 0 ? "" : moe::text(what, " ", value, " is not a multiple of ", multiple);
}
/// The first reason that is not empty.
std::string first(std::initializer_list<std::string> reasons) {
  for (std::string const& reason : reasons) {
    if (!reason.empty()) return reason;
  }
  return "";
}

template <class Act, class Quant>
std::string contiguous_unfit(moe::c::Request const& r) {
  constexpr auto kScheme = HopperContiguous::Kernel<moe::models::RuntimeLayer<Act, Act>, Quant, moe::ActivationFormat::standard>::kScheme;
  return first({wrong_device(r), wrong_size("hidden", r.shape.hidden, moe::hopper::hidden_multiple(kScheme)),
                wrong_size("intermediate", r.shape.intermediate, moe::hopper::intermediate_multiple(kScheme))});
}
template <int IntermediateMultiple>
std::string w4a16_unfit(moe::c::Request const& r) {
  return first(
      {wrong_device(r), wrong_size("hidden", r.shape.hidden, 64), wrong_size("intermediate", r.shape.intermediate, IntermediateMultiple)});
}

template <class Act, class Quant, class Experts>
void add(std::vector<Instance>& all, std::string (*unfit)(moe::c::Request const&) = nullptr) {
  all.push_back(instance<Act, Quant, moe::backends::NoExpertParallel<moe::space::cuda>, Experts>(unfit));
}
template <class Act, class Quant>
void add_contiguous(std::vector<Instance>& all) {
  add<Act, Quant, HopperContiguous>(all, &contiguous_unfit<Act, Quant>);
}

}  // namespace

void add_cuda_instances(std::vector<Instance>& all) {
  add_contiguous<moe::bf16, quantization::None>(all);
  add_contiguous<moe::f16, quantization::None>(all);
  add_contiguous<moe::bf16, quantization::Fp8Block<>>(all);
  add_contiguous<moe::bf16, quantization::Fp8PerToken<>>(all);
  add<moe::bf16, quantization::WNa16<4, 32>, HopperW4A16>(all, &w4a16_unfit<64>);
  add<moe::bf16, quantization::WNa16<4, 64>, HopperW4A16>(all, &w4a16_unfit<64>);
  add<moe::bf16, quantization::Int4Group128, HopperW4A16>(all, &w4a16_unfit<64>);
  add<moe::bf16, quantization::Mxfp4W4A16<>, HopperW4A16>(all, &w4a16_unfit<32>);

  add<float, quantization::None, CudaReference>(all);
  add<moe::bf16, quantization::None, CudaReference>(all);
  add<moe::f16, quantization::None, CudaReference>(all);
  add<moe::bf16, quantization::Fp8Block<>, CudaReference>(all);
  add<moe::bf16, quantization::Fp8PerToken<>, CudaReference>(all);
  add<moe::bf16, quantization::WNa16<4, 32>, CudaReference>(all);
  add<moe::bf16, quantization::WNa16<4, 64>, CudaReference>(all);
  add<moe::bf16, quantization::Int4Group128, CudaReference>(all);
  add<moe::bf16, quantization::Mxfp4W4A16<>, CudaReference>(all);
}

}  // namespace moe_c
