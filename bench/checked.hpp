// SPDX-License-Identifier: Apache-2.0
// bench/checked.hpp: benchmarks that check a result before they time it: a wrong one is not timed and makes the exit code 1.
#pragma once

#include <benchmark/benchmark.h>

#include <string>

namespace moe_bench {

inline int wrong_results = 0;

/// Ends a benchmark whose result is wrong; `what` is the error text.
inline void skip_wrong(benchmark::State& state, std::string const& what) {
  ++wrong_results;
  state.SkipWithError(what.c_str());
}
/// Runs the benchmarks that the command line selects, after benchmark::Initialize(). Returns the exit code.
inline int run_benchmarks() {
  benchmark::RunSpecifiedBenchmarks();
  return wrong_results == 0 ? 0 : 1;
}

}  // namespace moe_bench
