// SPDX-License-Identifier: Apache-2.0
// io/tensor_store.hpp: the tensors of a checkpoint by name, whether it is one safetensors file or many shards with an index.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/io/json.hpp"
#include "moe/io/one_line.hpp"
#include "moe/io/safetensors.hpp"

namespace moe::io {

/// A tensor and the file that holds it. Valid as long as the store.
struct StoredTensor {
  SafetensorsFile const* file;
  TensorInfo const* info;

  std::vector<std::int64_t> const& shape() const { return info->shape; }
  std::string where() const { return file->where(*info); }
};

/// Finds tensors by name over one file or the shards of a checkpoint directory. A shard is mapped when a tensor of it is first asked for.
class TensorStore {
 public:
  /// A .safetensors file, or a directory with model.safetensors.index.json, model.safetensors, or a single *.safetensors file.
  /// Throws E_ARG if there is none of these or the index is malformed.
  explicit TensorStore(std::filesystem::path const& path) : label_(path.string()) {
    namespace fs = std::filesystem;
    std::error_code ignored;
    if (!fs::is_directory(path, ignored)) {
      add_file(path);
    } else if (fs::exists(path / "model.safetensors.index.json", ignored)) {
      read_index(path);
    } else if (fs::exists(path / "model.safetensors", ignored)) {
      add_file(path / "model.safetensors");
    } else {
      std::vector<fs::path> found;
      std::error_code error;
      for (fs::directory_iterator at(path, error), end; !error && at != end; at.increment(error)) {
        if (at->path().extension() == ".safetensors") found.push_back(at->path());
      }
      if (error) throw Error(ErrorCode::argument, one_line("cannot read directory '", label_, "': ", error.message()));
      if (found.size() != 1) {
        throw Error(ErrorCode::argument, one_line("'", label_, "' holds neither model.safetensors.index.json nor model.safetensors, and ",
                                                  found.size(), " other .safetensors files, expected 1"));
      }
      add_file(found.front());
    }
  }
  /// One file that is already open.
  explicit TensorStore(SafetensorsFile file) : label_(file.label()) {
    shards_.push_back(std::make_unique<Shard>());
    shards_.back()->file.emplace(std::move(file));
    list_single();
  }

  std::string const& label() const { return label_; }
  bool contains(std::string_view tensor) const { return where_.find(tensor) != where_.end(); }
  /// The tensor of that name; nullopt if there is none. Throws E_ARG if the index lists it but its shard is missing or malformed, or lacks
  /// it.
  std::optional<StoredTensor> find(std::string_view tensor) const {
    auto const at = where_.find(tensor);
    if (at == where_.end()) return std::nullopt;
    SafetensorsFile const& file = open(*shards_[at->second]);
    TensorInfo const* info = file.find(tensor);
    if (info == nullptr) {
      throw Error(ErrorCode::argument,
                  one_line("tensor '", tensor, "' is missing in '", file.label(), "', where the index of '", label_, "' puts it"));
    }
    return StoredTensor{&file, info};
  }
  /// The tensor of that name. Throws E_ARG if there is none.
  StoredTensor at(std::string_view tensor) const {
    auto found = find(tensor);
    if (!found)
      throw Error(ErrorCode::argument,
                  one_line("tensor '", tensor, "' is missing in '", label_, "', which holds ", listed_tensors(where_)));
    return *found;
  }
  /// Names of all tensors that begin with `prefix`, sorted.
  std::vector<std::string_view> names(std::string_view prefix = {}) const {
    std::vector<std::string_view> out;
    for (auto at = where_.lower_bound(prefix); at != where_.end() && at->first.starts_with(prefix); ++at) out.push_back(at->first);
    return out;
  }
  /// Bytes of tensor data read so far, over all shards.
  std::uint64_t bytes_read() const {
    std::uint64_t total = 0;
    for (auto const& shard : shards_) {
      std::lock_guard const lock(shard->mutex);
      if (shard->file) total += shard->file->bytes_read();
    }
    return total;
  }
  /// Shards that were mapped so far.
  std::size_t shards_open() const {
    std::size_t n = 0;
    for (auto const& shard : shards_) {
      std::lock_guard const lock(shard->mutex);
      n += shard->file ? 1 : 0;
    }
    return n;
  }
  /// The files that hold the tensors; some of them may be missing.
  std::vector<std::filesystem::path> files() const {
    std::vector<std::filesystem::path> out;
    for (auto const& shard : shards_) {
      if (!shard->path.empty()) out.push_back(shard->path);
    }
    return out;
  }
  /// Metadata of the only file; empty for a sharded checkpoint.
  std::map<std::string, std::string, std::less<>> const& metadata() const {
    static std::map<std::string, std::string, std::less<>> const none;
    return shards_.size() == 1 ? open(*shards_.front()).metadata() : none;
  }

 private:
  struct Shard {
    std::filesystem::path path;
    std::mutex mutex;
    std::optional<SafetensorsFile> file;
  };

  static SafetensorsFile const& open(Shard& shard) {
    std::lock_guard const lock(shard.mutex);
    if (!shard.file) shard.file.emplace(shard.path);
    return *shard.file;
  }
  void add_file(std::filesystem::path const& path) {
    shards_.push_back(std::make_unique<Shard>());
    shards_.back()->path = path;
    list_single();
  }
  void list_single() {
    for (auto const& [tensor, info] : open(*shards_.front()).tensors()) where_.emplace(tensor, 0);
  }
  void read_index(std::filesystem::path const& directory) {
    std::filesystem::path const path = directory / "model.safetensors.index.json";
    auto fail = [&](std::string const& what) { throw Error(ErrorCode::argument, one_line("'", path.string(), "': ", what)); };
    nlohmann::json const index = read_json(path, ErrorCode::argument);
    if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) fail("'weight_map' is missing");
    std::map<std::string, std::size_t> numbers;
    for (auto const& [tensor, shard] : index["weight_map"].items()) {
      if (!shard.is_string()) fail(one_line("the entry of tensor '", tensor, "' is not a file name"));
      std::string const file = shard.get<std::string>();
      // A checkpoint must not be able to name files outside its own directory.
      if (file.empty() || file == "." || file == ".." || file.find('/') != std::string::npos || file.find('\0') != std::string::npos) {
        fail(one_line("'", file, "', the shard of tensor '", tensor, "', is not a plain file name"));
      }
      auto const [at, is_new] = numbers.try_emplace(file, shards_.size());
      if (is_new) {
        shards_.push_back(std::make_unique<Shard>());
        shards_.back()->path = directory / file;
      }
      where_.emplace(tensor, at->second);
    }
  }

  std::string label_;
  std::vector<std::unique_ptr<Shard>> shards_;
  std::map<std::string, std::size_t, std::less<>> where_;
};

}  // namespace moe::io
