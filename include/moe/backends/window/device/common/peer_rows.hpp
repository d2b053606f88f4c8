// SPDX-License-Identifier: Apache-2.0
// backends/window/device/common/peer_rows.hpp: common parts of OneSided, TwoSided and Pplx between GPUs: what all ranks agree on, and the
// layout of a window. docs/semantics/exchange.md §9-11.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe/backends/window/device/common/calls.hpp"
#include "moe/backends/window/device/common/layout.hpp"
#include "moe/core/error.hpp"
#include "moe/core/types.hpp"

namespace moe::detail {

/// What all ranks of such an exchange agree on.
struct PeerShape {
  char const* name = "";  ///< of the backend, for messages
  int ranks = 1;
  int max_tokens = 0;  ///< T: tokens that one rank may bring
  int hidden = 0;      ///< H, a multiple of 128
  int topk = 0;
  int num_experts = 0;          ///< L per rank, where L is the most physical experts of a rank
  bool fp8 = true;              ///< rows travel as e4m3 with one float scale for 128 values; else bf16
  int blocks = 64;              ///< thread blocks of every kernel, all resident at once
  int layer = 0;                ///< number of the exchange among those that share a window
  std::uint32_t placement = 0;  ///< a hash of the placement; 0: id e is expert e % L of rank e / L

  int local_experts() const { return num_experts / ranks; }
  int groups() const { return hidden / 128; }
  /// Bytes of the values of one row.
  int row_bytes() const { return fp8 ? hidden : 2 * hidden; }
  /// Floats from one row's scales to the next's: whole 128-byte lines, which transfer faster than partial ones.
  int scale_stride() const { return (groups() + 31) / 32 * 32; }
  /// Rows that one rank can receive.
  int rows() const { return ranks * max_tokens; }

  comm::HeaderTag tag() const {
    comm::HeaderTag tag;
    for (char const* c = name; *c != '\0'; ++c) {
      tag.add(static_cast<std::uint64_t>(*c));
    }
    return tag.add(ranks).add(max_tokens).add(hidden).add(topk).add(num_experts).add(fp8).add(blocks).add(layer).add(placement);
  }
  /// Checks the shape. E_CONFIG or E_UNSUPPORTED, naming the value.
  void check() const { check_sizes(*this, {name, 32, 128, 2048}); }
};

/// Options that a rank may choose independently.
struct PeerOptions {
  bool programmatic = true;  ///< programmatic dependent launch; not for ranks that share a GPU
  ScaleRule rule{1e-10F, false};
  std::int32_t const* expert_place = nullptr;  ///< device [num_ids]: rank * L + local of every id; null: the id itself
  int num_ids = 0;                             ///< ids that have an expert; 0: the shape's num_experts
};

template <class Layout>
struct PeerParams;  // peer_rows.cuh

/// One rank's part of a window, with the layout of a backend. Owns no memory.
template <class Layout>
class PeerCalls {
 public:
  PeerShape const& shape() const { return shape_; }
  Layout const& layout() const { return at_; }
  /// This rank's part at an offset of the layout.
  template <class T>
  T* own(std::size_t offset) const {
    return reinterpret_cast<T*>(window_.peer[window_.rank] + offset);
  }

 protected:
  /// E_CONFIG, E_UNSUPPORTED for the shape.
  PeerCalls(comm::WindowView const& window, PeerShape const& shape, Layout const& at, PeerOptions const& options)
      : window_(window), shape_(shape), at_(at), options_(options) {
    shape.check();
    options_.num_ids = options.num_ids == 0 ? shape.num_experts : options.num_ids;
  }
  /// The parameters that all kernels of one call share.
  PeerParams<Layout> params(ExchangeTokens const& in, int parity) const;

  comm::WindowView window_;
  PeerShape shape_;
  Layout at_;
  PeerOptions options_;
};

}  // namespace moe::detail
