// SPDX-License-Identifier: Apache-2.0
// tests/capi/nccl_ranks.cpp: moe.h between GPUs, a process for each: every backend and scheme beside the definition, graphs, a rank without
// rows, bad input of one rank, a stream of another device, a rank that does not come. The program brings the id to its ranks itself,
// through a pipe: nccl_ranks [RANKS]. Exits with 77 (skipped) where the node has fewer GPUs. g++ compiles it. Not GoogleTest: the ranks
// must not part.
#include <cuda_runtime_api.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "tests/capi/on_gpu.hpp"
#include "tests/capi/tensors.hpp"

namespace {

using namespace moe_test;

constexpr int kSkipped = 77;
constexpr int kGroups = 2;  // ids that rank 0 makes
int failed = 0;
int rank = 0;
int ranks = 2;

void expect(bool holds, std::string const& what) {
  if (holds) return;
  ++failed;
  std::fprintf(stderr, "rank %d: %s: last error: %s\n", rank, what.c_str(), moe_last_error());
}
void expect_status(moe_status status, moe_status wanted, std::string const& what) {
  expect(status == wanted, what + ": " + moe_status_name(status) + ", expected " + moe_status_name(wanted));
}

template <class T>
Array<T> slice(Array<T>& all, std::int64_t first, std::int64_t count) {
  std::int64_t const rows = all.tensor().shape[1], cols = all.tensor().shape[2];
  Array<T> out({count, rows, cols});
  std::copy_n(all.values().begin() + first * rows * cols, count * rows * cols, out.values().begin());
  return out;
}

struct Case {
  char const* backend;
  char const* quantization;
  double tolerance;
};

/// This rank's experts, rows and runner.
template <class T>
struct Problem {
  Problem(moe_group_t group, Case const& c, std::int64_t experts)
      : sizes{.hidden = 256, .intermediate = 128, .experts = experts, .topk = 2, .tokens = 24 + 8 * rank}, arrays(sizes) {
    fill(arrays.hidden, 30 + rank, 1.0F);
    fill(arrays.logits, 40 + rank, 1.0F);
    std::int64_t const first = experts / ranks * rank + std::min<std::int64_t>(rank, experts % ranks);
    std::int64_t const count = experts / ranks + (rank < experts % ranks ? 1 : 0);
    if constexpr (std::is_same_v<T, moe::bf16>) {
      Quantized const all13(c.quantization, arrays.w13), all2(c.quantization, arrays.w2);
      wide13 = all13.wide, wide2 = all2.wide;
      Array<T> mine13 = slice(arrays.w13, first, count), mine2 = slice(arrays.w2, first, count);
      auto const q13 = std::make_shared<Quantized>(c.quantization, mine13), q2 = std::make_shared<Quantized>(c.quantization, mine2);
      weights.w13 = q13->codes->get(), weights.w2 = q2->codes->get();
      weights.w13_scale = q13->scale(), weights.w2_scale = q2->scale();
      kept = {q13, q2};
    } else {
      auto const wide = [](std::vector<T> const& values) {
        std::vector<float> out(values.size());
        std::transform(values.begin(), values.end(), out.begin(), [](T v) { return moe::to_float(v); });
        return out;
      };
      wide13 = wide(arrays.w13.values()), wide2 = wide(arrays.w2.values());
      Array<T> mine13 = slice(arrays.w13, first, count), mine2 = slice(arrays.w2, first, count);
      auto const d13 = std::make_shared<OnGpu>(mine13), d2 = std::make_shared<OnGpu>(mine2);
      weights.w13 = d13->get(), weights.w2 = d2->get();
      kept = {d13, d2};
    }
    config = arrays.config();
    config.max_tokens_per_rank = 24 + 8 * ranks;
    config.backend = c.backend;
    config.quantization = c.quantization;
    config.router = &router;
    router.renorm = "sum";
    expect_status(moe_runner_create(&config, &weights, group, &runner), MOE_OK, std::string("create ") + c.backend);
  }
  ~Problem() {
    cudaDeviceSynchronize();
    expect_status(moe_runner_destroy(runner), MOE_OK, "destroy");
  }
  Problem(Problem const&) = delete;
  Problem& operator=(Problem const&) = delete;
  /// The error of `output` against the definition with the ids and weights of `arrays`.
  double error(OnGpu& output) {
    output.read(arrays.output);
    return relative_error(arrays.output.values(),
                          reference(sizes, widened(arrays.hidden.values()), wide13, wide2, arrays.ids.values(), arrays.weights.values()));
  }
  Sizes sizes;
  LayerArrays<T> arrays;
  std::vector<float> wide13, wide2;
  std::vector<std::shared_ptr<void>> kept;
  moe_weights weights = MOE_WEIGHTS_INIT;
  moe_router_config router = MOE_ROUTER_CONFIG_INIT;
  moe_runner_config config{};
  moe_runner_t runner = nullptr;
};

template <class T>
void run(moe_group_t group, Case const& c, std::int64_t experts) {
  std::string const name = std::string(c.backend) + ", " + c.quantization + ", " + std::to_string(experts) + " experts";
  Problem<T> p(group, c, experts);
  if (p.runner == nullptr) return;
  OnGpu hidden(p.arrays.hidden), logits(p.arrays.logits), ids(p.arrays.ids), given(p.arrays.weights), output(p.arrays.output);
  moe::CudaStream const stream;
  cudaDeviceSynchronize();
  auto const routed = [&] {
    return moe_runner_forward_routed(p.runner, hidden.get(), ids.get(), given.get(), output.get(), nullptr, stream);
  };
  for (int repeat = 0; repeat < 3; ++repeat) {
    output.spoil();
    cudaDeviceSynchronize();
    expect_status(routed(), MOE_OK, name + ": forward_routed");
    expect_status(moe_runner_wait(p.runner, stream), MOE_OK, name + ": wait");
    double const error = p.error(output);
    expect(error < c.tolerance, name + ": error " + std::to_string(error));
  }

  // A router inside: the same ids and weights from moe_route() give the definition's output.
  expect_status(moe_runner_forward(p.runner, hidden.get(), logits.get(), output.get(), nullptr, stream), MOE_OK, name + ": forward");
  expect_status(moe_runner_wait(p.runner, stream), MOE_OK, name + ": wait");
  moe_router_config router = p.router;
  router.num_experts = p.config.num_experts, router.topk = p.config.topk;
  OnGpu own_ids(p.arrays.ids), own_weights(p.arrays.weights);
  expect_status(moe_route(&router, logits.get(), nullptr, own_ids.get(), own_weights.get(), nullptr), MOE_OK, name + ": route");
  cudaDeviceSynchronize();
  auto const callers_ids = p.arrays.ids.values();
  auto const callers_weights = p.arrays.weights.values();
  own_ids.read(p.arrays.ids);
  own_weights.read(p.arrays.weights);
  double const error = p.error(output);
  expect(error < c.tolerance, name + ": router inside: error " + std::to_string(error));
  p.arrays.ids.values() = callers_ids;
  p.arrays.weights.values() = callers_weights;

  // A graph of the call, replayed on all ranks.
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  expect(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess, name + ": capture");
  expect_status(routed(), MOE_OK, name + ": forward in a capture");
  expect(cudaStreamEndCapture(stream, &graph) == cudaSuccess, name + ": end of the capture");
  expect(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess, name + ": instantiate");
  for (int replay = 0; replay < 2; ++replay) {
    output.spoil();
    cudaDeviceSynchronize();
    expect(cudaGraphLaunch(executable, stream) == cudaSuccess, name + ": launch");
    expect_status(moe_runner_wait(p.runner, stream), MOE_OK, name + ": wait for a graph");
    double const replayed = p.error(output);
    expect(replayed < c.tolerance, name + ": graph: error " + std::to_string(replayed));
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);

  // The last rank has no rows in this call.
  std::int64_t const rows = rank == ranks - 1 ? 0 : p.sizes.tokens;
  for (OnGpu* array : {&hidden, &ids, &given, &output}) array->tensor().shape[0] = rows;
  expect_status(routed(), MOE_OK, name + ": a rank without rows");
  expect_status(moe_runner_wait(p.runner, stream), MOE_OK, name + ": wait");
  if (rows > 0) expect(p.error(output) < c.tolerance, name + ": beside a rank without rows");
  for (OnGpu* array : {&hidden, &ids, &given, &output}) array->tensor().shape[0] = p.sizes.tokens;

  // The last rank's hidden states have a wrong dtype: it gets E_ARG, the others E_PEER, within the deadline.
  bool const last = rank == ranks - 1;
  DLTensor const good = hidden.tensor();
  if (last) hidden.tensor().dtype.code = kDLInt;
  moe_status status = routed();
  if (!last && status == MOE_OK) status = moe_runner_wait(p.runner, stream);  // between GPUs the others may see it on the device
  expect_status(status, last ? MOE_E_ARG : MOE_E_PEER, name + ": a refused argument");
  hidden.tensor() = good;
}

/// What a rank refuses while the runner is made, the others hear.
void refuse(moe_group_t group) {
  Sizes const s{.hidden = 256, .intermediate = 128, .experts = ranks, .topk = 1, .tokens = 8};
  LayerArrays<moe::bf16> a(s, 1);
  OnGpu w13(a.w13), w2(a.w2);
  moe_weights weights = MOE_WEIGHTS_INIT;
  weights.w13 = w13.get(), weights.w2 = w2.get();
  moe_runner_config config = a.config();
  bool const last = rank == ranks - 1;
  config.activation = last ? "swish" : "silu";
  moe_runner_t runner = nullptr;
  expect_status(moe_runner_create(&config, &weights, group, &runner), last ? MOE_E_CONFIG : MOE_E_PEER, "a refused configuration");
  expect(runner == nullptr, "a runner after an error");
}

/// A stream of the next rank's GPU, for a runner of one rank on this GPU: E_ARG with both devices, and the runner goes on.
void foreign_stream() {
  int const there = (rank + 1) % ranks;
  std::string const text = "E_ARG: stream: is of cuda:" + std::to_string(there) + ", expected one of cuda:" + std::to_string(rank);
  auto const refused = [&](moe_status status, std::string const& what) {
    expect_status(status, MOE_E_ARG, "a stream of another device: " + what);
    expect(moe_last_error() == text, "a stream of another device: " + what + ": expected the text " + text);
    int current = -1;
    expect(cudaGetDevice(&current) == cudaSuccess && current == rank, "a stream of another device: " + what + ": the current device");
  };
  moe::check_cuda(cudaSetDevice(there), "cudaSetDevice");
  cudaStream_t foreign = nullptr;
  moe::check_cuda(cudaStreamCreate(&foreign), "cudaStreamCreate");
  moe::check_cuda(cudaSetDevice(rank), "cudaSetDevice");
  {
    Sizes const s{.hidden = 256, .intermediate = 128, .experts = 4, .topk = 2, .tokens = 8};
    LayerArrays<moe::bf16> a(s);
    OnGpu w13(a.w13), w2(a.w2), hidden(a.hidden), logits(a.logits), ids(a.ids), given(a.weights), output(a.output);
    moe_weights weights = MOE_WEIGHTS_INIT;
    weights.w13 = w13.get(), weights.w2 = w2.get();
    moe_router_config router = MOE_ROUTER_CONFIG_INIT;
    moe_runner_config config = a.config();
    config.router = &router;
    moe_group_t group = nullptr;
    moe_runner_t runner = nullptr;
    expect_status(moe_group_create_self(&group), MOE_OK, "group of one rank");
    expect_status(moe_runner_create(&config, &weights, group, &runner), MOE_OK, "runner of one rank");
    auto const routed = [&](void* stream) {
      return moe_runner_forward_routed(runner, hidden.get(), ids.get(), given.get(), output.get(), nullptr, stream);
    };
    moe::CudaStream const stream;
    output.spoil();
    cudaDeviceSynchronize();
    refused(routed(foreign), "forward_routed");
    refused(moe_runner_forward(runner, hidden.get(), logits.get(), output.get(), nullptr, foreign), "forward");
    refused(moe_runner_wait(runner, foreign), "wait");
    refused(moe_runner_weights_changed(runner, foreign), "weights_changed");
    refused(moe_stream_wait({kDLCUDA, rank}, foreign, 1000), "moe_stream_wait");
    expect_status(moe_stream_wait({kDLCUDA, there}, foreign, 1000), MOE_OK, "moe_stream_wait on the stream's own device");
    expect_status(routed(stream), MOE_OK, "a stream of its own device after a foreign one");
    expect_status(moe_runner_wait(runner, stream), MOE_OK, "wait after a foreign stream");
    output.read(a.output);
    double const error = relative_error(a.output.values(), reference(a));
    expect(error < 8e-3, "after a foreign stream: error " + std::to_string(error));
    expect_status(moe_runner_destroy(runner), MOE_OK, "destroy");
    expect_status(moe_group_destroy(group), MOE_OK, "group_destroy");
  }
  cudaStreamDestroy(foreign);
}

/// The last rank does not come to a call: within the group's deadline each of the others gets E_TIMEOUT, or E_PEER from one that was faster
/// to see it; either error names that rank.
void leave(moe_group_t group) {
  Problem<moe::bf16> p(group, {"low_latency", "none", 0}, 2 * ranks);
  if (p.runner == nullptr || rank == ranks - 1) {
    std::this_thread::sleep_for(std::chrono::seconds(8));
    return;
  }
  OnGpu hidden(p.arrays.hidden), ids(p.arrays.ids), given(p.arrays.weights), output(p.arrays.output);
  auto const start = std::chrono::steady_clock::now();
  moe_status status = moe_runner_forward_routed(p.runner, hidden.get(), ids.get(), given.get(), output.get(), nullptr, nullptr);
  if (status == MOE_OK) status = moe_runner_wait(p.runner, nullptr);
  double const seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::string const error = moe_last_error(), last = "rank " + std::to_string(ranks - 1);
  bool const waited = status == MOE_E_TIMEOUT && error.find(last + " did not arrive") != std::string::npos;
  bool const told = status == MOE_E_PEER && error.find(last + " is missing") != std::string::npos;
  expect(waited || told, std::string("a rank that does not come: ") + moe_status_name(status) + ", expected an error that names " + last);
  expect(seconds < 7.0, "the deadline of 3 s took " + std::to_string(seconds) + " s");
}

int rank_main(std::vector<std::array<std::uint8_t, MOE_NCCL_ID_BYTES>> const& ids) {
  std::int32_t r = -1, n = -1;
  moe_group_t group = nullptr, again = nullptr;
  expect_status(moe_group_create_nccl(ids[0].data(), rank, ranks, 20000, &group), MOE_OK, "group");
  if (group == nullptr) return 1;
  expect(moe_group_get_rank(group, &r, &n) == MOE_OK && r == rank && n == ranks, "rank and size");
  expect_status(moe_group_create_nccl(ids[0].data(), rank, ranks, 20000, &again), MOE_E_STATE, "an id that was used");
  for (char const* backend : {"all_to_all_v", "low_latency", "high_throughput"}) {
    run<moe::bf16>(group, {backend, "none", 8e-3}, 4 * ranks);
    run<moe::bf16>(group, {backend, "fp8_block128", 0.06}, 4 * ranks);
    for (char const* four_bits : {"int4_group32", "int4_group64", "int4_group128", "mxfp4_w4a16"}) {
      run<moe::bf16>(group, {backend, four_bits, 8e-3}, 4 * ranks);
    }
  }
  run<moe::bf16>(group, {"all_to_all_v", "fp8_per_token", 0.06}, 4 * ranks);
  run<moe::f16>(group, {"all_to_all_v", "none", 2e-3}, 4 * ranks);
  run<float>(group, {"all_to_all_v", "none", 1e-5}, 4 * ranks);
  run<moe::bf16>(group, {"all_to_all_v", "none", 8e-3}, 4 * ranks + 1);  // one rank has an expert more
  run<moe::bf16>(group, {"low_latency", "none", 8e-3}, 4 * ranks + 1);
  refuse(group);
  foreign_stream();
  expect_status(moe_group_destroy(group), MOE_OK, "group_destroy");
  expect_status(moe_group_destroy(group), MOE_E_STATE, "a group that was destroyed");

  group = nullptr;
  expect_status(moe_group_create_nccl(ids[1].data(), rank, ranks, 3000, &group), MOE_OK, "second group");
  if (group != nullptr) leave(group);
  return failed == 0 ? 0 : 1;
}

/// A rank's process. Rank 0 makes the ids and writes them for every other rank.
int child(std::vector<int> const& to_ranks, int from_zero) try {
  int devices = 0;
  bool const enough = cudaGetDeviceCount(&devices) == cudaSuccess && devices >= ranks && moe_has("nccl") != 0;
  if (!enough) {
    if (rank == 0) std::printf("skipped: %d GPUs and NCCL are needed, found %d GPUs\n", ranks, devices);
    return kSkipped;
  }
  moe::check_cuda(cudaSetDevice(rank), "cudaSetDevice");
  std::vector<std::array<std::uint8_t, MOE_NCCL_ID_BYTES>> ids(kGroups);
  std::size_t const bytes = ids.size() * MOE_NCCL_ID_BYTES;
  if (rank == 0) {
    for (auto& id : ids) expect_status(moe_nccl_get_id(id.data()), MOE_OK, "id");
    for (int pipe : to_ranks) expect(::write(pipe, ids.data(), bytes) == static_cast<ssize_t>(bytes), "write of the ids");
  } else {
    expect(::read(from_zero, ids.data(), bytes) == static_cast<ssize_t>(bytes), "read of the ids");
  }
  int const code = rank_main(ids);
  if (rank == 0 && code == 0) std::printf("%d ranks agree with the definition\n", ranks);
  return code;
} catch (std::exception const& error) {
  std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) ranks = std::atoi(argv[1]);
  if (ranks < 2 || ranks > 8) return 2;
  std::vector<int> to_ranks, from_zero{-1};
  for (int r = 1; r < ranks; ++r) {
    int ends[2];
    if (::pipe(ends) != 0) return 1;
    from_zero.push_back(ends[0]);
    to_ranks.push_back(ends[1]);
  }
  std::vector<pid_t> children;
  for (int r = 0; r < ranks; ++r) {  // before any call of CUDA
    pid_t const pid = ::fork();
    if (pid == 0) {
      rank = r;
      int const code = child(to_ranks, from_zero[static_cast<std::size_t>(r)]);
      std::fflush(nullptr);
      ::_exit(code);
    }
    children.push_back(pid);
  }
  int result = 0, left = ranks;
  auto const end = std::chrono::steady_clock::now() + std::chrono::seconds(90);
  while (left > 0) {
    int status = 0;
    pid_t const pid = ::waitpid(-1, &status, WNOHANG);
    if (pid > 0) {
      --left;
      int const code = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
      if (code == kSkipped ? result == 0 : code != 0) result = code;
    } else if (std::chrono::steady_clock::now() > end) {
      std::fprintf(stderr, "%d ranks did not end\n", left);
      for (pid_t c : children) ::kill(c, SIGKILL);
      return 1;
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  return result;
}
