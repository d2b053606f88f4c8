// SPDX-License-Identifier: Apache-2.0
// tests/gpu/capi_test.cu: moe.h over libmoe in the CUDA space: every scheme beside the definition, streams, graphs, packed weights,
// routing, groups over NCCL.
// moe-alone: libmoe has kernels of its own.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "moe/core/buffer.hpp"
#include "moe/core/cuda_space.hpp"
#include "tests/capi/handles.hpp"
#include "tests/capi/on_gpu.hpp"
#include "tests/capi/tensors.hpp"
#include "tests/gpu/on_hopper.hpp"

namespace {

using namespace moe_test;

/// Waits for the device before the C handles are destroyed.
struct GpuHandles : Handles {
  ~GpuHandles() { cudaDeviceSynchronize(); }
};

/// A layer's arrays on the GPU beside those on the host, and the calls on them. Members of moe.h are the test's to change.
struct GpuLayer {
  GpuLayer() {
    weights.w13 = w13.get();
    weights.w2 = w2.get();
  }
  /// A router that renormalises, for config.router.
  moe_router_config router_config() const {
    moe_router_config router = MOE_ROUTER_CONFIG_INIT;
    router.renorm = "sum";
    return router;
  }
  moe_status create(moe_group_t group, moe_runner_t* runner) const { return moe_runner_create(&config, &weights, group, runner); }
  moe_status forward(moe_runner_t runner, cudaStream_t stream) const {
    return moe_runner_forward(runner, hidden.get(), logits.get(), output.get(), nullptr, stream);
  }
  moe_status forward_routed(moe_runner_t runner, cudaStream_t stream) const {
    return moe_runner_forward_routed(runner, hidden.get(), ids.get(), given.get(), output.get(), nullptr, stream);
  }
  /// The routing of `logits` into ids and given, with the sizes of the configuration.
  moe_status route(moe_router_config router, cudaStream_t stream) const {
    router.num_experts = config.num_experts;
    router.topk = config.topk;
    return moe_route(&router, logits.get(), nullptr, ids.get(), given.get(), stream);
  }
  void read_routing() {
    ids.read(host.ids);
    given.read(host.weights);
  }
  /// Of the output, read into host.output, from the layer's definition with the routing in `host`.
  double error() {
    output.read(host.output);
    return relative_error(host.output.values(), reference(host));
  }

