// SPDX-License-Identifier: Apache-2.0
// examples/moe/quantize_checkpoint.cpp: writes a checkpoint with quantised routed experts; everything else is unchanged.
//
// Experts that are separate tensors keep their names. Fused experts [E, …, …] stay fused where released checkpoints keep them fused:
// fp8_block128 in the existing orientation, every 8-bit scheme where they are modules ("input_linear.weight", Granite), mxfp4 blocks where
// they have biases (gpt-oss). Otherwise every expert becomes separate modules, as in compressed-tensors checkpoints of fused models.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>

#include "examples/moe/quantize.hpp"
#include "examples/moe/quantize_layouts.hpp"
#include "moe/core/error.hpp"
#include "moe/io/json.hpp"
#include "moe/io/layer_weights.hpp"
#include "moe/io/safetensors.hpp"
#include "moe/io/safetensors_writer.hpp"

namespace moe_tool {
namespace {

namespace fs = std::filesystem;
using moe::Error;
using moe::ErrorCode;
using moe::io::FileDType;
using moe::io::SafetensorsFile;
using moe::io::TensorInfo;

/// Of the weight of one routed expert, "….experts.7.down_proj.weight": "….experts" and "down_proj".
struct ExpertName {
  std::string_view layer, projection;
};
/// Nullopt for any other tensor, including one that is already quantised.
std::optional<ExpertName> expert_name(TensorInfo const& t) {
  constexpr std::string_view kWeight = ".weight", kDigits = "0123456789";
  constexpr std::string_view kWord = "0123456789_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  std::string_view rest = t.name;
  if (t.shape.size() != 2 || !rest.ends_with(kWeight)) return std::nullopt;
  rest.remove_suffix(kWeight.size());
  // Cuts off the part behind the last dot.
  auto const last_part = [&rest] {
    std::size_t const dot = rest.rfind('.');
    if (dot == std::string_view::npos) return std::string_view();
    std::string_view const part = rest.substr(dot + 1);
    rest = rest.substr(0, dot);
    return part;
  };
  std::string_view const projection = last_part();
  std::string_view number = last_part();
  if (number.starts_with("expert_")) number.remove_prefix(7);
  bool const is_expert = rest.ends_with(".experts") && !number.empty() && number.find_first_not_of(kDigits) == std::string_view::npos &&
                         !projection.empty() && projection.find_first_not_of(kWord) == std::string_view::npos;
  return is_expert ? std::optional(ExpertName{rest, projection}) : std::nullopt;
}
/// Fused expert weights, and whether they are the down projections. They end in ".weight" where they are modules.
struct FusedName {
  std::string_view suffix;
  bool down;
};
constexpr std::array kFusedNames{FusedName{".experts.gate_up_proj", false},    FusedName{".experts.down_proj", true},
                                 FusedName{".experts.up_proj", false},         FusedName{".input_linear.weight", false},
                                 FusedName{".output_linear.weight", true},     FusedName{".experts.gate_up_proj.weight", false},
                                 FusedName{".experts.down_proj.weight", true}, FusedName{".experts.fc1.weight", false},
                                 FusedName{".experts.fc2.weight", true}};
FusedName const* fused_name(TensorInfo const& t) {
  auto const at = std::find_if(kFusedNames.begin(), kFusedNames.end(), [&](FusedName const& f) { return t.name.ends_with(f.suffix); });
  return t.shape.size() == 3 && at != kFusedNames.end() ? &*at : nullptr;
}
std::string base_of(std::string const& weight) { return weight.substr(0, weight.size() - std::string(".weight").size()); }

/// Whether the file exists. E_ARG if that cannot be determined, as in a directory without read permission.
bool is_there(fs::path const& path) {
  std::error_code error;
  fs::file_status const status = fs::status(path, error);
  if (status.type() == fs::file_type::none) {
    throw Error(ErrorCode::argument, moe::text("cannot read '", path.string(), "': ", error.message()));
  }
  return fs::exists(status);
}

/// Which files a checkpoint directory consists of.
struct Source {
  fs::path directory;
  std::vector<std::string> shards;
  bool indexed = false;
};
Source open_source(fs::path const& directory) {
  Source s{.directory = directory, .shards = {}, .indexed = false};
  fs::path const index = directory / "model.safetensors.index.json";
  if (is_there(index)) {
    s.indexed = true;
    auto const json = moe::io::read_json(index, ErrorCode::argument);
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
  } else if (is_there(directory / "model.safetensors")) {
    s.shards = {"model.safetensors"};
  } else {
    throw Error(ErrorCode::argument,
                moe::text("'", directory.string(), "' holds neither model.safetensors.index.json nor model.safetensors"));
  }
  return s;
}

/// Copies a file of a checkpoint to the new directory unless that has one of its name. What is no regular file, such as a pipe or a link
/// that leads nowhere, stays behind.
void copy_beside(fs::path const& file, fs::path const& directory) {
  std::error_code error;
  if (file.extension() == ".safetensors" || !fs::is_regular_file(file, error) || fs::exists(directory / file.filename(), error)) return;
  if (!fs::copy_file(file, directory / file.filename(), error)) {
    throw Error(ErrorCode::argument, moe::text("cannot copy '", file.string(), "': ", error.message()));
  }
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
    std::error_code ignored;
    if (fs::is_symlink(path_, ignored) || is_there(path_)) {  // a dangling link also counts as existing
      throw Error(ErrorCode::argument, moe::text("output directory '", path_.string(), "' exists already"));
    }
    temporary_ = path_;
    temporary_ += moe::text(".partial-", ::getpid());
    for (fs::path p = path_.parent_path(); !p.empty() && !fs::exists(p, ignored); p = p.parent_path()) made_.push_back(p);
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
    if (committed_) return;
    for (fs::path const& parent : made_) fs::remove(parent, ignored);
  }
  fs::path const& path() const { return temporary_; }
  void commit() {
    std::error_code error;
    fs::rename(temporary_, path_, error);
    if (error) throw Error(ErrorCode::argument, moe::text("output directory '", path_.string(), "' cannot be made: ", error.message()));
    committed_ = true;
  }

