// SPDX-License-Identifier: Apache-2.0
// comm/process.hpp: whether the process of another rank has ended, as far as this process can see it.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace moe::comm::detail {

/// The first N - 1 bytes of a file at most, then zeros.
template <std::size_t N>
std::array<char, N> start_of_file(char const* path) {
  std::array<char, N> text{};
  int const file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return text;
  if (read(file, text.data(), N - 1) < 0) text = {};
  close(file);
  return text;
}

/// When the process with that id started, in ticks since boot; 0 if there is no such process, it has ended, or the time cannot be read.
inline std::uint64_t process_start(std::uint64_t id) {
  std::array<char, 64> path{};
  std::snprintf(path.data(), path.size(), "/proc/%llu/stat", static_cast<unsigned long long>(id));
  std::array<char, 1024> const text = start_of_file<1024>(path.data());
  char const* at = std::strrchr(text.data(), ')');  // the process name before it may hold any character
  if (at == nullptr || at[1] == '\0' || at[2] == 'Z' || at[2] == 'X') {
    return 0;
  }
  ++at;
  for (int field = 3; field < 22 && at != nullptr; ++field) {
    at = std::strchr(at + 1, ' ');
  }
  return at == nullptr ? 0 : std::strtoull(at, nullptr, 10);
}

/// A process as other processes of its machine find it. Made of bytes, so ranks can send it to each other.
struct ProcessMark {
  std::array<char, 40> boot{};  ///< which start of which machine; empty: unknown
  std::uint64_t id_space = 0;   ///< whose process ids: a container has its own
  std::uint64_t id = 0;
  std::uint64_t start_time = 0;  ///< 0: unknown

  static ProcessMark mine() {
    ProcessMark out{.boot = start_of_file<40>("/proc/sys/kernel/random/boot_id"), .id = static_cast<std::uint64_t>(getpid())};
    struct stat space{};
    if (stat("/proc/self/ns/pid", &space) == 0) out.id_space = space.st_ino;
    out.start_time = process_start(out.id);
    return out;
  }
  /// True if the process is known to have ended: false for one of another machine or container.
  bool ended(ProcessMark const& here) const {
    return boot[0] != '\0' && boot == here.boot && id_space != 0 && id_space == here.id_space && start_time != 0 &&
           process_start(id) != start_time;
  }
};

/// [ranks] the processes of all ranks. gather(in, n, out) gathers n bytes of each rank; if it throws, its memory stays, since messages may
/// still arrive there.
template <class Gather>
std::vector<ProcessMark> gather_marks(int ranks, Gather const& gather) {
  using Marks = std::vector<ProcessMark>;
  auto* const marks = std::make_unique<Marks>(static_cast<std::size_t>(ranks) + 1).release();
  marks->back() = ProcessMark::mine();
  gather(&marks->back(), static_cast<std::int64_t>(sizeof(ProcessMark)), marks->data());
  std::unique_ptr<Marks> const gathered(marks);
  gathered->pop_back();
  return std::move(*gathered);
}

/// The first of the processes that is known to have ended, or -1; `here` is the one that asks.
inline int first_ended(std::vector<ProcessMark> const& processes, int here) {
  if (process_start(static_cast<std::uint64_t>(getpid())) == 0) return -1;  // nothing can be read: no descriptors are left, for example
  for (std::size_t r = 0; r < processes.size(); ++r) {
    if (processes[r].ended(processes[static_cast<std::size_t>(here)])) return static_cast<int>(r);
  }
  return -1;
}

}  // namespace moe::comm::detail
