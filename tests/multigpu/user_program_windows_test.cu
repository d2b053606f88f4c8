// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/user_program_windows_test.cu: a user's program over windows between GPUs: one include for each policy, no explicit
// instantiation. The backends of one format agree.
// moe-ranks: 2 4
#include <gtest/gtest.h>
#include <mpi.h>

#include <cmath>
#include <moe/activation/activation.hpp>
#include <moe/backends/window/device/high_throughput.cuh>
#include <moe/backends/window/device/low_latency.cuh>
#include <moe/backends/window/device/one_sided.cuh>
#include <moe/backends/window/device/pplx.cuh>
#include <moe/backends/window/device/two_sided.cuh>
#include <moe/comm/mpi.hpp>
#include <moe/experts/cuda_reference.cuh>
#include <moe/modular_kernel.hpp>
#include <moe/quantization/none.hpp>
#include <moe/routing/device/route.cuh>
#include <moe/routing/softmax_topk.hpp>
#include <vector>

namespace {

using namespace moe;
constexpr int kRows = 9, kHidden = 128, kIntermediate = 32, kExperts = 8;

struct Config : LayerDefaults {
  static constexpr int hidden = kHidden, intermediate = kIntermediate, num_experts = kExperts, topk = 2;
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
};
using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
using None = quantization::None;
using Window = comm::NcclSymmetric;

template <class T>
std::vector<T> numbers(int seed, int count) {
  std::vector<T> out(static_cast<std::size_t>(count));
  for (T& v : out) v = from_float<T>(0.1F * std::sin(7.0F * static_cast<float>(seed++)));
  return out;
}

template <class Backend>
std::vector<float> forward(comm::Nccl& comm) {
  ExpertPlacement const placement(kExperts, comm.size());
  experts::WeightStore<Config, None, space::cuda> weights(placement.num_local(comm.rank()), kHidden, kIntermediate, true);
  int at = 0;
  for (int const e : placement.local_to_physical(comm.rank())) {
    weights.set_expert(at++, numbers<bf16>(e, 2 * kIntermediate * kHidden).data(), numbers<bf16>(-e, kHidden * kIntermediate).data());
  }
  ModularKernel<Config, Router, None, Backend, experts::CudaReference> layer(
      comm, weights.view(), {.max_tokens_per_rank = kRows, .placement = placement, .router = {kExperts, 2}});
  Buffer<bf16, space::cuda> hidden(kRows * kHidden), output(kRows * kHidden);
  Buffer<float, space::cuda> logits(kRows * kExperts);
  hidden.copy_from_host(numbers<bf16>(comm.rank(), kRows * kHidden).data());
  logits.copy_from_host(numbers<float>(comm.rank() + 8, kRows * kExperts).data());
  layer.forward(make_rows<kHidden, bf16 const>(hidden.data(), kRows, kHidden),
                make_rows<dynamic, float const>(logits.data(), kRows, kExperts), make_rows<kHidden>(output.data(), kRows, kHidden));
  check_cuda(cudaDeviceSynchronize(), "forward");
  layer.exchange().check();
  std::vector<bf16> host(kRows * kHidden);
  output.copy_to_host(host.data());
  std::vector<float> out;
  for (bf16 const v : host) out.push_back(to_float(v));
  return out;
}

void expect_near(std::vector<float> const& got, std::vector<float> const& want, char const* name) {
  float largest = 0;
  for (float const v : want) largest = std::max(largest, std::abs(v));
  ASSERT_GT(largest, 0.0F);
  for (std::size_t i = 0; i < want.size(); ++i) {  // sums in another order, each partial sum rounded to bf16
    ASSERT_NEAR(got[i], want[i], 0.02F * largest) << name << ", value " << i;
  }
}

TEST(UserProgramWindows, EveryBackend) {
  comm::Mpi host(MPI_COMM_WORLD);
  comm::Nccl comm = comm::Nccl::over_communicator(host, {});
  std::vector<float> const want = forward<backends::LowLatency<Window>>(comm);
  expect_near(forward<backends::LowLatencyRankMajor<Window>>(comm), want, "low_latency_rank_major");
  expect_near(forward<backends::HighThroughput<Window>>(comm), want, "high_throughput");
  expect_near(forward<backends::OneSided<Window>>(comm), want, "one_sided");
  expect_near(forward<backends::TwoSided<Window>>(comm), want, "two_sided");
  expect_near(forward<backends::Pplx<Window>>(comm), want, "pplx");
}

}  // namespace
