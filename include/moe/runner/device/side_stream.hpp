// SPDX-License-Identifier: Apache-2.0
// runner/device/side_stream.hpp: a second stream beside the caller's, forked and joined by events, also while a graph is captured. Plain
// host C++.
#pragma once

#include <cstdint>
#include <memory>

#include "moe/core/cuda_space.hpp"

namespace moe::runner {

/// A side stream of a memory space; only the CUDA space has one.
template <class Space>
class SideStream;

/// Work between fork() and join() on the side stream runs beside the main stream's. The caller must keep
/// the two from using the same data at the same time: the side stream reads what was written before fork(), and the main stream reads its
/// results after join(). One fork at a time.
template <>
class SideStream<space::cuda> {
 public:
  /// The side stream, ordered after all work of `main` so far. If `main` is being captured, the side stream is too, until join().
  cudaStream_t fork(cudaStream_t main) {
    forked_.record(main);
    forked_.make_wait(side_);
    return side_;
  }
  /// Orders later work of `main` after all work of the side stream.
  void join(cudaStream_t main) {
    joined_.record(side_);
    joined_.make_wait(main);
  }

 private:
  CudaStream side_;
  CudaMark forked_, joined_;
};

/// Work on up to `most_rows` rows runs on a side stream, from begin() to end(); on more rows, on the caller's.
template <class Space>
class FewRowsBeside {
 public:
  explicit FewRowsBeside(std::int64_t most_rows) : most_rows_(most_rows) {
    if (most_rows > 0) side_ = std::make_unique<SideStream<Space>>();
  }
  /// Whether rows of this number run on the side stream.
  bool takes(std::int64_t rows) const { return side_ != nullptr && rows > 0 && rows <= most_rows_; }
  /// The stream for work on `rows` rows, ordered after all work of `main` so far.
  Stream<Space> begin(std::int64_t rows, Stream<Space> main) {
    end();  // of a forward that threw between begin() and end()
    if (!takes(rows)) return main;
    forked_ = true;
    main_ = main;
    return side_->fork(main);
  }
  /// Orders later work of the caller's stream after that work.
  void end() {
    if (forked_) side_->join(main_);
    forked_ = false;
  }

 private:
  std::int64_t most_rows_;
  std::unique_ptr<SideStream<Space>> side_;
  bool forked_ = false;
  Stream<Space> main_ = {};
};

}  // namespace moe::runner
