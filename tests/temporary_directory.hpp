// SPDX-License-Identifier: Apache-2.0
// tests/temporary_directory.hpp: a test's own directory, which is deleted with the object.
#pragma once

#include <cstdlib>  // mkdtemp
#include <filesystem>
#include <iterator>
#include <stdexcept>
#include <string>

namespace moe_test {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name =
        (std::filesystem::temp_directory_path() / "moe_test_").string() + std::string(6, 'X');  // the suffix that mkdtemp replaces
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp: cannot make " + name);
    path_ = name;
  }
  TemporaryDirectory(TemporaryDirectory const&) = delete;
  TemporaryDirectory& operator=(TemporaryDirectory const&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::filesystem::path const& path() const { return path_; }
  std::filesystem::path operator/(std::filesystem::path const& name) const { return path_ / name; }
  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path_), std::filesystem::directory_iterator()));
  }

 private:
  std::filesystem::path path_;
};

}  // namespace moe_test
