// SPDX-License-Identifier: Apache-2.0
// bench/bench_report.hpp: results of programs that time several ranks together, in the JSON that Google Benchmark writes, which plot.py
// and its own tools read.
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace moe_bench {

/// A timed case: its name, microseconds (median) and their spread, and counters such as bytes or ranks.
struct Result {
  std::string name;
  double us = 0;
  double spread_us = 0;
  std::vector<std::pair<std::string, double>> counters{};
};

class Report {
 public:
  explicit Report(std::string program) : program_(std::move(program)) {}
  void add(Result result) { results_.push_back(std::move(result)); }
  /// False if the file cannot be written.
  bool write(std::string const& path) const {
    std::FILE* const file = std::fopen(path.c_str(), "w");
    if (file == nullptr) {
      return false;
    }
    std::fprintf(file, "{\n  \"context\": {\"executable\": \"%s\"},\n  \"benchmarks\": [", program_.c_str());
    for (std::size_t i = 0; i < results_.size(); ++i) {
      Result const& r = results_[i];
      std::fprintf(file, "%s\n    {\"name\": \"%s\", \"run_type\": \"iteration\", \"real_time\": %.4f, \"cpu_time\": %.4f, ",
                   i == 0 ? "" : ",", r.name.c_str(), r.us, r.us);
      std::fprintf(file, "\"time_unit\": \"us\", \"spread_us\": %.4f", r.spread_us);
      for (auto const& [key, value] : r.counters) {
        std::fprintf(file, ", \"%s\": %.6g", key.c_str(), value);
      }
      std::fprintf(file, "}");
    }
    std::fprintf(file, "\n  ]\n}\n");
    return std::fclose(file) == 0;
  }

 private:
  std::string program_;
  std::vector<Result> results_;
};

/// The median and the spread of some repeats.
inline std::pair<double, double> median_and_spread(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return {v[v.size() / 2], v.back() - v.front()};
}

}  // namespace moe_bench
