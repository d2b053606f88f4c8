// SPDX-License-Identifier: Apache-2.0
// bench/fixed_sizes_bench.cu: kernels with sizes that are known at compile time beside the same with run-time sizes, on one GPU, taking
// turns: routing, low_latency's dispatch and combine (one rank, so without waits for peers), the one-token kernel. Both write the same
// bits, or nothing is timed. A time is that of a call in a graph of 64, in microseconds: the median of the repeats, and the spread from the
// least to the most. docs/log/routing.md and exchange.md have results of the first two; hopper.md says why the products are not here.
//
//   fixed_sizes_bench [routing] [exchange] [token]        default: all
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "bench/arguments.hpp"
#include "bench/bench_report.hpp"
#include "moe/backends/window/device/low_latency/fixed.cuh"
#include "moe/core/buffer.hpp"
#include "moe/core/config_defaults.hpp"
#include "moe/core/cuda_graph.hpp"
#include "moe/experts/hopper/token/launch.cuh"
#include "moe/models/deepseek.hpp"
#include "moe/models/gpt_oss.hpp"
#include "moe/models/mixtral.hpp"
#include "moe/models/qwen.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/fixed_sizes.hpp"
#include "tests/multigpu/exchange_ranks.cuh"

namespace {

using namespace moe;
using namespace moe::routing;

constexpr int kLaunches = 64, kInputs = 8, kRounds = 15;

/// A captured graph of kLaunches calls.
class Graph {
 public:
  template <class Launch>
  Graph(CudaStream& stream, Launch const& launch)
      : stream_(stream), graph_(stream, [&] {
          for (int i = 0; i < kLaunches; ++i) launch(i);
        }) {}
  /// Microseconds of a call, of 20 replays.
  double time() {
    start_.record(stream_);
    for (int i = 0; i < 20; ++i) graph_.launch(stream_);
    stop_.record(stream_);
    return static_cast<double>(stop_.since(start_)) * 1e3 / (20 * kLaunches);
  }

