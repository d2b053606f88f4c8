// SPDX-License-Identifier: Apache-2.0
// experts/hopper/contiguous_layer.hpp: the MoE layer's experts on one Hopper GPU (sm_90a), standard and batched formats, at most
// three launches. Plain host C++; the definitions are in contiguous_layer.cuh.
#pragma once

#include <cstdint>
#include <memory>

#include "moe/core/error.hpp"
#include "moe/experts/hopper/common/problem.hpp"
#include "moe/experts/hopper/layer/launcher.hpp"
#include "moe/experts/hopper/tuning.hpp"

struct CUstream_st;

/// Defined where the kernels' definitions are, so that the linker's message for a program without them says what to do.
namespace moe::fix {
void include_moe_experts_hopper_contiguous_cuh_or_link_a_library_of_moe_add_hopper_kernels();
void include_moe_experts_hopper_masked_cuh_or_link_a_library_of_moe_add_hopper_kernels();
}  // namespace moe::fix

namespace moe::hopper {

/// Weights of one layer in device memory; borrowed for the layer's lifetime, 16-byte aligned. An ungated layer has I rows of w13, not 2I.
struct LayerWeights {
  void const* w13 = nullptr;          ///< [E, 2I, H], gate rows before up rows, or interleaved
  void const* w2 = nullptr;           ///< [E, H, I]
  float const* w13_scales = nullptr;  ///< fp8_block: [E, 2I / 128, ⌈H / 128⌉]; row-scaled: [E, 2I], or [E]
  float const* w2_scales = nullptr;   ///< fp8_block: [E, ⌈H / 128⌉, I / 128]; row-scaled: [E, H], or [E]
  float const* w13_bias = nullptr;    ///< [E, 2I] or null, in the order of w13's rows
  float const* w2_bias = nullptr;     ///< [E, H] or null
  bool interleaved = false;           ///< rows of w13 (and its scales and biases) are gate 0, up 0, gate 1, up 1, …; not fp8_block
  bool tensor_scales = false;         ///< row-scaled: one scale per expert
};

/// Throws E_CONFIG unless the kernels can run these sizes.
inline void check_sizes(LocalShape const& s, Scheme scheme) {
  auto const expect = [](char const* what, int value, int multiple, Scheme of) {
    if (value > most_columns(of)) {
      throw Error(ErrorCode::config, text("hopper experts: ", what, " ", value, " is over ", most_columns(of), " in ", name(of),
                                          ", where int32 sums could overflow. Use the experts cuda_reference"));
    }
    if (value < multiple || value % multiple != 0) {
      throw Error(ErrorCode::config, text("hopper experts: ", what, " ", value, " must be a multiple of ", multiple, " in ", name(of),
                                          ". Pad it, or use the experts cuda_reference"));
    }
  };
  expect("hidden", s.hidden, hidden_multiple(scheme), scheme);
  expect("intermediate", s.intermediate, intermediate_multiple(scheme), scheme);
  if (is_row_scaled(scheme) && s.intermediate > kMostRowScaledColumns) {
    throw Error(ErrorCode::config, text("hopper experts: intermediate ", s.intermediate, " is over ", kMostRowScaledColumns, " in ",
                                        name(scheme), ", where the counters of rows could overflow. Use the experts cuda_reference"));
  }
  if (s.num_experts < 1 || s.num_experts > 1024) {
    throw Error(ErrorCode::config, text("hopper experts: ", s.num_experts, " local experts are out of range [1, 1024]"));
  }
  if (s.topk < 1) throw Error(ErrorCode::config, text("topk ", s.topk, " must be at least 1"));
}

/// One layer's experts. forward() enqueues at most three kernels, allocates nothing, never synchronises, and can be captured. Run one
/// forward of an object at a time: the object has counters, which every forward leaves at their initial values.
class ContiguousLayer {
 public:
  /// `launcher`: layer_launcher<scheme, an activation that covers options.activation, and biases if there are any>(). E_UNSUPPORTED without
  /// a Hopper device; E_CONFIG if a size does not fit the tiles or the activation lacks a limit; E_ARG on null or misaligned weights.
  ContiguousLayer(LocalShape shape, Scheme scheme, LayerWeights weights, LayerOptions const& options, LayerLauncher launcher);
  /// The kernels of every scheme, with one activation (default SwiGLU) of experts/hopper/common/activation.hpp.
  template <class Activation = FastSilu>
  ContiguousLayer(LocalShape shape, Scheme scheme, LayerWeights weights, LayerOptions const& options = {});
  ~ContiguousLayer();
  ContiguousLayer(ContiguousLayer&&) noexcept;
  ContiguousLayer& operator=(ContiguousLayer&&) noexcept;

