// SPDX-License-Identifier: Apache-2.0
// examples/expert_parallel.cpp: one layer whose experts lie on the ranks of an MPI job: mpirun -n 4 example_expert_parallel
// moe-ranks: 4
#include <mpi.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <moe/comm/mpi.hpp>
#include <moe/moe.hpp>
#include <random>

struct Config : moe::LayerDefaults {
  static constexpr int hidden = 128, intermediate = 256, num_experts = 16, topk = 4;
  using Activation = moe::activation::Silu;
};
using Router = moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>;
using None = moe::quantization::None;
using Layer = moe::ModularKernel<Config, Router, None, moe::backends::AllToAllV<moe::comm::Mpi>, moe::experts::OneDnn>;
using OneRank = moe::ModularKernel<Config, Router, None, moe::backends::NoExpertParallel<>, moe::experts::OneDnn>;

std::vector<float> normal(int seed, int count) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& v : out) v = std::normal_distribution<float>(0.0F, 0.1F)(random);
  return out;
}
/// The experts of a rank; an expert has the same weights wherever it lies.
moe::experts::WeightStore<Config, None> experts(moe::ExpertPlacement const& placement, int rank) {
  moe::experts::WeightStore<Config, None> store(placement.num_local(rank), 128, 256, true);
  int local = 0;
  for (int e : placement.local_to_physical(rank)) store.set_expert(local++, normal(e, 512 * 128).data(), normal(e + 16, 128 * 256).data());
  return store;
}
std::vector<float> forward(auto& layer, std::vector<float> const& hidden, std::vector<float> const& logits, int tokens) {
  std::vector<float> out(hidden.size());
  layer.forward(moe::make_rows<128>(hidden.data(), tokens, 128), moe::make_rows(logits.data(), tokens, 16),
                moe::make_rows<128>(out.data(), tokens, 128));
  return out;
}
int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  std::atexit([] { MPI_Finalize(); });
  moe::comm::Mpi comm(MPI_COMM_WORLD);
  moe::ExpertPlacement const placement(16, comm.size()), one(16, 1);
  auto const mine = experts(placement, comm.rank()), all = experts(one, 0);
  Layer layer(comm, mine.view(), {.max_tokens_per_rank = 64, .placement = placement, .router = {16, 4}});
  moe::comm::Self<> self;
  OneRank reference(self, all.view(), {.max_tokens_per_rank = 64, .placement = one, .router = {16, 4}});

  int const tokens = 32 + comm.rank();  // another number on every rank
  auto const hidden = normal(100 + comm.rank(), tokens * 128), logits = normal(200 + comm.rank(), tokens * 16);
  auto const output = forward(layer, hidden, logits, tokens), wanted = forward(reference, hidden, logits, tokens);
  float worst = 0.0F;
  for (std::size_t i = 0; i < output.size(); ++i) worst = std::fmax(worst, std::fabs(output[i] - wanted[i]));
  std::printf("rank %d: %d tokens, %.1e from one rank with all experts\n", comm.rank(), tokens, static_cast<double>(worst));
  return worst < 1e-6F ? 0 : 1;
}
