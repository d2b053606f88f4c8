// SPDX-License-Identifier: Apache-2.0
// bench/checked.hpp: benchmarks that check a result before they time it: a wrong one is not timed and makes the exit code 1. A filter that
// selects none, and an option that is not Google Benchmark's, make it 2.
#pragma once

#include <benchmark/benchmark.h>

#include <cstdio>
#include <string>

#include "bench/arguments.hpp"

namespace moe_bench {

inline int wrong_results = 0;

/// Ends a benchmark whose result is wrong; `what` is the error text.
inline void skip_wrong(benchmark::State& state, std::string const& what) {
  ++wrong_results;
  state.SkipWithError(what.c_str());
}
/// Reads Google Benchmark's options. False, with a line for each, if there are others: the program then ends with kBadArguments.
inline bool initialize(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  return !benchmark::ReportUnrecognizedArguments(argc, argv);
}
/// Runs the benchmarks that the command line selects, after initialize(). Returns the exit code.
inline int run_benchmarks() {
  if (benchmark::RunSpecifiedBenchmarks() == 0) {
    std::fprintf(stderr, "no benchmark is selected; --benchmark_list_tests lists them\n");
    return kBadArguments;
  }
  return wrong_results == 0 ? 0 : 1;
}

}  // namespace moe_bench
