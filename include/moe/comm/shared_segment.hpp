// SPDX-License-Identifier: Apache-2.0
// comm/shared_segment.hpp: a piece of memory that processes of one node map by name: POSIX shared memory.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>

#include "moe/core/error.hpp"

namespace moe::comm {

/// One mapping of a segment. The memory lives as long as any process maps it, even if its maker has ended, so destruction waits for no
/// other process. The segment has a name until its maker calls unlink().
class SharedSegment {
 public:
  using Name = std::array<char, 64>;

  SharedSegment() = default;
  SharedSegment(SharedSegment const&) = delete;
  SharedSegment& operator=(SharedSegment const&) = delete;
  SharedSegment(SharedSegment&& other) noexcept { swap(other); }
  SharedSegment& operator=(SharedSegment&& other) noexcept {
    swap(other);
    return *this;
  }
  ~SharedSegment() {
    unlink();
    if (data_ != nullptr) {
      munmap(data_, bytes_);
    }
  }

  /// A new segment of zeros, mapped here. Untouched pages take no memory. E_CAPACITY with the system's reason.
  static SharedSegment make(std::size_t bytes) {
    static std::atomic<std::uint32_t> made{0};
    SharedSegment s;
    int file = -1;
    for (int attempt = 0; attempt < 100 && file < 0; ++attempt) {  // an earlier process with the same id may have left a segment
      auto const now = static_cast<unsigned long long>(std::chrono::steady_clock::now().time_since_epoch().count());
      std::snprintf(s.name_.data(), s.name_.size(), "/moe-%ld-%u-%llx", static_cast<long>(getpid()), made.fetch_add(1), now);
      file = shm_open(s.name_.data(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
      if (file < 0 && errno != EEXIST) {
        break;
      }
    }
    if (file < 0) {
      s.name_ = {};
      refuse("cannot be made", bytes);
    }
    bool const sized = ftruncate(file, static_cast<off_t>(bytes)) == 0;
    s.map(file, bytes, sized, "cannot be made");
    return s;
  }
  /// Maps another process's segment. E_UNSUPPORTED if it does not exist or has another size.
  static SharedSegment open(Name const& name, std::size_t bytes) {
    SharedSegment s;
    int const file = shm_open(name.data(), O_RDWR | O_CLOEXEC, 0);
    struct stat found{};
    if (file < 0 || fstat(file, &found) != 0 || static_cast<std::size_t>(found.st_size) != bytes) {
      if (file >= 0) {
        close(file);
      }
      throw Error(ErrorCode::unsupported, text("shared memory: no segment ", name.data(), " of ", bytes, " bytes"));
    }
    s.map(file, bytes, true, "cannot be mapped");
    return s;
  }
  /// Call it once all processes have mapped the segment: the system then frees it even if processes are killed.
  void unlink() noexcept {
    if (name_[0] != '\0') {
      shm_unlink(name_.data());
      name_ = {};
    }
  }

  Name const& name() const { return name_; }
  char* data() const { return static_cast<char*>(data_); }
  std::size_t bytes() const { return bytes_; }

 private:
  [[noreturn]] static void refuse(char const* what, std::size_t bytes) {
    throw Error(ErrorCode::capacity, text("shared memory: ", bytes, " bytes ", what, ": ", std::strerror(errno)));
  }
  void map(int file, std::size_t bytes, bool sound, char const* what) {
    void* const at = sound ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    int const reason = errno;
    close(file);
    if (at == MAP_FAILED) {
      errno = reason;
      refuse(what, bytes);
    }
    data_ = at;
    bytes_ = bytes;
  }
  void swap(SharedSegment& other) noexcept {
    std::swap(name_, other.name_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  Name name_{};
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace moe::comm
