// SPDX-License-Identifier: Apache-2.0
// eplb/maps.hpp: the three views of one mapping (physical to logical, logical to physical, replica counts), checked and hashed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"

namespace moe::eplb {

/// A dense row-major matrix in host memory.
template <class T>
class Table {
 public:
  Table() = default;
  Table(int rows, int cols, T fill = T{})
      : rows_(rows), cols_(cols), data_(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols), fill) {}
  /// From rows of equal length. E_ARG on ragged rows.
  explicit Table(std::vector<std::vector<T>> const& rows)
      : rows_(static_cast<int>(rows.size())), cols_(rows.empty() ? 0 : static_cast<int>(rows.front().size())) {
    for (auto const& row : rows) {
      if (static_cast<int>(row.size()) != cols_) {
        throw Error(ErrorCode::argument, text("row ", &row - rows.data(), " has ", row.size(), " entries, row 0 has ", cols_));
      }
      data_.insert(data_.end(), row.begin(), row.end());
    }
  }

  int rows() const { return rows_; }
  int cols() const { return cols_; }
  std::span<T> row(int r) { return std::span(data_).subspan(offset(r), static_cast<std::size_t>(cols_)); }
  std::span<T const> row(int r) const { return std::span(data_).subspan(offset(r), static_cast<std::size_t>(cols_)); }
  T& operator()(int r, int c) { return data_[offset(r) + static_cast<std::size_t>(c)]; }
  T const& operator()(int r, int c) const { return data_[offset(r) + static_cast<std::size_t>(c)]; }
  std::vector<T>& flat() { return data_; }
  std::vector<T> const& flat() const { return data_; }
  bool operator==(Table const&) const = default;

 private:
  std::size_t offset(int r) const { return static_cast<std::size_t>(r) * static_cast<std::size_t>(cols_); }
  int rows_ = 0;
  int cols_ = 0;
  std::vector<T> data_;
};

/// Expert slot without an expert: on a dead rank, or on a rank that is joining or leaving.
inline constexpr std::int32_t kEmptySlot = -1;

/// Whether a mapping may have expert slots without an expert.
enum class EmptySlots : bool { forbidden, allowed };

/// The mapping of all layers. Host memory; devices hold copies of the same shapes, which never change while P stays, so that
/// captured graphs see new maps at the same addresses.
class ExpertMaps {
 public:
  ExpertMaps() = default;

  /// physical_to_logical [layers, P]. Replicas of an expert are numbered by ascending physical id. E_ARG, naming the first bad (layer,
  /// physical id): an id outside [0, num_logical), an empty expert slot where forbidden, or an expert without one.
  ExpertMaps(Table<std::int32_t> physical_to_logical, int num_logical, EmptySlots empty = EmptySlots::forbidden)
      : num_logical_(num_logical), physical_to_logical_(std::move(physical_to_logical)) {
    shape();
    for (int layer = 0; layer < num_layers(); ++layer) {
      for (int slot = 0; slot < num_physical(); ++slot) {
        std::int32_t const e = checked(layer, slot, empty);
        if (e != kEmptySlot) set_replica(layer, slot, e, replica_count_(layer, e)++);
      }
      check_complete(layer);
    }
  }

  /// With a given replica index of every expert slot [layers, P]. E_ARG as above, on another shape, or if the indices of an expert are not
  /// 0, 1, … each once.
  ExpertMaps(Table<std::int32_t> physical_to_logical, Table<std::int32_t> const& replica, int num_logical,
             EmptySlots empty = EmptySlots::forbidden)
      : num_logical_(num_logical), physical_to_logical_(std::move(physical_to_logical)) {
    shape();
    if (replica.rows() != num_layers() || replica.cols() != num_physical()) {
      throw Error(ErrorCode::argument, text("replica is [", replica.rows(), ", ", replica.cols(), "], physical_to_logical [", num_layers(),
                                            ", ", num_physical(), "]"));
    }
    for (int layer = 0; layer < num_layers(); ++layer) {
      for (int slot = 0; slot < num_physical(); ++slot) {
        std::int32_t const e = checked(layer, slot, empty);
        if (e == kEmptySlot) continue;
        std::int32_t const index = replica(layer, slot);
        if (index < 0 || index >= max_replicas() || replicas_of(layer, e)[static_cast<std::size_t>(index)] != -1) {
          throw Error(ErrorCode::argument, text("replica index ", index, " of expert ", e, " in layer ", layer, ", physical id ", slot,
                                                " is out of range or taken"));
        }
        set_replica(layer, slot, e, index);
        ++replica_count_(layer, e);
      }
      check_complete(layer);
      for (int e = 0; e < num_logical_; ++e) {
        auto const slots = replicas_of(layer, e).first(static_cast<std::size_t>(replica_count_(layer, e)));
        if (std::find(slots.begin(), slots.end(), -1) != slots.end()) {
          throw Error(ErrorCode::argument, text("replica indices of expert ", e, " in layer ", layer, " have a gap"));
        }
      }
    }
  }

