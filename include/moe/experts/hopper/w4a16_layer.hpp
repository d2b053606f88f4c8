// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4a16_layer.hpp: the MoE layer's experts with 4- or 8-bit weights and bf16 activations on one Hopper GPU (sm_90a),
// standard and batched formats, at most three launches, of quantised rows six. Plain host C++; the definitions are in w4a16_layer.cuh.
#pragma once

#include <cstdint>
#include <memory>

#include "moe/experts/hopper/w4/batched_call.hpp"
#include "moe/experts/hopper/w4/problem.hpp"
#include "moe/experts/hopper/w4/rounded_rows.hpp"

struct CUstream_st;

/// Defined where the kernels' definitions are, so that the linker's message for a program without them says what to do.
namespace moe::fix {
void include_moe_experts_hopper_w4a16_cuh_or_link_a_library_of_moe_add_hopper_kernels();
}  // namespace moe::fix

namespace moe::hopper {

/// One layer's experts. forward() enqueues at most three kernels, of quantised rows six, allocates nothing, never synchronises, and can be
/// captured; the row count may be in device memory.
class W4A16Layer {
 public:
  /// Run one forward of an object at a time: the object has counters, which every forward leaves at their initial values. Packs the weights
  /// into `packed` (device memory of packed_bytes(), 16-byte aligned, valid for the layer's lifetime) and waits for that. Later only the
  /// biases are read, and by weights_changed() all weights. Weights that are packed already (W4Weights::packed) are read where they lie,
  /// and `packed` has state_bytes(). E_UNSUPPORTED without a Hopper device, for a scale under which a code is not
  /// finite, or for a zero point that is not an integer of 0 … 15; E_CONFIG if a size or group does not fit; E_ARG for null or misaligned
  /// memory.
  W4A16Layer(LocalShape shape, W4Scheme scheme, W4Weights const& weights, W4Activation const& activation, void* packed,
             W4Launcher launcher);
  /// The same with any activation, gated or not. `launcher`: w4_any_launcher<scheme>(). E_CONFIG for an activation without its limit.
  W4A16Layer(LocalShape shape, W4Scheme scheme, W4Weights const& weights, W4AnyActivation const& activation, void* packed,
             W4Launcher launcher);
  /// The same with rows in codes: forward() takes those, and the intermediate is rounded to such codes before the second product.
  /// `launcher`: w4_rounded_launcher<scheme>(). E_CONFIG for a global scale that is not a finite positive number, and if a group of the
  /// rows does not divide the intermediate width.
  W4A16Layer(LocalShape shape, W4Scheme scheme, W4Weights const& weights, W4AnyActivation const& activation, W4Rows const& rows,
             void* packed, W4Launcher launcher);
  ~W4A16Layer();
  W4A16Layer(W4A16Layer&&) noexcept;
  W4A16Layer& operator=(W4A16Layer&&) noexcept;

  /// Bytes of the packed weights and their parameters.
  static constexpr std::int64_t packed_bytes(LocalShape const& s, W4Scheme scheme, bool gated = true) {
    int const width = padded_intermediate(s.intermediate);
    std::int64_t const matrices =
        hopper::packed_bytes(scheme, (gated ? 2LL : 1LL) * width, s.hidden) + hopper::packed_bytes(scheme, s.hidden, width);
    return s.num_experts * matrices + kHeadBytes;
  }
  /// Bytes that a layer of W4Weights::packed takes in place of them.
  static constexpr std::int64_t state_bytes() { return kHeadBytes; }
  /// What one expert takes among packed experts.
  static constexpr W4ExpertSizes expert_sizes(LocalShape const& s, W4Scheme scheme, bool gated) {
    std::int64_t const width = padded_intermediate(s.intermediate), rows13 = (gated ? 2 : 1) * width;
    return {{hopper::bricks_bytes(scheme, rows13, s.hidden), hopper::bricks_bytes(scheme, s.hidden, width)},
            {factor_count(scheme, rows13), factor_count(scheme, s.hidden)}};
  }
  /// E_CONFIG if a size or group does not fit.
  static void check_sizes(LocalShape const& s, W4Scheme scheme, int w13_group, int w2_group) {
    W4Weights groups{};
    groups.w13_group = w13_group;
    groups.w2_group = w2_group;
    w4::check_sizes(policy_name(scheme), s, scheme, kBrickDepth, intermediate_multiple(scheme));
    w4::check_groups(policy_name(scheme), s, scheme, groups);
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
  /// Packs the current contents of the weights' memory again, in stream order. Zero points and scales are not checked again. Nothing where
  /// the weights were packed already.
  void weights_changed(CUstream_st* stream);
  /// x and out of the call are bf16. E_ARG on null or misaligned pointers.
  void forward(LayerCall const& call, void* workspace, CUstream_st* stream) const;
  /// The same with the caller's tile choice.
  void forward(LayerCall const& call, W4Tuning const& tuning, void* workspace, CUstream_st* stream) const;
  /// The workspace is for E·capacity slots.
  void forward_batched(BatchedCall const& call, void* workspace, CUstream_st* stream) const;
  /// The same of a layer whose rows are codes, instead of x and x_stride of the call. E_ARG for null codes or scales and short strides.
  void forward(LayerCall const& call, W4Codes const& codes, void* workspace, CUstream_st* stream) const;
  void forward_batched(BatchedCall const& call, W4Codes const& codes, void* workspace, CUstream_st* stream) const;

 private:
  /// Checks and packs.
  void open(LocalShape const& shape, W4Scheme scheme, W4Weights const& weights, void* packed, W4Launcher launcher);
  static constexpr std::int64_t kHeadBytes = (3 * 1024 + W4Workspace::kMaxSplitUnits) * 4;  ///< factors, largest scales, counters
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace moe::hopper
