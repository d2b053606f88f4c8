// SPDX-License-Identifier: Apache-2.0
// bench/load_bench.cpp: how fast load_runner reads an fp8 layer, beside `cat FILE > /dev/null` by as many processes, in turns:
//
//   mpirun -n 4 load_bench [--experts 256] [--hidden 2048] [--intermediate 768] [--rounds 9] [--threads 1] [--cold] [--directory DIR]
//
// One file a rank holds the rank's experts in blocks of 128 x 128, as released checkpoints store them; cat reads the same files, and, as a
// bound of any loader, cat into memory that was never touched. A rate is the bytes of all ranks over the time of the slowest one. Loading
// counts from the call until the last expert is in its place; `call` is the whole load_runner, which also makes the layer. --cold: the
// files leave the page cache before each turn. Sizes of DeepSeek-V3 are
// --hidden 7168 --intermediate 2048: 11.3 GB of files and as much memory.
#include <fcntl.h>
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/arguments.hpp"
#include "bench/bench_report.hpp"
#include "moe/backends/all_to_all_v.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/core/buffer.hpp"
#include "moe/io/huge_pages.hpp"
#include "moe/io/safetensors_writer.hpp"
#include "moe/models/load_runner_host.hpp"
#include "moe/quantization/fp8_block128.hpp"

namespace {

using namespace moe;
namespace fs = std::filesystem;
using Block = models::AnyBlock<quantization::Fp8Block<>, backends::AllToAllV<comm::Mpi>>;
using Clock = std::chrono::steady_clock;

struct Options {
  std::int64_t experts = 256, hidden = 2048, intermediate = 768, rounds = 9, threads = 1;
  bool cold = false;
  fs::path directory = fs::temp_directory_path();
};
double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }
std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
fs::path shard(fs::path const& directory, int rank) { return directory / text("model-", rank, ".safetensors"); }
void require(bool ok, char const* what) {
  if (!ok) throw Error(ErrorCode::internal, text(what, ": ", std::strerror(errno)));
}

