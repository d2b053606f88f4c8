// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/window_harness.cuh: OneSided, TwoSided and Pplx between ranks that one process drives: identity experts, and the expected
// rows and outputs, computed on the host. Shared by the tests and the benchmark.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/multigpu/window_checks.cuh"

namespace moe_test {

/// y[row] = Σ_j w_j times the row's value, over the choices that have an expert here.
static __global__ void identity_standard(char const* rows, int row_stride, float const* scales, int scale_stride, std::int32_t const* ids,
                                         float const* weights, std::int32_t const* num_rows, int max_rows, int topk, int hidden, bool fp8,
                                         __nv_bfloat16* y) {
  int const n = num_rows != nullptr ? *num_rows : max_rows;
  for (int r = static_cast<int>(blockIdx.x); r < n; r += static_cast<int>(gridDim.x)) {
    for (int h = static_cast<int>(threadIdx.x); h < hidden; h += static_cast<int>(blockDim.x)) {
      char const* const row = rows + static_cast<std::size_t>(r) * row_stride;
      float v;
      if (fp8) {
        __nv_fp8_e4m3 code;
        code.__x = static_cast<unsigned char>(row[h]);
        v = static_cast<float>(code) * scales[static_cast<std::size_t>(r) * scale_stride + h / 128];
      } else {
        v = __bfloat162float(reinterpret_cast<__nv_bfloat16 const*>(row)[h]);
      }
      v = __bfloat162float(__float2bfloat16_rn(v));
      float sum = 0.0F;
      bool any = false;
      for (int j = 0; j < topk; ++j) {
        std::size_t const at = static_cast<std::size_t>(r) * topk + j;
        if (ids[at] >= 0) {
          sum = fmaf(weights[at], v, sum);
          any = true;
        }
      }
      if (any) {
        y[static_cast<std::size_t>(r) * hidden + h] = __float2bfloat16_rn(sum);
      }
    }
  }
}

// The three backends under one set of names.

struct OneSidedPeer {
  using Calls = OneSidedCalls;
  static constexpr char const* kName = "one_sided";
  static constexpr SumOrder kOrder = SumOrder::named_ranks;
  static constexpr bool kHalves = false;
  static std::size_t window_bytes(PeerShape const& s) { return Calls::window_bytes(s); }
  static Calls calls(moe::comm::WindowView const& view, PeerShape const& s, bool programmatic) {
    return {view, s, {.programmatic = programmatic}};
  }
  static void dispatch(Calls const& c, ExchangeTokens const& in, int parity, cudaStream_t stream) {
    c.dispatch(in, c.shape().max_tokens, parity, stream);
  }
  static void experts(Calls const& c, int parity, cudaStream_t stream, int blocks = 32) {
    auto const& s = c.shape();
    auto const& at = c.layout();
    identity_standard<<<static_cast<unsigned>(blocks), 128, 0, stream>>>(
        c.own<char>(at.rows[parity]), s.row_bytes(), c.own<float>(at.scales[parity]), s.scale_stride(), c.own<std::int32_t>(at.ids[parity]),
        c.own<float>(at.weights[parity]), nullptr, s.rows(), s.topk, s.hidden, s.fp8, c.outputs(parity));
  }
  static void combine(Calls const& c, ExchangeTokens const& in, __nv_bfloat16* out, int parity, cudaStream_t stream) {
    c.combine(in, out, c.shape().hidden, c.shape().max_tokens, parity, stream);
  }
};

struct TwoSidedPeer {
  using Calls = TwoSidedCalls;
  static constexpr char const* kName = "two_sided";
  static constexpr SumOrder kOrder = SumOrder::ranks;
  static constexpr bool kHalves = false;
  /// Small queues if there are few blocks, so that they wrap several times in a test.
  static TwoSidedQueues queues(PeerShape const& s) {
    return s.blocks > 16 ? TwoSidedQueues{} : TwoSidedQueues{2, ((2 * s.hidden + 8 * s.topk + 127) / 128 * 128) * 2};
  }
  static std::size_t window_bytes(PeerShape const& s) { return Calls::window_bytes(s, queues(s)); }
  static Calls calls(moe::comm::WindowView const& view, PeerShape const& s, bool programmatic) {
    return {view, s, queues(s), {.programmatic = programmatic}};
  }
  static void dispatch(Calls const& c, ExchangeTokens const& in, int parity, cudaStream_t stream) { c.dispatch(in, parity, stream); }
  static void experts(Calls const& c, int parity, cudaStream_t stream, int blocks = 32) {
    auto const& s = c.shape();
    auto const& at = c.layout();
    identity_standard<<<static_cast<unsigned>(blocks), 128, 0, stream>>>(
        c.own<char>(at.rows[parity]), s.row_bytes(), c.own<float>(at.scales[parity]), s.scale_stride(), c.own<std::int32_t>(at.ids[parity]),
        c.own<float>(at.weights[parity]), c.own<std::int32_t>(at.summary[parity]), s.rows(), s.topk, s.hidden, s.fp8, c.outputs(parity));
  }
  static void combine(Calls const& c, ExchangeTokens const& in, __nv_bfloat16* out, int parity, cudaStream_t stream) {
    c.combine(in, out, c.shape().hidden, parity, stream);
  }
};

struct PplxPeer {
  using Calls = PplxCalls;
  static constexpr char const* kName = "pplx";
  static constexpr SumOrder kOrder = SumOrder::choices;
  static constexpr bool kHalves = true;
  static std::size_t window_bytes(PeerShape const& s) { return Calls::window_bytes(s, {}); }
  static Calls calls(moe::comm::WindowView const& view, PeerShape const& s, bool programmatic) {
    return {view, s, {}, {.programmatic = programmatic}};
  }
  static void dispatch(Calls const& c, ExchangeTokens const& in, int parity, cudaStream_t stream, bool send = true, bool receive = true) {
    c.dispatch(in, parity, stream, send, receive);
  }
  static void experts(Calls const& c, int parity, cudaStream_t stream, int blocks = 4) {
    auto const& s = c.shape();
    auto const& at = c.layout();
    identity_batched<<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(s.local_experts())), 128, 0, stream>>>(
        c.own<char>(at.batch[parity]), c.own<float>(at.batch_scales[parity]), nullptr, c.own<std::int32_t>(at.num_tokens[parity]),
        at.capacity, s.hidden, s.fp8, c.outputs(parity));
  }
  static void combine(Calls const& c, ExchangeTokens const& in, __nv_bfloat16* out, int parity, cudaStream_t stream, bool send = true,
                      bool receive = true) {
    c.combine(in, out, c.shape().hidden, parity, stream, send, receive);
  }
};