 private:
  fs::path path_, temporary_;
  std::vector<fs::path> made_;  // parent directories that were created, innermost first
  bool committed_ = false;
};

/// The experts of one layer whose tensors are fused: its description gives their layout, its reader returns them one at a time.
class FusedLayer {
 public:
  FusedLayer(moe::io::TensorStore const& store, moe::io::HfConfig const& config, std::int64_t layer)
      : description_(moe::io::from_config(config, layer)),
        root_(moe::io::LayerLoader::from_checkpoint(store, description_, layer).root()),
        reader_(store, description_, root_, layer) {}

  moe::io::LayerDescription const& description() const { return description_; }
  bool owns(std::string const& tensor) const { return tensor.starts_with(root_); }
  /// The modules that the experts of a fused tensor become.
  std::vector<SourceMatrix> modules(FusedName const& tensor) {
    bool const mixtral_names = tensor.suffix.ends_with("_linear.weight");  // Granite names its block, and so its experts, like Mixtral
    auto const& d = description_;
    std::int64_t const h = d.expert_hidden(), i = d.intermediate;
    std::vector<SourceMatrix> out;
    for (int e = 0; e < d.router.num_experts; ++e) {
      std::string const base = moe::text(root_, "experts.", e, '.');
      auto const matrix = [&](char const* name, std::int64_t rows, std::int64_t cols, auto part) {
        auto const read = [this, e, base, name, rows, cols](auto const& of) {
          auto weight = of(expert(e));
          require_finite(weight, {rows, cols}, moe::text("'", base, name, "' of the fused experts"));
          return weight;
        };
        out.push_back({base + name, rows, cols, [read, part] { return read(part); }});
        return read;
      };
      if (tensor.down) {
        matrix(mixtral_names ? "w2" : "down_proj", h, i, [](Expert const& x) { return x.w2; });
        continue;
      }
      auto const rows = [i, h](std::int64_t first) {
        return [=](Expert const& x) { return std::vector<float>(x.w13.begin() + first * h, x.w13.begin() + (first + i) * h); };
      };
      bool const gated = d.activation.gated();
      if (gated) matrix(mixtral_names ? "w1" : "gate_proj", i, h, rows(0));
      auto const read = matrix(mixtral_names ? "w3" : "up_proj", i, h, rows(gated ? i : 0));
      if (!gated) continue;
      out.back().global_scale = out[out.size() - 2].global_scale =
          once([read, gate = rows(0), up = rows(i)] { return nvfp4_global_scale({read(gate), read(up)}); });
    }
    return out;
  }

