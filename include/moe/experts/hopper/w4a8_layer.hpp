// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4a8_layer.hpp: the MoE layer's experts with 4-bit weights and e4m3 activations on one Hopper GPU (sm_90a), standard
// and batched formats, at most three launches. Plain host C++; the definitions are in w4a8_layer.cuh.
#pragma once

#include <cstdint>
#include <memory>

#include "moe/experts/hopper/w4/a8/problem.hpp"
#include "moe/experts/hopper/w4/batched_call.hpp"

struct CUstream_st;

/// Defined where the kernels' definitions are, so that the linker's message for a program without them says what to do.
namespace moe::fix {
void include_moe_experts_hopper_w4a8_cuh_or_link_a_library_of_moe_add_hopper_kernels();
}  // namespace moe::fix

namespace moe::hopper {

/// One layer's experts. forward() enqueues at most three kernels, allocates nothing, never synchronises, and can be captured; the row
/// count may be in device memory.
class W4A8Layer {
 public:
  /// Run one forward of an object at a time: the object has counters, which every forward leaves at their initial values. Packs the
  /// weights into `packed` (device memory of packed_bytes(), 16-byte aligned, valid for the layer's lifetime) and waits for that. Later
  /// only the biases are read, and by weights_changed() all weights. Weights that are packed already (W4Weights::packed) are read where
  /// they lie, and `packed` has state_bytes(). `launcher`: w4a8::launch_layer<scheme, false>. E_UNSUPPORTED without a Hopper device, for a
  /// scale under which a weight is not finite (mxfp4: a byte over 252), or for a zero point that is no integer of 0 to 15; E_CONFIG if a
  /// size or the scheme does not fit; E_ARG for null or misaligned memory.
  W4A8Layer(LocalShape shape, W4Scheme scheme, W4Weights const& weights, W4Activation const& activation, void* packed,
            w4a8::Launcher launcher);
  /// The same with any activation, gated or not. `launcher`: w4a8::launch_layer<scheme, true>. E_CONFIG for an activation without its
  /// limit.
  W4A8Layer(LocalShape shape, W4Scheme scheme, W4Weights const& weights, W4AnyActivation const& activation, void* packed,
            w4a8::Launcher launcher);
  ~W4A8Layer();
  W4A8Layer(W4A8Layer&&) noexcept;
  W4A8Layer& operator=(W4A8Layer&&) noexcept;

  /// Bytes of the packed weights and their parameters.
  static constexpr std::int64_t packed_bytes(LocalShape const& s, W4Scheme scheme, bool gated = true) {
    std::int64_t const width = w4a8::padded(s.intermediate);
    std::int64_t const w13_rows = (gated ? 2 : 1) * width;
    std::int64_t const matrices =
        w4a8::packed_bytes(scheme, w13_rows, w4a8::padded(s.hidden)) + w4a8::packed_bytes(scheme, s.hidden, width);
    return s.num_experts * matrices + kHeadBytes;
  }
  /// Bytes that a layer of W4Weights::packed takes in place of them.
  static constexpr std::int64_t state_bytes() { return kHeadBytes; }
  /// What one expert takes among packed experts.
  static constexpr W4ExpertSizes expert_sizes(LocalShape const& s, W4Scheme scheme, bool gated) {
    std::int64_t const width = w4a8::padded(s.intermediate), rows13 = (gated ? 2 : 1) * width;
    return {{w4a8::bricks_bytes(scheme, rows13, w4a8::padded(s.hidden)), w4a8::bricks_bytes(scheme, s.hidden, width)},
            {factor_count(scheme, rows13), factor_count(scheme, s.hidden)}};
  }
  /// E_CONFIG if a size, group or the scheme does not fit.
  static void check_sizes(LocalShape const& s, W4Scheme scheme, int w13_group, int w2_group) {
    W4Weights groups{};
    groups.w13_group = w13_group;
    groups.w2_group = w2_group;
    w4a8::check_sizes(s, scheme, groups);
  }
  /// Packs one matrix of some experts of a layer of checked sizes into the first experts of `to`, on the default stream, and waits for it.
  /// Refuses what the constructor refuses. A part (W4StagedMatrix::part) goes to the beginning of `to`.
  static void pack(LocalShape const& shape, W4Scheme scheme, bool gated, W4StagedMatrix const& matrix, W4Packed const& to);
  /// From the next forward on at most so many multiprocessors; 0: all. E_CONFIG for a negative number.
  void limit_workers(int most);
  /// The tiles of a call of that many tokens.
  W4Tuning tuning(int max_tokens) const;
  /// Bytes of workspace (device memory, 1024-byte aligned, any contents) for at most that many tokens.
  std::int64_t workspace_bytes(int max_tokens) const;
  /// Packs the current contents of the weights' memory again, in stream order. Scales are not checked again. Nothing where the weights were
  /// packed already.
  void weights_changed(CUstream_st* stream);
  /// x of the call has e4m3 codes and x_scales one float32 per 128 of K; out is bf16. E_ARG on null or misaligned pointers.
  void forward(LayerCall const& call, void* workspace, CUstream_st* stream) const;
  /// The same with the caller's tile choice: tile_rows 8 to w4a8::most_tile_rows(), a multiple of 8.
  void forward(LayerCall const& call, W4Tuning const& tuning, void* workspace, CUstream_st* stream) const;
  /// The workspace is for E·capacity slots. Scales of a row of x lie side by side: [E, capacity, H / 128, rounded up].
  void forward_batched(BatchedCall const& call, void* workspace, CUstream_st* stream) const;

 private:
  /// Checks and packs.
  void open(LocalShape const& shape, W4Scheme scheme, W4Weights const& weights, void* packed, w4a8::Launcher launcher);
  static constexpr std::int64_t kHeadBytes = (2 * 1024 + W4Workspace::kMaxSplitUnits) * 4;  ///< factors, counters
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace moe::hopper
