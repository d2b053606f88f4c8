// SPDX-License-Identifier: Apache-2.0
// tests/mpi/load_runner_test.cpp: a block of a checkpoint on several ranks: the output of one rank, each rank reads its own experts only,
// what one rank cannot read.
// moe-ranks: 2 4
#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "at.hpp"
#include "expect_close.hpp"
#include "golden_dir.hpp"
#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/backends/window/host/high_throughput.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/mpi_shared.hpp"
#include "moe/comm/self.hpp"
#include "moe/models/load_runner_host.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/none.hpp"
#include "packed_checkpoint.hpp"
#include "temporary_directory.hpp"

namespace {

using namespace moe;
namespace fs = std::filesystem;
using moe_test::at;
using moe_test::expect_close;
using moe_test::golden_checkpoint;
using quantization::None;
using Fp8 = quantization::Fp8Block<>;
using OneRank = backends::NoExpertParallel<>;
using Collective = backends::AllToAllV<comm::Mpi>;
template <class Quant, class Backend>
using Block = models::AnyBlock<Quant, Backend>;

comm::Mpi& world() {
  static comm::Mpi comm(MPI_COMM_WORLD);
  return comm;
}

template <class BlockT>
std::vector<float> forward(BlockT& block, float const* x, std::int64_t rows) {
  std::int64_t const h = block.runner().hidden();
  std::vector<float> y(at(rows * h));
  block.forward(make_rows(x, rows, h), make_rows(y.data(), rows, h));
  return y;
}

/// Every rank takes rows of its own, another number on each; the output is transformers' and that of one rank with all experts.
template <class Backend>
void expect_same_on_all_ranks(char const* checkpoint, int layer, std::optional<ExpertPlacement> const& placement = {},
                              routing::ExpertMapping const& mapping = {}) {
  SCOPED_TRACE(text(checkpoint, ", layer ", layer, ", ", Backend::kName));
  io::SafetensorsFile const file(golden_checkpoint(checkpoint) / "moe_io.safetensors");
  auto const x = file.read<float>(text("layers.", layer, ".moe_in"));
  auto const want = file.read<float>(text("layers.", layer, ".moe_out_f32"));
  comm::Mpi& comm = world();
  auto block = load_runner<Block<None, Backend>>(golden_checkpoint(checkpoint), layer, comm,
                                                 {.max_tokens_per_rank = 91, .placement = placement, .mapping = mapping});
  comm::Self<> self;
  auto all = load_runner<Block<None, OneRank>>(golden_checkpoint(checkpoint), layer, self, {.max_tokens_per_rank = 91});
  EXPECT_EQ(block.placement().ep_size(), comm.size());
  std::int64_t const h = block.runner().hidden(), rows = 91 - 13 * comm.rank();
  float const* const mine = x.data() + comm.rank() * 91 * h;
  auto const got = forward(block, mine, rows);
  expect_close(got, {want.begin() + comm.rank() * 91 * h, want.begin() + (comm.rank() * 91 + rows) * h}, 1e-5F);
  expect_close(got, forward(all, mine, rows), 1e-6F);
}

TEST(LoadRunner, EqualsTransformersAndOneRank) {
  for (int layer : {0, 1}) {
    expect_same_on_all_ranks<Collective>("qwen3_moe_tiny", layer);
    expect_same_on_all_ranks<backends::LowLatency<comm::MpiShared>>("qwen3_moe_tiny", layer);
    expect_same_on_all_ranks<backends::HighThroughput<comm::MpiShared>>("qwen3_moe_tiny", layer);
  }
  for (int layer : {1, 2}) {
    expect_same_on_all_ranks<Collective>("deepseek_v3_tiny", layer);
    expect_same_on_all_ranks<backends::LowLatency<comm::MpiShared>>("deepseek_v3_tiny", layer);
  }
}
TEST(LoadRunner, APlacementWithReplicas) {
  std::vector<std::int32_t> const slots{3, 0, 1, 2, 3, 4, 5, 6, 7, 3, 7, 0};  // 6 or 3 a rank; experts 0, 3 and 7 have replicas
  std::vector<std::int32_t> places(8 * 3, -1), replicas(8, 0);
  for (std::size_t p = 0; p < slots.size(); ++p) {
    auto const e = static_cast<std::size_t>(slots[p]);
    places[3 * e + static_cast<std::size_t>(replicas[e]++)] = static_cast<std::int32_t>(p);
  }
  routing::ExpertMapping const mapping{.num_experts = 8,
                                       .num_physical = 12,
                                       .max_replicas = 3,
                                       .logical_to_physical = places.data(),
                                       .replica_count = replicas.data(),
                                       .source_rank = world().rank(),
                                       .ep_size = world().size()};
  expect_same_on_all_ranks<Collective>("qwen3_moe_tiny", 1, ExpertPlacement::from_physical_to_logical(slots, 8, world().size()), mapping);
}

/// Each rank's copy of the checkpoint has NaN codes in all experts that are not its own: to read one would be an error.
TEST(LoadRunner, ARankReadsItsOwnExpertsOnly) {
  comm::Mpi& comm = world();
  moe_test::PackedSizes const sizes{.experts = 9, .hidden = 128, .intermediate = 128};  // they do not divide
  ExpertPlacement const placement(9, comm.size());
  auto const write = [&](fs::path const& directory, bool damage) {
    moe_test::write_checkpoint(
        directory, moe_test::fp8_block_config(),
        [&](moe_test::CheckpointWriter& w, std::string const& base, std::int64_t n, std::int64_t k) {
          moe_test::add_fp8_blocks(w, base, n, k);
          int const expert = base[base.find("experts.") + 8] - '0';
          auto const mine = placement.local_to_physical(comm.rank());
          bool const own = std::any_of(mine.begin(), mine.end(), [&](std::int32_t p) { return placement.logical(p) == expert; });
          if (damage && !own) std::fill(w.kept.back().begin(), w.kept.back().end(), std::uint8_t{0x7F});
        },
        sizes);
  };
  moe_test::TemporaryDirectory const damaged, whole;
  write(damaged.path(), true);
  write(whole.path(), false);
  std::int64_t done = 0, total = 0;
  auto block = load_runner<Block<Fp8, Collective>>(
      damaged.path(), 0, comm, {.max_tokens_per_rank = 8, .progress = [&](std::int64_t d, std::int64_t t) { done = d, total = t; }});
  EXPECT_TRUE(block.direct());
  EXPECT_EQ(total, placement.num_local(comm.rank()) * 3 * (128 * 128 + 4));
  EXPECT_EQ(done, total);

  comm::Self<> self;
  auto all = load_runner<Block<Fp8, OneRank>>(whole.path(), 0, self, {.max_tokens_per_rank = 8});
  moe_test::CheckpointWriter random;
  auto const x = random.normal({8, 128});
  expect_close(forward(block, x.data(), 8), forward(all, x.data(), 8), 1e-5F);
}

TEST(LoadRunner, WhatOneRankCannotReadEndsAll) {
  comm::Mpi& comm = world();
  bool const last = comm.rank() == comm.size() - 1;
  auto const expect = [&](fs::path const& checkpoint, LoadedRunner<Block<None, Collective>>::Options const& options, char const* part) {
    try {
      load_runner<Block<None, Collective>>(checkpoint, 0, comm, options);
      ADD_FAILURE() << "no error: " << part;
    } catch (Error const& error) {
      EXPECT_EQ(error.code(), last ? ErrorCode::argument : ErrorCode::peer) << error.what();
      bool const named = std::string(error.what()).find(part) != std::string::npos;
      EXPECT_TRUE(!last || named) << error.what();
    }
  };
  fs::path const good = golden_checkpoint("qwen3_moe_tiny");
  expect(last ? good / "nowhere" : good, {.max_tokens_per_rank = 1}, "cannot open");
  expect(good, {.max_tokens_per_rank = last ? 0 : 1}, "max_tokens_per_rank: 0, at least 1");
  // The shard that is cut off has experts of every rank; the ranks but the last one read whole files.
  moe_test::TemporaryDirectory const copy;
  fs::copy(good, copy.path(), fs::copy_options::recursive);
  if (last) {
    fs::path const shard = copy.path() / "model-00002-of-00003.safetensors";
    fs::resize_file(shard, fs::file_size(shard) - 100);
  }
  expect(copy.path(), {.max_tokens_per_rank = 1}, "model-00002");
}

}  // namespace
