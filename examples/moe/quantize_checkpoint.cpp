// SPDX-License-Identifier: Apache-2.0
// examples/moe/quantize_checkpoint.cpp: a checkpoint whose routed experts are quantised in the layouts of released checkpoints.
//
// fp8_block128: `.weight` e4m3 with `.weight_scale_inv` [⌈N/128⌉, ⌈K/128⌉], as DeepSeek-V3. fp8_per_tensor, fp8_per_channel,
// int8_per_channel, int4_group128: compressed-tensors, `.weight` with `.weight_scale`, or `.weight_packed`, `.weight_scale` and
// `.weight_shape`.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "examples/moe/quantize.hpp"
#include "moe/core/error.hpp"
#include "moe/io/json.hpp"
#include "moe/io/safetensors.hpp"
#include "moe/io/safetensors_writer.hpp"
#include "moe/quantization/packed_int.hpp"
#include "moe/quantization/schemes.hpp"

namespace moe_tool {
namespace {

namespace fs = std::filesystem;
using moe::Error;
using moe::ErrorCode;
using moe::io::FileDType;
using moe::io::SafetensorsFile;
using moe::io::TensorInfo;

template <class T>
std::vector<std::byte> bytes_of(std::vector<T> const& v) {
  std::vector<std::byte> out(v.size() * sizeof(T));
  if (!v.empty()) std::memcpy(out.data(), v.data(), out.size());
  return out;
}

/// The weight of one routed expert: "….experts.7.down_proj.weight", two dimensions, not yet quantised.
bool is_expert_weight(TensorInfo const& t) {
  static std::regex const pattern(R"(.*\.experts\.(expert_)?[0-9]+\.[A-Za-z0-9_]+\.weight)");
  return t.shape.size() == 2 && std::regex_match(t.name, pattern);
}
std::string base_of(std::string const& weight) { return weight.substr(0, weight.size() - std::string(".weight").size()); }

/// Which files a checkpoint directory consists of.
struct Source {
  fs::path directory;
  std::vector<std::string> shards;
  bool indexed = false;
};
Source open_source(fs::path const& directory) {
  Source s{.directory = directory, .shards = {}, .indexed = false};
  fs::path const index = directory / "model.safetensors.index.json";
  if (fs::exists(index)) {
    s.indexed = true;
    auto const json = moe::io::read_json(index);
    if (!json.contains("weight_map") || !json["weight_map"].is_object()) {
      throw Error(ErrorCode::argument, moe::text("'", index.string(), "': 'weight_map' is missing"));
    }
    std::set<std::string> names;
    for (auto const& [tensor, shard] : json["weight_map"].items()) {
      if (!shard.is_string() || fs::path(shard.get<std::string>()).filename() != fs::path(shard.get<std::string>())) {
        throw Error(ErrorCode::argument, moe::text("'", index.string(), "': the shard of tensor '", tensor, "' is not a plain file name"));
      }
      names.insert(shard.get<std::string>());
    }
    s.shards.assign(names.begin(), names.end());
  } else if (fs::exists(directory / "model.safetensors")) {
    s.shards = {"model.safetensors"};
  } else {
    throw Error(ErrorCode::argument,
                moe::text("'", directory.string(), "' holds neither model.safetensors.index.json nor model.safetensors"));
  }
  return s;
}

/// What is added for one expert weight: names with dtypes and shapes, and their bytes, made when they are written.
class ExpertTensors {
 public:
  ExpertTensors(std::string scheme, std::int64_t int4_group) : scheme_(std::move(scheme)), group_(int4_group) {}

