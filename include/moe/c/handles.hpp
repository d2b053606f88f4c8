// SPDX-License-Identifier: Apache-2.0
// c/handles.hpp: the C handles of moe.h are numbers that a table checks, so that use after destruction is an error, not a crash.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"

namespace moe::c {

/// Objects by C handle. A C handle holds its kind (8 bits), how many objects its entry of the table had before (24 bits) and that entry's
/// index + 1 (32 bits). All functions may be called from any thread; an object lives until remove() and the last call that looked it up.
template <class Object>
class HandleTable {
 public:
  /// kind: not 0, different for each table of a program.
  HandleTable(char const* name, std::uint8_t kind) : name_(name), kind_(kind) {}

  std::uint64_t insert(std::shared_ptr<Object> object) {
    std::unique_lock const lock(mutex_);
    if (free_.empty()) {
      free_.push_back(static_cast<std::uint32_t>(entries_.size()));
      entries_.emplace_back();
    }
    std::uint32_t const index = free_.back();
    free_.pop_back();
    entries_[index].object = std::move(object);
    return handle(index, entries_[index].generation);
  }
  /// E_ARG for a number that is not a C handle of this table, E_STATE for one whose object was destroyed.
  std::shared_ptr<Object> find(std::uint64_t given) const {
    std::shared_lock const lock(mutex_);
    return entries_[index_of(given)].object;
  }
  /// Takes the object out: the C handle is invalid from here on.
  std::shared_ptr<Object> remove(std::uint64_t given) {
    std::unique_lock const lock(mutex_);
    std::uint32_t const index = index_of(given);
    Entry& at = entries_[index];
    if (++at.generation <= kLastGeneration) free_.push_back(index);  // else its C handles are used up
    return std::exchange(at.object, nullptr);
  }

 private:
  struct Entry {
    std::uint32_t generation = 0;
    std::shared_ptr<Object> object;
  };
  static constexpr std::uint32_t kLastGeneration = (1U << 24U) - 1;

  std::uint64_t handle(std::uint32_t index, std::uint32_t generation) const {
    return (std::uint64_t{kind_} << 56U) | (std::uint64_t{generation} << 32U) | (std::uint64_t{index} + 1);
  }
  std::uint32_t index_of(std::uint64_t given) const {
    std::uint64_t const index = (given & 0xffffffffU) - 1;
    auto const generation = static_cast<std::uint32_t>(given >> 32U) & kLastGeneration;
    if (given >> 56U != kind_ || index >= entries_.size() || generation > entries_[index].generation) {
      throw Error(ErrorCode::argument, given == 0 ? text(name_, ": is NULL") : text(name_, ": ", given, " is not a handle of a ", name_));
    }
    if (generation != entries_[index].generation || entries_[index].object == nullptr) {
      throw Error(ErrorCode::state, text(name_, ": ", given, " was destroyed"));
    }
    return static_cast<std::uint32_t>(index);
  }

  char const* name_;
  std::uint8_t kind_;
  mutable std::shared_mutex mutex_;
  std::vector<Entry> entries_;
  std::vector<std::uint32_t> free_;
};

}  // namespace moe::c
