// SPDX-License-Identifier: Apache-2.0
// io/mapped_file.hpp: a whole file mapped read-only.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <span>
#include <utility>

#include "moe/core/error.hpp"
#include "moe/io/one_line.hpp"

namespace moe::io {

/// Owns a read-only mapping of a regular file; pages are read from disk when they are touched.
class MappedFile {
 public:
  /// Throws E_ARG if the file cannot be opened, is not a regular file, or cannot be mapped.
  explicit MappedFile(std::filesystem::path const& path) {
    int const file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) throw Error(ErrorCode::argument, one_line("cannot open '", path.string(), "': ", std::strerror(errno)));
    struct stat status{};
    if (::fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) {
      ::close(file);
      throw Error(ErrorCode::argument, one_line("'", path.string(), "' is not a regular file"));
    }
    size_ = static_cast<std::size_t>(status.st_size);
    if (size_ > 0) {
      data_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
      int const error = errno;
      if (data_ == MAP_FAILED) {
        ::close(file);
        throw Error(ErrorCode::argument, one_line("cannot map '", path.string(), "' (", size_, " bytes): ", std::strerror(error)));
      }
    }
    ::close(file);
  }
  MappedFile(MappedFile&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~MappedFile() {
    if (data_ != nullptr) ::munmap(data_, size_);
  }

  std::span<std::byte const> bytes() const { return {static_cast<std::byte const*>(data_), size_}; }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace moe::io
