// SPDX-License-Identifier: Apache-2.0
// examples/moe/cmd_layer.cpp: `moe layer` and `moe block`: distribute the rows over the ranks, run the composition, gather, compare,
// report. Under mpirun every rank runs this; each step that can fail ends in agree(), so that no rank waits for one that has given up.
#include <fmt/core.h>
#include <mpi.h>
#include <omp.h>
#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <range/v3/action/sort.hpp>
#include <range/v3/algorithm/max.hpp>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/enumerate.hpp>
#include <range/v3/view/iota.hpp>
#include <range/v3/view/transform.hpp>
#include <thread>

#include "examples/moe/commands.hpp"
#include "examples/moe/compositions.hpp"
#include "examples/moe/grid.hpp"
#include "examples/moe/job.hpp"
#include "examples/moe/mpi_session.hpp"
#include "examples/moe/option_values.hpp"
#include "examples/moe/output.hpp"
#include "examples/moe/placement.hpp"
#include "examples/moe/policy_lists.hpp"
#include "examples/moe/report.hpp"
#include "examples/moe/router_name.hpp"
#include "moe/io/layer_description_json.hpp"
#include "moe/io/safetensors_writer.hpp"
#include "moe/models/registry.hpp"
#include "moe/parallel/construction.hpp"
#include "moe/runner/parallel.hpp"

