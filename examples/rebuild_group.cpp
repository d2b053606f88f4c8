// SPDX-License-Identifier: Apache-2.0
// examples/rebuild_group.cpp: a rank stops answering; the others build a group without it: mpirun -n 4 example_rebuild_group
// moe-ranks: 4
#include <mpi.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <moe/comm/mpi.hpp>
#include <moe/moe.hpp>
#include <optional>
#include <thread>

struct Config : moe::LayerDefaults {
  static constexpr int hidden = 64, intermediate = 32, num_experts = 12, topk = 2;
  using Activation = moe::activation::Silu;
};
using Router = moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>;
using None = moe::quantization::None;
using Layer = moe::ModularKernel<Config, Router, None, moe::backends::AllToAllV<moe::comm::Mpi>, moe::experts::OneDnn>;

std::vector<float> numbers(int seed, int count) {
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& v : out) v = 0.1F * std::sin(7.0F * static_cast<float>(seed++));
  return out;
}
/// What belongs to one group: a layer is built anew with another number of ranks, since every rank then holds other experts.
struct Group {
  moe::comm::Mpi comm;
  moe::ExpertPlacement placement;
  moe::experts::WeightStore<Config, None> weights;
  Layer layer;

  explicit Group(MPI_Comm ranks)
      : comm(ranks, {.timeout_ms = 1000}),
        placement(Config::num_experts, comm.size()),
        weights(experts()),
        layer(comm, weights.view(), {.max_tokens_per_rank = 8, .placement = placement}) {}
  moe::experts::WeightStore<Config, None> experts() const {
    moe::experts::WeightStore<Config, None> store(placement.num_local(comm.rank()), 64, 32, true);
    int local = 0;
    for (int e : placement.local_to_physical(comm.rank()))
      store.set_expert(local++, numbers(e, 64 * 64).data(), numbers(-e, 64 * 32).data());
    return store;
  }
  std::vector<float> forward(int seed) {
    auto const hidden = numbers(seed, 8 * 64), logits = numbers(seed + 50, 8 * 12);
    std::vector<float> out(hidden.size());
    layer.forward(moe::make_rows<64>(hidden.data(), 8, 64), moe::make_rows(logits.data(), 8, 12), moe::make_rows<64>(out.data(), 8, 64));
    return out;
  }
};

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  std::atexit([] { MPI_Finalize(); });
  std::optional<Group> group(std::in_place, MPI_COMM_WORLD);
  int const rank = group->comm.rank(), last = group->comm.size() - 1;
  auto const before = group->forward(rank);
  if (rank == last) {  // stops answering
    std::this_thread::sleep_for(std::chrono::seconds(3));
    return 0;
  }
  try {
    group->forward(rank);
    return 1;
  } catch (moe::Error const& e) {  // E_TIMEOUT, or E_PEER where another rank gave up first
    std::printf("rank %d: %s\n", rank, e.what());
  }
  group.reset();  // waits for no rank

  // Which ranks go on is the program's decision: here all but the last. This call is collective over those ranks alone.
  MPI_Group all, rest;
  MPI_Comm remaining;
  MPI_Comm_group(MPI_COMM_WORLD, &all);
  MPI_Group_excl(all, 1, &last, &rest);
  MPI_Comm_create_group(MPI_COMM_WORLD, rest, 0, &remaining);
  group.emplace(remaining);
  auto const after = group->forward(rank);
  float worst = 0.0F;
  for (std::size_t i = 0; i < after.size(); ++i) worst = std::fmax(worst, std::fabs(after[i] - before[i]));
  std::printf("rank %d: %d ranks go on, output differs by %.1e\n", rank, group->comm.size(), static_cast<double>(worst));
  return worst < 1e-6F ? 0 : 1;
}
