// SPDX-License-Identifier: Apache-2.0
// bench/hopper_layer_bench.cu: the Hopper layer with tiles of the caller's choice: checks it against float32, or checks and times it.
// bench/layer times what the library chooses itself. A wrong result is printed, not timed, and makes the exit code 1. Every line ends with
// a hash of the output, which two builds of this program share if their kernels give the same bits.
//
//   hopper_layer_bench check <bf16|f16|fp8_block|fp8_row|int8_row> [seed]
//   hopper_layer_bench time <bf16|f16|fp8_block|fp8_codes|fp8_row|int8_row> <shape|all> <tokens,tokens,…> [tile_rows] [max_splits]
//   [cluster]
//   hopper_layer_bench columns <bf16|fp8_block|fp8_codes> <shape|all> <tokens,tokens,…> [tile_rows] [max_splits] [cluster]
//
// columns: GEMM2 in 0, 2, 4 and 8 blocks of columns (Tuning::column_blocks) in turns, and whether their outputs have the bits of 0. Calls
// with small tiles or topk 1 have no blocks, which their line says.
// fp8_codes: fp8_block with input rows that are already quantised, as those of fp8_row and int8_row always are.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bench/arguments.hpp"
#include "bench/layer_problem.cuh"
#include "moe/experts/hopper/contiguous_layer.hpp"

