// SPDX-License-Identifier: Apache-2.0
// examples/data_parallel_decode.cpp: two data-parallel ranks decode their own sequences with one MoE block whose experts they share, over
// LowLatency windows, one half of a batch on its way while the other is computed: mpirun -n 2 example_data_parallel_decode
// moe-ranks: 2
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <moe/backends/window/host/low_latency.hpp>
#include <moe/comm/mpi_shared.hpp>
#include <moe/moe.hpp>
#include <moe/runner/host/primitives.hpp>
#include <moe/runner/runner.hpp>
#include <random>

constexpr int kHidden = 64, kIntermediate = 96, kExperts = 8, kTopK = 2, kSequences = 6;
struct Config : moe::LayerDefaults {
  static constexpr int hidden = kHidden, intermediate = kIntermediate, num_experts = kExperts, topk = kTopK;
  using Activation = moe::activation::Silu;
};
struct OneRank : moe::RunnerDefaults {  // a block has its gate inside; everything else that a block can have is absent
  using Backend = moe::backends::NoExpertParallel<>;
  using Gate = moe::runner::gate::Linear<float>;
};
struct Decode : OneRank {
  using Backend = moe::backends::LowLatency<moe::comm::MpiShared>;
  using DualBatch = moe::runner::dual_batch::Halves;
};
using Router = moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>;
using None = moe::quantization::None;
template <class Parts>
using Block = moe::Runner<moe::ModularKernel<Config, Router, None, typename Parts::Backend, moe::experts::Reference<float>>, Parts>;

std::vector<float> normal(int seed, int count, float deviation) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& v : out) v = std::normal_distribution<float>(0.0F, deviation)(random);
  return out;
}
/// A rank's experts; an expert has the same weights wherever it lies.
moe::experts::WeightStore<Config, None> experts(moe::ExpertPlacement const& placement, int rank) {
  moe::experts::WeightStore<Config, None> store(placement.num_local(rank), kHidden, kIntermediate, true);
  int local = 0;
  for (int e : placement.local_to_physical(rank)) {
    store.set_expert(local++, normal(e, 2 * kIntermediate * kHidden, 0.1F).data(),
                     normal(e + kExperts, kHidden * kIntermediate, 0.1F).data());
  }
  return store;
}
/// The step after the block, instead of a model's other layers: the residual sum, scaled to a mean square of 1.
void advance(std::vector<float>& hidden, std::vector<float> const& output, int rows) {
  for (int t = 0; t < rows; ++t) {
    float* const x = hidden.data() + t * kHidden;
    float square = 0;
    for (int i = 0; i < kHidden; ++i) x[i] += output[static_cast<std::size_t>(t) * kHidden + static_cast<std::size_t>(i)];
    for (int i = 0; i < kHidden; ++i) square += x[i] * x[i];
    for (int i = 0; i < kHidden; ++i) x[i] /= std::sqrt(square / kHidden + 1e-6F);
  }
}
/// Decodes sequences of decreasing length, one row each, until no rank has any. Returns what is left in the rows.
template <class Parts>
std::vector<float> decode(typename Parts::Backend::Comm& comm, std::vector<int> const& lengths, int seed, int steps) {
  moe::ExpertPlacement const placement(kExperts, comm.size());
  auto const mine = experts(placement, comm.rank());
  std::vector<float> const gate = normal(99, kExperts * kHidden, 0.3F);
  typename Block<Parts>::Params params{.layer = {.max_tokens_per_rank = kSequences, .placement = placement, .router = {kExperts, kTopK}}};
  params.gate = {moe::make_rows(gate.data(), kExperts, kHidden)};
  if constexpr (requires { params.dual_batch.min_rows; }) params.dual_batch.min_rows = 4;  // smaller batches run whole
  Block<Parts> block(comm, mine.view(), params);
  std::vector<float> hidden = normal(seed, kSequences * kHidden, 1.0F), output(hidden.size());
  for (int step = 0; step < steps; ++step) {  // a rank whose sequences have ended still takes part, with no rows
    auto const rows = static_cast<int>(std::count_if(lengths.begin(), lengths.end(), [&](int length) { return length > step; }));
    block.forward(moe::make_rows(static_cast<float const*>(hidden.data()), rows, kHidden), moe::make_rows(output.data(), rows, kHidden));
    advance(hidden, output, rows);
  }
  return hidden;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  std::atexit([] { MPI_Finalize(); });
  moe::comm::Mpi comm(MPI_COMM_WORLD);
  moe::comm::Self<> self;
  std::vector<int> lengths(kSequences);  // longest first; rank 1 has fewer steps to go than rank 0
  for (int s = 0; s < kSequences; ++s) lengths[static_cast<std::size_t>(s)] = (32 - 4 * s) / (comm.rank() + 1);
  int const seed = 200 + comm.rank(), steps = 32;
  auto const got = decode<Decode>(comm, lengths, seed, steps);
  auto const wanted = decode<OneRank>(self, lengths, seed, steps);  // the same sequences with all experts here
  float worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) worst = std::fmax(worst, std::fabs(got[i] - wanted[i]));
  std::printf("rank %d: %d sequences of at most %d steps, %.1e from one rank with all experts\n", comm.rank(), kSequences, lengths[0],
              static_cast<double>(worst));
  return worst < 1e-3F ? 0 : 1;
}
