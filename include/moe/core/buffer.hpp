// SPDX-License-Identifier: Apache-2.0
// core/buffer.hpp: owning arrays, the arena from which a layer takes all its memory at construction, and checks of the rows that callers
// pass.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "moe/core/array.hpp"
#include "moe/core/error.hpp"
#include "moe/core/space.hpp"

namespace moe {

/// `size` uninitialised elements in the memory of `Space`, owned. Movable, not copyable.
template <class T, class Space = space::host>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::int64_t size) : data_(allocate(size)), size_(size) {}
  Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) {
      Memory<Space>::release(data_);
    }
  }

  T* data() { return data_; }
  T const* data() const { return data_; }
  std::int64_t size() const { return size_; }
  std::size_t bytes() const { return static_cast<std::size_t>(size_) * sizeof(T); }

  /// Blocking copies of the whole buffer; `from` and `to` are host pointers to size() elements.
  void copy_from_host(T const* from) { Memory<Space>::copy_from_host(data_, from, bytes()); }
  void copy_to_host(T* to) const { Memory<Space>::copy_to_host(to, data_, bytes()); }

 private:
  static T* allocate(std::int64_t size) {
    if (size < 0) {
      throw Error(ErrorCode::internal, text("buffer: size ", size, " is negative"));
    }
    return size == 0 ? nullptr : static_cast<T*>(Memory<Space>::allocate(static_cast<std::size_t>(size) * sizeof(T)));
  }
  T* data_ = nullptr;
  std::int64_t size_ = 0;
};

/// Memory taken piece by piece while a layer is constructed, freed together when it is destroyed. After seal() nothing more can
/// be taken, so a forward path that would allocate is an error instead of a slow path.
template <class Space>
class Arena {
 public:
  static constexpr std::size_t kAlign = 256;  ///< of every piece, in bytes
  static constexpr std::size_t kChunk = std::size_t{1} << 20;

  Arena() = default;
  Arena(Arena const&) = delete;
  Arena& operator=(Arena const&) = delete;
  ~Arena() {
    for (Chunk const& c : chunks_) {
      Memory<Space>::release(c.base);
    }
  }

  /// `n` uninitialised elements, aligned to kAlign bytes. E_STATE after seal().
  template <class T>
  T* take(std::int64_t n) {
    if (sealed_) {
      throw Error(ErrorCode::state, "arena: nothing can be taken after construction");
    }
    if (n < 0) {
      throw Error(ErrorCode::internal, text("arena: size ", n, " is negative"));
    }
    std::size_t const bytes = (static_cast<std::size_t>(n) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    if (bytes == 0) {
      return nullptr;
    }
    if (chunks_.empty() || chunks_.back().used + bytes > chunks_.back().size) {
      add_chunk(bytes);
    }
    Chunk& c = chunks_.back();
    void* p = c.base + c.used;
    c.used += bytes;
    bytes_ += bytes;
    return static_cast<T*>(p);
  }
  /// take() followed by filling every byte; for flags and counters that must start at a known value.
  template <class T>
  T* take_filled(std::int64_t n, int byte) {
    T* p = take<T>(n);
    if (p != nullptr) {
      Memory<Space>::fill(p, byte, static_cast<std::size_t>(n) * sizeof(T));
    }
    return p;
  }
  void seal() { sealed_ = true; }
  /// Bytes handed out so far.
  std::size_t bytes() const { return bytes_; }

 private:
  struct Chunk {
    std::byte* base;
    std::size_t size;
    std::size_t used;
  };
  void add_chunk(std::size_t bytes) {
    std::size_t const size = std::max(bytes, kChunk) + kAlign;
    auto* raw = static_cast<std::byte*>(Memory<Space>::allocate(size));
    auto const misfit = static_cast<std::size_t>(reinterpret_cast<std::uintptr_t>(raw) % kAlign);
    chunks_.push_back({raw, size, misfit == 0 ? 0 : kAlign - misfit});
  }
  std::vector<Chunk> chunks_;
  std::size_t bytes_ = 0;
  bool sealed_ = false;
};

namespace detail {
/// E_ARG if there are rows and the pointer is null, or if rows overlap.
template <class View>
void check_rows(char const* what, View const& v) {
  std::int64_t const rows = v.extent(0);
  if (rows > 0 && v.data_handle() == nullptr) {
    throw Error(ErrorCode::argument, text(what, ": null pointer for ", rows, " rows"));
  }
  if (rows > 1 && v.stride(0) < v.extent(1)) {
    throw Error(ErrorCode::argument, text(what, ": row stride ", v.stride(0), " is less than the width ", v.extent(1)));
  }
}
/// E_ARG unless the base and the row stride are multiples of kAlignment bytes, as device code needs.
inline void check_alignment(char const* what, void const* data, std::int64_t rows, std::int64_t stride_bytes) {
  if (reinterpret_cast<std::uintptr_t>(data) % kAlignment != 0) {
    throw Error(ErrorCode::argument, text(what, ": the base address is not a multiple of ", kAlignment, " bytes"));
  }
  if (rows > 1 && stride_bytes % kAlignment != 0) {
    throw Error(ErrorCode::argument, text(what, ": row stride ", stride_bytes, " bytes is not a multiple of ", kAlignment));
  }
}
}  // namespace detail

}  // namespace moe
