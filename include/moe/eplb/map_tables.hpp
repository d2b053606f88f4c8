// SPDX-License-Identifier: Apache-2.0
// eplb/map_tables.hpp: expert maps and load counters where the routers run, at addresses that never change, so that captured graphs see
// new maps.
#pragma once

#include <cstdint>
#include <vector>

#include "moe/core/buffer.hpp"
#include "moe/core/error.hpp"
#include "moe/core/space.hpp"
#include "moe/eplb/maps.hpp"
#include "moe/routing/expert_mapping.hpp"

namespace moe::eplb {

/// The three tables of all layers and one counter per expert slot, in the memory of `Space`. All memory is taken at construction.
template <class Space = space::host>
class MapTables {
 public:
  using StreamType = Stream<Space>;

  /// Publishes all layers; counters are 0.
  explicit MapTables(ExpertMaps const& maps, StreamType stream = {})
      : num_layers_(maps.num_layers()),
        num_logical_(maps.num_logical()),
        num_physical_(maps.num_physical()),
        physical_to_logical_(entries(num_physical_)),
        logical_to_physical_(entries(num_logical_) * maps.max_replicas()),
        replica_count_(entries(num_logical_)),
        load_(entries(num_physical_)) {
    for (int layer = 0; layer < num_layers_; ++layer) publish(layer, maps, stream);
    if (load_.size() > 0) Memory<Space>::fill(load_.data(), 0, load_.bytes());
  }

  /// Copies one layer of `maps` over the tables in use, in stream order: calls and graph replays enqueued later use it. E_ARG on maps of
  /// another shape or a layer out of range.
  void publish(int layer, ExpertMaps const& maps, StreamType stream = {}) {
    if (maps.num_layers() != num_layers_ || maps.num_logical() != num_logical_ || maps.num_physical() != num_physical_) {
      throw Error(ErrorCode::argument, text("maps of [", maps.num_layers(), ", ", maps.num_physical(), "] for tables of [", num_layers_,
                                            ", ", num_physical_, "]"));
    }
    check_layer(layer);
    put(physical_to_logical_, layer, maps.physical_to_logical(), stream);
    put(logical_to_physical_, layer, maps.logical_to_physical(), stream);
    put(replica_count_, layer, maps.replica_count(), stream);
  }

  /// [P], [E, X + 1] and [E] of one layer, and [P] counters, in the memory of `Space`. E_ARG on a layer out of range.
  std::int32_t const* physical_to_logical(int layer) const { return physical_to_logical_.data() + offset(layer, num_physical_); }
  std::int32_t const* logical_to_physical(int layer) const {
    return logical_to_physical_.data() + offset(layer, std::int64_t{num_logical_} * max_replicas());
  }
  std::int32_t const* replica_count(int layer) const { return replica_count_.data() + offset(layer, num_logical_); }
  std::int32_t* load_counter(int layer) { return load_.data() + offset(layer, num_physical_); }

  /// The tables that a router needs to map one layer's ids. Valid as long as this object, also after publish().
  routing::ExpertMapping mapping(int layer, int source_rank, int ep_size, routing::ReplicaPolicy policy = routing::ReplicaPolicy::token,
                                 int ranks_per_node = 1) const {
    return {.num_experts = num_logical_,
            .num_physical = num_physical_,
            .max_replicas = max_replicas(),
            .logical_to_physical = logical_to_physical(layer),
            .replica_count = replica_count(layer),
            .policy = policy,
            .source_rank = source_rank,
            .ep_size = ep_size,
            .ranks_per_node = ranks_per_node};
  }

  /// Copies the counters [layers, P] to host memory of at least load_size() values (CUDA space: pinned) and clears them, in stream order.
  void take_load_async(std::int32_t* to, StreamType stream) {
    if (load_.size() == 0) return;
    Memory<Space>::copy_to_host_async(to, load_.data(), load_.bytes(), stream);
    Memory<Space>::fill_async(load_.data(), 0, load_.bytes(), stream);
  }
  std::size_t load_size() const { return static_cast<std::size_t>(load_.size()); }
  int num_layers() const { return num_layers_; }
  int num_physical() const { return num_physical_; }

  /// Moves the counters into load [layers, P] (Balancer::load_pass) and clears them. Blocking; the streams that count must be idle.
  void take_load(Table<std::int32_t>& load) {
    if (load.rows() != num_layers_ || load.cols() != num_physical_) {
      throw Error(ErrorCode::argument,
                  text("load is [", load.rows(), ", ", load.cols(), "], the tables are of [", num_layers_, ", ", num_physical_, "]"));
    }
    if (load_.size() == 0) return;
    load_.copy_to_host(load.flat().data());
    Memory<Space>::fill(load_.data(), 0, load_.bytes());
  }

 private:
  std::int64_t entries(int a_layer) const { return std::int64_t{num_layers_} * a_layer; }
  int max_replicas() const { return num_physical_ - num_logical_ + 1; }
  void check_layer(int layer) const {
    if (layer < 0 || layer >= num_layers_) {
      throw Error(ErrorCode::argument, text("layer ", layer, " is out of range [0, ", num_layers_, ")"));
    }
  }
  std::int64_t offset(int layer, std::int64_t a_layer) const {
    check_layer(layer);
    return layer * a_layer;
  }
  void put(Buffer<std::int32_t, Space>& to, int layer, Table<std::int32_t> const& from, StreamType stream) {
    auto const row = from.row(layer);
    Memory<Space>::copy_from_host_async(to.data() + offset(layer, from.cols()), row.data(), row.size_bytes(), stream);
  }

  int num_layers_;
  int num_logical_;
  int num_physical_;
  Buffer<std::int32_t, Space> physical_to_logical_;  // [layers, P]
  Buffer<std::int32_t, Space> logical_to_physical_;  // [layers, E, X + 1]
  Buffer<std::int32_t, Space> replica_count_;        // [layers, E]
  Buffer<std::int32_t, Space> load_;                 // [layers, P]
};

}  // namespace moe::eplb