 private:
  CudaStream& stream_;
  CudaGraph graph_;
  CudaEvent start_, stop_;
};

/// Times both in turns and prints a line.
void take_turns(char const* what, char const* model, long rows, char const* kind, Graph& at_run_time, Graph& fixed) {
  std::vector<double> a, b;
  at_run_time.time(), fixed.time();
  for (int round = 0; round < kRounds; ++round) a.push_back(at_run_time.time()), b.push_back(fixed.time());
  auto const [ma, sa] = moe_bench::median_and_spread(a);
  auto const [mb, sb] = moe_bench::median_and_spread(b);
  std::printf("%-8s %-14s %5ld rows %-8s run time %7.2f us (spread %.2f), fixed %7.2f us (spread %.2f): %+.1f %%\n", what, model, rows,
              kind, ma, sa, mb, sb, 100 * (mb / ma - 1));
}
bool disagree(char const* what, char const* model, long rows) {
  std::printf("%-8s %-14s %5ld rows: the two disagree\n", what, model, rows);
  return false;
}

// ---- Routing

struct Outputs {
  Buffer<std::int32_t, space::cuda> ids, sorted, inverse, load;
  Buffer<float, space::cuda> weights;
  Buffer<std::int64_t, space::cuda> offsets;
  Buffer<char, space::cuda> workspace;
  Outputs(std::int64_t rows, int experts, int k, int num_sms)
      : ids(rows * k),
        sorted(rows * k),
        inverse(rows * k),
        load(experts),
        weights(rows * k),
        offsets(experts + 1),
        workspace(routing_workspace_bytes(experts, num_sms)) {
    Memory<space::cuda>::fill(workspace.data(), 0, workspace.bytes());
    Memory<space::cuda>::fill(load.data(), 0, load.bytes());
  }
  std::vector<std::int32_t> host_ids() const {
    std::vector<std::int32_t> out(static_cast<std::size_t>(ids.size()));
    ids.copy_to_host(out.data());
    return out;
  }
  std::vector<float> host_weights() const {
    std::vector<float> out(static_cast<std::size_t>(weights.size()));
    weights.copy_to_host(out.data());
    return out;
  }
};

template <class Model>
bool compare_routing(std::int64_t rows, bool permute) {
  using Router = typename Model::Router;
  constexpr int E = Model::num_experts, K = Model::topk;
  auto const p = default_router_params<Model, typename Router::Params>();
  std::mt19937 gen(1);
  std::normal_distribution<float> normal(0.0F, 1.5F);
  std::vector<Buffer<float, space::cuda>> inputs;
  for (int i = 0; i < kInputs; ++i) {
    std::vector<float> z(static_cast<std::size_t>(rows * E));
    for (float& v : z) v = normal(gen);
    inputs.emplace_back(rows * E);
    inputs.back().copy_from_host(z.data());
  }
  CudaStream stream;
  auto const device = moe::device_facts();
  Outputs a(rows, E, K, device.num_sms), b(rows, E, K, device.num_sms);
  auto const call = [&](Outputs& o, int input) {
    FusedRouting<float> f;
    f.args.logits = make_rows<dynamic, float const>(inputs[static_cast<std::size_t>(input % kInputs)].data(), rows, E);
    f.args.num_valid_rows = rows;
    f.args.topk_ids = make_rows(o.ids.data(), rows, K);
    f.args.topk_weights = make_rows(o.weights.data(), rows, K);
    if (permute) {
      f.recorder.load_counter = o.load.data();
      f.permutation.num_local_experts = E;
      f.permutation.expert_offsets = o.offsets.data();
      f.permutation.sorted_slots = o.sorted.data();
      f.permutation.inverse = o.inverse.data();
    }
    f.workspace = o.workspace.data();
    return f;
  };
  Router const router_a(p);
  Fixed<Router, Model> const router_b(p);
  Graph at_run_time(stream, [&](int i) { route_fused(router_a, call(a, i), stream); });
  Graph fixed(stream, [&](int i) { route_fused(router_b, call(b, i), stream); });
  at_run_time.time(), fixed.time();
  if (a.host_ids() != b.host_ids() || a.host_weights() != b.host_weights())
    return disagree("routing", Model::kName, static_cast<long>(rows));
  take_turns("routing", Model::kName, static_cast<long>(rows), permute ? "all" : "ids", at_run_time, fixed);
  return true;
}
template <class Model>
bool compare_routing() {
  bool ok = true;
  for (std::int64_t rows : {1, 16, 128, 512, 4096}) {
    for (bool permute : {false, true}) ok = compare_routing<Model>(rows, permute) && ok;
  }
  return ok;
}

// ---- Dispatch and combine of low_latency

template <class Model, bool kFp8>
bool compare_exchange(int tokens) {
  namespace tests = moe_test;
  using moe::detail::LowLatencyCalls;
  moe::detail::LowLatencyShape shape;
  shape.max_tokens = tokens;
  shape.hidden = Model::hidden;
  shape.topk = Model::topk;
  shape.num_experts = Model::num_experts;
  shape.fp8 = kFp8;
  CudaStream stream;
  struct Side {
    tests::RankGroup group;
    tests::RankBuffers buffers;
    LowLatencyCalls calls;
    Side(tests::RankTokens const& t, moe::detail::LowLatencyShape const& s, moe::detail::LowLatencyFixed const* fixed)
        : group(1, true, LowLatencyCalls::window_bytes(s), 3'000'000'000ULL),
          buffers(tests::make_buffers(t, s.hidden, s.local_experts(), 0)),
          calls(group.view(0), s, moe::detail::ExchangeOptions{.programmatic = true}, fixed) {}
    void dispatch(cudaStream_t to) { calls.dispatch(buffers.in, buffers.num.data(), 0, to); }
    void combine(cudaStream_t to) { calls.combine(buffers.in, tests::as_bf16(buffers.out), calls.shape().hidden, 0, to); }
    void experts(cudaStream_t to) {
      dim3 const grid(16, static_cast<unsigned>(calls.shape().local_experts()));
      tests::identity_batched<<<grid, 128, 0, to>>>(calls.own<char>(calls.layout().rows[0]), calls.own<float>(calls.layout().scales[0]),
                                                    nullptr, buffers.num.data(), calls.shape().capacity(), calls.shape().hidden, kFp8,
                                                    calls.outputs(0));
    }
  };
  auto const t = tests::make_tokens(0, tokens, Model::hidden, Model::topk, Model::num_experts, 1, tests::Routing::uniform, 1);
  Side a(t, shape, nullptr), b(t, shape, &moe::detail::low_latency_fixed<Model, kFp8>());
  for (Side* side : {&a, &b}) side->dispatch(stream), side->experts(stream), side->combine(stream);
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  if (a.buffers.out.host() != b.buffers.out.host() || a.buffers.num.host() != b.buffers.num.host()) {
    return disagree("exchange", Model::kName, tokens);
  }
  Graph dispatch_a(stream, [&](int) { a.dispatch(stream); });
  Graph dispatch_b(stream, [&](int) { b.dispatch(stream); });
  take_turns("exchange", Model::kName, tokens, "dispatch", dispatch_a, dispatch_b);
  Graph combine_a(stream, [&](int) { a.combine(stream); });
  Graph combine_b(stream, [&](int) { b.combine(stream); });
  take_turns("exchange", Model::kName, tokens, "combine", combine_a, combine_b);
  for (Side* side : {&a, &b}) side->group.check(0);
  return true;
}
template <class Model, bool kFp8>
bool compare_exchange() {
  bool ok = true;
  for (int tokens : {1, 16, 128}) ok = compare_exchange<Model, kFp8>(tokens) && ok;
  return ok;
}

// ---- The one-token kernel: the products of one token, with its sizes and the plan that follows from them as constants.

namespace hopper = moe::hopper;

/// Two constants in the place of an array of two. As 1 / A and 1 / B where the plan has reciprocals.
template <int A, int B>
struct PairOf {
  MOE_HD constexpr int operator[](int i) const { return i == 0 ? A : B; }
};
template <int A, int B>
struct ReciprocalsOf {
  MOE_HD constexpr float operator[](int i) const { return 1.0F / static_cast<float>(i == 0 ? A : B); }
};

/// TokenParams of a model on one rank, on a device of kWorkers multiprocessors.
template <class Model, int kExperts, hopper::Scheme S, int kWorkers>
struct FixedToken : hopper::TokenParams {
  static constexpr hopper::LocalShape kShape{kExperts, Model::hidden, Model::intermediate, Model::topk};
  static constexpr hopper::TokenPlan kPlan = hopper::plan_token(kShape, S, kWorkers);
  struct Shape {
    static constexpr int num_experts = kExperts, hidden = Model::hidden, intermediate = Model::intermediate, topk = Model::topk;
  };
  struct Matrix {
    static constexpr int rows = 2 * Model::intermediate, half_step = Model::intermediate;
  };
  struct Plan {
    PairOf<kPlan.row_bytes[0], kPlan.row_bytes[1]> row_bytes;
    PairOf<kPlan.rows[0], kPlan.rows[1]> rows;
    PairOf<kPlan.piece_rows[0], kPlan.piece_rows[1]> piece_rows;
    PairOf<kPlan.segments[0], kPlan.segments[1]> segments;
    PairOf<kPlan.segment_bytes[0], kPlan.segment_bytes[1]> segment_bytes;
    ReciprocalsOf<kPlan.segments[0], kPlan.segments[1]> per_segment;
    ReciprocalsOf<kPlan.rows[0] / 2, kPlan.rows[1]> per_row;
    static constexpr int unit_pairs = kPlan.unit_pairs, plane_bytes = kPlan.plane_bytes, raw_at = kPlan.raw_at, scales_at = kPlan.scales_at,
                         parts_at = kPlan.parts_at, buffers_at = kPlan.buffers_at;
    static constexpr float per_feature = kPlan.per_feature;
  };
  Shape shape;
  Matrix matrix;
  Plan plan;
};
template <hopper::Scheme S, class Params>
__global__ void __launch_bounds__(hopper::kTokenWarps * 32, 1) fixed_token_kernel(__grid_constant__ Params const p) {
  hopper::detail::run_token<S>(p);
}

/// Random weights; their scale keeps the output finite.
__global__ void fill_weights(void* to, std::int64_t n, bool fp8) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += std::int64_t{gridDim.x} * blockDim.x) {
    auto bits = static_cast<unsigned>(i * 2654435761LL >> 7);
    bits ^= bits >> 13;
    if (fp8) {
      static_cast<unsigned char*>(to)[i] = static_cast<unsigned char>((bits & 0x80U) | 0x20U | (bits & 0x1FU));
    } else {
      static_cast<std::uint16_t*>(to)[i] = static_cast<std::uint16_t>((bits & 0x8000U) | 0x3C00U | (bits & 0xFFU));
    }
  }
}

