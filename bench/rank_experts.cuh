// SPDX-License-Identifier: Apache-2.0
// bench/rank_experts.cuh: what the benchmarks of whole layers between ranks share, with their random experts.
#pragma once

#include <mpi.h>

#include <cstdio>
#include <exception>
#include <string>
#include <string_view>

#include "bench/arguments.hpp"
#include "bench/random_experts.cuh"
#include "bench/rank_gpu.hpp"
#include "moe/comm/mpi.hpp"

namespace moe_bench {

/// The largest value of all ranks of MPI_COMM_WORLD.
inline double worst_of(double mine) {
  double worst = 0;
  MPI_Allreduce(&mine, &worst, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return worst;
}

/// Runs Bench, a class of one process per GPU, with the options. The program's exit code: 1 for a wrong result or a report that cannot be
/// written, 77 with fewer GPUs than ranks.
template <class Bench, class Options>
int run_on_ranks(Options const& options) {
  moe::comm::Mpi host(MPI_COMM_WORLD);
  if (!take_gpu(host.rank(), host.size())) return 77;
  Bench bench(host, options);
  bench.run();
  return bench.write() && bench.good() ? 0 : 1;
}

/// A program's name, and what --help prints.
struct Program {
  char const* name;
  char const* usage;
};

/// main() of a program that calls run_on_ranks(), with options "--key value": set(options, key, value) throws BadArgument for an unknown
/// key.
template <class Bench, class Options, class Set>
int ranks_main(int argc, char** argv, Program const& program, Set const& set) {
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]) == "--help") {
      std::puts(program.usage);
      return 0;
    }
  }
  Options options;
  try {
    for (int i = 1; i < argc; i += 2) set(options, argv[i], value_of(argc, argv, i));
  } catch (BadArgument const& error) {
    return refuse(program.name, error);
  }
  MPI_Init(&argc, &argv);
  int result = 1;
  try {
    result = run_on_ranks<Bench>(options);
  } catch (std::exception const& e) {
    std::printf("error: %s\n", e.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return result;
}

}  // namespace moe_bench