  /// The map at start: physical expert p is expert p for p < E, and (p - E) mod E beyond. E_CONFIG on num_redundant < 0 or sizes below 1.
  static ExpertMaps initial(int num_layers, int num_logical, int num_redundant) {
    if (num_layers < 1 || num_logical < 1) {
      throw Error(ErrorCode::config, text("a map needs layers and experts, has ", num_layers, " and ", num_logical));
    }
    if (num_redundant < 0) throw Error(ErrorCode::config, text("num_redundant_experts must be at least 0, is ", num_redundant));
    if (num_redundant > std::numeric_limits<std::int32_t>::max() - num_logical) {
      throw Error(ErrorCode::capacity, text("num_redundant_experts = ", num_redundant, " gives more than 2^31 - 1 expert slots"));
    }
    Table<std::int32_t> map(num_layers, num_logical + num_redundant);
    for (int layer = 0; layer < num_layers; ++layer) {
      for (int p = 0; p < map.cols(); ++p) map(layer, p) = p < num_logical ? p : (p - num_logical) % num_logical;
    }
    return ExpertMaps(std::move(map), num_logical);
  }

  int num_layers() const { return physical_to_logical_.rows(); }
  int num_logical() const { return num_logical_; }
  int num_physical() const { return physical_to_logical_.cols(); }
  int num_redundant() const { return num_physical() - num_logical_; }
  /// Last dimension of logical_to_physical: X + 1.
  int max_replicas() const { return num_redundant() + 1; }

  /// [layers, P].
  Table<std::int32_t> const& physical_to_logical() const { return physical_to_logical_; }
  /// [layers, E · (X + 1)]: the physical ids of each expert, then -1.
  Table<std::int32_t> const& logical_to_physical() const { return logical_to_physical_; }
  /// [layers, E].
  Table<std::int32_t> const& replica_count() const { return replica_count_; }

  /// [X + 1]: the physical ids of one expert, -1 padded.
  std::span<std::int32_t const> replicas_of(int layer, int expert) const {
    return logical_to_physical_.row(layer).subspan(replica_offset(expert), static_cast<std::size_t>(max_replicas()));
  }
  /// [layers, P]: which replica of its expert each physical expert is; -1 in empty expert slots.
  Table<std::int32_t> replica_index() const {
    Table<std::int32_t> index(num_layers(), num_physical(), -1);
    for (int layer = 0; layer < num_layers(); ++layer) {
      for (int e = 0; e < num_logical_; ++e) {
        auto const slots = replicas_of(layer, e);
        for (std::int32_t i = 0; i < replica_count_(layer, e); ++i) index(layer, slots[static_cast<std::size_t>(i)]) = i;
      }
    }
    return index;
  }

  /// The same on every platform for equal maps (FNV-1a over shapes and entries, replica order included).
  std::uint64_t hash() const {
    std::uint64_t h = 0xcbf29ce484222325ULL;
    auto const mix = [&h](std::int32_t value) {
      for (int shift = 0; shift < 32; shift += 8) h = (h ^ ((static_cast<std::uint32_t>(value) >> shift) & 0xffU)) * 0x100000001b3ULL;
    };
    mix(num_layers());
    mix(num_logical_);
    mix(num_physical());
    for (std::int32_t v : physical_to_logical_.flat()) mix(v);
    for (std::int32_t v : logical_to_physical_.flat()) mix(v);
    return h;
  }

  bool operator==(ExpertMaps const&) const = default;

  /// Equal layers, E and P.
  bool same_shape(ExpertMaps const& other) const {
    return num_layers() == other.num_layers() && num_logical_ == other.num_logical_ && num_physical() == other.num_physical();
  }
  /// The experts or the replica order of that layer differ. Both of the same shape.
  bool layer_differs(int layer, ExpertMaps const& other) const {
    return !std::ranges::equal(physical_to_logical_.row(layer), other.physical_to_logical_.row(layer)) ||
           !std::ranges::equal(logical_to_physical_.row(layer), other.logical_to_physical_.row(layer));
  }
  /// Copies one layer from `from`. The tables keep their addresses, so that views of them (ExpertMapping, captured graphs) see the new map.
  /// E_ARG on another shape or a layer out of range.
  void set_layer(int layer, ExpertMaps const& from) {
    if (!same_shape(from)) throw Error(ErrorCode::argument, "maps of another shape cannot replace a layer");
    if (layer < 0 || layer >= num_layers()) {
      throw Error(ErrorCode::argument, text("layer ", layer, " is out of range [0, ", num_layers(), ")"));
    }
    std::ranges::copy(from.physical_to_logical_.row(layer), physical_to_logical_.row(layer).begin());
    std::ranges::copy(from.logical_to_physical_.row(layer), logical_to_physical_.row(layer).begin());
    std::ranges::copy(from.replica_count_.row(layer), replica_count_.row(layer).begin());
  }