namespace moe_tool {

void agree(moe::comm::Mpi& comm, std::string const& error) {
  constexpr std::size_t kLength = 1024;
  std::vector<char> mine(kLength);
  std::vector<char> all(kLength * static_cast<std::size_t>(comm.size()));
  std::strncpy(mine.data(), error.c_str(), kLength - 1);
  comm.all_gather(mine.data(), static_cast<std::int64_t>(kLength), all.data(), {});
  for (int r = 0; r < comm.size(); ++r) {
    std::string const words = all.data() + static_cast<std::size_t>(r) * kLength;
    if (words.empty()) {
      continue;
    }
    std::size_t const colon = words.find(": ");  // "E_ARG: message"
    for (int code = 0; code <= static_cast<int>(moe::ErrorCode::internal); ++code) {
      auto const c = static_cast<moe::ErrorCode>(code);
      if (moe::name(c) == words.substr(0, colon)) {
        throw moe::Error(c, words.substr(colon + 2));
      }
    }
    throw moe::Error(moe::ErrorCode::internal, words);
  }
}

void report_error(char const* what) {
  char const* const ranks = std::getenv("OMPI_COMM_WORLD_SIZE");
  int running = 0;
  int over = 0;
  MPI_Initialized(&running);
  MPI_Finalized(&over);
  bool const started_here = running == 0 && ranks != nullptr && std::string(ranks) != "1";
  if (started_here) {
    MPI_Init(nullptr, nullptr);
  }
  int rank = 0;
  bool const together = started_here || (running != 0 && over == 0);
  if (together) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  }
  if (rank == 0) {
    std::string line = what;  // CLI11 words some errors over several lines
    std::replace_if(line.begin(), line.end(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
    std::fprintf(stderr, "moe: %s\n", line.c_str());
  }
  if (together) {
    MPI_Barrier(MPI_COMM_WORLD);
  }
  if (started_here) {
    MPI_Finalize();
  }
}

void require_one_rank(char const* command) {
  for (char const* const variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {  // Open MPI's mpirun, and other launchers
    char const* const ranks = std::getenv(variable);
    if (ranks != nullptr && std::strtol(ranks, nullptr, 10) > 1) {
      throw CLI::ValidationError(command, moe::text("runs on 1 rank, and ", variable, " is ", ranks, "; start it without mpirun"));
    }
  }
}

std::string default_backend(JobOptions const& o, int ranks) {
  if (ranks == 1) return "no_expert_parallel";
  if (o.expert_parallel == "on") return "all_to_all_v";
  return o.tp == ranks ? "no_expert_parallel" : "allgather_reduce_scatter";
}
std::string default_experts(Job const& job) { return job.options.device == "cuda" ? "cuda_reference" : "onednn"; }

namespace {

/// What `--dual-batch` comes to, and why.
std::string dual_batch_choice(Job const& job) {
  JobOptions const& o = job.options;
  if (o.dual_batch == "on") return "on: every batch is split";
  if (o.dual_batch == "off") return "off";
  if (!moe::registry::backend_facts(o.backend).asynchronous) {
    return moe::text("auto: batches are never split: ", o.backend, " cannot send and wait apart");
  }
  moe::runner::dual_batch::Threshold const threshold = dual_batch_threshold(o);
  if (!threshold.never() && !job.needs_second_exchange()) {
    return moe::text("auto: batches are never split: that takes ", threshold.min_rows, " rows on every rank, and the most of any rank is ",
                     job.layer_rows());
  }
  return moe::text("auto: ", threshold);
}

}  // namespace

void log_choices(Job const& job, std::vector<std::string> const& lines) {
  if (job.options.log.empty()) return;
  auto const logger =
      std::make_shared<spdlog::logger>(moe::text("rank ", job.comm->rank()), std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_level(spdlog::level::from_str(job.options.log));
  logger->info("grid: tp {}, dp {}, pcp {}; experts over {} ranks, their columns over {}; router {}, backend {}, experts {}",
               job.moe.tp_size, job.moe.dp_size, job.moe.pcp_size, job.moe.ep_size, job.moe.moe_tp_size, router_name(job.description),
               job.options.backend, job.options.experts);
  for (std::string const& line : lines) logger->info(line);
  logger->info("--dual-batch {}", dual_batch_choice(job));
  logger->debug("placement: {}", job.placement->report(job.moe.ep_rank));
}

namespace {

using namespace moe;
namespace views = ranges::views;

int set_threads() {
  MPI_Comm node = MPI_COMM_NULL;
  int ranks_here = 1;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
  MPI_Comm_size(node, &ranks_here);
  MPI_Comm_free(&node);
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    omp_set_num_threads(std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / ranks_here));
  }
  return omp_get_max_threads();
}

/// first_row [G + 1]: equal shares, or shares cut at random rows, some of them empty.
std::vector<std::int64_t> deal_rows(std::int64_t rows, int groups, JobOptions const& o) {
  std::mt19937_64 random(o.seed);
  auto const cut = [&](int g) {
    return o.deal == "even" || g == 0 || g == groups ? rows * g / groups
                                                     : static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(rows + 1));
  };
  return views::closed_iota(0, groups) | views::transform(cut) | ranges::to<std::vector> | ranges::actions::sort;
}

/// Rows [first, last) of a [T, width] tensor as float32, finite.
std::vector<float> read_rows(io::TensorStore const& store, std::string const& name, std::int64_t width, std::int64_t first,
                             std::int64_t last) {
  io::StoredTensor const t = store.at(name);
  std::vector<float> rows(static_cast<std::size_t>((last - first) * width));
  t.file->read_elements(*t.info, first * width, (last - first) * width, rows.data());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!std::isfinite(rows[i])) {
      auto const at = static_cast<std::int64_t>(i);
      throw Error(ErrorCode::argument,
                  text(t.where(), ": row ", first + at / width, ", column ", at % width, " is ", rows[i], ", expected a finite number"));
    }
  }
  return rows;
}

void require_matrix(io::StoredTensor const& t, std::int64_t width) {
  if (t.shape().size() != 2 || t.shape()[1] != width) {
    throw Error(ErrorCode::argument, text(t.where(), ": shape ", t.info->shape_text(), ", expected [tokens, ", width, "]"));
  }
}

/// [G] rows of each TP group.
std::vector<std::int64_t> group_rows(Job const& job) {
  return views::iota(std::size_t{0}, job.first_row.size() - 1) | views::transform([&](std::size_t g) { return job.rows(g); }) |
         ranges::to<std::vector>;
}

/// E_ARG, E_UNSUPPORTED if an expert's capacity is counted over sequences whose ends are not known, or that are dealt to several groups.
void check_sequences(Job const& job) {
  std::int64_t const rows = job.first_row.back();
  std::int64_t const capacity = job.description.router.expert_capacity;
  if (capacity > 0 && rows > capacity && job.options.sequence_length == 0) {
    throw Error(ErrorCode::argument, text("--sequence-length is missing: an expert of this model takes at most ", capacity,
                                          " tokens of each sequence (expert_capacity), and there are ", rows, " rows"));
  }
  for (std::int64_t const first : job.first_row) routing::check_cut(job.description.router, rows, first, job.options.sequence_length);
}