  /// Adds the tensors that replace t to `out`; `placed` hears the name of each.
  template <class Placed>
  void add(moe::io::SafetensorsWriter& out, SafetensorsFile const& file, TensorInfo const& t, Placed placed) const {
    std::string const base = base_of(t.name);
    std::int64_t const rows = t.shape[0], cols = t.shape[1];
    auto lazy = [&](std::string const& suffix, FileDType dtype, std::vector<std::int64_t> shape, auto make) {
      placed(base + suffix, dtype, shape);
      out.add_lazy(base + suffix, dtype, std::move(shape), [&file, &t, make] { return make(file.read<float>(t)); });
    };
    if (scheme_ == "int4_group128") {
      // weight_shape first: the original [N, K], which the packed shape does not tell.
      std::vector<std::int64_t> const shape{rows, cols};
      placed(base + ".weight_shape", FileDType::i64, std::vector<std::int64_t>{2});
      out.add<std::int64_t>(base + ".weight_shape", {2}, shape);
      std::int64_t const group = group_;
      lazy(".weight_packed", FileDType::i32, {rows, cols / 8},
           [=](std::vector<float> const& w) { return bytes_of(moe::quantization::pack_words(int4(w, rows, cols, group))); });
      lazy(".weight_scale", FileDType::f32, {rows, cols / group},
           [=](std::vector<float> const& w) { return bytes_of(int4(w, rows, cols, group).scales); });
      return;
    }
    bool const block = scheme_ == "fp8_block128";
    std::vector<std::int64_t> scale_shape{rows, 1};
    if (block) scale_shape = {(rows + 127) / 128, (cols + 127) / 128};
    if (scheme_ == "fp8_per_tensor") scale_shape = {1};
    auto const quantized = [scheme = scheme_, rows, cols](std::vector<float> const& w) {
      return quantize_matrices(scheme, {}, w, 1, rows, cols);
    };
    lazy(".weight", scheme_ == "int8_per_channel" ? FileDType::i8 : FileDType::f8_e4m3, t.shape,
         [quantized](std::vector<float> const& w) { return bytes_of(quantized(w).q); });
    lazy(block ? ".weight_scale_inv" : ".weight_scale", FileDType::f32, scale_shape,
         [quantized](std::vector<float> const& w) { return bytes_of(quantized(w).scale); });
  }

 private:
  /// int4 codes with offset 8 in groups of `group`.
  static moe::quantization::IntWeight int4(std::vector<float> const& w, std::int64_t rows, std::int64_t cols, std::int64_t group) {
    moe::quantization::IntWeight out{.bits = 4, .rows = rows, .cols = cols, .group = group, .codes = {}, .scales = {}, .zeros = {}};
    moe::quantization::OffsetIntUnit<4> const unit;
    for (std::int64_t begin = 0; begin < rows * cols; begin += group) {
      std::uint32_t amax = 0;
      for (std::int64_t i = begin; i < begin + group; ++i) amax = std::max(amax, unit.magnitude(w[static_cast<std::size_t>(i)]));
      out.scales.push_back(unit.scale(amax));
      for (std::int64_t i = begin; i < begin + group; ++i) {
        out.codes.push_back(unit.encode(w[static_cast<std::size_t>(i)], out.scales.back()));
      }
    }
    return out;
  }