 private:
  std::size_t replica_offset(int expert) const { return static_cast<std::size_t>(expert) * static_cast<std::size_t>(max_replicas()); }

  void shape() {
    if (num_logical_ < 1) throw Error(ErrorCode::argument, text("num_logical must be at least 1, is ", num_logical_));
    if (num_redundant() < 0) {
      throw Error(ErrorCode::argument, text("physical_to_logical has ", num_physical(), " expert slots for ", num_logical_, " experts"));
    }
    if (std::int64_t{num_logical_} * max_replicas() > std::numeric_limits<std::int32_t>::max()) {
      throw Error(ErrorCode::capacity, text("logical_to_physical of ", num_logical_, " experts with up to ", max_replicas(),
                                            " replicas exceeds 2^31 - 1 entries a layer"));
    }
    logical_to_physical_ = Table<std::int32_t>(num_layers(), num_logical_ * max_replicas(), -1);
    replica_count_ = Table<std::int32_t>(num_layers(), num_logical_, 0);
  }
  std::int32_t checked(int layer, int slot, EmptySlots empty) const {
    std::int32_t const e = physical_to_logical_(layer, slot);
    bool const is_empty = e == kEmptySlot && empty == EmptySlots::allowed;
    if (!is_empty && (e < 0 || e >= num_logical_)) {
      throw Error(ErrorCode::argument, text("physical_to_logical: expert ", e, " in layer ", layer, ", physical id ", slot,
                                            " is out of range [0, ", num_logical_, ")"));
    }
    return e;
  }
  void check_complete(int layer) const {
    auto const counts = replica_count_.row(layer);
    auto const missing = std::find(counts.begin(), counts.end(), 0);
    if (missing != counts.end()) {
      throw Error(ErrorCode::argument,
                  text("physical_to_logical: expert ", missing - counts.begin(), " has no expert slot in layer ", layer));
    }
  }
  void set_replica(int layer, int slot, int expert, int index) { logical_to_physical_(layer, expert * max_replicas() + index) = slot; }

  int num_logical_ = 0;
  Table<std::int32_t> physical_to_logical_;
  Table<std::int32_t> logical_to_physical_;
  Table<std::int32_t> replica_count_;
};

/// E_ARG unless three tables, from a user or a file, describe the same mapping. Names the first bad entry.
inline void check_views(ExpertMaps const& maps, Table<std::int32_t> const& logical_to_physical, Table<std::int32_t> const& replica_count) {
  if (replica_count.rows() != maps.num_layers() || replica_count.cols() != maps.num_logical() ||
      logical_to_physical.rows() != maps.num_layers() || logical_to_physical.cols() != maps.num_logical() * maps.max_replicas()) {
    throw Error(ErrorCode::argument, "logical_to_physical and replica_count do not have the shapes of physical_to_logical");
  }
  for (int layer = 0; layer < maps.num_layers(); ++layer) {
    for (int e = 0; e < maps.num_logical(); ++e) {
      std::int32_t const count = maps.replica_count()(layer, e);
      if (replica_count(layer, e) != count) {
        throw Error(ErrorCode::argument, text("replica_count of expert ", e, " in layer ", layer, " is ", replica_count(layer, e),
                                              ", physical_to_logical has it ", count, " times"));
      }
      auto const begin = static_cast<std::size_t>(e) * static_cast<std::size_t>(maps.max_replicas());
      auto const given = logical_to_physical.row(layer).subspan(begin, static_cast<std::size_t>(maps.max_replicas()));
      std::vector<std::int32_t> slots(given.begin(), given.begin() + count);
      std::vector<std::int32_t> expected(maps.replicas_of(layer, e).begin(), maps.replicas_of(layer, e).begin() + count);
      std::sort(slots.begin(), slots.end());
      std::sort(expected.begin(), expected.end());
      bool const padded = std::all_of(given.begin() + count, given.end(), [](std::int32_t s) { return s == -1; });
      if (slots != expected || !padded) {
        throw Error(ErrorCode::argument,
                    text("logical_to_physical of expert ", e, " in layer ", layer, " does not list exactly its physical ids"));
      }
    }
  }
}

/// E_MISMATCH naming the first rank whose maps differ from rank 0's. hashes[r] is rank r's ExpertMaps::hash().
inline void check_same_maps(std::span<std::uint64_t const> hashes) {
  for (std::size_t r = 1; r < hashes.size(); ++r) {
    if (hashes[r] != hashes[0]) {
      throw Error(ErrorCode::mismatch, text("expert maps differ: hash ", hashes[0], " on rank 0, ", hashes[r], " on rank ", r));
    }
  }
}

}  // namespace moe::eplb
