// SPDX-License-Identifier: Apache-2.0
// bench/ep_layer_bench.cu: whole MoE layers with expert parallelism over all GPUs, each a ModularKernel. kUsage has its options.
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>

#include "bench/bench_report.hpp"
#include "bench/given_routing.hpp"
#include "bench/rank_experts.cuh"
#include "moe/activation/activation.hpp"
#include "moe/backends/collective/device/all_to_all_v.cuh"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/nccl.hpp"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/core/cuda_graph.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/softmax_topk.hpp"
#include "tests/gpu/hopper_reference.cuh"

namespace {

using namespace moe;
using comm::Nccl;
using moe_bench::count;
using moe_bench::counts;
using moe_bench::known_name;
using moe_bench::known_names;
using moe_bench::median_and_spread;
using moe_bench::Names;
using moe_bench::RandomExperts;
using moe_bench::worst_of;
using moe_test::TypedMemory;
using Window = comm::NcclSymmetric;
constexpr int kCalls = 10;
constexpr int kRepeats = 5;
constexpr int kSamples = 8;             // tokens of each rank that are compared
constexpr int kMostDecodeTokens = 256;  // up to here --backends window takes LowLatency

/// What --help prints.
constexpr char const* kUsage = R"(Whole MoE layers with expert parallelism over all GPUs of a node, one process per GPU, microseconds.

  mpirun -n <GPUs> ep_layer_bench [--option value]…      with these defaults:

  --shapes flash,pro             flash: hidden 4096, intermediate 2048, top-6 of 256 experts; pro: 7168, 3072, top-6 of 384
  --like-ranks 8                 as many experts per rank as on eight ranks, so that a rank computes the same amount
  --schemes fp8,bf16             fp8: blocks of 128
  --tokens 8,16,…                of each rank
  --backends window,fused,…      low_latency: LowLatency + HopperMasked; high_throughput: HighThroughput + HopperContiguous;
                                 window: the first up to 256 tokens per rank, the second above; fused: window with overlap_dispatch;
                                 completing and both: high_throughput with overlap_combine, and with overlap_dispatch, too;
                                 all_to_all_v: AllToAllV + HopperContiguous
  --routing given                given: ids and weights are in the layer before it runs, as with engines that do the routing;
                                 softmax: the layer routes from logits; a folder, with a "/" in it: given, from
                                 FOLDER/<shape>_<tokens>.bin, so that another implementation runs with the same routing: ids int32
                                 [ranks, tokens, topk], then weights float32 of the same shape, of this machine's byte order
  --blocks 16                    thread blocks of HighThroughput
  --column-blocks 4              blocks of columns of HighThroughput
  --turns 1                      how often all of these but all_to_all_v are measured, one after the other
  --json FILE

Each composition is first compared with the layer's definition in float32; a wrong result makes the exit code 1. Then graphs of ten layers
where the exchange can be captured (AllToAllV up to its fixed sizes), else calls one after the other: slowest rank, median of five. Beside
each time are that of its experts alone and the bytes of a rank's window.)";

struct Config : LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
};
struct Fused : Config {
  static constexpr bool overlap_dispatch = true;
};
struct Completing : Config {
  static constexpr bool overlap_combine = true;
};
struct Both : Fused {
  static constexpr bool overlap_combine = true;
};
using Fp8 = quantization::Fp8Block<>;
using None = quantization::None;

/// Softmax and the k largest; or no routing: then the layer's topk_ids() and topk_weights() keep the caller's values.
class Routing : public routing::SoftmaxTopK<routing::Renormalize::yes> {
  using Base = routing::SoftmaxTopK<routing::Renormalize::yes>;

 public:
  struct Params {
    Base::Params softmax{};
    bool given = true;
  };
  explicit Routing(Params const& p) : Base(p.softmax), given_(p.given) {}
  void select(routing::RouteArgs<float> const& args, cudaStream_t stream) const {
    if (!given_) Base::select(args, stream);
  }

 private:
  bool given_;
};

struct Model {
  char const* name;
  LayerShape shape;
};
constexpr Model kModels[] = {{"flash", {4096, 2048, 256, 6, false}}, {"pro", {7168, 3072, 384, 6, false}}};