namespace {

using namespace moe::hopper;
using namespace moe_bench;
using namespace moe_test;
using moe::check_cuda;

int failures = 0;

/// FNV-1a over the 8-byte words of an output; its bytes are a multiple of 8.
unsigned long long hash_of(std::vector<char> const& bytes) {
  unsigned long long hash = 0xCBF29CE484222325ULL;
  for (std::size_t at = 0; at + 8 <= bytes.size(); at += 8) {
    unsigned long long word = 0;
    std::memcpy(&word, bytes.data() + at, 8);
    hash = (hash ^ word) * 0x100000001B3ULL;
    hash ^= hash >> 32;  // the product alone carries no high bit down
  }
  return hash;
}

void check_one(char const* label, LocalShape shape, Scheme scheme, int tokens, Pattern pattern, std::uint64_t seed,
               Tuning const* tuning = nullptr) {
  Problem problem(shape, scheme, tokens, pattern, seed);
  ContiguousLayer layer(shape, scheme, problem.layer_weights());
  TypedMemory<char> workspace(static_cast<std::size_t>(layer.workspace_bytes(tokens)));
  TypedMemory<char> out(static_cast<std::size_t>(tokens) * shape.hidden * 2);
  double worst = 0;
  double norm = 0;
  Tuning const t = tuning != nullptr ? *tuning : choose_tuning(shape, scheme, tokens);
  std::vector<char> first;
  bool same = true;
  for (int repeat = 0; repeat < 3; ++repeat) {
    workspace.fill_bytes(0xFF);
    out.fill_bytes(0xFF);
    layer.forward(problem.call(out.data()), t, workspace.data(), nullptr);
    check_cuda(cudaDeviceSynchronize(), label);
    if (repeat == 0) {
      Difference const d = compare(problem, out.data(), 128);
      worst = d.relative;
      norm = d.norm;
      first = out.download();
    } else {
      same = same && first == out.download();
    }
  }
  bool const ok = worst < tolerance(scheme, tokens) && same;
  if (!ok) ++failures;
  std::printf("%s %-10s E%d H%d I%d k%d M%-6d pattern %d tile %3d: rel %.3e norm %.3e hash %016llx%s\n", ok ? "ok  " : "FAIL", name(scheme),
              shape.num_experts, shape.hidden, shape.intermediate, shape.topk, tokens, static_cast<int>(pattern), t.tile_rows, worst, norm,
              hash_of(first), same ? "" : " NOT REPEATABLE");
  std::fflush(stdout);
}

void check_all(Scheme scheme, std::uint64_t seed) {
  LocalShape const tiny{8, 256, is_fp8(scheme) ? 256 : 192, 2};
  LocalShape const odd{16, is_fp8(scheme) ? 384 : 320, is_fp8(scheme) ? 128 : 320, 4};
  for (int tokens : {1, 2, 7, 8, 9, 33, 64, 129, 222, 1024}) check_one("tiny", tiny, scheme, tokens, Pattern::random, ++seed);
  for (Pattern pattern : {Pattern::one_expert, Pattern::some_missing, Pattern::all_missing, Pattern::few_experts}) {
    for (int tokens : {1, 40, 700}) check_one("odd", odd, scheme, tokens, pattern, ++seed);
  }
  LocalShape const one{4, 512, 256, 1};
  for (Pattern pattern : {Pattern::random, Pattern::some_missing, Pattern::one_expert, Pattern::all_missing})
    check_one("k1", one, scheme, 300, pattern, ++seed);
  for (int rows : {8, 16, 32, 48, 64, 80, 96, 112, 128}) {
    Tuning t{};
    t.tile_rows = rows;
    check_one("tile", tiny, scheme, 500, Pattern::random, ++seed, &t);
  }
  check_one("qwen3-30b", kShapes.at("qwen3-30b-a3b"), scheme, 1, Pattern::random, ++seed);
  check_one("qwen3-30b", kShapes.at("qwen3-30b-a3b"), scheme, 64, Pattern::random, ++seed);
  check_one("qwen3-30b", kShapes.at("qwen3-30b-a3b"), scheme, 1000, Pattern::random, ++seed);
  check_one("deepseek", kShapes.at("deepseek-v3-ep8rank"), scheme, 1, Pattern::random, ++seed);
  check_one("deepseek", kShapes.at("deepseek-v3-ep8rank"), scheme, 3000, Pattern::random, ++seed);
  if (!is_fp8(scheme)) check_one("gpt-oss", kShapes.at("gpt-oss-120b"), scheme, 37, Pattern::random, ++seed);
  if (is_row_scaled(scheme)) {  // rows that no warp holds
    for (int tokens : {1, 64, 256}) check_one("mixtral", kShapes.at("mixtral-8x7b"), scheme, tokens, Pattern::random, ++seed);
  }
}

/// Tiles of the caller's choice; 0: the library's.
struct Tiles {
  int tile_rows;
  int max_splits;
  int cluster;
};
Tuning tuning_of(LocalShape const& shape, Scheme scheme, Features const& features, int tokens, Tiles const& tiles) {
  Tuning tuning = choose_tuning(shape, scheme, tokens, scheme == Scheme::fp8_block && !features.quantized_x);
  if (tiles.tile_rows != 0) tuning.one_token = false;
  if (tiles.tile_rows > 0) {
    tuning.tile_rows = tiles.tile_rows;
    if (tiles.max_splits > 0) tuning.max_splits = tiles.max_splits;
    if (tiles.cluster > 0) tuning.cluster = tiles.cluster;
  }
  return tuning;
}

/// Microseconds of one layer: median of 25 replays after warming up.
void time_one(std::string const& label, LocalShape shape, Scheme scheme, Features const& features, int tokens, Tiles const& tiles) {
  Rotation const rotation(shape, scheme, tokens, features);
  std::vector<ContiguousLayer> layers;
  for (int s = 0; s < rotation.sets; ++s) layers.emplace_back(shape, scheme, rotation.weights_of(s).layer_weights());
  TypedMemory<char> workspace(static_cast<std::size_t>(layers[0].workspace_bytes(tokens)));
  TypedMemory<char> out(static_cast<std::size_t>(tokens) * shape.hidden * 2);
  Tuning const tuning = tuning_of(shape, scheme, features, tokens, tiles);
  out.fill_bytes(0xFF);
  layers[0].forward(rotation.batch(0).call(out.data()), tuning, workspace.data(), nullptr);
  check_cuda(cudaDeviceSynchronize(), label.c_str());
  if (double const error = compare(rotation.batch(0), out.data(), 16).relative; !(error < tolerance(scheme, tokens))) {
    ++failures;
    std::printf("%-20s %-9s M%-6d WRONG: differs from float32 by %.3e, at most %.0e, tile %d: not timed\n", label.c_str(), name(scheme),
                tokens, error, tolerance(scheme, tokens), tuning.tile_rows);
    return;
  }
  unsigned long long const hash = hash_of(out.download());
  auto const round = [&](cudaStream_t stream) {
    for (int s = 0; s < rotation.sets; ++s) {
      layers[static_cast<std::size_t>(s)].forward(rotation.batch(s).call(out.data()), tuning, workspace.data(), stream);
    }
  };
  Replay replay(rounds_of(rotation.sets, round), rotation.sets, round);
  replay.warm_up(tokens >= 1024 ? 250 : 60);
  std::vector<double> times(25);
  for (double& t : times) t = replay.us();
  std::sort(times.begin(), times.end());
  double const us = times[times.size() / 2];
  LayerWork const& work = rotation.work;
  std::printf("%-20s %-9s M%-6d %9.1f us (min %.1f max %.1f) %7.1f TFLOP/s %7.0f GB/s floor %8.1f ratio %.3f tile %d hash %016llx\n",
              label.c_str(), name(scheme), tokens, us, times.front(), times.back(), work.flops / us * 1e-6, work.bytes / us * 1e-3,
              work.floor_us(), us / work.floor_us(), tuning.tile_rows, hash);
  std::fflush(stdout);
}

/// Whether a call of this program has blocks of columns if Tuning::column_blocks asks for them.
bool has_column_blocks(LocalShape const& shape, Scheme scheme, int tokens, Tuning const& t) {
  bool const largest = scheme == Scheme::fp8_block ? t.tile_rows > most_rows(scheme) && shape.hidden % 128 == 0 : t.tile_rows > 64;
  return largest && shape.topk > 1 && !(t.one_token && tokens == 1);
}

/// Microseconds of one layer in 0, 2, 4 and 8 blocks of columns, in 15 turns; in each a candidate is replayed twice and the second counts.
/// A candidate whose bits are not those of 0 is not timed, nor is a call whose kernel has no blocks of columns.
void time_columns(std::string const& label, LocalShape shape, Scheme scheme, Features const& features, int tokens, Tiles const& tiles) {
  constexpr int kBlocks[] = {0, 2, 4, 8};
  if (Tuning const t = tuning_of(shape, scheme, features, tokens, tiles); !has_column_blocks(shape, scheme, tokens, t)) {
    std::printf("%-20s %-9s M%-6d no blocks of columns with tiles of %d rows and topk %d: not timed\n", label.c_str(), name(scheme), tokens,
                t.tile_rows, shape.topk);
    return;
  }
  Rotation const rotation(shape, scheme, tokens, features);
  std::vector<ContiguousLayer> layers;
  for (int s = 0; s < rotation.sets; ++s)
    layers.emplace_back(shape, scheme, rotation.weights_of(s).layer_weights(), LayerOptions{}, launcher_with_columns(scheme));
  TypedMemory<char> workspace(static_cast<std::size_t>(layers[0].workspace_bytes(tokens)));
  TypedMemory<char> out(static_cast<std::size_t>(tokens) * shape.hidden * 2);
  struct Candidate {
    Tuning tuning;
    std::unique_ptr<Replay> replay;
    std::vector<double> times{};
  };
  std::vector<Candidate> candidates;
  std::vector<char> want;
  unsigned long long hash = 0;
  for (int blocks : kBlocks) {
    Tuning tuning = tuning_of(shape, scheme, features, tokens, tiles);
    tuning.column_blocks = blocks;
    workspace.fill_bytes(0xFF);
    out.fill_bytes(0xFF);
    layers[0].forward(rotation.batch(0).call(out.data()), tuning, workspace.data(), nullptr);
    check_cuda(cudaDeviceSynchronize(), label.c_str());
    std::vector<char> got = out.download();
    if (blocks == 0) {
      double const error = compare(rotation.batch(0), out.data(), 16).relative;
      if (!(error < tolerance(scheme, tokens))) {
        ++failures;
        std::printf("%-20s %-9s M%-6d WRONG: differs from float32 by %.3e, at most %.0e: not timed\n", label.c_str(), name(scheme), tokens,
                    error, tolerance(scheme, tokens));
        return;
      }
      hash = hash_of(got);
      want = std::move(got);
    } else if (got != want) {
      ++failures;
      std::printf("%-20s %-9s M%-6d WRONG: %d blocks of columns have other bits than none: not timed\n", label.c_str(), name(scheme),
                  tokens, blocks);
      continue;
    }
    auto const round = [&, tuning](cudaStream_t stream) {
      for (int s = 0; s < rotation.sets; ++s) {
        layers[static_cast<std::size_t>(s)].forward(rotation.batch(s).call(out.data()), tuning, workspace.data(), stream);
      }
    };
    candidates.push_back({tuning, std::make_unique<Replay>(rounds_of(rotation.sets, round), rotation.sets, round)});
  }
  for (Candidate& c : candidates) c.replay->warm_up(tokens >= 1024 ? 250 : 60);
  for (int turn = 0; turn < 15; ++turn) {
    for (Candidate& c : candidates) {
      c.replay->us();
      c.times.push_back(c.replay->us());
    }
  }
  double base = 0;
  for (Candidate& c : candidates) {
    std::sort(c.times.begin(), c.times.end());
    double const us = c.times[c.times.size() / 2];
    if (c.tuning.column_blocks == 0) base = us;
    std::printf("%-20s %-9s M%-6d column blocks %d %9.1f us (min %.1f max %.1f) over none %.3f tile %d cluster %d hash %016llx\n",
                label.c_str(), name(scheme), tokens, c.tuning.column_blocks, us, c.times.front(), c.times.back(), us / base,
                c.tuning.tile_rows, c.tuning.cluster, hash);
  }
  std::fflush(stdout);
}

/// The scheme of a format that a mode has.
Scheme scheme_of(std::string const& mode, std::string const& format) {
  moe_bench::Names formats{"bf16", "fp8_block"};
  if (mode != "columns") formats.insert(formats.end(), {"f16", "fp8_row", "int8_row"});
  if (mode != "check") formats.emplace_back("fp8_codes");
  moe_bench::known_name("format", format, formats);
  if (format == "f16") return Scheme::f16;
  if (format == "fp8_row") return Scheme::fp8_row;
  if (format == "int8_row") return Scheme::int8_row;
  return format == "bf16" ? Scheme::bf16 : Scheme::fp8_block;
}

/// The shapes that `part` names and the scheme can compute. At least one.
std::map<std::string, LocalShape> shapes_of(std::string const& part, Scheme scheme) {
  std::map<std::string, LocalShape> shapes = find_shapes(kShapes, part);
  std::erase_if(shapes, [&](auto const& s) { return s.second.hidden % intermediate_multiple(scheme) != 0; });
  if (shapes.empty()) {
    throw BadArgument(moe::text("shape ", part, " has a hidden size that is not a multiple of ", intermediate_multiple(scheme), ", which ",
                                name(scheme), " needs"));
  }
  return shapes;
}

}  // namespace