  std::string scheme_;
  std::int64_t group_;
};

/// quantization_config as inference servers read it.
nlohmann::ordered_json quantization_config(std::string const& scheme, std::int64_t int4_group,
                                           std::vector<std::string> const& unquantized) {
  nlohmann::ordered_json q;
  if (scheme == "fp8_block128") {
    q["quant_method"] = "fp8";
    q["fmt"] = "e4m3";
    q["activation_scheme"] = "dynamic";
    q["weight_block_size"] = {128, 128};
    q["modules_to_not_convert"] = unquantized;
    return q;
  }
  bool const is_int4 = scheme == "int4_group128", is_int8 = scheme == "int8_per_channel";
  nlohmann::ordered_json weights;
  weights["num_bits"] = is_int4 ? 4 : 8;
  weights["type"] = is_int4 || is_int8 ? "int" : "float";
  weights["symmetric"] = true;
  weights["dynamic"] = false;
  weights["strategy"] = is_int4 ? "group" : scheme == "fp8_per_tensor" ? "tensor" : "channel";
  if (is_int4) weights["group_size"] = int4_group;
  nlohmann::ordered_json group;
  group["targets"] = {"Linear"};
  group["weights"] = weights;
  if (is_int4) {
    group["input_activations"] = nullptr;
  } else {
    group["input_activations"] = {
        {"num_bits", 8}, {"type", is_int8 ? "int" : "float"}, {"symmetric", true}, {"dynamic", true}, {"strategy", "token"}};
  }
  q["quant_method"] = "compressed-tensors";
  q["format"] = is_int4 ? "pack-quantized" : is_int8 ? "int-quantized" : "float-quantized";
  q["quantization_status"] = "compressed";
  q["config_groups"]["group_0"] = group;
  q["ignore"] = unquantized;
  return q;
}

void write_json(fs::path const& path, nlohmann::ordered_json const& json) {
  std::ofstream out(path);
  out << json.dump(2) << '\n';
  out.flush();
  if (!out) throw Error(ErrorCode::argument, moe::text("'", path.string(), "' cannot be written"));
}

/// A directory that appears under its name only when it is complete.
class NewDirectory {
 public:
  explicit NewDirectory(fs::path path) : path_(std::move(path)) {
    if (path_.filename().empty()) path_ = path_.parent_path();  // "out/"
    if (fs::exists(path_)) throw Error(ErrorCode::argument, moe::text("output directory '", path_.string(), "' exists already"));
    temporary_ = path_;
    temporary_ += moe::text(".partial-", ::getpid());
    std::error_code error;
    if (!fs::create_directories(temporary_, error)) {
      throw Error(ErrorCode::argument, moe::text("output directory '", path_.string(), "' cannot be made: ", error.message()));
    }
  }
  NewDirectory(NewDirectory const&) = delete;
  NewDirectory& operator=(NewDirectory const&) = delete;
  ~NewDirectory() {
    std::error_code ignored;
    fs::remove_all(temporary_, ignored);
  }
  fs::path const& path() const { return temporary_; }
  void commit() {
    std::error_code error;
    fs::rename(temporary_, path_, error);
    if (error) throw Error(ErrorCode::argument, moe::text("output directory '", path_.string(), "' cannot be made: ", error.message()));
  }

