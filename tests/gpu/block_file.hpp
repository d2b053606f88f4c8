// SPDX-License-Identifier: Apache-2.0
// tests/gpu/block_file.hpp: a block file of the reference data, run through any composition of one rank.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "expect_error.hpp"
#include "golden_dir.hpp"
#include "moe/models/block_runner.hpp"
#include "stored_array.hpp"
#include "tests/gpu/relative_error.hpp"

namespace moe_test {

struct BlockFile {
  std::filesystem::path path;
  std::string name;
  moe::io::TensorStore store;
  std::vector<float> hidden, expected;
  std::vector<std::int64_t> tokens;
  moe::io::LayerDescription description;

  explicit BlockFile(std::filesystem::path const& file) : path(file), name(file.stem().string()), store(file) {
    hidden = read<float>(store, "hidden");
    expected = read<float>(store, "expected");
    if (store.contains("input_ids")) tokens = read<std::int64_t>(store, "input_ids");
    description = moe::io::from_block_metadata(store.metadata(), store.label());
  }
  std::int64_t rows() const { return static_cast<std::int64_t>(hidden.size()) / description.hidden; }

  /// The block's output; `change` may alter the weights that were read.
  template <class Quant, class Backend, class Experts, class Act = moe::bf16, class Change>
  std::vector<float> run(Change&& change) const {
    using Block = moe::models::BlockRunner<Quant, Backend, Experts, Act, Act, float>;
    typename Backend::Comm comm;
    auto weights = moe::io::load_block<float>(store);
    change(weights);
    Block block(comm, std::move(weights), moe::ExpertPlacement(description.router.num_experts, 1), rows());
    std::vector<float> out(hidden.size());
    block.forward(hidden, tokens.empty() ? nullptr : tokens.data(), out);
    return out;
  }
  template <class Quant, class Backend, class Experts, class Act = moe::bf16>
  std::vector<float> run() const {
    return run<Quant, Backend, Experts, Act>([](auto&) {});
  }
};

/// Calls test(file) for every block file; returns how many there are.
template <class Test>
int each_block_file(Test test) {
  int count = 0;
  for (std::filesystem::path const& path : golden_blocks()) {
    SCOPED_TRACE(path.filename().string());
    try {
      test(BlockFile(path));
    } catch (moe::Error const& e) {
      ADD_FAILURE() << e.what();
    }
    ++count;
  }
  EXPECT_GT(count, 0);
  return count;
}

/// As each_block_file(), without the files that Experts refuse: those with a norm of the experts' outputs. The number of files run.
template <class Experts, class Test>
int each_block_file_of(Test test) {
  int refused = 0;
  int const all = each_block_file([&](BlockFile const& f) {
    if (f.description.expert_norm && !moe::facts::normalises_output<Experts>()) {
      ++refused;
    } else {
      test(f);
    }
  });
  return all - refused;
}

/// Experts refuse the files with a norm of the experts' outputs when the layer is constructed.
template <class Quant, class Backend, class Experts, class Act = moe::bf16>
void expect_norm_refused() {
  int files = 0;
  each_block_file([&](BlockFile const& f) {
    if (!f.description.expert_norm) return;
    ++files;
    expect_error(moe::ErrorCode::unsupported, moe::text(Experts::kName, " cannot normalise an expert's output before the weighted sum"),
                 [&] { (void)f.run<Quant, Backend, Experts, Act>(); });
  });
  EXPECT_GT(files, 0);
}

}  // namespace moe_test
