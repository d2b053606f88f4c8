// SPDX-License-Identifier: Apache-2.0
// capi/mpi_instances.cpp: the rows of the table for ranks of the host space over MPI; mpi_*.cpp instantiate them.
#include "capi/instances.hpp"
#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/high_throughput.hpp"
#include "moe/backends/low_latency.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/mpi_shared.hpp"
#include "moe/experts/onednn.hpp"
#include "moe/quantization/schemes.hpp"

namespace moe_c {
namespace {

template <class Backend, class Quant>
void add(std::vector<Instance>& all) {
  all.push_back(instance<float, Quant, Backend, moe::experts::OneDnn>());
  all.push_back(instance<moe::bf16, Quant, Backend, moe::experts::OneDnn>());
}

}  // namespace

void add_mpi_instances(std::vector<Instance>& all) {
  using AllToAllV = moe::backends::AllToAllV<moe::comm::Mpi>;
  add<AllToAllV, moe::quantization::None>(all);
  add<AllToAllV, moe::quantization::Fp8Block<>>(all);
  add<AllToAllV, moe::quantization::Fp8PerToken<>>(all);
  add<AllToAllV, moe::quantization::WNa16<4, 32>>(all);
  add<AllToAllV, moe::quantization::WNa16<4, 64>>(all);
  add<AllToAllV, moe::quantization::Int4Group128>(all);
  add<AllToAllV, moe::quantization::Mxfp4W4A16<>>(all);
  add<moe::backends::LowLatency<moe::comm::MpiShared>, moe::quantization::None>(all);
  add<moe::backends::HighThroughput<moe::comm::MpiShared>, moe::quantization::None>(all);
}

}  // namespace moe_c