/// This rank's shard; rank 0 also writes the configuration and the index.
void write_checkpoint(Options const& o, fs::path const& directory, int rank, int ranks) {
  ExpertPlacement const placement(static_cast<int>(o.experts), ranks);
  std::string const root = "model.layers.0.mlp.";
  auto const names = [&](int r, auto const& use) {
    for (std::int32_t e : placement.local_to_physical(r)) {
      for (auto const& [name, n, k] : {std::tuple{"gate_proj", o.intermediate, o.hidden},
                                       {"up_proj", o.intermediate, o.hidden},
                                       {"down_proj", o.hidden, o.intermediate}}) {
        use(text(root, "experts.", e, '.', name), n, k);
      }
    }
  };
  io::SafetensorsWriter writer;
  std::vector<float> const gate(size(o.experts * o.hidden), 0.01F);
  if (rank == 0) writer.add(root + "gate.weight", {o.experts, o.hidden}, gate);
  names(rank, [&](std::string const& base, std::int64_t n, std::int64_t k) {
    writer.add_lazy(base + ".weight", io::FileDType::f8_e4m3, {n, k}, [n, k] {
      std::vector<std::byte> codes(size(n * k));
      static std::minstd_rand random;
      for (std::byte& c : codes) c = static_cast<std::byte>(random() % 0x7F);
      return codes;
    });
    writer.add(base + ".weight_scale_inv", {(n + 127) / 128, (k + 127) / 128},
               std::vector<float>(size((n + 127) / 128 * ((k + 127) / 128)), 0.01F));
  });
  writer.write(shard(directory, rank));
  if (rank != 0) return;
  nlohmann::json index, config{{"model_type", "qwen3_moe"},
                               {"hidden_act", "silu"},
                               {"hidden_size", o.hidden},
                               {"moe_intermediate_size", o.intermediate},
                               {"num_experts", o.experts},
                               {"num_experts_per_tok", 8},
                               {"num_hidden_layers", 1},
                               {"norm_topk_prob", true},
                               {"mlp_only_layers", nlohmann::json::array()},
                               {"decoder_sparse_step", 1},
                               {"quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}}}};
  auto& map = index["weight_map"];
  map[root + "gate.weight"] = shard("", 0).string();
  for (int r = 0; r < ranks; ++r) {
    names(r, [&](std::string const& base, std::int64_t, std::int64_t) {
      for (char const* part : {".weight", ".weight_scale_inv"}) map[base + part] = shard("", r).string();
    });
  }
  std::ofstream(directory / "config.json") << config;
  std::ofstream(directory / "model.safetensors.index.json") << index;
}

enum class Into { same_memory, fresh_memory, nothing };

/// Reads a file as cat does, 128 KiB at a time into the same memory; or into fresh memory of its size, which is what a loader has to fill.
/// Into nothing: the file leaves the page cache.
double cat(fs::path const& path, Into into = Into::same_memory) {
  constexpr std::int64_t kPiece = 128 << 10;
  auto const start = Clock::now();
  int const file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  require(file >= 0, "open");
  Buffer<char> memory(into == Into::fresh_memory ? static_cast<std::int64_t>(fs::file_size(path)) + kPiece : kPiece);
  io::advise_huge_pages(memory.data(), memory.bytes());
  if (into == Into::nothing) {
    require(::fsync(file) == 0 && ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED) == 0, "posix_fadvise");
  } else {
    ssize_t n = 0;
    char* to = memory.data();
    do {
      n = ::read(file, to, kPiece);
      if (into == Into::fresh_memory) to += std::max<ssize_t>(n, 0);
    } while (n > 0);
    require(n == 0, "read");
  }
  ::close(file);
  return since(start);
}

struct Times {
  std::vector<double> cat, fresh, load, call;
};
Times measure(Options const& o, fs::path const& directory, comm::Mpi& comm) {
  Times times;
  auto const slowest = [](double mine) {
    double most = 0;
    MPI_Allreduce(&mine, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return most;
  };
  auto const turn = [&](auto const& f) {
    if (o.cold) cat(shard(directory, comm.rank()), Into::nothing);
    MPI_Barrier(MPI_COMM_WORLD);
    return slowest(f());
  };
  for (std::int64_t round = 0; round <= o.rounds; ++round) {  // the first warms up
    double const bare = turn([&] { return cat(shard(directory, comm.rank())); });
    double const fresh = turn([&] { return cat(shard(directory, comm.rank()), Into::fresh_memory); });
    double read = 0;
    auto const call = turn([&] {
      auto const start = Clock::now();
      auto block = load_runner<Block>(
          directory, 0, comm,
          {.max_tokens_per_rank = 1, .threads = static_cast<int>(o.threads), .progress = [&](auto, auto) { read = since(start); }});
      if (!block.direct()) throw Error(ErrorCode::internal, "the experts were converted");
      return since(start);
    });
    double const load = slowest(read);
    if (round == 0) continue;
    times.cat.push_back(bare), times.fresh.push_back(fresh), times.load.push_back(load), times.call.push_back(call);
  }
  return times;
}

Options parse(int argc, char** argv) {
  Options o;
  std::array<std::pair<std::string_view, std::int64_t*>, 5> const numbers{{{"--experts", &o.experts},
                                                                           {"--hidden", &o.hidden},
                                                                           {"--intermediate", &o.intermediate},
                                                                           {"--rounds", &o.rounds},
                                                                           {"--threads", &o.threads}}};
  for (int i = 1; i < argc; ++i) {
    std::string_view const name = argv[i];
    if (name == "--cold") {
      o.cold = true;
      continue;
    }
    auto const known = std::ranges::find(numbers, name, [](auto const& n) { return n.first; });
    if (i + 1 == argc || (known == numbers.end() && name != "--directory"))
      throw moe_bench::BadArgument(text("unknown or without a value: ", name));
    std::string_view const value = argv[++i];
    if (name == "--directory") {
      o.directory = value;
      continue;
    }
    auto const [end, error] = std::from_chars(value.data(), value.data() + value.size(), *known->second);
    if (error != std::errc() || end != value.data() + value.size() || *known->second < 1)
      throw moe_bench::BadArgument(text(name, ": ", value, " is not a number from 1"));
  }
  return o;
}

int run(Options const& o) {
  comm::Mpi comm(MPI_COMM_WORLD);
  int id = static_cast<int>(::getpid());
  MPI_Bcast(&id, 1, MPI_INT, 0, MPI_COMM_WORLD);
  fs::path const directory = o.directory / text("moe_load_bench_", id);
  fs::create_directories(directory);
  MPI_Barrier(MPI_COMM_WORLD);
  write_checkpoint(o, directory, comm.rank(), comm.size());
  MPI_Barrier(MPI_COMM_WORLD);
  double bytes = 0;
  for (int r = 0; r < comm.size(); ++r) bytes += static_cast<double>(fs::file_size(shard(directory, r)));
  Times const t = measure(o, directory, comm);
  MPI_Barrier(MPI_COMM_WORLD);
  if (comm.rank() != 0) return 0;
  fs::remove_all(directory);
  auto const rate = [&](std::vector<double> const& times) { return bytes / moe_bench::median_and_spread(times).first / 1e9; };
  auto const share = [&](std::vector<double> const& other) {
    std::vector<double> shares;
    shares.reserve(t.load.size());
    for (std::size_t i = 0; i < t.load.size(); ++i) shares.push_back(other[i] / t.load[i]);
    return moe_bench::median_and_spread(shares);
  };
  auto const [of_cat, cat_spread] = share(t.cat);
  auto const [of_fresh, fresh_spread] = share(t.fresh);
  std::printf("%d ranks, %.2f GB, %s: cat %.2f GB/s, cat into fresh memory %.2f, load %.2f, the whole call %.2f\n", comm.size(),
              bytes / 1e9, o.cold ? "from the disk" : "from the page cache", rate(t.cat), rate(t.fresh), rate(t.load), rate(t.call));
  std::printf("load / cat in a turn: %.2f (spread %.2f), of cat into fresh memory: %.2f (spread %.2f)\n", of_cat, cat_spread, of_fresh,
              fresh_spread);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  try {
    options = parse(argc, argv);
  } catch (moe_bench::BadArgument const& error) {
    return moe_bench::refuse("load_bench", error);
  }
  MPI_Init(&argc, &argv);
  int code = 1;
  try {
    code = run(options);
  } catch (Error const& error) {
    std::fprintf(stderr, "load_bench: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return code;
}