struct Options {
  Names shapes{"flash", "pro"};
  Names schemes{"fp8", "bf16"};
  std::vector<int> tokens{8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192};
  Names backends{"window", "fused", "all_to_all_v"};
  std::string routing = "given";
  int like_ranks = 0;
  int blocks = backends::HighThroughput<Window>::Params{}.blocks;
  int column_blocks = backends::HighThroughput<Window>::Params{}.column_blocks;
  int turns = 1;
  std::string json;
};

/// This rank's part of the layer by its definition, in float32: rows [count, H] bf16 with local ids.
template <class Quant>
std::vector<float> reference(RandomExperts<Quant> const& experts, LayerShape const& s, std::vector<bf16> const& x,
                             std::vector<std::int32_t> const& ids, std::vector<float> const& weights, int count) {
  auto const upload = [](auto const& host) {
    TypedMemory<std::remove_cvref_t<decltype(host[0])>> d(host.size());
    d.upload(host);
    return d;
  };
  std::vector<int> tokens;
  for (int t = 0; t < count; ++t) tokens.push_back(t);
  auto const dx = upload(x);
  auto const di = upload(ids);
  auto const dw = upload(weights);
  auto const dt = upload(tokens);
  int const k = s.topk;
  TypedMemory<float> inter(static_cast<std::size_t>(count * k * s.intermediate)), out(static_cast<std::size_t>(count * s.hidden));
  inter.fill_bytes(0);
  moe_test::ReferenceArgs const a{{experts.local(), static_cast<int>(s.hidden), static_cast<int>(s.intermediate), k},
                                  RandomExperts<Quant>::kFp8 ? hopper::Scheme::fp8_block : hopper::Scheme::bf16,
                                  {},
                                  nullptr,
                                  nullptr,
                                  nullptr,
                                  dx.data(),
                                  experts.w13(),
                                  experts.w2(),
                                  experts.s13(),
                                  experts.s2(),
                                  di.data(),
                                  dw.data(),
                                  dt.data(),
                                  count,
                                  inter.data(),
                                  out.data()};
  moe_test::reference_gemm1<<<static_cast<unsigned>(count * k), 512, static_cast<std::size_t>(s.hidden) * 4>>>(a);
  moe_test::reference_gemm2<<<dim3(static_cast<unsigned>(count), 8), 1024>>>(a);
  check_cuda(cudaDeviceSynchronize(), "reference");
  return out.download();
}

/// The input of one rank to every call. Ids and weights are random; with `softmax` the host router's results for the logits.
struct Batch {
  std::vector<bf16> x;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  TypedMemory<bf16> dx, out;
  TypedMemory<float> logits;

  Batch(LayerShape const& s, int tokens, int rank, bool softmax) {
    std::mt19937 random(static_cast<unsigned>(31 + rank));
    std::normal_distribution<float> normal;
    std::vector<float> some(65536);
    for (float& v : some) v = normal(random);
    x.resize(static_cast<std::size_t>(tokens * s.hidden));
    for (bf16& v : x) v = from_float<bf16>(some[random() % some.size()]);
    std::vector<std::int32_t> pool(static_cast<std::size_t>(s.num_experts));
    for (int e = 0; e < s.num_experts; ++e) pool[static_cast<std::size_t>(e)] = e;
    for (int i = 0; i < tokens * s.topk; ++i) {
      auto const j = static_cast<std::size_t>(i % s.topk);
      std::swap(pool[j], pool[j + random() % (pool.size() - j)]);
      ids.push_back(pool[j]);
      weights.push_back(static_cast<float>(random() % 1000 + 1) / 1000.0F);
    }
    std::vector<float> z(static_cast<std::size_t>(tokens * s.num_experts));
    if (softmax) {
      for (float& v : z) v = normal(random);
      routing::SoftmaxTopK<routing::Renormalize::yes> const router({s.num_experts, s.topk});
      router.select(routing::RouteArgs<float>{make_rows(static_cast<float const*>(z.data()), tokens, s.num_experts), tokens, nullptr,
                                              make_rows(ids.data(), tokens, s.topk), make_rows(weights.data(), tokens, s.topk)});
    }
    dx = TypedMemory<bf16>(x.size());
    out = TypedMemory<bf16>(x.size());
    logits = TypedMemory<float>(z.size());
    dx.upload(x);
    logits.upload(z);
    out.fill_bytes(0xff);
  }
};