template <class Model, int kExperts, hopper::Scheme S>
bool compare_token() {
  constexpr int kWorkers = 132;
  using Params = FixedToken<Model, kExperts, S, kWorkers>;
  if (moe::device_facts().num_sms != kWorkers || Params::kPlan.warps == 0) {
    std::printf("token    %-14s left out: the kernel takes neither this shape nor a device without %d multiprocessors\n", Model::kName,
                kWorkers);
    return true;
  }
  constexpr bool kFp8 = hopper::is_fp8(S);
  constexpr std::int64_t kH = Model::hidden, kI = Model::intermediate, kK = Model::topk, kBytes = kFp8 ? 1 : 2;
  CudaStream stream;
  Buffer<char, space::cuda> w13(kExperts * 2 * kI * kH * kBytes), w2(kExperts * kH * kI * kBytes);
  fill_weights<<<1024, 256, 0, stream>>>(w13.data(), kExperts * 2 * kI * kH, kFp8);
  fill_weights<<<1024, 256, 0, stream>>>(w2.data(), kExperts * kH * kI, kFp8);
  auto const floats = [](std::int64_t n, float value) {
    Buffer<float, space::cuda> b(n);
    std::vector<float> const host(static_cast<std::size_t>(n), value);
    b.copy_from_host(host.data());
    return b;
  };
  auto scales13 = floats(kExperts * 2 * kI * kH / (128 * 128), 0.01F), scales2 = floats(kExperts * kH * kI / (128 * 128), 0.01F);
  auto weights = floats(kK, 1.0F / kK), inter = floats(kK * kI, 0.0F);
  std::vector<Buffer<std::int32_t, space::cuda>> ids;
  std::mt19937 gen(1);
  for (int i = 0; i < kInputs; ++i) {
    std::vector<std::int32_t> all(kExperts);
    for (int e = 0; e < kExperts; ++e) all[static_cast<std::size_t>(e)] = e;
    std::shuffle(all.begin(), all.end(), gen);
    ids.emplace_back(kK);
    ids.back().copy_from_host(all.data());
  }
  Buffer<std::uint16_t, space::cuda> x(kH), out_a(kH), out_b(kH);
  std::vector<std::uint16_t> host_x(kH), a(kH), b(kH);
  for (auto& v : host_x) v = static_cast<std::uint16_t>(0x3E00U | (gen() & 0x80FFU));
  x.copy_from_host(host_x.data());
  Buffer<std::int32_t, space::cuda> counters(2);
  Memory<space::cuda>::fill(counters.data(), 0, counters.bytes());

  hopper::TokenParams p{};
  p.shape = Params::kShape;
  p.plan = Params::kPlan;
  p.matrix = hopper::w13_layout(Params::kShape, hopper::GateUp::halves);
  p.w13 = w13.data(), p.w2 = w2.data();
  p.w13_scales = scales13.data(), p.w2_scales = scales2.data();
  p.scale_floor = 1e-10F / 448.0F;
  p.activation = hopper::activation_params(activation::Kind::silu, {});
  p.x = x.data(), p.weights = weights.data(), p.inter = inter.data();
  p.arrived = counters.data(), p.passed = counters.data() + 1;
  constexpr auto* kKernel = fixed_token_kernel<S, Params>;
  hopper::detail::allow_shared_memory<kKernel>(hopper::kTokenSharedMemory);
  auto const at_run_time = [&](int i) {
    auto mine = p;
    mine.ids = ids[static_cast<std::size_t>(i % kInputs)].data(), mine.out = out_a.data();
    hopper::launch_token(mine, S, kWorkers, stream);
  };
  auto const fixed = [&](int i) {
    Params mine{p, {}, {}, {}};
    mine.ids = ids[static_cast<std::size_t>(i % kInputs)].data(), mine.out = out_b.data();
    hopper::detail::launch(kKernel, kWorkers, Params::kPlan.warps * 32, Params::kPlan.bytes, 1, stream, mine);
  };
  for (int i = 0; i < kInputs; ++i) {
    at_run_time(i), fixed(i);
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    out_a.copy_to_host(a.data()), out_b.copy_to_host(b.data());
    if (a != b) return disagree("token", Model::kName, 1);
  }
  Graph graph_a(stream, at_run_time), graph_b(stream, fixed);
  take_turns("token", Model::kName, 1, hopper::name(S), graph_a, graph_b);
  return true;
}

}  // namespace