 private:
  struct Expert {
    int number = -1;
    std::vector<float> w13, w2;
  };
  /// The tensors of one expert are written one after the other, so caching the last expert read is enough.
  Expert const& expert(int e) {
    if (last_.number != e) {
      auto const& d = description_;
      last_.w13.resize(static_cast<std::size_t>(d.w13_rows() * d.expert_hidden()));
      last_.w2.resize(static_cast<std::size_t>(d.expert_hidden() * d.intermediate));
      reader_.read(e, last_.w13.data(), last_.w2.data());
      last_.number = e;
    }
    return last_;
  }

  moe::io::LayerDescription description_;
  std::string root_;
  moe::io::ExpertReader reader_;
  Expert last_;
};

/// The source checkpoint, and what each of its expert tensors becomes.
class Conversion {
 public:
  Conversion(Source const& source, CheckpointScheme scheme)
      : store_(source.directory), config_(moe::io::HfConfig::from_file(source.directory)), scheme_(std::move(scheme)) {
    for (auto const& name : source.shards) shards_.push_back(std::make_unique<SafetensorsFile>(source.directory / name));
    for (std::string_view name : store_.names()) (void)store_.at(name);  // E_ARG if a shard lacks it despite the index
    for (auto const& shard : shards_) {
      for (auto const& [name, t] : shard->tensors()) {
        if (!store_.contains(name))
          throw Error(ErrorCode::argument, moe::text(shard->where(t), ": the index of the checkpoint does not have it"));
        plan(*shard, t);
      }
    }
    check_experts();
    if (expert_weights_ == 0) {
      throw Error(ErrorCode::unsupported,
                  moe::text("'", source.directory.string(), "' has no expert weights named '….experts.N.….weight' and no fused ones"));
    }
    std::sort(unquantized_.begin(), unquantized_.end());
  }
  std::vector<std::unique_ptr<SafetensorsFile>> const& shards() const { return shards_; }
  std::int64_t expert_weights() const { return expert_weights_; }
  nlohmann::ordered_json quantization_config() const { return moe_tool::quantization_config(scheme_, blocks_, unquantized_); }

  /// The tensors that replace t; empty if t stays unchanged.
  std::vector<NewTensor> replacement(SafetensorsFile const& file, TensorInfo const& t) {
    if (auto const name = expert_name(t)) {
      auto const read = [](SafetensorsFile const& of, TensorInfo const& tensor) {
        auto values = of.read<float>(tensor);
        require_finite(values, tensor.shape, of.where(tensor));
        return values;
      };
      SourceMatrix matrix{base_of(t.name), t.shape[0], t.shape[1], [=, &file, &t] { return read(file, t); }};
      if (auto const other = other_half(t, *name)) {
        // Whichever of the two names comes first is that of both.
        auto& global = globals_[std::min(t.name, other->info->name)];
        if (!global) {
          global = once([=, &file, &t] { return nvfp4_global_scale({read(file, t), read(*other->file, *other->info)}); });
        }
        matrix.global_scale = global;
      }
      return quantized_linear(scheme_, matrix);
    }
    auto const at = fused_.find(t.name);
    if (at == fused_.end()) return {};
    auto const& [name, kind] = at->second;
    std::int64_t const elements = t.shape[1] * t.shape[2];
    SourceStack const stack{t.name, t.shape[0], t.shape[1], t.shape[2], [&file, &t, elements](std::int64_t e) {
                              std::vector<float> matrix(static_cast<std::size_t>(elements));
                              file.read_elements(t, e * elements, elements, matrix.data());
                              require_finite(matrix, {t.shape[1], t.shape[2]}, moe::text(file.where(t), ", expert ", e));
                              return matrix;
                            }};
    if (kind == Kind::blocks) return mxfp4_blocks(scheme_, stack);
    if (kind == Kind::stack) return quantized_stack(scheme_, stack);
    std::vector<NewTensor> out;
    for (SourceMatrix const& m : layer_of(t.name).modules(*name)) {
      for (NewTensor& n : quantized_linear(scheme_, m)) out.push_back(std::move(n));
    }
    return out;
  }

 private:
  enum class Kind { modules, stack, blocks };

