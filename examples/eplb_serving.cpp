// SPDX-License-Identifier: Apache-2.0
// examples/eplb_serving.cpp: experts move between ranks while a block of a model serves skewed traffic: mpirun -n 4 example_eplb_serving
// moe-ranks: 4
#include <mpi.h>

#include <cmath>
#include <cstdio>
#include <moe/comm/mpi.hpp>
#include <moe/eplb/runtime_balancer.hpp>
#include <moe/moe.hpp>
#include <moe/runner/host/primitives.hpp>
#include <moe/runner/runner.hpp>
#include <random>

struct Config : moe::LayerDefaults {
  static constexpr int hidden = 64, intermediate = 128, num_experts = 32, topk = 4;
  using Activation = moe::activation::Silu;
};
using Mpi = moe::comm::Mpi;
using Router = moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>;
using Block = moe::Runner<moe::ModularKernel<Config, Router, moe::quantization::None, moe::backends::AllToAllV<Mpi>, moe::experts::OneDnn>>;

std::vector<float> normal(int seed, int count, float scale) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& v : out) v = std::normal_distribution<float>(0.0F, scale)(random);
  return out;
}
int serve() {
  Mpi tokens(MPI_COMM_WORLD), weights(MPI_COMM_WORLD), engine(MPI_COMM_WORLD);
  moe::eplb::CommGroup<Mpi> group(engine);
  auto const maps = moe::eplb::ExpertMaps::initial(1, 32, 2 * tokens.size());  // one layer; two spare expert slots a rank
  moe::experts::WeightStore<Config, moe::quantization::None> store(maps.num_physical() / tokens.size(), 64, 128, true);
  for (int s = 0, n = static_cast<int>(store.num_local()); s < n; ++s) {
    int const e = maps.physical_to_logical()(0, tokens.rank() * n + s);
    store.set_expert(s, normal(e, 256 * 64, 0.1F).data(), normal(e + 32, 64 * 128, 0.1F).data());
  }
  moe::eplb::RuntimeBalancer<Mpi, moe::eplb::CommGroup<Mpi>> balancer(weights, group, {moe::eplb::expert_tensors(store)},
                                                                      {.maps = maps, .options = {8, 16}});
  Block::Params p{.layer = {.max_tokens_per_rank = 64, .placement = balancer.placement(0), .router = {32, 4}}};
  p.layer.mapping = balancer.mapping(0), p.layer.load = balancer.load(0);
  Block block(tokens, store.view(), p);
  balancer.attach(0, block);
  for (int moves = 0; moves < 2; moves += balancer.step().finished ? 1 : 0) {  // weights move in the background
    auto const hidden = normal(tokens.rank(), 64 * 64, 1.0F);
    auto logits = normal(tokens.rank() + 100, 64 * 32, 1.0F), output = hidden;
    for (std::size_t i = 0; i < logits.size(); ++i) logits[i] -= 1.2F * std::log(1.0F + static_cast<float>(i % 32));  // few are hot
    block.forward(moe::make_rows(hidden.data(), 64, 64), moe::make_rows(logits.data(), 64, 32), moe::make_rows(output.data(), 64, 64));
  }
  auto const load = balancer.global_load();
  double const after = balancedness(rank_loads(balancer.maps(), load, tokens.size()));
  if (tokens.rank() == 0) std::printf("balancedness %.2f, was %.2f\n", after, balancedness(rank_loads(maps, load, tokens.size())));
  return after > 0.9 ? 0 : 1;
}
int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  int const result = serve();
  return MPI_Finalize() == MPI_SUCCESS ? result : 1;
}