/// The rows of this rank's group: input and token ids.
void read_input(Job& job, io::TensorStore const& input) {
  io::StoredTensor const t = input.at(job.options.tensor);
  require_matrix(t, job.description.hidden);
  std::int64_t const rows = t.shape()[0];
  job.first_row = deal_rows(rows, job.moe.flat_size / job.moe.tp_size, job.options);
  check_sequences(job);
  job.max_rows = ranges::max(group_rows(job));
  auto const me = job.group(job.comm->rank());
  job.hidden = read_rows(input, job.options.tensor, job.description.hidden, job.first_row[me], job.first_row[me + 1]);
  if (job.description.router.selection == routing::Selection::hash_table && job.options.token_ids.empty()) {
    job.options.token_ids = "input_ids";
  }
  if (!job.options.token_ids.empty()) {
    io::StoredTensor const ids = input.at(job.options.token_ids);
    if (ids.info->elements() != rows) {
      throw Error(ErrorCode::argument, text(ids.where(), ": shape ", ids.info->shape_text(), ", expected [", rows, "]"));
    }
    std::vector<std::int64_t> const all = ids.file->read<std::int64_t>(*ids.info);
    job.token_ids.assign(all.begin() + job.first_row[me], all.begin() + job.first_row[me + 1]);
  }
}

/// Rows of the input that one rank brings.
struct Share {
  std::int64_t first;
  std::int64_t rows;
};
/// [R] the rows whose output each rank gives: its group's, from the group's first rank.
std::vector<Share> output_shares(Job const& job) {
  return views::iota(0, job.comm->size()) | views::transform([&](int rank) {
           std::size_t const g = job.group(rank);
           return Share{job.first_row[g], rank % job.moe.tp_size == 0 ? job.rows(g) : 0};
         }) |
         ranges::to<std::vector>;
}
/// [R] the rows that each rank routes: under sequence parallelism its part of its group's, else as output_shares(). None if the experts
/// route inside.
std::vector<Share> routed_shares(Job const& job) {
  if (routes_inside(job.options.experts)) return std::vector<Share>(static_cast<std::size_t>(job.comm->size()));
  if (!job.moe.use_sp_moe()) return output_shares(job);
  return views::iota(0, job.comm->size()) | views::transform([&](int rank) {
           std::size_t const g = job.group(rank);
           auto const slice = runner::parallel::slice_of(job.rows(g), job.moe, rank % job.moe.tp_size);
           return Share{job.first_row[g] + slice.begin, slice.rows};
         }) |
         ranges::to<std::vector>;
}

/// The rows of all ranks in input order, on every rank.
template <class T>
std::vector<T> gather(Job const& job, std::vector<Share> const& shares, std::vector<T> const& mine, std::int64_t width) {
  auto const size = static_cast<std::int64_t>(sizeof(T)) * width;
  auto const bytes = [&](std::int64_t Share::* field) {
    return shares | views::transform([=](Share const& share) { return share.*field * size; }) | ranges::to<std::vector<std::int64_t>>;
  };
  std::vector<std::int64_t> const counts = bytes(&Share::rows);
  std::vector<std::int64_t> const offsets = bytes(&Share::first);
  std::vector<T> all(static_cast<std::size_t>(job.first_row.back() * width));
  job.comm->all_gather_v(mine.data(), counts[static_cast<std::size_t>(job.comm->rank())], all.data(), counts.data(), offsets.data(), {});
  return all;
}

/// The tensor that the output will be compared with; E_ARG if it cannot be.
io::StoredTensor expected_tensor(Job const& job, io::TensorStore const& store) {
  io::StoredTensor const t = store.at(job.options.expected.substr(job.options.expected.rfind(':') + 1));
  require_matrix(t, job.description.hidden);
  if (t.shape()[0] != job.first_row.back()) {
    throw Error(ErrorCode::argument, text(t.where(), ": shape ", t.info->shape_text(), ", the output has ", job.first_row.back(), " rows"));
  }
  t.file->read_elements<float>(*t.info, 0, 0, nullptr);  // checks the type
  return t;
}

