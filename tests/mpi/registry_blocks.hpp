// SPDX-License-Identifier: Apache-2.0
// tests/mpi/registry_blocks.hpp: one block file or one MoE layer of a reference checkpoint through one host composition without
// quantisation, rows distributed unevenly: output, experts and weights equal those of the model's own code.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "golden_dir.hpp"
#include "moe/io/layer_weights.hpp"
#include "moe/models/block_runner.hpp"
#include "moe/models/registry.hpp"

namespace moe_test {

namespace fs = std::filesystem;
namespace hana = boost::hana;
using moe::quantization::None;

/// One MoE block: its weights, its input and the expected output.
struct Source {
  std::string name;
  fs::path weights, tensors;
  std::int64_t layer = -1;  ///< of a checkpoint; -1: a block file
  std::string hidden = "hidden", expected = "expected", ids = "topk_ids", topk_weights = "topk_weights";
};

inline std::vector<Source> sources() {
  std::vector<Source> found;
  for (fs::path const& path : golden_blocks()) found.push_back({path.stem(), path, path});
  for (fs::path const& folder : golden_entries("checkpoints")) {
    fs::path const io = folder / "moe_io.safetensors";
    if (!fs::exists(io)) continue;
    for (std::int64_t layer = 0; layer < 8; ++layer) {
      std::string const at = moe::text("layers.", layer, ".");
      if (!moe::io::TensorStore(io).contains(at + "moe_in")) continue;
      found.push_back({moe::text(folder.filename().string(), "_layer", layer), folder, io, layer, at + "moe_in", at + "moe_out_f32",
                       at + "topk_ids_f32", at + "topk_weights_f32"});
    }
  }
  std::sort(found.begin(), found.end(), [](Source const& a, Source const& b) { return a.name < b.name; });
  return found;
}

template <class Backend, class Experts>
class BlockTest : public testing::Test {
 public:
  BlockTest(Source source, moe::PlacementStrategy strategy) : source_(std::move(source)), strategy_(strategy) {}

  void TestBody() override {
    using Comm = typename Backend::Comm;
    constexpr bool kLocal = std::is_same_v<Comm, moe::comm::Self<>>;  // every rank holds all experts and works alone
    moe::comm::Mpi mpi(MPI_COMM_WORLD, {.timeout_ms = 30'000});
    moe::io::TensorStore const store(source_.weights);
    moe::io::TensorStore const tensors(source_.tensors);
    moe::io::LayerDescription const d = source_.layer < 0
                                            ? moe::io::from_block_metadata(store.metadata(), store.label())
                                            : moe::io::from_config(moe::io::HfConfig::from_file(source_.weights), source_.layer);
    moe::ExpertPlacement const placement(d.router.num_experts, kLocal ? 1 : mpi.size(), strategy_);

    moe::io::LoadOptions load;
    auto const mine = placement.local_to_physical(kLocal ? 0 : mpi.rank());
    load.experts = std::vector<int>(mine.begin(), mine.end());
    auto const loader =
        source_.layer < 0 ? moe::io::LayerLoader::from_block(store, d) : moe::io::LayerLoader::from_checkpoint(store, d, source_.layer);
    // Rank r's rows begin at T r^2 / R^2: the first rank has few or none, the last the most.
    auto const input = read<float>(tensors, source_.hidden);
    std::int64_t const total = static_cast<std::int64_t>(input.size()) / d.hidden;
    auto cut = [&](std::int64_t r) { return total * r * r / (mpi.size() * mpi.size()); };
    first_ = static_cast<std::size_t>(cut(mpi.rank()));
    rows_ = static_cast<std::size_t>(cut(mpi.rank() + 1)) - first_;

    std::vector<std::int64_t> tokens;
    if (d.router.selection == moe::routing::Selection::hash_table) tokens = read<std::int64_t>(tensors, "input_ids");
    using Block = moe::models::BlockRunner<None, Backend, Experts>;
    Block block(comm<Comm>(mpi), loader.template load<float>(load), placement, total);
    std::vector<float> output(rows_ * static_cast<std::size_t>(d.hidden));
    block.forward(part(input, d.hidden), tokens.empty() ? nullptr : tokens.data() + first_, output);

    expect_output(output, read<float>(tensors, source_.expected), d.hidden);
    expect_routing(d, block.topk_ids(), block.topk_weights(), tensors);
  }

 private:
  template <class Comm>
  static Comm& comm(moe::comm::Mpi& mpi) {
    if constexpr (std::is_same_v<Comm, moe::comm::Mpi>) {
      return mpi;
    } else {
      static Comm self;
      return self;
    }
  }
  template <class T>
  static std::vector<T> read(moe::io::TensorStore const& store, std::string const& name) {
    auto const t = store.at(name);
    return t.file->read<T>(*t.info);
  }
  template <class T>
  std::span<T const> part(std::vector<T> const& all, std::int64_t width) const {
    auto const w = static_cast<std::size_t>(width);
    return std::span(all).subspan(first_ * w, rows_ * w);
  }

  void expect_output(std::vector<float> const& output, std::vector<float> const& all, std::int64_t width) const {
    double largest = 0;
    for (float v : all) largest = std::max(largest, std::abs(static_cast<double>(v)));
    std::span<float const> const expected = part(all, width);
    double error = 0;
    for (std::size_t i = 0; i < output.size(); ++i) {
      double const difference = std::abs(static_cast<double>(output[i]) - static_cast<double>(expected[i]));
      ASSERT_FALSE(std::isnan(difference)) << "NaN at " << i;
      error = std::max(error, difference);
    }
    EXPECT_LE(error, 1e-5 * largest);
  }

  void expect_routing(moe::io::LayerDescription const& d, std::vector<std::int32_t> const& ids, std::vector<float> const& weights,
                      moe::io::TensorStore const& tensors) const {
    auto const k = static_cast<std::size_t>(d.router.topk);
    auto const all_ids = read<std::int32_t>(tensors, source_.ids);
    auto const all_weights = read<float>(tensors, source_.topk_weights);
    auto const want_ids = part(all_ids, d.router.topk);
    auto const want_weights = part(all_weights, d.router.topk);
    ASSERT_EQ(ids.size(), want_ids.size());
    for (std::size_t t = 0; t < rows_; ++t) {
      std::map<std::int32_t, float> got;
      std::map<std::int32_t, float> want;
      for (std::size_t i = t * k; i < (t + 1) * k; ++i) {
        // Zaya's gate reports a skipped token as expert 0 with weight 0, this library as the id behind the experts.
        bool const skipped = d.router.zero_expert_kind == moe::routing::ZeroExpertKind::none && ids[i] == d.router.num_experts;
        got[skipped ? 0 : ids[i]] = skipped ? 0.0F : weights[i];
        want[want_ids[i]] = want_weights[i];
      }
      ASSERT_EQ(got.size(), k) << "row " << first_ + t << ": an id occurs twice";
      for (auto const& [id, weight] : want) {
        ASSERT_TRUE(got.contains(id)) << "row " << first_ + t << ": expert " << id << " is missing";
        ASSERT_NEAR(got[id], weight, 1e-5 * std::abs(weight)) << "row " << first_ + t << ", expert " << id;
      }
    }
  }

  Source source_;
  moe::PlacementStrategy strategy_;
  std::size_t first_ = 0;
  std::size_t rows_ = 0;
};

}  // namespace moe_test