class Bench {
 public:
  Bench(comm::Mpi& host, Options const& options)
      : host_(host), comm_(Nccl::over_communicator(host, {.timeout_ms = 20'000})), options_(options), report_("ep_layer_bench") {}

  void run() {
    for (std::string const& shape : options_.shapes) {
      Model model = *std::find_if(std::begin(kModels), std::end(kModels), [&](Model const& m) { return shape == m.name; });
      if (options_.like_ranks > 0) model.shape.num_experts = model.shape.num_experts / options_.like_ranks * host_.size();
      for (std::string const& scheme : options_.schemes) {
        if (scheme == "fp8") {
          run<Fp8>(model, "fp8");
        } else {
          run<None>(model, "bf16");
        }
      }
    }
  }
  bool write() const { return host_.rank() != 0 || options_.json.empty() || report_.write(options_.json); }
  bool good() const { return good_; }

 private:
  template <class Quant>
  void run(Model const& model, char const* scheme) {
    LayerShape const& s = model.shape;
    int const local = s.num_experts / host_.size();
    RandomExperts<Quant> const weights(s.hidden, s.intermediate, local, static_cast<std::uint64_t>(1000 * host_.rank()));
    for (int const tokens : options_.tokens) {
      Batch batch(s, tokens, host_.rank(), options_.routing == "softmax");
      if (from_files()) {
        moe_bench::GivenRouting const r(text(options_.routing, "/", model.name, "_", tokens, ".bin"), {s.num_experts, s.topk}, tokens,
                                        host_.rank(), host_.size());
        batch.ids = r.ids;
        batch.weights = r.weights;
      }
      std::vector<float> const want = expected(weights, s, batch, tokens);
      auto const measure_one = [&]<class Of = Config>(auto backend, auto experts, char const* name, auto const& params,
                                                      std::type_identity<Of> = {}) {
        try {
          measure<Quant, typename decltype(backend)::type, typename decltype(experts)::type, Of>(
              weights, s, batch, want, tokens, params, text(model.name, "/", scheme, "/", name, given() ? "" : "_softmax"));
        } catch (TransportError const&) {
          throw;
        } catch (Error const& e) {
          good_ = false;
          if (host_.rank() == 0) std::printf("%s/%s/%s/%d: %s\n", model.name, scheme, name, tokens, e.what());
        }
      };
      using HighThroughput = backends::HighThroughput<Window>;
      using LowLatency = backends::LowLatency<Window>;
      HighThroughput::Params high{};
      high.blocks = options_.blocks;
      high.column_blocks = options_.column_blocks;
      using Local = backends::NoExpertParallel<space::cuda>;
      if (host_.size() == 1) {
        measure_one(std::type_identity<Local>{}, std::type_identity<experts::HopperContiguous>{}, "local", Local::Params{});
        continue;
      }
      for (int turn = 0; turn < options_.turns; ++turn) {
        if (wanted("low_latency") || (wanted("window") && tokens <= kMostDecodeTokens)) {
          measure_one(std::type_identity<LowLatency>{}, std::type_identity<experts::HopperMasked>{}, "low_latency", LowLatency::Params{});
        }
        if (wanted("high_throughput") || (wanted("window") && tokens > kMostDecodeTokens)) {
          measure_one(std::type_identity<HighThroughput>{}, std::type_identity<experts::HopperContiguous>{}, "high_throughput", high);
        }
        if (wanted("fused") && tokens <= kMostDecodeTokens) {
          measure_one(std::type_identity<LowLatency>{}, std::type_identity<experts::HopperMasked>{}, "low_latency_fused",
                      LowLatency::Params{}, std::type_identity<Fused>{});
        } else if (wanted("fused")) {
          measure_one(std::type_identity<HighThroughput>{}, std::type_identity<experts::HopperContiguous>{}, "high_throughput_fused", high,
                      std::type_identity<Fused>{});
        }
        if (wanted("completing")) {
          measure_one(std::type_identity<HighThroughput>{}, std::type_identity<experts::HopperContiguous>{}, "high_throughput_completing",
                      high, std::type_identity<Completing>{});
        }
        if (wanted("both")) {
          measure_one(std::type_identity<HighThroughput>{}, std::type_identity<experts::HopperContiguous>{}, "high_throughput_both", high,
                      std::type_identity<Both>{});
        }
      }
      if (wanted("all_to_all_v")) {
        measure_one(std::type_identity<backends::AllToAllV<Nccl>>{}, std::type_identity<experts::HopperContiguous>{}, "all_to_all_v",
                    backends::AllToAllV<Nccl>::Params{});
      }
    }
  }
  bool from_files() const { return options_.routing.find('/') != std::string::npos; }
  bool given() const { return options_.routing != "softmax"; }
  bool wanted(char const* backend) const { return std::ranges::find(options_.backends, backend) != options_.backends.end(); }

  /// The first rows of this rank's output, in float32: every rank computes what its experts add to the samples of all.
  template <class Quant>
  std::vector<float> expected(RandomExperts<Quant> const& weights, LayerShape const& s, Batch const& b, int tokens) {
    int const n = std::min(tokens, kSamples);
    int const R = host_.size();
    int const local = s.num_experts / R;
    auto const gather = [&](auto const& mine, std::int64_t width) {
      std::remove_cvref_t<decltype(mine)> all(static_cast<std::size_t>(R * n * width));
      host_.all_gather(mine.data(), n * width * static_cast<std::int64_t>(sizeof(mine[0])), all.data(), {});
      return all;
    };
    auto ids = gather(b.ids, s.topk);
    for (auto& id : ids) id = id / local == host_.rank() ? id % local : -1;
    std::vector<float> const part = reference(weights, s, gather(b.x, s.hidden), ids, gather(b.weights, s.topk), R * n);
    std::vector<float> sum(part.size());
    MPI_Allreduce(part.data(), sum.data(), static_cast<int>(part.size()), MPI_FLOAT, MPI_SUM, host_.handle());
    auto const first = sum.begin() + host_.rank() * n * s.hidden;
    return {first, first + n * s.hidden};
  }

  template <class Quant, class Backend, class Experts, class Of = Config>
  void measure(RandomExperts<Quant> const& weights, LayerShape const& s, Batch& b, std::vector<float> const& want, int tokens,
               typename Backend::Params const& params, std::string const& name) {
    using Layer = ModularKernel<Of, Routing, Quant, Backend, Experts>;
    int const R = host_.size();
    auto& comm = [&]() -> auto& {
      if constexpr (std::is_same_v<typename Backend::Comm, Nccl>) {
        return comm_;
      } else {
        return self_;
      }
    }();
    typename Layer::Params layer_params{.shape = s,
                                        .max_tokens_per_rank = tokens,
                                        .placement = ExpertPlacement(s.num_experts, R, PlacementStrategy::linear),
                                        .router = {.softmax = {s.num_experts, s.topk}, .given = given()},
                                        .backend = params};
    layer_params.experts.expected_rows = std::max(1, (tokens * R * s.topk + s.num_experts - 1) / s.num_experts);
    Layer layer(comm, weights.template view<Of>(), layer_params);
    if (given()) {
      check_cuda(cudaMemcpy(layer.topk_ids().data_handle(), b.ids.data(), b.ids.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
      check_cuda(cudaMemcpy(layer.topk_weights().data_handle(), b.weights.data(), b.weights.size() * 4, cudaMemcpyHostToDevice),
                 "cudaMemcpy");
    }

    auto const hidden = make_rows(static_cast<bf16 const*>(b.dx.data()), tokens, s.hidden);
    auto const logits = make_rows(static_cast<float const*>(b.logits.data()), tokens, s.num_experts);
    auto const out = make_rows(b.out.data(), tokens, s.hidden);
    std::function<void()> const forward = [&] { layer.forward(hidden, logits, out, {}, stream_); };
    auto& exchange = layer.exchange();
    auto const finish = [&] {
      if constexpr (facts::waits<typename Layer::Exchange, cudaStream_t>()) {
        exchange.wait(stream_);
      } else {
        stream_.synchronize();
        facts::check(exchange);
      }
    };
    b.out.fill_bytes(0xff);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    forward();
    finish();
    double const error = worst_of(difference(b, want));
    double const bound = RandomExperts<Quant>::kFp8 ? 1e-2 : 6e-3;
    if (!(error < bound)) {
      good_ = false;
      if (host_.rank() == 0) std::printf("%-28s M%-5d error %.1e WRONG, not timed\n", name.c_str(), tokens, error);
      return;
    }

    bool const captures = facts::capturable(exchange);
    auto const [us, spread] = time(forward, captures, finish);
    // The layer's experts alone, on the rows that this rank received.
    constexpr bool kSkips = facts::skips_foreign_ids<typename Layer::Kernel>();
    auto const received = exchange.prepare({hidden, layer.topk_ids(), layer.topk_weights(), nullptr, kSkips}, stream_);
    std::function<void()> const experts = [&] { layer.kernel().apply(received, facts::expert_output(exchange, out), stream_); };
    auto const [experts_us, experts_spread] = time(experts, true, [&] { stream_.synchronize(); });
    exchange.finalize(out, stream_);
    finish();
    std::size_t const window = layer.memory().window;
    if (host_.rank() == 0) {
      std::printf("%-28s M%-5d %9.1f us (+- %5.1f), experts %9.1f, window %7.1f MB, error %.1e%s\n", name.c_str(), tokens, us, spread / 2,
                  experts_us, static_cast<double>(window) / 1e6, error, captures ? "" : ", calls");
      std::fflush(stdout);
    }
    report_.add({text(name, "/", tokens),
                 us,
                 spread,
                 {{"ranks", R},
                  {"tokens", tokens},
                  {"experts", s.num_experts},
                  {"experts_us", experts_us},
                  {"window_bytes", static_cast<double>(window)},
                  {"graph", captures ? 1 : 0},
                  {"error", error}}});
  }

  /// ‖out − want‖ / ‖want‖ of the samples; huge if a value is NaN.
  static double difference(Batch const& b, std::vector<float> const& want) {
    std::vector<bf16> const out = b.out.download();
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      error += std::pow(static_cast<double>(to_float(out[i])) - static_cast<double>(want[i]), 2);
      norm += std::pow(static_cast<double>(want[i]), 2);
    }
    double const relative = std::sqrt(error / norm);
    return std::isfinite(relative) ? relative : 1e9;
  }

  /// Microseconds of one call: the slowest rank; median and spread over the repeats.
  template <class Finish>
  std::pair<double, double> time(std::function<void()> const& call, bool graph, Finish&& finish) {
    CudaGraph captured;
    if (graph) {
      call();
      finish();
      captured = CudaGraph(stream_, [&] {
        for (int i = 0; i < kCalls; ++i) call();
      });
    }
    auto const once = [&] {
      if (graph) {
        captured.launch(stream_);
      } else {
        for (int i = 0; i < kCalls; ++i) call();
      }
    };
    std::vector<double> us;
    int replays = 1;
    for (int repeat = -2; repeat < kRepeats; ++repeat) {
      host_.barrier({});
      once();  // ranks start together, so the timed part does not include another rank's first launch
      begin_.record(stream_);
      for (int i = 0; i < replays; ++i) once();
      end_.record(stream_);
      finish();
      double const slowest = worst_of(1e3 * static_cast<double>(end_.since(begin_)) / (kCalls * replays));
      if (repeat == -2) {
        replays = std::max(1, std::min(20, static_cast<int>(1e4 / (slowest * kCalls))));  // ten milliseconds
      } else if (repeat >= 0) {
        us.push_back(slowest);
      }
    }
    return median_and_spread(us);
  }

  comm::Mpi& host_;
  Nccl comm_;
  comm::Self<space::cuda> self_;
  Options options_;
  CudaStream stream_;
  CudaEvent begin_, end_;
  moe_bench::Report report_;
  bool good_ = true;
};

void set_option(Options& options, std::string const& key, std::string const& value) {
  known_name(
      "option", key,
      {"--shapes", "--schemes", "--tokens", "--backends", "--routing", "--like-ranks", "--blocks", "--column-blocks", "--turns", "--json"});
  if (key == "--shapes") {
    options.shapes = known_names(key, value, {"flash", "pro"});
  } else if (key == "--schemes") {
    options.schemes = known_names(key, value, {"fp8", "bf16"});
  } else if (key == "--tokens") {
    options.tokens = counts(key, value);
  } else if (key == "--backends") {
    options.backends = known_names(key, value, {"window", "fused", "completing", "both", "low_latency", "high_throughput", "all_to_all_v"});
  } else if (key == "--routing") {
    options.routing = value.find('/') == std::string::npos ? known_name(key, value, {"given", "softmax", "a folder with a /"}) : value;
  } else if (key == "--like-ranks") {
    options.like_ranks = count(key, value, 0);
  } else if (key == "--blocks") {
    options.blocks = count(key, value, 1);
  } else if (key == "--column-blocks") {
    options.column_blocks = count(key, value, 1);
  } else if (key == "--turns") {
    options.turns = count(key, value, 1);
  } else {
    options.json = value;
  }
}

}  // namespace

int main(int argc, char** argv) { return moe_bench::ranks_main<Bench, Options>(argc, argv, {"ep_layer_bench", kUsage}, set_option); }