/// max |out - expected| / max |expected|
double compare(io::StoredTensor const& t, std::vector<float> const& output) {
  std::vector<float> const expected = t.file->read<float>(*t.info);
  double error = 0;
  double largest = 0;
  for (std::size_t i = 0; i < output.size(); ++i) {
    double const difference = std::abs(static_cast<double>(output[i]) - static_cast<double>(expected[i]));
    error = std::isnan(difference) ? HUGE_VAL : std::max(error, difference);
    largest = std::max(largest, std::abs(static_cast<double>(expected[i])));
  }
  return largest > 0 ? error / largest : error;
}

/// [P] slots of all rows. Ranks with the same rows have counted the same. Collective.
std::vector<std::int64_t> slot_load(Job const& job, JobResult const& result) {
  bool const counts = job.moe.tp_rank == 0 || job.moe.use_sp_moe();
  std::vector<std::int64_t> const mine = counts ? result.slot_load : std::vector<std::int64_t>(result.slot_load.size(), 0);
  std::vector<std::int64_t> sum(mine.size());
  MPI_Allreduce(mine.data(), sum.data(), static_cast<int>(sum.size()), MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
  return sum;
}

/// The slots of each expert and of each rank's experts. Collective.
void set_loads(Job const& job, JobResult const& result, std::vector<std::int32_t> const& ids, Report& r) {
  r.load.assign(static_cast<std::size_t>(r.num_experts), 0);
  r.rank_load.assign(static_cast<std::size_t>(job.moe.ep_size), 0);
  for (std::int32_t id : ids) {
    if (id >= 0 && id < r.num_experts) ++r.load[static_cast<std::size_t>(id)];
  }
  std::vector<std::int64_t> const slots = job.maps ? slot_load(job, result) : r.load;
  for (auto const [slot, load] : views::enumerate(slots)) {
    r.rank_load[static_cast<std::size_t>(job.placement->owner(static_cast<int>(slot)))] += load;
  }
}

Report report_of(Job const& job, JobResult const& result, std::vector<std::int32_t> const& ids, int threads) {
  Report r;
  io::LayerDescription const& d = job.description;
  r.source = job.options.block.empty() ? fmt::format("{}, layer {}", d.model_type, job.options.layer) : d.model_type;
  r.router = router_name(d);
  r.quantization = job.options.quantization;
  r.backend = job.options.backend;
  r.experts = job.options.experts;
  r.device = job.options.device;
  r.ranks = job.comm->size();
  r.threads = threads;
  r.grid = {job.moe.tp_size, job.moe.dp_size, job.moe.pcp_size, job.moe.ep_size, job.moe.moe_tp_size, job.moe.use_sp_moe()};
  r.chunk_rows = job.layer_rows();
  r.passes = result.passes;
  r.passes_in_halves = result.passes_in_halves;
  r.dual_batch = dual_batch_choice(job);
  r.tokens = job.first_row.back();
  r.group_tokens = group_rows(job);
  r.hidden = d.hidden;
  r.intermediate = d.intermediate;
  r.num_experts = d.router.num_experts;
  r.topk = d.router.topk;
  r.routes_inside = routes_inside(job.options.experts);
  if (!r.routes_inside) set_loads(job, result, ids, r);
  r.replicas = job.maps ? job.maps->num_redundant() : 0;
  if (!result.waited.empty()) {
    r.waited.resize(static_cast<std::size_t>(r.ranks) * static_cast<std::size_t>(r.ranks));
    job.comm->all_gather(result.waited.data(), static_cast<std::int64_t>(sizeof(double)) * r.ranks, r.waited.data(), {});
  }
  MPI_Allreduce(result.seconds.data(), r.seconds.data(), static_cast<int>(kNumPhases), MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  r.output = job.options.output.string();
  return r;
}

/// Without ids and weights of a choice that the experts made.
void write_output(Job const& job, std::vector<float> const& output, std::vector<std::int32_t> const& ids,
                  std::vector<float> const& weights) {
  std::int64_t const rows = job.first_row.back();
  std::int64_t const k = job.description.router.topk;
  io::SafetensorsWriter writer;
  writer.add("output", {rows, job.description.hidden}, std::span(output));
  if (!routes_inside(job.options.experts)) {
    writer.add("topk_ids", {rows, k}, std::span(ids));
    writer.add("topk_weights", {rows, k}, std::span(weights));
  }
  writer.write(job.options.output);
}

/// Every file that the job reads.
std::vector<std::filesystem::path> inputs_of(Job const& job, std::initializer_list<std::optional<io::TensorStore> const*> stores) {
  std::vector<std::filesystem::path> files;
  for (auto const* store : stores) {
    if (*store) {
      auto const some = (*store)->files();
      files.insert(files.end(), some.begin(), some.end());
    }
  }
  if (!job.options.checkpoint.empty()) {
    files.push_back(job.options.checkpoint / "config.json");
    files.push_back(job.options.checkpoint / "model.safetensors.index.json");
  }
  if (job.maps && job.options.placement != "linear") files.emplace_back(job.options.placement);
  return files;
}

/// E_CONFIG if a pass has too few rows for two halves.
void expect_halves(Job const& job) {
  if (job.options.dual_batch != "on" || job.layer_rows() >= 2) return;
  if (job.options.chunk == 1) throw Error(ErrorCode::config, "--dual-batch on: a pass of --chunk 1 row has no two halves. Fix: --chunk 2");
  throw Error(ErrorCode::config, text("--dual-batch on: no rank has more than ", job.layer_rows(), " row, and two halves need 2"));
}

/// E_MISMATCH, on every rank, naming the first option that differs from rank 0's. Paths may differ between machines.
void require_same_run(Job const& job) {
  JobOptions const& o = job.options;
  moe::Fingerprint f;
  f.add("--layer", o.layer).add("the description of the layer (hash)", moe::fnv1a(io::to_json(job.description).dump()));
  f.add("--tensor", io::one_line(o.tensor)).add("the number of rows", job.first_row.back()).add("--token-ids", io::one_line(o.token_ids));
  f.add("--sequence-length", o.sequence_length);
  f.add("--tp", o.tp).add("--dp", o.dp).add("--pcp", o.pcp).add("--expert-parallel", o.expert_parallel);
  f.add("--sequence-parallel", static_cast<int>(o.sequence_parallel)).add("--chunk", o.chunk);
  f.add("--dual-batch", o.dual_batch).add("--shared-overlap", o.shared_overlap);
  f.add("--deal", o.deal)
      .add("--seed", o.seed)
      .add("--repeat", o.repeat)
      .add("--placement", io::one_line(o.placement))
      .add("--replicas", o.replicas)
      .add("--device", o.device);
  f.add("--backend", o.backend).add("--experts", o.experts).add("--quantization", o.quantization);
  moe::detail::agree_on_fingerprint(*job.comm, f);
}

io::Tokens tokens_of(std::string const& option) {
  return option == "text" ? io::Tokens::text : option == "image" ? io::Tokens::image : io::Tokens::all;
}

void run(JobOptions const& options) {
  // CLI11 checks no empty value of an option that may go without one.
  if (options.dual_batch.empty()) throw CLI::ValidationError("--dual-batch", refusal("", "one of auto, on, off"));
  MpiSession session;
  try {
    Job job;
    job.options = options;
    comm::Mpi comm(MPI_COMM_WORLD, {.timeout_ms = options.timeout_ms, .statistics = true});
    job.comm = &comm;
#ifndef MOE_HAS_CUDA
    together(comm, [&] {
      if (options.nvtx) throw Error(ErrorCode::unsupported, "--nvtx: this program was built without CUDA");
    });
#endif
    if (job.options.backend.empty()) job.options.backend = default_backend(options, comm.size());
    if (job.options.experts.empty()) job.options.experts = default_experts(job);
    int const threads = set_threads();

    std::optional<io::TensorStore> store;
    std::optional<io::TensorStore> input;
    std::optional<io::TensorStore> expected;
    std::optional<io::StoredTensor> wanted;
    together(comm, [&] {
      if (options.block.empty()) {
        std::error_code ignored;
        if (auto const found = std::filesystem::status(options.checkpoint, ignored);
            std::filesystem::exists(found) && !std::filesystem::is_directory(found)) {
          throw Error(ErrorCode::argument, text("--checkpoint '", options.checkpoint.string(), "' is not a directory"));
        }
        job.description = io::from_config(io::HfConfig::from_file(options.checkpoint), options.layer, tokens_of(options.tokens));
        store.emplace(options.checkpoint);
        input.emplace(options.input);
      } else {
        store.emplace(options.block);
        job.description = io::from_block_metadata(store->metadata(), store->label());
        if (!options.input.empty()) {
          input.emplace(options.input);
        }
      }
      job.store = &*store;
      job.moe = place_in_grid(job.options, comm);
      place_experts(job);
      read_input(job, input ? *input : *store);
      expect_halves(job);
      if (!options.expected.empty()) {
        expected.emplace(options.expected.substr(0, options.expected.rfind(':')));  // there is one: file_and_name()
        wanted = expected_tensor(job, *expected);
      }
      if (comm.rank() == 0) {
        check_output(options.output, inputs_of(job, {&store, &input, &expected}));
      }
    });
    require_same_run(job);
    GridGroups const groups(job, options.timeout_ms);

    JobResult const result = runner_of(job.options)(job);

    std::vector<Share> const routed = routed_shares(job);
    std::vector<float> const output = gather(job, output_shares(job), result.output, job.description.hidden);
    std::vector<std::int32_t> const ids = gather(job, routed, result.topk_ids, job.description.router.topk);
    std::vector<float> const weights = gather(job, routed, result.topk_weights, job.description.router.topk);
    Report report = report_of(job, result, ids, threads);
    together(comm, [&] {
      if (wanted) {
        report.error = compare(*wanted, output);
      }
      if (comm.rank() == 0) {
        write_output(job, output, ids, weights);
      }
    });
    if (comm.rank() == 0) {
      fmt::print("{}", options.json ? as_json(report) : as_text(report));
    }
  } catch (TransportError const& e) {
    session.broken = true;
    std::fprintf(stderr, "moe: %s\n", e.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  } catch (Error const& e) {
    report_error(e.what());
    throw Reported{};
  }
}

/// Refuses, as bad usage, what is not FILE:NAME.
std::string file_and_name(std::string const& words) {
  std::size_t const colon = words.rfind(':');
  bool const both = colon != std::string::npos && colon > 0 && colon + 1 < words.size();
  return both ? std::string{} : refusal(words, "FILE:NAME");
}

void add_common(CLI::App& command, JobOptions& o) {
  command.add_option("--output", o.output, "File to write: output, and topk_ids, topk_weights unless the experts route inside")
      ->required()
      ->check(some_text("a file to write"));
  command.add_option("--expected", o.expected, "FILE:NAME of the tensor to compare the output with")->check(file_and_name);
  command.add_option("--token-ids", o.token_ids, "Tensor of token ids, for hash routing (default: input_ids)")
      ->check(some_text("the name of a tensor"));
  command.add_option("--sequence-length", o.sequence_length, "Rows of one sequence, for a model with an expert_capacity (Switch)")
      ->check(whole_number(1));
  command
      .add_option(
          "--backend", o.backend,
          text(
              "Default: no_expert_parallel on one rank, else all_to_all_v, or allgather_reduce_scatter with --expert-parallel off. Known: ",
              joined(names_of<Backends>())))
      ->check(one_of(names_of<Backends>(), false));
  command.add_option("--experts", o.experts, text("Default: onednn, on cuda cuda_reference. Known: ", joined(names_of<ExpertsKinds>())))
      ->check(one_of(names_of<ExpertsKinds>(), false));
  command.add_option("--quantization", o.quantization, text("Known: ", joined(names_of<Quantizations>())))
      ->check(one_of(names_of<Quantizations>(), false))
      ->capture_default_str();
  command.add_option("--device", o.device, "host or cuda")->check(one_of({"host", "cuda"}))->capture_default_str();
  command.add_option("--placement", o.placement, "linear, round_robin, or a file of maps, as serve-sim --save-placement writes it")
      ->capture_default_str();
  command.add_option("--replicas", o.replicas, "Redundant experts X: experts + X physical experts over the ranks")
      ->check(whole_number(0, 1 << 16));
  command.add_option("--log", o.log, "Log on standard error what was chosen and why: info or debug")->check(one_of({"info", "debug"}));
  command.add_flag("--nvtx", o.nvtx, "Make a range of NVTX of each stage, for a profiler (in programs with CUDA)");
  auto const size = whole_number(1);
  command.add_option("--tp", o.tp, "Tensor parallel: ranks that hold the same rows")->check(size)->capture_default_str();
  command.add_option("--dp", o.dp, "Data parallel: groups of ranks with rows of their own (default: ranks / (tp pcp))")->check(size);
  command.add_option("--pcp", o.pcp, "Prefill context parallel: parts of a prompt")->check(size)->capture_default_str();
  command.add_option("--expert-parallel", o.expert_parallel, "on: experts are divided among all ranks; off: every rank has a part of each")
      ->check(one_of({"on", "off"}))
      ->capture_default_str();
  command.add_flag("--sequence-parallel", o.sequence_parallel, "The ranks of a TP group divide their rows before the exchange");
  command.add_option("--chunk", o.chunk, "Most rows of a rank in one pass through the layer (default: all)")
      ->check(whole_number(std::int64_t{1}));
  command
      .add_option("--dual-batch", o.dual_batch,
                  text("on: one half of a batch travels while the other computes; auto: so where every rank has at least ",
                       runner::dual_batch::default_threshold(SpaceKind::host).min_rows,
                       " rows, on cuda never, by measurement; off: the whole batch travels, then its experts compute; the report says what "
                       "was done. Without a mode: on"))
      ->check(one_of({"auto", "on", "off"}))
      ->expected(0, 1)
      ->default_str("on")  // of the option without a value
      ->option_text("[TEXT:{auto, on, off}]=off");
  command
      .add_option("--shared-overlap", o.shared_overlap,
                  "Shared experts beside the exchange and, on cuda, the routed experts, where that is possible: auto, or off: before them")
      ->check(one_of({"auto", "off"}))
      ->capture_default_str();
  command.add_option("--deal", o.deal, "How rows are dealt to the groups: even or random")
      ->check(one_of({"even", "random"}))
      ->capture_default_str();
  command.add_option("--seed", o.seed, "For --deal random, at least 0")->check(whole_number(std::uint64_t{0}))->capture_default_str();
  command.add_option("--repeat", o.repeat, "Timed repetitions; the fastest is reported")
      ->check(whole_number(1, 1000000))
      ->capture_default_str();
  command.add_option("--timeout-ms", o.timeout_ms, "Deadline of every wait for another rank")
      ->check(whole_number(std::int64_t{1}, std::int64_t{86'400'000}))
      ->capture_default_str();
  command.add_flag("--json", o.json, "Print the report as one JSON object");
}

}  // namespace

void add_layer(CLI::App& app) {
  auto o = std::make_shared<JobOptions>();
  auto* command = app.add_subcommand("layer", "Run one MoE layer of a Hugging Face checkpoint (under mpirun: expert-parallel)");
  command->add_option("--checkpoint", o->checkpoint, "Directory with config.json and safetensors files")
      ->required()
      ->check(some_text("a directory"));
  constexpr auto kLeast = std::numeric_limits<std::int64_t>::min(), kMost = std::numeric_limits<std::int64_t>::max();
  command->add_option("--layer", o->layer, "Layer number")->required()->check(whole_number<std::int64_t>(kLeast, kMost, 0));
  command->add_option("--tokens", o->tokens, "text or image: which block of a layer that has two (ERNIE-4.5-VL)")
      ->check(one_of({"text", "image"}));
  command->add_option("--input", o->input, "safetensors file with the rows that enter the layer")->required()->check(some_text("a file"));
  command->add_option("--tensor", o->tensor, "Its tensor, [tokens, hidden]")->required()->check(some_text("the name of a tensor"));
  add_common(*command, *o);
  command->callback([o] { run(*o); });
}

void add_block(CLI::App& app) {
  auto o = std::make_shared<JobOptions>();
  auto* command = app.add_subcommand("block", "Run the MoE block of a file that holds weights, inputs and semantics");
  command->add_option("file", o->block, "The block file")->required()->check(some_text("a file"));
  command->add_option("--input", o->input, "Another safetensors file with the rows (default: the block file)")->check(some_text("a file"));
  command->add_option("--tensor", o->tensor, "Tensor of the rows, [tokens, hidden]")
      ->check(some_text("the name of a tensor"))
      ->capture_default_str();
  add_common(*command, *o);
  command->callback([o] { run(*o); });
}

}  // namespace moe_tool
