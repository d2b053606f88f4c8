// SPDX-License-Identifier: Apache-2.0
// tests/golden_dir.hpp: where the reference data lies: the whole set if MOE_GOLDEN_DIR names it, else the selection in tests/data. Of
// blocks and checkpoints tests/data has some that the whole set lacks: those are always read.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace moe_test {

inline std::filesystem::path golden_dir() {
  char const* whole = std::getenv("MOE_GOLDEN_DIR");
  return whole != nullptr && *whole != '\0' ? std::filesystem::path(whole) : std::filesystem::path(MOE_TEST_DATA);
}

/// The folder of a checkpoint of the reference data.
inline std::filesystem::path golden_checkpoint(std::string const& name) { return golden_dir() / "checkpoints" / name; }

/// What lies in a folder of the reference data, by name: also what tests/data has there beyond the whole set.
inline std::vector<std::filesystem::path> golden_entries(std::string const& folder) {
  std::map<std::string, std::filesystem::path> found;
  for (auto const& root : {golden_dir(), std::filesystem::path(MOE_TEST_DATA)}) {
    for (auto const& entry : std::filesystem::directory_iterator(root / folder)) {
      found.try_emplace(entry.path().filename().string(), entry.path());
    }
  }
  std::vector<std::filesystem::path> entries;
  for (auto const& [name, path] : found) entries.push_back(path);
  return entries;
}

/// The block files.
inline std::vector<std::filesystem::path> golden_blocks() {
  std::vector<std::filesystem::path> files = golden_entries("moe_blocks");
  std::erase_if(files, [](auto const& path) { return path.extension() != ".safetensors"; });
  return files;
}

}  // namespace moe_test