int main(int argc, char** argv) try {
  std::string const mode = argc > 1 ? argv[1] : "";
  known_name("mode", mode, {"check", "time", "columns"});
  std::string const format = argc > 2 ? argv[2] : "";
  Scheme const scheme = scheme_of(mode, format);
  if (mode == "check") {
    check_all(scheme, argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
    std::printf("%d failures\n", failures);
    return failures == 0 ? 0 : 1;
  }
  auto const shapes = shapes_of(argc > 3 ? argv[3] : "", scheme);
  std::vector<int> const token_counts = counts("tokens", argc > 4 ? argv[4] : "");
  Features features;
  features.quantized_x = format == "fp8_codes";
  Tiles const tiles{argc > 5 ? std::atoi(argv[5]) : 0, argc > 6 ? std::atoi(argv[6]) : 0, argc > 7 ? std::atoi(argv[7]) : 0};
  for (auto const& [label, shape] : shapes) {
    for (int const tokens : token_counts) {
      if (mode == "columns") {
        time_columns(label, shape, scheme, features, tokens, tiles);
      } else {
        time_one(label, shape, scheme, features, tokens, tiles);
      }
    }
  }
  return failures == 0 ? 0 : 1;
} catch (moe_bench::BadArgument const& error) {
  return moe_bench::refuse("hopper_layer_bench", error);
} catch (std::exception const& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
