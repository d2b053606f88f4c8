// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/word_group.hpp: an agreement of processes on one machine in a file that all map: what load balancing takes as its group. A
// rank that does not join a call within the deadline is named.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "moe/core/error.hpp"

namespace moe_test {

/// One rank of the group. `path`: a file of this group alone, zero or absent at first.
class WordGroup {
 public:
  WordGroup(std::string const& path, int rank, int size, std::int64_t timeout_ms) : rank_(rank), size_(size), timeout_(timeout_ms) {
    int const file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes())) != 0) throw std::runtime_error("cannot make " + path);
    void* const memory = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) throw std::runtime_error("cannot map " + path);
    ranks_ = static_cast<Words*>(memory);
  }
  WordGroup(WordGroup const&) = delete;
  WordGroup& operator=(WordGroup const&) = delete;
  ~WordGroup() { munmap(ranks_, bytes()); }
  int size() const { return size_; }
  void set_timeout_ms(std::int64_t timeout_ms) { timeout_ = std::chrono::milliseconds(timeout_ms); }
  std::vector<std::uint64_t> all_gather(std::uint64_t word) {
    auto const mine = static_cast<std::int64_t>(word);
    share({&mine, 1});
    std::vector<std::uint64_t> all;
    for (int r = 0; r < size_; ++r) all.push_back(static_cast<std::uint64_t>(shared(r)[0]));
    return all;
  }
  void all_reduce_sum(std::span<std::int64_t> values) {
    share(values);
    std::fill(values.begin(), values.end(), 0);
    for (int r = 0; r < size_; ++r) {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] += shared(r)[i];
    }
  }

 private:
  static constexpr std::size_t kMost = 4096;
  /// Of one rank; two buffers, since a rank may be one call ahead of another that still reads.
  struct Words {
    std::atomic<std::uint64_t> calls;
    std::int64_t words[2][kMost];
  };
  std::size_t bytes() const { return sizeof(Words) * static_cast<std::size_t>(size_); }
  std::int64_t const* shared(int r) const { return ranks_[r].words[calls_ % 2]; }
  void share(std::span<std::int64_t const> values) {
    if (values.size() > kMost) throw std::runtime_error("too many words");
    ++calls_;
    std::copy(values.begin(), values.end(), ranks_[rank_].words[calls_ % 2]);
    ranks_[rank_].calls.store(calls_, std::memory_order_release);
    using Clock = std::chrono::steady_clock;
    auto const start = Clock::now();
    for (int r = 0; r < size_; ++r) {
      while (ranks_[r].calls.load(std::memory_order_acquire) < calls_) {
        if (Clock::now() - start > timeout_) {
          throw moe::TransportError(moe::ErrorCode::timeout, rank_, r, "agreement", calls_, moe::text("rank ", r, " did not arrive"));
        }
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  }

  int rank_, size_;
  std::chrono::milliseconds timeout_;
  Words* ranks_ = nullptr;  // [size]
  std::uint64_t calls_ = 0;
};

}  // namespace moe_test