int main(int argc, char** argv) try {
  moe_bench::Names const all{"routing", "exchange", "token"};
  moe_bench::Names const sections = argc > 1 ? moe_bench::Names(argv + 1, argv + argc) : all;
  for (std::string const& section : sections) moe_bench::known_name("section", section, all);
  if (!has_device()) {
    std::printf("skipped: no GPU\n");
    return 77;
  }
  auto const wanted = [&](char const* section) { return std::ranges::find(sections, section) != sections.end(); };
  namespace models = moe::models;
  bool ok = true;
  if (wanted("routing")) {
    ok = compare_routing<models::Qwen3_30B_A3B>() && ok;
    ok = compare_routing<models::GptOss_120B>() && ok;
    ok = compare_routing<models::Mixtral_8x7B>() && ok;
    ok = compare_routing<models::DeepSeek_V3>() && ok;  // its sizes are compiled in either way: no difference is expected
  }
  if (wanted("exchange")) {
    ok = compare_exchange<models::DeepSeek_V3, true>() && ok;
    ok = compare_exchange<models::Qwen3_30B_A3B, false>() && ok;
    ok = compare_exchange<models::GptOss_120B, false>() && ok;
  }
  if (wanted("token")) {
    ok = compare_token<models::Qwen3_30B_A3B, 128, hopper::Scheme::bf16>() && ok;
    ok = compare_token<models::Mixtral_8x7B, 8, hopper::Scheme::bf16>() && ok;
    ok = compare_token<models::Qwen3_30B_A3B, 128, hopper::Scheme::fp8_block>() && ok;
    ok = compare_token<models::DeepSeek_V3, 32, hopper::Scheme::fp8_block>() && ok;
  }
  return ok ? 0 : 1;
} catch (moe_bench::BadArgument const& error) {
  return moe_bench::refuse("fixed_sizes_bench", error);
}