  /// Bytes of workspace (device memory, 1024-byte aligned, any contents) for at most that many tokens.
  std::int64_t workspace_bytes(int max_tokens) const;
  /// E_ARG on null or misaligned pointers, before anything is launched.
  void forward(LayerCall const& call, void* workspace, CUstream_st* stream) const;
  /// The same with the caller's tile choice.
  void forward(LayerCall const& call, Tuning const& tuning, void* workspace, CUstream_st* stream) const;

  /// Batched format: x and out are [E, capacity, H], counts[e] rows of expert e are valid (device memory); no router weights.
  /// `expected_rows` of an expert is a hint for the tile. The workspace is for E·capacity slots. x_scales: [E, capacity, …] as in
  /// LayerCall. gather [E, capacity]: row i of expert e is row gather[e][i] of x and of x_scales, which then have any number of rows.
  /// arrivals: as in LayerCall; `counts` is complete when the kernel before this call in the stream has ended. Between two such calls runs
  /// a kernel that waits for the end of the first, as a dispatch does: the products begin by a counter that the first one clears.
  void forward_batched(void const* x, std::int32_t const* counts, int capacity, int expected_rows, void* out, void* workspace,
                       CUstream_st* stream, float const* x_scales = nullptr, std::int32_t const* gather = nullptr,
                       comm::Arrivals const* arrivals = nullptr) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

namespace detail {

template <class Activation>
LayerLauncher launcher_of(Scheme scheme) {
  switch (scheme) {
    case Scheme::bf16: return layer_launcher<Scheme::bf16, Activation>();
    case Scheme::f16: return layer_launcher<Scheme::f16, Activation>();
    case Scheme::fp8_block: return layer_launcher<Scheme::fp8_block, Activation>();
    case Scheme::fp8_row: return layer_launcher<Scheme::fp8_row, Activation>();
    case Scheme::int8_row: return layer_launcher<Scheme::int8_row, Activation>();
  }
  return {};
}

}  // namespace detail

/// The kernels of a scheme for calls with Tuning::column_blocks or completions, too; bf16 and fp8_block have them.
template <class Activation = FastSilu>
LayerLauncher launcher_with_columns(Scheme scheme) {
  LayerLauncher launcher = detail::launcher_of<Activation>(scheme);
  if (scheme == Scheme::bf16) launcher.enqueue_columns = column_launcher<Scheme::bf16, Activation>();
  if (scheme == Scheme::fp8_block) launcher.enqueue_columns = column_launcher<Scheme::fp8_block, Activation>();
  return launcher;
}

template <class Activation>
ContiguousLayer::ContiguousLayer(LocalShape shape, Scheme scheme, LayerWeights weights, LayerOptions const& options)
    : ContiguousLayer(shape, scheme, weights, options, detail::launcher_of<Activation>(scheme)) {
  if (kPlainKernels<Activation> && (options.weight_on_input || weights.w13_bias != nullptr || weights.w2_bias != nullptr)) {
    throw Error(ErrorCode::config, "hopper experts: these kernels leave out biases and weights on the input. Take AnyActivation's");
  }
}

}  // namespace moe::hopper
