// SPDX-License-Identifier: Apache-2.0
// bench/host_dual_batch_bench.cpp: a host layer's forward in two halves against the whole batch, in turns, over MPI ranks:
//
//   mpirun -n 2 host_dual_batch_bench [--backend all_to_all_v|low_latency] [--rows 16,32,64] [--rounds 101] [--hidden 1024]
//                                     [--intermediate 512] [--experts 32] [--topk 4]
//
// One runner does both: its verdict changes between two forwards. `wall` is the slowest rank's time from a barrier until its forward
// returns; `cpu` is the processor time of all ranks' forwards, which other programs on the machine disturb less. The outputs are compared
// first.
#include <mpi.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bench/arguments.hpp"
#include "moe/activation/activation.hpp"
#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/mpi_shared.hpp"
#include "moe/experts/onednn.hpp"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/softmax_topk.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/runner.hpp"

namespace {

using namespace moe;

struct Config : LayerDefaults {
  using Activation = activation::Silu;
};
struct Parts : RunnerDefaults {
  using DualBatch = runner::dual_batch::Halves;
};
struct Options {
  std::map<std::string, std::int64_t> sizes{
      {"--rounds", 101}, {"--hidden", 1024}, {"--intermediate", 512}, {"--experts", 32}, {"--topk", 4}};
  std::string backend = "all_to_all_v";
  std::vector<int> rows{16, 32, 64, 128, 256, 512};
  std::int64_t operator[](char const* name) const { return sizes.at(name); }
};

Options parse(int argc, char** argv) {
  Options o;
  moe_bench::Names known{"--backend", "--rows"};
  for (auto const& [name, value] : o.sizes) known.push_back(name);
  for (int i = 1; i < argc; i += 2) {
    std::string const name = moe_bench::known_name("argument", argv[i], known);
    std::string const value = moe_bench::value_of(argc, argv, i);
    if (name == "--backend") {
      o.backend = moe_bench::known_name("backend", value, {"all_to_all_v", "low_latency"});
    } else if (name == "--rows") {
      o.rows = moe_bench::counts(name, value);
    } else {
      o.sizes[name] = moe_bench::count(name, value);
    }
  }
  return o;
}

std::vector<float> normal(unsigned seed, std::int64_t count, double scale = 1.0) {
  std::mt19937 gen(seed);
  std::normal_distribution<float> dist(0.0F, static_cast<float>(scale));
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& v : out) v = dist(gen);
  return out;
}
struct Times {
  double wall, cpu;  // s
};
Times now() {
  timespec cpu{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
  double const wall = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  return {wall, static_cast<double>(cpu.tv_sec) + static_cast<double>(cpu.tv_nsec) * 1e-9};
}
/// The median, and the quartiles beside it.
std::string quartiles(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  auto const at = [&](std::size_t quarter) { return values[(values.size() - 1) * quarter / 4]; };
  char text[64];
  std::snprintf(text, sizeof text, "%.2f (%.2f to %.2f)", at(2), at(1), at(3));
  return text;
}

template <class Backend>
void measure(Options const& o, comm::Mpi& mpi) {
  using Layer = ModularKernel<Config, routing::SoftmaxTopK<routing::Renormalize::yes>, quantization::None, Backend, experts::OneDnn>;
  std::int64_t const hidden = o["--hidden"], intermediate = o["--intermediate"];
  int const num_experts = static_cast<int>(o["--experts"]), topk = static_cast<int>(o["--topk"]);
  std::int64_t const most = std::max<std::int64_t>(2, *std::max_element(o.rows.begin(), o.rows.end()));
  ExpertPlacement const placement(num_experts, mpi.size());
  auto const mine = placement.local_to_physical(mpi.rank());
  experts::WeightStore<Config, quantization::None> store(static_cast<std::int64_t>(mine.size()), hidden, intermediate, true);
  for (std::size_t e = 0; e < mine.size(); ++e) {
    auto const seed = 2 * static_cast<unsigned>(mine[e]);
    store.set_expert(static_cast<std::int64_t>(e), normal(seed, 2 * intermediate * hidden, 1 / std::sqrt(hidden)).data(),
                     normal(seed + 1, intermediate * hidden, 1 / std::sqrt(intermediate)).data());
  }
  Runner<Layer, Parts> runner(mpi, store.view(),
                              {.layer = {.shape = {hidden, intermediate, num_experts, topk, false},
                                         .max_tokens_per_rank = most,
                                         .placement = placement,
                                         .router = {num_experts, topk}}});
  for (std::int64_t const rows : o.rows) {
    auto const seed = 1000 + static_cast<unsigned>(mpi.rank());
    std::vector<float> const x = normal(seed, rows * hidden), logits = normal(seed + 500, rows * num_experts);
    std::vector<float> outputs[2] = {std::vector<float>(x.size()), std::vector<float>(x.size())};
    auto const forward = [&](bool halves) {
      runner.decide_dual_batch(halves);
      MPI_Barrier(MPI_COMM_WORLD);
      Times const start = now();
      runner.forward(make_rows(x.data(), rows, hidden), make_rows(logits.data(), rows, num_experts),
                     make_rows(outputs[halves ? 1 : 0].data(), rows, hidden));
      Times const end = now();
      Times times{end.wall - start.wall, end.cpu - start.cpu};
      MPI_Allreduce(MPI_IN_PLACE, &times.wall, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
      MPI_Allreduce(MPI_IN_PLACE, &times.cpu, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
      return times;
    };
    for (bool halves : {false, true, false, true}) forward(halves);
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (!(std::abs(outputs[0][i] - outputs[1][i]) <= 1e-4F)) throw Error(ErrorCode::internal, "halves give another output");
    }
    std::vector<Times> whole, halved;
    for (std::int64_t round = 0; round < o["--rounds"]; ++round) {
      bool const first = round % 2 == 0;  // neither is always the first
      Times const one = forward(first), other = forward(!first);
      halved.push_back(first ? one : other);
      whole.push_back(first ? other : one);
    }
    if (mpi.rank() != 0) continue;
    for (auto const& [name, member] : {std::pair("wall", &Times::wall), std::pair("cpu", &Times::cpu)}) {
      std::vector<double> one, two, ratio;
      for (std::size_t i = 0; i < whole.size(); ++i) {
        one.push_back(whole[i].*member * 1e3);
        two.push_back(halved[i].*member * 1e3);
        ratio.push_back(two.back() / one.back());
      }
      std::printf("%s %5lld rows  %-4s  whole %s ms  halves %s ms  halves / whole %s\n", Backend::kName, static_cast<long long>(rows), name,
                  quartiles(one).c_str(), quartiles(two).c_str(), quartiles(ratio).c_str());
    }
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  try {
    options = parse(argc, argv);
  } catch (moe_bench::BadArgument const& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return moe_bench::kBadArguments;
  }
  MPI_Init(&argc, &argv);
  try {
    comm::Mpi mpi(MPI_COMM_WORLD, {});
    if (options.backend == "low_latency") {
      measure<backends::LowLatency<comm::MpiShared>>(options, mpi);
    } else {
      measure<backends::AllToAllV<comm::Mpi>>(options, mpi);
    }
  } catch (std::exception const& e) {
    std::fprintf(stderr, "%s\n", e.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
}
