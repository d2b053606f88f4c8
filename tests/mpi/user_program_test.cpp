// SPDX-License-Identifier: Apache-2.0
// tests/mpi/user_program_test.cpp: a user's program in the host space: one include for each policy, no explicit instantiation. All backends
// agree.
// moe-ranks: 2
#include <gtest/gtest.h>

#include <cmath>
#include <moe/activation/activation.hpp>
#include <moe/backends/all_to_all_v.hpp>
#include <moe/backends/allgather_reduce_scatter.hpp>
#include <moe/backends/naive.hpp>
#include <moe/backends/window/host/high_throughput.hpp>
#include <moe/backends/window/host/low_latency.hpp>
#include <moe/backends/window/host/one_sided.hpp>
#include <moe/backends/window/host/pplx.hpp>
#include <moe/backends/window/host/two_sided.hpp>
#include <moe/comm/mpi.hpp>
#include <moe/comm/mpi_shared.hpp>
#include <moe/experts/reference.hpp>
#include <moe/modular_kernel.hpp>
#include <moe/quantization/none.hpp>
#include <moe/routing/softmax_topk.hpp>
#include <vector>

namespace {

using namespace moe;
constexpr int kRows = 9, kHidden = 64, kIntermediate = 32, kExperts = 8;

struct Config : LayerDefaults {
  static constexpr int hidden = kHidden, intermediate = kIntermediate, num_experts = kExperts, topk = 2;
  using Activation = activation::Silu;
};
using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
using None = quantization::None;
using Window = comm::MpiShared;

std::vector<float> numbers(int seed, int count) {
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& v : out) v = 0.1F * std::sin(7.0F * static_cast<float>(seed++));
  return out;
}

template <class Backend>
std::vector<float> forward(comm::Mpi& comm) {
  ExpertPlacement const placement(kExperts, comm.size());
  experts::WeightStore<Config, None> weights(placement.num_local(comm.rank()), kHidden, kIntermediate, true);
  int at = 0;
  for (int const e : placement.local_to_physical(comm.rank())) {
    weights.set_expert(at++, numbers(e, 2 * kIntermediate * kHidden).data(), numbers(-e, kHidden * kIntermediate).data());
  }
  ModularKernel<Config, Router, None, Backend, experts::Reference<float>> layer(
      comm, weights.view(), {.max_tokens_per_rank = kRows, .placement = placement, .router = {kExperts, 2}});
  std::vector<float> const hidden = numbers(comm.rank(), kRows * kHidden), logits = numbers(comm.rank() + 8, kRows * kExperts);
  std::vector<float> output(hidden.size());
  layer.forward(make_rows<kHidden, float const>(hidden.data(), kRows, kHidden),
                make_rows<dynamic, float const>(logits.data(), kRows, kExperts), make_rows<kHidden>(output.data(), kRows, kHidden));
  return output;
}

TEST(UserProgram, EveryBackend) {
  comm::Mpi comm(MPI_COMM_WORLD);
  std::vector<float> const want = forward<backends::AllToAllV<comm::Mpi>>(comm);
  float largest = 0;
  for (float const v : want) largest = std::max(largest, std::abs(v));
  ASSERT_GT(largest, 0.0F);
  auto const same = [&](std::vector<float> const& got, char const* name) {
    for (std::size_t i = 0; i < want.size(); ++i) {
      ASSERT_NEAR(got[i], want[i], 1e-6F * largest) << name << ", value " << i;  // sums in another order
    }
  };
  same(forward<backends::AllGatherReduceScatter<comm::Mpi>>(comm), "allgather_reduce_scatter");
  same(forward<backends::Naive<comm::Mpi>>(comm), "naive");
  same(forward<backends::LowLatency<Window>>(comm), "low_latency");
  same(forward<backends::LowLatencyRankMajor<Window>>(comm), "low_latency_rank_major");
  same(forward<backends::HighThroughput<Window>>(comm), "high_throughput");
  same(forward<backends::OneSided<Window>>(comm), "one_sided");
  same(forward<backends::TwoSided<Window>>(comm), "two_sided");
  same(forward<backends::Pplx<Window>>(comm), "pplx");
}

}  // namespace
