// SPDX-License-Identifier: Apache-2.0
// capi/host_instances.cpp: the rows of the table for one rank of the host space; host_*.cpp instantiate them.
#include "capi/instances.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/experts/onednn.hpp"
#include "moe/quantization/schemes.hpp"

namespace moe_c {

namespace {

template <class Act, class Quant>
void add_one(std::vector<Instance>& all) {
  all.push_back(instance<Act, Quant, moe::backends::NoExpertParallel<>, moe::experts::OneDnn>());
}
template <class Quant>
void add(std::vector<Instance>& all) {
  add_one<float, Quant>(all);
  add_one<moe::bf16, Quant>(all);
  add_one<moe::f16, Quant>(all);
}
/// Schemes that have no layers in float16.
template <class... Quants>
void add_two(std::vector<Instance>& all) {
  ((add_one<float, Quants>(all), add_one<moe::bf16, Quants>(all)), ...);
}

}  // namespace

void add_host_instances(std::vector<Instance>& all) {
  add<moe::quantization::None>(all);
  add<moe::quantization::Fp8Block<>>(all);
  add<moe::quantization::Fp8PerToken<>>(all);
  add<moe::quantization::WNa16<4, 32>>(all);
  add<moe::quantization::WNa16<4, 64>>(all);
  add<moe::quantization::WNa16<4, 128>>(all);
  add<moe::quantization::Mxfp4W4A16<>>(all);
  add_two<moe::quantization::Int4Group128Zero, moe::quantization::Int8PerChannel, moe::quantization::Int8PerToken,
          moe::quantization::Fp8PerChannel<>, moe::quantization::Mxfp8<>, moe::quantization::Mxfp8W8A16<>, moe::quantization::Mxfp4Fp8<>,
          moe::quantization::Nvfp4W4A16, moe::quantization::Int4Fp8<32>, moe::quantization::Int4Fp8<64>, moe::quantization::Int4Fp8<128>,
          moe::quantization::Int4Fp8<128, true>>(all);
}

}  // namespace moe_c
