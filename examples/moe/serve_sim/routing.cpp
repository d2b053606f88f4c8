// SPDX-License-Identifier: Apache-2.0
// examples/moe/serve_sim/routing.cpp: the routing of a simulated run: drawn from a Zipf distribution, or read from a trace.
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <range/v3/algorithm/max.hpp>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/enumerate.hpp>

#include "examples/moe/refusal.hpp"
#include "examples/moe/serve_sim/serve_sim.hpp"
#include "moe/core/error.hpp"
#include "moe/io/one_line.hpp"
#include "moe/io/tensor_store.hpp"
#include "moe/routing/capture.hpp"
#include "moe/routing/row/score.hpp"
#include "moe/routing/simulator.hpp"

namespace moe_tool::serve_sim {

using moe::Error;
using moe::ErrorCode;
using moe::text;

namespace {

/// The number after "zipf:". E_ARG.
double exponent_of(std::string const& words) {
  double value = 0;
  auto const [end, error] = std::from_chars(words.data(), words.data() + words.size(), value);
  if (error != std::errc{} || end != words.data() + words.size() || !(value >= 0 && value <= 100)) {
    throw Error(ErrorCode::argument, moe::io::one_line("--routing: ", refusal(text("zipf:", words), "zipf:S with S from 0 to 100")));
  }
  return value;
}

/// The first layer of a record of RoutingRecorder, or the tensor topk_ids of a safetensors file, which `moe layer` writes. Adds what it
/// reads to `files`.
moe::routing::RoutingRecord read_record(std::filesystem::path const& path, std::vector<std::filesystem::path>& files) {
  constexpr std::string_view kMagic = "moe-routing-1\n";
  std::string start(kMagic.size(), '\0');
  std::error_code ignored;
  auto const found = std::filesystem::status(path, ignored);
  if (std::filesystem::exists(found) && !std::filesystem::is_directory(found) && !std::filesystem::is_regular_file(found)) {
    throw Error(ErrorCode::argument, moe::io::one_line("'", path.string(), "' is not a regular file"));
  }
  std::ifstream(path, std::ios::binary).read(start.data(), static_cast<std::streamsize>(start.size()));
  if (start == kMagic) {
    files.push_back(path);
    auto const all = moe::routing::RoutingRecorder::read(path);
    if (all.num_layers() == 0) throw Error(ErrorCode::argument, moe::io::one_line("'", path.string(), "': no layers"));
    return all.layer(0);
  }
  moe::io::TensorStore const store(path);
  files = store.files();
  moe::io::StoredTensor const ids = store.at("topk_ids");
  if (ids.shape().size() != 2) {
    throw Error(ErrorCode::argument, moe::io::one_line(ids.where(), ": shape ", ids.info->shape_text(), ", expected [rows, topk]"));
  }
  moe::routing::RoutingRecord out;
  out.topk = static_cast<int>(ids.shape()[1]);
  out.ids = ids.file->read<std::int32_t>(*ids.info);
  return out;
}

}  // namespace

Routing::Routing(Options const& o) : num_experts_(o.experts), topk_(o.topk), seed_(o.seed) {
  constexpr std::string_view kZipf = "zipf:", kTrace = "trace:";
  if (o.routing.starts_with(kTrace) && o.routing.size() > kTrace.size()) {
    read_trace(o.routing.substr(kTrace.size()));
    return;
  }
  if (!o.routing.starts_with(kZipf)) {
    throw Error(ErrorCode::argument, moe::io::one_line("--routing: ", refusal(o.routing, "zipf:S or trace:FILE")));
  }
  exponent_ = exponent_of(o.routing.substr(kZipf.size()));
  if (num_experts_ == 0) num_experts_ = 256;
  if (num_experts_ > moe::routing::kMaxLogits) {
    throw Error(ErrorCode::config, text("--experts: ", num_experts_, " is out of range [1, ", moe::routing::kMaxLogits, "] of zipf"));
  }
  int const most = std::min(moe::kMaxTopK, num_experts_);
  if (topk_ > most) {
    throw Error(ErrorCode::config, text("--topk: ", topk_, " is out of range [1, ", most, "]",
                                        most < moe::kMaxTopK ? text(" of --experts ", num_experts_) : ""));
  }
  moe::routing::Simulator const valid({.strategy = "zipf", .num_experts = num_experts_, .topk = topk_, .zipf_exponent = exponent_});
}

void Routing::read_trace(std::filesystem::path const& path) {
  moe::routing::RoutingRecord record = read_record(path, files_);
  if (record.rows() == 0) throw Error(ErrorCode::argument, moe::io::one_line("'", path.string(), "': no rows"));
  topk_ = record.topk;
  int const bound = num_experts_ == 0 ? kMostExperts : num_experts_;
  for (auto const [i, id] : ranges::views::enumerate(record.ids)) {
    if (id >= -1 && id < bound) continue;
    throw Error(ErrorCode::argument, moe::io::one_line("'", path.string(), "': row ", i / static_cast<std::size_t>(topk_), ": expert ", id,
                                                       " is out of range [-1, ", bound, ")"));
  }
  if (num_experts_ == 0) num_experts_ = ranges::max(record.ids) + 1;
  if (num_experts_ == 0) throw Error(ErrorCode::argument, moe::io::one_line("'", path.string(), "': no row names an expert"));
  trace_ = std::move(record.ids);
}

void Routing::fill(std::int64_t step, std::int64_t first, std::int64_t rows, std::int64_t rows_per_step, std::int32_t* ids) const {
  std::vector<float> weights(static_cast<std::size_t>(topk_));
  auto const zipf = moe::routing::SimulatorRegistry::instance().find("zipf");
  moe::routing::SimulatorParams const params{
      .num_experts = num_experts_, .topk = topk_, .seed = seed_, .step = step, .zipf_exponent = exponent_};
  std::int64_t const recorded = static_cast<std::int64_t>(trace_.size()) / topk_;
  for (std::int64_t t = 0; t < rows; ++t, ids += topk_) {
    if (recorded == 0) {
      zipf(params, first + t, ids, weights.data());
    } else {
      std::copy_n(trace_.data() + (step * rows_per_step + first + t) % recorded * topk_, topk_, ids);
    }
  }
}

}  // namespace moe_tool::serve_sim
