// SPDX-License-Identifier: Apache-2.0
// bench/tune.cu: measures the tile candidates of the Hopper experts over rows per expert on the present device and writes
// experts/hopper/tuning_table.hpp, with the measurements beside the choices. Prints up to which size one token is faster as matrix-vector
// products; that choice is made by hand, in tuning.hpp.
//
//   tune [path of the header to write]      measurements go to standard output in any case
//   tune - <scheme>                         of one scheme, bf16, fp8_block, fp8_row or int8_row, with the rows that its table would have
//
// A candidate's time is that of a whole layer: a CUDA graph of calls over two sets of inputs, candidates in turns, median of the turns. In
// each turn a candidate is replayed twice. Only the second replay counts, because it runs at the clocks that the candidate's own power draw
// allows.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/arguments.hpp"
#include "bench/bench_report.hpp"
#include "bench/layer_problem.cuh"
#include "moe/experts/hopper/contiguous_layer.hpp"

namespace {

using namespace moe::hopper;
using namespace moe_test;
using moe::check_cuda;

constexpr LocalShape kShapes[] = {{128, 2048, 768, 8}, {32, 7168, 2048, 1}};  // qwen3-30b-a3b, deepseek-v3-ep8rank
constexpr LocalShape kTokenShapes[] = {{128, 2048, 768, 8}, {32, 7168, 2048, 1}, {128, 4096, 1536, 8}, {128, 2880, 2880, 4}};
constexpr int kRows[] = {16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 128, 192, 256, 512, 1024};
constexpr int kTurns = 9;

struct Candidate {
  int tile_rows;
  int cluster;
};

std::vector<Candidate> candidates(Scheme scheme, int rows) {
  std::vector<Candidate> all{{64, 1}, {most_rows(scheme), 1}};
  if (rows >= 48 && rows <= 96 && scheme != Scheme::fp8_block) all.push_back({96, 1});
  if (rows >= 128 && !is_scaled(scheme)) all.push_back({most_rows(scheme), 2});
  if (scheme == Scheme::fp8_block) {
    all.push_back({kBlockRows, 1});
    all.push_back({kBlockRows, 2});
  }
  return all;
}

/// Two sets of weights and inputs of one shape, measured at any number of tokens up to a maximum.
class Bench {
 public:
  Bench(LocalShape shape, Scheme scheme, int max_tokens) {
    for (int s = 0; s < 2; ++s) {
      problems_.emplace_back(shape, scheme, max_tokens, Pattern::random, 100 + 10 * static_cast<std::uint64_t>(s));
      layers_.emplace_back(shape, scheme, problems_.back().layer_weights());
    }
    workspace_ = TypedMemory<char>(static_cast<std::size_t>(layers_[0].workspace_bytes(max_tokens)));
    out_ = TypedMemory<char>(static_cast<std::size_t>(max_tokens) * static_cast<std::size_t>(shape.hidden) * 2);
  }

  /// Microseconds of each tuning. Throws if a result is wrong.
  std::vector<float> measure(int tokens, std::vector<Tuning> const& tunings) {
    for (Tuning const& t : tunings) check(tokens, t);
    std::list<moe_bench::Replay> replays;
    for (Tuning const& t : tunings) {
      replays.emplace_back(4, static_cast<int>(layers_.size()), [&](cudaStream_t stream) {
        for (std::size_t s = 0; s < layers_.size(); ++s) layers_[s].forward(call(s, tokens), t, workspace_.data(), stream);
      });
    }
    std::vector<std::vector<double>> times(tunings.size());
    for (int turn = 0; turn < kTurns; ++turn) {
      auto replay = replays.begin();
      for (auto& of_one : times) {
        replay->us();
        of_one.push_back((replay++)->us());
      }
    }
    std::vector<float> us;
    for (auto& of_one : times) us.push_back(static_cast<float>(moe_bench::median_and_spread(of_one).first));
    return us;
  }

 private:
  LayerCall call(std::size_t set, int tokens) {
    LayerCall c = problems_[set].call(out_.data());
    c.max_tokens = tokens;
    return c;
  }
  void check(int tokens, Tuning const& tuning) {
    out_.fill_bytes(0xFF);
    layers_[0].forward(call(0, tokens), tuning, workspace_.data(), nullptr);
    check_cuda(cudaDeviceSynchronize(), "check");
    double const error = compare(problems_[0], out_.data(), 16, tokens).relative;
    double const most = tolerance(problems_[0].scheme, tokens);
    if (!(error < most)) {
      std::ostringstream what;
      what << "tune: " << name(problems_[0].scheme) << ", " << tokens << " tokens, " << tuning << ": differs from float32 by " << error
           << ", at most " << most << ". Nothing is written";
      throw std::runtime_error(what.str());
    }
  }

