// SPDX-License-Identifier: Apache-2.0
// comm/self.hpp: the communicator of one rank. Every collective is a local copy, or does nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "moe/core/space.hpp"

namespace moe::comm {

/// One rank in `SpaceT`, no state. Arrays are in the space's memory, counts and offsets in host memory; `in` may equal `out` where source
/// and destination of the copy are the same.
template <class SpaceT = space::host>
class Self {
 public:
  using Space = SpaceT;
  using StreamType = Stream<Space>;
  static constexpr char const* kName = "self";

  constexpr int rank() const { return 0; }
  constexpr int size() const { return 1; }

  /// Copies `n` bytes of this rank into out[0, n).
  void all_gather(void const* in, std::int64_t n, void* out, StreamType stream) { copy(in, out, n, stream); }
  /// Copies `n` = counts[0] bytes into out + offsets[0].
  void all_gather_v(void const* in, std::int64_t n, void* out, std::int64_t const*, std::int64_t const* offsets, StreamType stream) {
    copy(in, at(out, offsets[0]), n, stream);
  }
  /// Copies in_counts[0] bytes at in + in_offsets[0] into out + out_offsets[0].
  void all_to_all_v(void const* in, std::int64_t const* in_counts, std::int64_t const* in_offsets, void* out, std::int64_t const*,
                    std::int64_t const* out_offsets, StreamType stream) {
    copy(at(in, in_offsets[0]), at(out, out_offsets[0]), in_counts[0], stream);
  }
  void broadcast(void*, std::int64_t, int, StreamType) {}
  void barrier(StreamType) {}
  /// out[0, n) = in[0, n), floats.
  void all_reduce(float const* in, std::int64_t n, float* out, StreamType stream) { copy(in, out, n * kFloat, stream); }
  /// out[0, counts[0]) = in[offsets[0], …), floats.
  void reduce_scatter_v(float const* in, std::int64_t const* counts, std::int64_t const* offsets, float* out, StreamType stream) {
    copy(in + offsets[0], out, counts[0] * kFloat, stream);
  }

 private:
  static constexpr std::int64_t kFloat = sizeof(float);
  static void const* at(void const* p, std::int64_t offset) { return static_cast<std::byte const*>(p) + offset; }
  static void* at(void* p, std::int64_t offset) { return static_cast<std::byte*>(p) + offset; }

  static void copy(void const* in, void* out, std::int64_t bytes, [[maybe_unused]] StreamType stream) {
    if (bytes == 0 || in == out) {
      return;
    }
    if constexpr (Space::kKind == SpaceKind::host) {
      std::memmove(out, in, static_cast<std::size_t>(bytes));
    } else {
      Memory<Space>::copy_async(out, in, static_cast<std::size_t>(bytes), stream);
    }
  }
};

}  // namespace moe::comm
