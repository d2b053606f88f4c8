// SPDX-License-Identifier: Apache-2.0
// io/mapped_file.hpp: a whole file mapped read-only, which can be read past its mapping as well.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <span>
#include <string_view>
#include <utility>

#include "moe/core/error.hpp"
#include "moe/io/one_line.hpp"

namespace moe::io {

/// Owns a read-only mapping of a regular file; pages are read from disk when they are touched. The file stays open: what is copied as it is
/// stored is read into its destination by read(), which costs no page fault of the mapping.
class MappedFile {
 public:
  /// Throws E_ARG if the file cannot be opened, is not a regular file, or cannot be mapped.
  explicit MappedFile(std::filesystem::path const& path) {
    File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (file.number < 0) throw Error(ErrorCode::argument, one_line("cannot open '", path.string(), "': ", std::strerror(errno)));
    struct stat status{};
    if (::fstat(file.number, &status) != 0 || !S_ISREG(status.st_mode)) {
      throw Error(ErrorCode::argument, one_line("'", path.string(), "' is not a regular file"));
    }
    size_ = static_cast<std::size_t>(status.st_size);
    if (size_ > 0) {
      void* const data = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.number, 0);
      if (data == MAP_FAILED) {
        throw Error(ErrorCode::argument, one_line("cannot map '", path.string(), "' (", size_, " bytes): ", std::strerror(errno)));
      }
      data_ = data;
    }
    std::swap(file_.number, file.number);
  }
  MappedFile(MappedFile&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {
    std::swap(file_.number, other.file_.number);
  }
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(file_.number, other.file_.number);
    return *this;
  }
  ~MappedFile() {
    if (data_ != nullptr) ::munmap(data_, size_);
  }

  std::span<std::byte const> bytes() const { return {static_cast<std::byte const*>(data_), size_}; }

  /// Bytes [first, first + count), which are inside bytes(), into out. Throws E_ARG if the file cannot be read there or was cut off since
  /// it was opened; `label` names it. Safe to call from several threads.
  void read(std::uint64_t first, std::uint64_t count, void* out, std::string_view label) const {
    auto* to = static_cast<std::byte*>(out);
    while (count > 0) {
      ssize_t const n = ::pread(file_.number, to, count, static_cast<off_t>(first));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) throw Error(ErrorCode::argument, one_line("cannot read '", label, "' at byte ", first, ": ", std::strerror(errno)));
      if (n == 0) {
        throw Error(ErrorCode::argument, one_line("'", label, "' ends at byte ", first, ", had ", size_, " bytes when it was opened"));
      }
      to += n, first += static_cast<std::uint64_t>(n), count -= static_cast<std::uint64_t>(n);
    }
  }

 private:
  struct File {
    explicit File(int n = -1) : number(n) {}
    File(File const&) = delete;
    File& operator=(File const&) = delete;
    ~File() {
      if (number >= 0) ::close(number);
    }
    int number;
  };

  void* data_ = nullptr;
  std::size_t size_ = 0;
  File file_;
};

}  // namespace moe::io