  LayerArrays<moe::bf16> host;
  OnGpu w13{host.w13}, w2{host.w2}, hidden{host.hidden}, logits{host.logits}, ids{host.ids}, given{host.weights}, output{host.output};
  moe_runner_config config = host.config();
  moe_weights weights = MOE_WEIGHTS_INIT;
};

/// A graph of the calls on a stream, captured in the mode that torch uses. A test that ends early ends the capture.
class Graph {
 public:
  explicit Graph(cudaStream_t stream) : stream_(stream) {
    moe::check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  }
  ~Graph() {
    if (graph_ == nullptr) cudaStreamEndCapture(stream_, &graph_);
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
    cudaGetLastError();
  }
  Graph(Graph const&) = delete;
  Graph& operator=(Graph const&) = delete;
  /// Ends the capture. Throws if a call has broken it.
  void end() {
    moe::check_cuda(cudaStreamEndCapture(stream_, &graph_), "cudaStreamEndCapture");
    moe::check_cuda(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
  }
  std::size_t num_nodes() const {
    std::size_t n = 0;
    moe::check_cuda(cudaGraphGetNodes(graph_, nullptr, &n), "cudaGraphGetNodes");
    return n;
  }
  /// Runs it and waits.
  void launch() {
    moe::check_cuda(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch");
    moe::check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

/// The status, and a part of the text.
void expect_refused(moe_status status, moe_status expected, char const* part) {
  EXPECT_EQ(status, expected);
  EXPECT_NE(std::string(moe_last_error()).find(part), std::string::npos) << moe_last_error();
}

struct Case {
  char const* quantization;
  char const* experts;  // null: the fastest of the device
  double tolerance;
};
class CapiOnGpu : public testing::TestWithParam<Case> {};

TEST_P(CapiOnGpu, ForwardRouted) {
  auto const [scheme, experts, tolerance] = GetParam();
  if (experts != nullptr && std::string(experts).starts_with("hopper") && !on_hopper()) GTEST_SKIP() << "needs a Hopper GPU";
  Sizes const s{.hidden = 256, .intermediate = 256, .experts = 8, .topk = 2, .tokens = 48};
  LayerArrays<moe::bf16> a(s);
  Quantized const w13(scheme, a.w13);
  Quantized const w2(scheme, a.w2);
  moe_runner_config config = a.config();
  config.quantization = scheme;
  config.experts = experts;
  moe_weights weights = MOE_WEIGHTS_INIT;
  weights.w13 = w13.codes->get();
  weights.w2 = w2.codes->get();
  weights.w13_scale = w13.scale();
  weights.w2_scale = w2.scale();
  GpuHandles h;
  ASSERT_OK(moe_runner_create(&config, &weights, h.group, &h.runner));
  moe_runner_info info = MOE_RUNNER_INFO_INIT;
  ASSERT_OK(moe_runner_get_info(h.runner, &info));
  EXPECT_EQ(info.device.device_type, kDLCUDA);
  if (experts != nullptr) {
    EXPECT_STREQ(info.experts, experts);
  }
  if (info.weights_packed == 1) {  // the caller's arrays are free
    for (OnGpu* array : {w13.codes.get(), w2.codes.get(), w13.scales.get(), w2.scales.get()}) {
      if (array != nullptr) array->spoil();
    }
  }

  moe::CudaStream const stream;
  OnGpu hidden(a.hidden);
  OnGpu ids(a.ids);
  OnGpu given(a.weights);
  OnGpu output(a.output);
  output.spoil();
  cudaDeviceSynchronize();
  ASSERT_OK(moe_runner_forward_routed(h.runner, hidden.get(), ids.get(), given.get(), output.get(), nullptr, stream));
  ASSERT_OK(moe_runner_wait(h.runner, stream));
  output.read(a.output);
  std::vector<double> const expected = reference(s, widened(a.hidden.values()), w13.wide, w2.wide, a.ids.values(), a.weights.values());
  EXPECT_LT(relative_error(a.output.values(), expected), tolerance);

  // The same call captured in a graph.
  Graph graph(stream);
  ASSERT_OK(moe_runner_forward_routed(h.runner, hidden.get(), ids.get(), given.get(), output.get(), nullptr, stream));
  graph.end();
  output.spoil();
  cudaDeviceSynchronize();
  graph.launch();
  std::vector<float> const first = widened(a.output.values());
  output.read(a.output);
  EXPECT_EQ(widened(a.output.values()), first);

  // A slot that is no expert: found by the kernels, reported after the stream.
  a.ids[5] = 99;
  ids.write(a.ids);
  EXPECT_OK(moe_runner_forward_routed(h.runner, hidden.get(), ids.get(), given.get(), output.get(), nullptr, stream));
  EXPECT_EQ(moe_runner_wait(h.runner, stream), MOE_E_ARG);
  EXPECT_NE(std::string(moe_last_error()).find("topk_ids[2, 1]: 99"), std::string::npos) << moe_last_error();
  EXPECT_OK(moe_runner_check(h.runner));
}
INSTANTIATE_TEST_SUITE_P(Schemes, CapiOnGpu,
                         testing::Values(Case{"none", nullptr, 8e-3}, Case{"none", "hopper_contiguous", 8e-3},
                                         Case{"none", "cuda_reference", 8e-3}, Case{"fp8_block128", "hopper_contiguous", 0.06},
                                         Case{"fp8_block128", "cuda_reference", 0.06}, Case{"fp8_per_token", "hopper_contiguous", 0.06},
                                         Case{"fp8_per_token", "cuda_reference", 0.06}, Case{"int4_group32", nullptr, 8e-3},
                                         Case{"int4_group32", "hopper_w4a16", 8e-3}, Case{"int4_group32", "cuda_reference", 8e-3},
                                         Case{"int4_group64", "hopper_w4a16", 8e-3}, Case{"int4_group128", "hopper_w4a16", 8e-3},
                                         Case{"int4_group128", "cuda_reference", 8e-3}, Case{"mxfp4_w4a16", "hopper_w4a16", 8e-3},
                                         Case{"mxfp4_w4a16", "cuda_reference", 8e-3}, Case{"int4_group128_zero", "hopper_w4a16", 8e-3},
                                         Case{"nvfp4_w4a16", "hopper_w4a16", 8e-3}, Case{"int8_per_channel", "hopper_w8a16", 8e-3},
                                         Case{"int8_per_token", "hopper_contiguous", 0.02}, Case{"mxfp4_fp8", "hopper_w4a8", 0.06},
                                         Case{"int4_group32_fp8", "hopper_w4a8", 0.06}, Case{"int4_group64_fp8", "hopper_w4a8", 0.06},
                                         Case{"int4_group128_fp8", "hopper_w4a8", 0.06},
                                         Case{"int4_group128_zero_fp8", "hopper_w4a8", 0.06}, Case{"mxfp8", "cuda_reference", 0.06},
                                         Case{"mxfp8", nullptr, 0.06}, Case{"mxfp8", "hopper_w8a16", 0.06},
                                         Case{"fp8_per_channel", "hopper_w8a16", 8e-3}, Case{"mxfp8_w8a16", "hopper_w8a16", 8e-3}));

/// hopper_w4a8 are the only experts of the scheme on a GPU.
TEST(CapiOnGpu, Mxfp4UnderFp8RowsOfEveryActivation) {
  if (!on_hopper()) GTEST_SKIP() << "needs a Hopper GPU";
  GpuLayer a;
  Quantized const w13("mxfp4_fp8", a.host.w13);
  Quantized const w2("mxfp4_fp8", a.host.w2);
  a.config.quantization = "mxfp4_fp8";
  a.weights.w13 = w13.codes->get();
  a.weights.w2 = w2.codes->get();
  a.weights.w13_scale = w13.scale();
  a.weights.w2_scale = w2.scale();
  for (char const* activation : {"silu", "gelu"}) {
    for (int const on_input : {0, 1}) {
      a.config.activation = activation;
      a.config.weight_on_input = on_input;
      GpuHandles h;
      ASSERT_OK(a.create(h.group, &h.runner));
      moe_runner_info info = MOE_RUNNER_INFO_INIT;
      ASSERT_OK(moe_runner_get_info(h.runner, &info));
      EXPECT_STREQ(info.experts, "hopper_w4a8");
    }
  }
  GpuHandles h;
  a.config.experts = "hopper_w4a16";
  expect_refused(a.create(h.group, &h.runner), MOE_E_CONFIG, "experts: \"hopper_w4a16\"");
}

TEST(CapiOnGpu, RouterAndBadInput) {
  GpuLayer a;
  moe_router_config const router = a.router_config();
  a.config.router = &router;
  GpuHandles h;
  ASSERT_OK(a.create(h.group, &h.runner));
  ASSERT_OK(a.forward(h.runner, nullptr));
  ASSERT_OK(a.route(router, nullptr));
  ASSERT_OK(moe_runner_wait(h.runner, nullptr));
  a.read_routing();
  EXPECT_LT(a.error(), 8e-3);

  auto const refused = [&](DLTensor const* hidden, char const* part) {
    expect_refused(moe_runner_forward(h.runner, hidden, a.logits.get(), a.output.get(), nullptr, nullptr), MOE_E_ARG, part);
  };
  refused(&a.host.hidden, "hidden: device is cpu");
  refused(a.output.get(), "output: its memory overlaps that of hidden");
  OnGpu odd(a.host.hidden);
  odd.tensor().byte_offset = 2;
  refused(odd.get(), "16 bytes");
  odd.tensor().device.device_id = 7;
  refused(odd.get(), "hidden: device is cuda:7");
  moe_runner_t runner = nullptr;
  a.weights.w2 = &a.host.w2;
  expect_refused(a.create(h.group, &runner), MOE_E_ARG, "w2: device is cpu");
  a.weights.w2 = a.w2.get();
  a.config.experts = "onednn";
  expect_refused(a.create(h.group, &runner), MOE_E_CONFIG, "onednn");
}

TEST(CapiOnGpu, Capture) {
  GpuLayer a;
  OnGpu other(a.host.output);
  moe_router_config const router = a.router_config();
  a.config.experts = "cuda_reference";  // has a copy of the weights
  a.config.router = &router;
  GpuHandles h;
  ASSERT_OK(a.create(h.group, &h.runner));
  moe::CudaStream const stream;
  moe::CudaStream const beside;
  auto run = [&] {
    ASSERT_OK(moe_runner_weights_changed(h.runner, stream));
    ASSERT_OK(a.forward(h.runner, stream));
    ASSERT_OK(a.route(router, stream));
  };
  run();
  ASSERT_OK(moe_runner_wait(h.runner, stream));
  a.read_routing();
  EXPECT_LT(a.error(), 8e-3);
  std::vector<float> const first = widened(a.host.output.values());

  // What may be captured, and between it what is refused and leaves the capture as it is.
  Graph graph(stream);
  run();
  if (HasFatalFailure()) return;
  expect_refused(moe_runner_wait(h.runner, stream), MOE_E_STATE, "moe_runner_wait()");
  expect_refused(moe_experts(&a.config, &a.weights, a.hidden.get(), a.ids.get(), a.given.get(), a.output.get(), stream), MOE_E_STATE,
                 "moe_experts()");
  expect_refused(moe_runner_forward(h.runner, &a.host.hidden, a.logits.get(), a.output.get(), nullptr, stream), MOE_E_ARG,
                 "hidden: device is cpu");
  EXPECT_OK(moe_runner_check(h.runner));
  // On a stream that is not captured.
  EXPECT_OK(moe_runner_forward(h.runner, a.hidden.get(), a.logits.get(), other.get(), nullptr, beside));
  graph.end();
  Graph alone(stream);
  run();
  if (HasFatalFailure()) return;
  alone.end();
  EXPECT_EQ(graph.num_nodes(), alone.num_nodes());
  ASSERT_OK(moe_runner_wait(h.runner, beside));
  other.read(a.host.output);
  EXPECT_EQ(widened(a.host.output.values()), first);
  a.output.spoil();
  a.ids.spoil();
  cudaDeviceSynchronize();
  graph.launch();
  a.output.read(a.host.output);
  EXPECT_EQ(widened(a.host.output.values()), first);
  std::vector<std::int32_t> const chosen = a.host.ids.values();
  a.ids.read(a.host.ids);
  EXPECT_EQ(a.host.ids.values(), chosen);

  // The graph reads the weights again.
  for (moe::bf16& w : a.host.w2.values()) w = moe::bf16{};
  a.w2.write(a.host.w2);
  graph.launch();
  a.output.read(a.host.output);
  EXPECT_EQ(widened(a.host.output.values()), std::vector<float>(first.size(), 0.0F));
}

TEST(CapiOnGpu, ErrorsOfOthers) {
  GpuLayer a;
  GpuHandles h;
  ASSERT_OK(a.create(h.group, &h.runner));
  void* memory = nullptr;
  ASSERT_NE(cudaMalloc(&memory, std::size_t{1} << 60), cudaSuccess);  // the program's error is none of the next call
  EXPECT_OK(a.forward_routed(h.runner, nullptr));
  ASSERT_OK(moe_runner_wait(h.runner, nullptr));

  // A capture that another call has broken: an error, and neither the program's next call nor the runner's is touched.
  moe::CudaStream const stream;
  {
    Graph graph(stream);
    EXPECT_NE(cudaStreamSynchronize(stream), cudaSuccess);
    cudaGetLastError();  // the program's own: libmoe has a CUDA runtime of its own, whose errors are others
    EXPECT_EQ(a.forward_routed(h.runner, stream), MOE_E_CUDA) << moe_last_error();
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
    EXPECT_THROW(graph.end(), moe::Error);
  }
  EXPECT_OK(a.forward_routed(h.runner, stream));
  ASSERT_OK(moe_runner_wait(h.runner, stream));
  EXPECT_LT(a.error(), 8e-3);
}

/// The exchange of one rank over NCCL, for each scheme whose rows or weights are not those of none and fp8_block128.
TEST(CapiOnGpu, OneRankOverNccl) {
  if (moe_has("nccl") == 0 || !on_hopper()) GTEST_SKIP() << "needs NCCL and a Hopper GPU";
  std::uint8_t id[MOE_NCCL_ID_BYTES];
  Handles h;
  ASSERT_OK(moe_nccl_get_id(id));
  ASSERT_OK(moe_group_destroy(h.group));
  ASSERT_OK(moe_group_create_nccl(id, 0, 1, 20000, &h.group));
  for (Case const c : {Case{"fp8_per_token", "hopper_contiguous", 0.06}, Case{"int4_group32", "hopper_w4a16", 8e-3},
                       Case{"int4_group128", "hopper_w4a16", 8e-3}, Case{"mxfp4_w4a16", "hopper_w4a16", 8e-3}}) {
    Sizes const s{.hidden = 256, .intermediate = 256, .experts = 8, .topk = 2, .tokens = 48};
    LayerArrays<moe::bf16> a(s);
    Quantized const w13(c.quantization, a.w13);
    Quantized const w2(c.quantization, a.w2);
    moe_runner_config config = a.config();
    config.quantization = c.quantization;
    config.backend = "all_to_all_v";
    moe_weights weights = MOE_WEIGHTS_INIT;
    weights.w13 = w13.codes->get();
    weights.w2 = w2.codes->get();
    weights.w13_scale = w13.scale();
    weights.w2_scale = w2.scale();
    moe_runner_t runner = nullptr;
    ASSERT_OK(moe_runner_create(&config, &weights, h.group, &runner)) << c.quantization;
    moe_runner_info info = MOE_RUNNER_INFO_INIT;
    EXPECT_OK(moe_runner_get_info(runner, &info));
    EXPECT_STREQ(info.experts, c.experts);
    OnGpu hidden(a.hidden);
    OnGpu ids(a.ids);
    OnGpu given(a.weights);
    OnGpu output(a.output);
    output.spoil();
    EXPECT_OK(moe_runner_forward_routed(runner, hidden.get(), ids.get(), given.get(), output.get(), nullptr, nullptr));
    EXPECT_OK(moe_runner_wait(runner, nullptr));
    output.read(a.output);
    EXPECT_LT(
        relative_error(a.output.values(), reference(s, widened(a.hidden.values()), w13.wide, w2.wide, a.ids.values(), a.weights.values())),
        c.tolerance)
        << c.quantization;
    EXPECT_OK(moe_runner_destroy(runner));
  }
}

TEST(CapiOnGpu, NcclIds) {
  std::uint8_t id[MOE_NCCL_ID_BYTES];
  moe_group_t group = nullptr;
  moe_group_t again = nullptr;
  if (moe_has("nccl") == 0) GTEST_SKIP() << "built without NCCL";
  ASSERT_OK(moe_nccl_get_id(id));
  ASSERT_OK(moe_group_create_nccl(id, 0, 1, 20000, &group));
  EXPECT_EQ(moe_group_create_nccl(id, 0, 1, 20000, &again), MOE_E_STATE);
  EXPECT_NE(std::string(moe_last_error()).find("id: "), std::string::npos);

  if (on_hopper()) {  // one rank over NCCL
    GpuLayer a;
    a.config.backend = "all_to_all_v";
    moe_runner_t runner = nullptr;
    ASSERT_OK(a.create(group, &runner));
    EXPECT_OK(a.forward_routed(runner, nullptr));
    EXPECT_OK(moe_runner_wait(runner, nullptr));
    EXPECT_LT(a.error(), 8e-3);
    EXPECT_OK(moe_runner_destroy(runner));

    // So many rows that the exchange reads their counts on the host: refused under a capture, before anything is enqueued.
    a.config.max_tokens_per_rank = 1 << 17;
    ASSERT_OK(a.create(group, &runner));
    moe::CudaStream const stream;
    EXPECT_OK(a.forward_routed(runner, stream));
    EXPECT_OK(moe_runner_wait(runner, stream));
    {
      Graph graph(stream);
      expect_refused(a.forward_routed(runner, stream), MOE_E_STATE, "reads the counts of rows on the host");
      graph.end();
      EXPECT_EQ(graph.num_nodes(), 0);
    }
    EXPECT_OK(a.forward_routed(runner, stream));
    EXPECT_OK(moe_runner_wait(runner, stream));
    EXPECT_OK(moe_runner_destroy(runner));
  }
  EXPECT_OK(moe_group_destroy(group));
}

}  // namespace