  /// Of a gate the tensor of its up, and of an up that of its gate, where the checkpoint has it.
  std::optional<moe::io::StoredTensor> other_half(TensorInfo const& t, ExpertName const& name) const {
    std::string const base = base_of(t.name), before = base.substr(0, base.size() - name.projection.size());
    for (auto const& names : moe::io::detail::kProjectionNames) {
      if (names.gate.empty() || (name.projection != names.gate && name.projection != names.up)) continue;
      if (auto other = store_.find(moe::text(before, name.projection == names.gate ? names.up : names.gate, ".weight"))) return other;
    }
    return std::nullopt;
  }

  void plan(SafetensorsFile const& file, TensorInfo const& t) {
    FusedName const* const fused = fused_name(t);
    std::optional<ExpertName> const expert = expert_name(t);
    if (!expert && fused == nullptr) {
      if (t.shape.size() == 2 && t.name.ends_with(".weight")) unquantized_.push_back(base_of(t.name));
      return;
    }
    if (!moe::io::is_floating(t.dtype) || moe::io::bits(t.dtype) < 16) {
      throw Error(ErrorCode::argument, moe::text(file.where(t), ": the experts are quantised already; expected BF16, F16 or F32"));
    }
    if (fused == nullptr) {
      fit_scheme(scheme_, t.shape[0], t.shape[1], file.where(t));
      note_expert(file, t, *expert);
      ++expert_weights_;
      return;
    }
    Kind const kind = kind_of(file, t, *fused);
    fused_.emplace(t.name, std::pair{fused, kind});
    if (kind == Kind::modules) {
      for (SourceMatrix const& m : layer_of(t.name).modules(*fused)) {
        fit_scheme(scheme_, m.rows, m.cols, file.where(t));
        ++expert_weights_;
      }
      return;
    }
    if (kind == Kind::blocks) fit_scheme(scheme_, t.shape[2], t.shape[1], file.where(t));
    blocks_ = blocks_ || kind == Kind::blocks;
    expert_weights_ += t.shape[0];
  }
  /// Counts one more projection of a kind in a layer; all of one kind have the same shape.
  void note_expert(SafetensorsFile const& file, TensorInfo const& t, ExpertName const& name) {
    Projection& like = projections_[std::string(name.layer)][std::string(name.projection)];
    if (like.count++ == 0) like.first = &t;
    if (t.shape != like.first->shape) {
      throw Error(ErrorCode::argument,
                  moe::text(file.where(t), ": shape ", t.shape_text(), ", of other experts ", like.first->shape_text()));
    }
  }
  /// E_ARG unless a layer has the same number of each projection.
  void check_experts() const {
    for (auto const& [layer, projections] : projections_) {
      auto const& [first, all] = *projections.begin();
      for (auto const& [projection, some] : projections) {
        if (some.count != all.count) {
          throw Error(ErrorCode::argument,
                      moe::text("'", layer, "': ", all.count, " experts have ", first, ", ", some.count, " have ", projection));
        }
      }
    }
  }
  Kind kind_of(SafetensorsFile const& file, TensorInfo const& t, FusedName const& name) {
    if (scheme_.name == "fp8_block128") return Kind::stack;
    bool const eight_bits = scheme_.name.starts_with("fp8") || scheme_.name.starts_with("int8");
    if (eight_bits && name.suffix.ends_with("_linear.weight")) return Kind::stack;
    if (!layer_of(t.name).description().expert_bias) return Kind::modules;
    if (scheme_.name == "mxfp4" || scheme_.name == "mxfp4_w4a16") return Kind::blocks;
    throw Error(ErrorCode::unsupported,
                moe::text(file.where(t), ": fused experts with biases are written as mxfp4 or fp8_block128, not as ", scheme_.name));
  }
  /// The layer that a tensor belongs to: the number behind "layers." or "blocks." in its name.
  FusedLayer& layer_of(std::string const& tensor) {
    std::int64_t number = -1;
    for (std::string_view word : {"layers.", "blocks."}) {
      std::size_t const at = tensor.find(word);
      if (at != std::string::npos) std::from_chars(tensor.data() + at + word.size(), tensor.data() + tensor.size(), number);
    }
    auto found = layers_.find(number);
    if (found == layers_.end()) {
      found = layers_.emplace(number, std::make_unique<FusedLayer>(store_, config_, number)).first;
    }
    if (!found->second->owns(tensor)) {
      throw Error(ErrorCode::unsupported, moe::text("'", tensor, "' is not a tensor of layer ", number, " of '", config_.label(), "'"));
    }
    return *found->second;
  }

