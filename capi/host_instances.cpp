// SPDX-License-Identifier: Apache-2.0
// capi/host_instances.cpp: the rows of the table for one rank of the host space; host_*.cpp instantiate them.
#include "capi/instances.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/experts/onednn.hpp"
#include "moe/quantization/schemes.hpp"

namespace moe_c {

namespace {
template <class Quant>
void add(std::vector<Instance>& all) {
  all.push_back(instance<float, Quant, moe::backends::NoExpertParallel<>, moe::experts::OneDnn>());
  all.push_back(instance<moe::bf16, Quant, moe::backends::NoExpertParallel<>, moe::experts::OneDnn>());
  all.push_back(instance<moe::f16, Quant, moe::backends::NoExpertParallel<>, moe::experts::OneDnn>());
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
}

}  // namespace moe_c