 private:
  fs::path path_, temporary_;
};

/// What is found before anything is written.
struct Plan {
  std::int64_t expert_weights = 0;
  std::int64_t int4_group = 128;
  std::vector<std::string> unquantized;  ///< linear modules that stay as they are
};
Plan make_plan(Source const& source, std::vector<std::unique_ptr<SafetensorsFile>> const& shards, std::string const& scheme) {
  Plan plan;
  for (auto const& shard : shards) {
    for (auto const& [name, t] : shard->tensors()) {
      if (!is_expert_weight(t)) {
        if (t.shape.size() == 2 && name.ends_with(".weight")) plan.unquantized.push_back(base_of(name));
        continue;
      }
      if (!moe::io::is_floating(t.dtype) || moe::io::bits(t.dtype) < 16) {
        throw Error(ErrorCode::argument, moe::text(shard->where(t), ": the experts are quantised already; expected BF16, F16 or F32"));
      }
      if (scheme == "int4_group128") {
        std::int64_t const group = moe::quantization::effective_group(t.shape[1], 128);
        if (group == 0) {
          throw Error(ErrorCode::config, moe::text(shard->where(t), ": int4_group128 needs K to be a multiple of 32, got ", t.shape[1]));
        }
        plan.int4_group = std::min(plan.int4_group, group);  // one group size for the checkpoint
      }
      ++plan.expert_weights;
    }
  }
  if (plan.expert_weights == 0) {
    throw Error(ErrorCode::unsupported,
                moe::text("'", source.directory.string(),
                          "' has no expert weights named '….experts.N.….weight'; fused experts are not quantised here"));
  }
  std::sort(plan.unquantized.begin(), plan.unquantized.end());
  return plan;
}

}  // namespace

std::vector<std::string> checkpoint_schemes() {
  return {"fp8_block128", "fp8_per_channel", "fp8_per_tensor", "int4_group128", "int8_per_channel"};
}

int quantize_checkpoint(QuantizeOptions const& options) {
  Source const source = open_source(options.input);
  if (!fs::exists(source.directory / "config.json")) {
    throw Error(ErrorCode::argument, moe::text("'", source.directory.string(), "' has no config.json"));
  }
  auto config = nlohmann::ordered_json::parse(moe::io::read_json(source.directory / "config.json").dump());
  if (config.contains("quantization_config")) {
    throw Error(ErrorCode::argument, moe::text("'", source.directory.string(), "' is quantised already"));
  }
  std::vector<std::unique_ptr<SafetensorsFile>> shards;
  for (auto const& name : source.shards) shards.push_back(std::make_unique<SafetensorsFile>(source.directory / name));
  Plan const plan = make_plan(source, shards, options.scheme);
  config["quantization_config"] = quantization_config(options.scheme, plan.int4_group, plan.unquantized);

  NewDirectory directory(options.output);
  nlohmann::ordered_json index;
  std::uint64_t before = 0, total = 0;
  ExpertTensors const experts(options.scheme, plan.int4_group);
  bool const progress = ::isatty(STDERR_FILENO) != 0 && !options.json;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    if (progress) std::fprintf(stderr, "\rquantising shard %zu of %zu", i + 1, shards.size());
    SafetensorsFile const& file = *shards[i];
    moe::io::SafetensorsWriter out;
    for (auto const& [key, value] : file.metadata()) out.set_metadata(key, value);
    auto const placed = [&](std::string const& name, FileDType dtype, std::vector<std::int64_t> const& shape) {
      index["weight_map"][name] = source.shards[i];
      std::uint64_t elements = 1;
      for (std::int64_t const d : shape) elements *= static_cast<std::uint64_t>(d);
      total += elements * static_cast<std::uint64_t>(moe::io::bits(dtype)) / 8;
    };
    for (auto const& [name, t] : file.tensors()) {
      before += file.raw(t).size();
      if (is_expert_weight(t)) {
        experts.add(out, file, t, placed);
      } else {
        placed(name, t.dtype, t.shape);
        out.add_bytes(name, t.dtype, t.shape, file.raw(t));
      }
    }
    out.write(directory.path() / source.shards[i]);
  }
  if (progress) std::fprintf(stderr, "\n");
  if (source.indexed) {
    index["metadata"]["total_size"] = total;
    write_json(directory.path() / "model.safetensors.index.json", index);
  }
  write_json(directory.path() / "config.json", config);
  // Tokeniser, generation settings, licence: whatever else belongs to the model.
  for (auto const& entry : fs::directory_iterator(source.directory)) {
    auto const name = entry.path().filename();
    if (entry.is_regular_file() && entry.path().extension() != ".safetensors" && !fs::exists(directory.path() / name)) {
      fs::copy_file(entry.path(), directory.path() / name);
    }
  }
  directory.commit();
  if (options.json) {
    nlohmann::ordered_json report;
    report["scheme"] = options.scheme;
    report["expert_weights"] = plan.expert_weights;
    report["shards"] = source.shards.size();
    report["bytes_before"] = before;
    report["bytes_after"] = total;
    report["output"] = options.output.string();
    fmt::print("{}\n", report.dump());
  } else {
    fmt::print("{} expert weights as {} in {} shard(s): {} bytes, before {}\nwritten to {}\n", plan.expert_weights, options.scheme,
               source.shards.size(), total, before, options.output.string());
  }
  return 0;
}

}  // namespace moe_tool