  moe::io::TensorStore store_;
  moe::io::HfConfig config_;
  CheckpointScheme scheme_;
  std::vector<std::unique_ptr<SafetensorsFile>> shards_;
  std::map<std::int64_t, std::unique_ptr<FusedLayer>> layers_;
  std::map<std::string, std::pair<FusedName const*, Kind>> fused_;
  std::map<std::string, std::function<float()>> globals_;  // nvfp4: of a gate and its up
  std::int64_t expert_weights_ = 0;
  struct Projection {
    TensorInfo const* first = nullptr;
    int count = 0;
  };
  std::map<std::string, std::map<std::string, Projection>> projections_;  // by layer and name
  bool blocks_ = false;
  std::vector<std::string> unquantized_;  ///< linear modules that stay as they are
};

bool is_quantized(nlohmann::ordered_json const& config) {
  auto const states = [](nlohmann::ordered_json const& c) {
    return c.contains("quantization_config") && !c["quantization_config"].is_null();
  };
  return states(config) || (config.contains("text_config") && states(config["text_config"]));
}

}  // namespace

int quantize_checkpoint(QuantizeOptions const& options) {
  Source const source = open_source(options.input);
  if (!is_there(source.directory / "config.json")) {
    throw Error(ErrorCode::argument, moe::text("'", source.directory.string(), "' has no config.json"));
  }
  auto config = nlohmann::ordered_json::parse(moe::io::read_json(source.directory / "config.json").dump());
  if (is_quantized(config)) throw Error(ErrorCode::argument, moe::text("'", source.directory.string(), "' is quantised already"));
  Conversion conversion(source, {.name = options.scheme, .mx_rule = options.mx_rule});
  config["quantization_config"] = conversion.quantization_config();

  NewDirectory directory(options.output);
  nlohmann::ordered_json index;
  std::uint64_t before = 0, total = 0;
  bool const progress = ::isatty(STDERR_FILENO) != 0 && !options.json;
  for (std::size_t i = 0; i < source.shards.size(); ++i) {
    if (progress) std::fprintf(stderr, "\rquantising shard %zu of %zu", i + 1, source.shards.size());
    SafetensorsFile const& file = *conversion.shards()[i];
    moe::io::SafetensorsWriter out;
    for (auto const& [key, value] : file.metadata()) out.set_metadata(key, value);
    auto const placed = [&](std::string const& name, FileDType dtype, std::vector<std::int64_t> const& shape) {
      index["weight_map"][name] = source.shards[i];
      std::uint64_t elements = 1;
      for (std::int64_t const d : shape) elements *= static_cast<std::uint64_t>(d);
      total += elements * static_cast<std::uint64_t>(moe::io::bits(dtype)) / 8;
    };
    for (auto const& [name, t] : file.tensors()) {
      before += t.size_bytes();
      auto const replaced = conversion.replacement(file, t);
      for (NewTensor const& n : replaced) {
        placed(n.name, n.dtype, n.shape);
        out.add_lazy(n.name, n.dtype, n.shape, n.make);
      }
      if (replaced.empty()) {
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
  // The other files of the model: tokeniser, generation settings, licence.
  std::error_code error;
  fs::directory_iterator at(source.directory, error);
  for (; !error && at != fs::directory_iterator(); at.increment(error)) copy_beside(at->path(), directory.path());
  if (error) throw Error(ErrorCode::argument, moe::text("cannot read directory '", source.directory.string(), "': ", error.message()));
  directory.commit();
  if (options.json) {
    nlohmann::ordered_json report;
    report["scheme"] = options.scheme;
    report["expert_weights"] = conversion.expert_weights();
    report["shards"] = source.shards.size();
    report["bytes_before"] = before;
    report["bytes_after"] = total;
    report["output"] = options.output.string();
    fmt::print("{}\n", report.dump());
  } else {
    fmt::print("{} expert weights as {} in {} shard(s): {} bytes, before {}\nwritten to {}\n", conversion.expert_weights(), options.scheme,
               source.shards.size(), total, before, options.output.string());
  }
  return 0;
}

}  // namespace moe_tool