  std::vector<Problem> problems_;
  std::vector<ContiguousLayer> layers_;
  TypedMemory<char> workspace_;
  TypedMemory<char> out_;
};

/// The table's rows of one scheme. A candidate counts by the product of its times over the shapes; a later one must win by 1 %.
void tune_tiles(Scheme scheme, std::ostream& table) {
  std::vector<std::vector<double>> log_us(std::size(kRows));
  std::vector<std::string> notes(std::size(kRows));
  for (LocalShape const& shape : kShapes) {
    int const most = kRows[std::size(kRows) - 1] * shape.num_experts / shape.topk;
    Bench bench(shape, scheme, most);
    for (std::size_t r = 0; r < std::size(kRows); ++r) {
      std::vector<Tuning> tunings;
      for (Candidate const& c : candidates(scheme, kRows[r])) {
        Tuning t{};
        t.tile_rows = c.tile_rows;
        t.cluster = c.cluster;
        tunings.push_back(t);
      }
      std::vector<float> const us = bench.measure(kRows[r] * shape.num_experts / shape.topk, tunings);
      log_us[r].resize(us.size());
      std::ostringstream note;
      for (std::size_t c = 0; c < us.size(); ++c) {
        log_us[r][c] += std::log(us[c]);
        note << (c == 0 ? "" : " ") << tunings[c].tile_rows << (tunings[c].cluster == 2 ? "x2" : "") << " " << std::lround(us[c]);
      }
      notes[r] += (notes[r].empty() ? "" : "; ") + note.str();
    }
  }
  std::vector<Candidate> chosen;
  for (std::size_t r = 0; r < std::size(kRows); ++r) {
    std::vector<Candidate> const all = candidates(scheme, kRows[r]);
    std::size_t best = 0;
    for (std::size_t c = 1; c < all.size(); ++c) {
      if (log_us[r][c] < log_us[r][best] - 0.01 * static_cast<double>(std::size(kShapes))) best = c;
    }
    Candidate pick = all[best];
    if (!chosen.empty() && pick.tile_rows < chosen.back().tile_rows) pick = chosen.back();  // more rows never take a smaller tile
    chosen.push_back(pick);
    std::printf("%-9s %5d rows: %-60s -> %d x%d\n", name(scheme), kRows[r], notes[r].c_str(), pick.tile_rows, pick.cluster);
    std::fflush(stdout);
  }
  for (std::size_t r = 0; r < std::size(kRows); ++r) {
    bool const last = r + 1 == std::size(kRows);
    table << "    // " << kRows[r] << " rows, us: " << notes[r] << "\n";
    if (last || chosen[r + 1].tile_rows != chosen[r].tile_rows || chosen[r + 1].cluster != chosen[r].cluster) {
      table << "    {Scheme::" << name(scheme) << ", ";
      if (last) {
        table << "kAnyRows";
      } else {
        table << (kRows[r] + kRows[r + 1]) / 2;
      }
      table << ", " << chosen[r].tile_rows << ", " << chosen[r].cluster << "},\n";
    }
  }
}

/// The threshold, in megabytes of a token's weights, up to which the one-token kernel is faster: between the largest size where it is and
/// the smallest where it is not, or 1.5 times the largest.
long long tune_one_token(Scheme scheme) {
  long long wins = 0;
  long long loses = 0;
  for (LocalShape const& shape : kTokenShapes) {
    if (is_fp8(scheme) && shape.hidden % 128 != 0) continue;
    Bench bench(shape, scheme, 1);
    Tuning layer{};
    layer.tile_rows = 8;
    layer.self_align = true;
    Tuning vector = layer;
    vector.one_token = true;
    std::vector<float> const us = bench.measure(1, {layer, vector});
    long long const bytes = 3LL * shape.topk * shape.hidden * shape.intermediate * (is_fp8(scheme) ? 1 : 2);
    std::printf("%-9s one token, %4lld MB: %.1f us, as vector %.1f us\n", name(scheme), bytes / 1000000, us[0], us[1]);
    if (us[1] < us[0]) {
      wins = std::max(wins, bytes);
    } else {
      loses = loses == 0 ? bytes : std::min(loses, bytes);
    }
  }
  if (loses == 0) loses = 2 * wins;
  return std::min((wins + loses) / 2, loses - 1) / 1000000;
}

}  // namespace

int main(int argc, char** argv) try {
  std::vector<Scheme> schemes;  // of "tune - <scheme>"
  if (argc > 2) {
    moe_bench::Names known;
    for (Scheme const scheme : {Scheme::bf16, Scheme::fp8_block, Scheme::fp8_row, Scheme::int8_row}) {
      known.emplace_back(name(scheme));
      if (known.back() == argv[2]) schemes.push_back(scheme);
    }
    moe_bench::known_name("scheme", argv[2], known);
  }
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::fprintf(stderr, "tune: no CUDA device\n");
    return 77;
  }
  cudaDeviceProp facts{};
  check_cuda(cudaGetDeviceProperties(&facts, 0), "cudaGetDeviceProperties");
  std::ostringstream table;
  if (!schemes.empty()) {
    tune_tiles(schemes[0], table);
    std::printf("%s", table.str().c_str());
    return 0;
  }
  tune_tiles(Scheme::bf16, table);
  tune_tiles(Scheme::fp8_block, table);
  for (Scheme const scheme : {Scheme::bf16, Scheme::fp8_block}) {
    std::printf("%-9s one token as vector: up to %lld MB (one_token_bytes() in tuning.hpp)\n", name(scheme), tune_one_token(scheme));
  }
  std::ostringstream header;
  header << R"(// SPDX-License-Identifier: Apache-2.0
// experts/hopper/tuning_table.hpp: what bench/tune measured on one )"
         << facts.name << R"(. bench/tune writes this file; choices made by hand stand in
// tuning.hpp. Plain host C++. Beside a choice: rows per expert and, for the shapes {128, 2048, 768, 8} and {32, 7168, 2048, 1}, tile rows
// (x2: in clusters) and microseconds of the whole layer.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/common/problem.hpp"

namespace moe::hopper {

/// The tile for up to `rows` expected rows per expert.
struct TileChoice {
  Scheme scheme;
  std::int64_t rows;
  int tile_rows;
  int cluster;
};

inline constexpr std::int64_t kAnyRows = std::int64_t{1} << 62;

// clang-format off
inline constexpr TileChoice kMeasuredTiles[] = {
)" << table.str()
         << "};\n"
         << R"(// clang-format on

}  // namespace moe::hopper
)";
  if (argc > 1) std::ofstream(argv[1]) << header.str();
  return 0;
} catch (moe_bench::BadArgument const& error) {
  return moe_bench::refuse("tune", error);
} catch (std::exception const& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