inline constexpr std::uint64_t kTimeout = 3'000'000'000ULL;

/// The settings of a test's ranks.
struct Case {
  int ranks, max_tokens, hidden, topk, experts;
  bool fp8;
  Routing routing;
  int blocks = 12;
};

/// Ranks on one GPU that run rounds with identity experts.
template <class Peer>
class PeerRun {
 public:
  using Calls = typename Peer::Calls;
  explicit PeerRun(Case const& c, std::uint64_t timeout = kTimeout) : case_(c) {
    shape_ = {Peer::kName, c.ranks, c.max_tokens, c.hidden, c.topk, c.experts, c.fp8, c.blocks};
    group_ = std::make_unique<RankGroup>(c.ranks, true, Peer::window_bytes(shape_), timeout);
    for (int r = 0; r < c.ranks; ++r) {
      calls_.push_back(Peer::calls(group_->view(r), shape_, false));
    }
  }
  void bring(unsigned seed) {
    tokens_.clear();
    buffers_.clear();
    for (int r = 0; r < case_.ranks; ++r) {
      tokens_.push_back(
          make_tokens(r, tokens_of(case_.max_tokens, r, seed), case_.hidden, case_.topk, case_.experts, case_.ranks, case_.routing, seed));
      buffers_.push_back(make_buffers(tokens_.back(), case_.hidden, shape_.local_experts(), 0));
    }
    moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void dispatch(int r, int parity) { Peer::dispatch(calls(r), buffer(r).in, parity, group_->stream(r)); }
  void experts(int r, int parity) { Peer::experts(calls(r), parity, group_->stream(r), 4); }
  void combine(int r, int parity) { Peer::combine(calls(r), buffer(r).in, as_bf16(buffer(r).out), parity, group_->stream(r)); }
  void round(int parity, unsigned delays = 0) {
    for (int r = 0; r < case_.ranks; ++r) {
      auto const pause = [&](unsigned salt) { random_delay(delays, r, salt, group_->stream(r)); };
      pause(1);
      dispatch(r, parity);
      pause(2);
      experts(r, parity);
      pause(3);
      combine(r, parity);
    }
  }
  /// "" or the first error in the last round of that parity, on any rank. Waits for all ranks.
  std::string wrong(int parity) {
    group_->synchronize_and_check();
    std::string why;
    for (int r = 0; r < case_.ranks && why.empty(); ++r) {
      why = check_rows(calls_, tokens_, r, parity, 1);
      why = why.empty() ? check_sums(shape_, Peer::kOrder, tokens_[static_cast<std::size_t>(r)], buffer(r), r, 1) : why;
    }
    return why;
  }
  RankBuffers& buffer(int r) { return buffers_[static_cast<std::size_t>(r)]; }
  RankTokens& tokens(int r) { return tokens_[static_cast<std::size_t>(r)]; }
  Calls& calls(int r) { return calls_[static_cast<std::size_t>(r)]; }
  RankGroup& group() { return *group_; }
  PeerShape const& shape() const { return shape_; }

 private:
  Case case_;
  PeerShape shape_;
  std::unique_ptr<RankGroup> group_;
  std::vector<Calls> calls_;
  std::vector<RankTokens> tokens_;
  std::vector<RankBuffers> buffers_;
};

}  // namespace moe_test
