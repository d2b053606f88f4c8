// SPDX-License-Identifier: Apache-2.0
// tests/gpu/eplb_device_serving.hpp: layers on the device that serve while their experts move, in any composition: every step's output
// against the same step without load balancing, and every expert slot's bytes against its expert's. Host C++ only.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <optional>
#include <thread>
#include <type_traits>
#include <vector>

#include "moe/activation/activation.hpp"
#include "moe/core/cuda_graph.hpp"
#include "moe/eplb/runtime_balancer.hpp"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/routing/softmax_topk.hpp"
#include "tests/gpu/on_hopper.hpp"
#include "tests/numbers.hpp"

namespace moe_test {

using namespace moe;
using eplb::ExpertMaps;
using eplb::MoveMode;

struct EplbConfig : LayerDefaults {
  static constexpr int hidden = 512, intermediate = 256, num_experts = 16, topk = 4;
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
};

/// Layers whose sizes are known when they are compiled. Other layers are a class with these members.
struct EplbFixedLayer {
  using Config = EplbConfig;
  using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
  int topk = EplbConfig::topk;
  template <class Params>
  void set(Params& p) const {
    p.router = {EplbConfig::num_experts, topk};
  }
};

/// A stream for the balancer's worker: see RuntimeBalancer::Params::worker_stream.
class WorkerStream {
 public:
  WorkerStream() {
    int least = 0, greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, std::max(greatest, least - 1)),
               "cudaStreamCreateWithPriority");
  }
  WorkerStream(WorkerStream const&) = delete;
  WorkerStream& operator=(WorkerStream const&) = delete;
  ~WorkerStream() { cudaStreamDestroy(stream_); }
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// What serves: a layer, or the block that Of builds around it: Of::Block<Layer>, a runner with its gate inside. Of then has
/// set_block(params, l) and gate(l), its weights [E, H] on the host.
template <class Of, class Layer>
struct ServedOf {
  using type = Layer;
};
template <class Of, class Layer>
  requires requires { typename Of::template Block<Layer>; }
struct ServedOf<Of, Layer> {
  using type = typename Of::template Block<Layer>;
};

/// What owns the experts: codes and scales, or, if there is Of::OwnStores, the experts' own store.
template <class Of, class Quant, class Experts>
struct StoreOf {
  using type = moe::experts::WeightStore<typename Of::Config, Quant, space::cuda>;
};
template <class Of, class Quant, class Experts>
  requires requires { typename Of::OwnStores; }
struct StoreOf<Of, Quant, Experts> {
  using type = moe::experts::StoreFor<Experts, typename Of::Config, Quant>;
};

/// A model of two layers with load balancing, or without.
template <class Quant, class Backend, class Experts, class Of, class WeightsComm, class Group>
class DeviceServing {
 public:
  using Layer = ModularKernel<typename Of::Config, typename Of::Router, Quant, Backend, Experts>;
  using Served = typename ServedOf<Of, Layer>::type;
  static constexpr bool kBlocks = !std::is_same_v<Served, Layer>;
  using Store = typename StoreOf<Of, Quant, Experts>::type;
  using Balancer = eplb::RuntimeBalancer<WeightsComm, Group>;
  using Tokens = typename Backend::Comm;
  static constexpr int kLayers = 2, kExperts = EplbConfig::num_experts, kHidden = EplbConfig::hidden, kTokens = 24;

  DeviceServing(Of const& of, Tokens& tokens, cudaStream_t stream)
      : of_(of), rank_(tokens.rank()), ranks_(tokens.size()), stream_(stream), slots_(kExperts / ranks_) {
    load(ExpertMaps::initial(kLayers, kExperts, 0));
    build(tokens);
  }
  DeviceServing(Of const& of, Tokens& tokens, cudaStream_t stream, WeightsComm& weights, Group& group,
                typename Balancer::Params const& params)
      : of_(of), rank_(tokens.rank()), ranks_(tokens.size()), stream_(stream), slots_(params.maps.num_physical() / ranks_) {
    load(params.maps);
    std::vector<eplb::LayerTensors> tensors;
    for (Store& store : stores_) tensors.push_back(eplb::expert_tensors(store));
    balancer_.emplace(weights, group, tensors, params);
    build(tokens);
  }
  /// Of one layer's experts of a rank.
  static std::int64_t buffer_bytes(int slots_per_rank) {
    return eplb::WeightMover<WeightsComm>::bytes_needed({eplb::expert_tensors(encoded())}, slots_per_rank);
  }
  Balancer& balancer() { return *balancer_; }
  Served& layer(int l) { return served_[static_cast<std::size_t>(l)]; }

  /// The inputs of a step, in the addresses of every step. Which experts are hot depends on the step.
  void bring(int step) {
    for (int l = 0; l < kLayers; ++l) {
      int const seed = 1000 * step + 100 * l + rank_;
      std::vector<float> const x = numbers(seed, kTokens * kHidden, 1.7F), z = numbers(seed + 50'000, kTokens * kExperts, 1.7F);
      std::vector<bf16> hidden(kTokens * kHidden);
      std::vector<float> logits(kTokens * kExperts);
      int const hot[] = {(step / 8 * 5 + l) % kExperts, (step / 8 * 7 + 3) % kExperts};
      for (std::size_t i = 0; i < x.size(); ++i) {
        float value = x[i];
        if constexpr (kBlocks) {  // along the gate's rows of the hot experts
          for (int const e : hot) value += 3.0F * of_.gate(l)[static_cast<std::size_t>(e) * kHidden + i % kHidden];
        }
        hidden[i] = from_float<bf16>(value);
      }
      for (std::size_t i = 0; i < logits.size(); ++i) {
        auto const e = static_cast<int>(i) % kExperts;
        logits[i] = z[i] + (e == hot[0] || e == hot[1] ? 3.0F : 0.0F);
      }
      // In stream order: a wait for the whole device would wait for the worker's collectives.
      auto& to_hidden = hidden_[static_cast<std::size_t>(l)];
      auto& to_logits = logits_[static_cast<std::size_t>(l)];
      Memory<space::cuda>::copy_from_host_async(to_hidden.data(), hidden.data(), static_cast<std::size_t>(to_hidden.bytes()), stream_);
      Memory<space::cuda>::copy_from_host_async(to_logits.data(), logits.data(), static_cast<std::size_t>(to_logits.bytes()), stream_);
    }
  }
  void forward() {
    for (std::size_t l = 0; l < kLayers; ++l) {
      if constexpr (kBlocks) {
        served_[l].forward(make_rows(static_cast<bf16 const*>(hidden_[l].data()), kTokens, kHidden),
                           make_rows(output_[l].data(), kTokens, kHidden), {}, stream_);
      } else {
        served_[l].forward(make_rows<Of::Config::hidden>(static_cast<bf16 const*>(hidden_[l].data()), kTokens, kHidden),
                           make_rows(static_cast<float const*>(logits_[l].data()), kTokens, kExperts),
                           make_rows<Of::Config::hidden>(output_[l].data(), kTokens, kHidden), {}, stream_);
      }
    }
  }
  /// Waits for the stream: outputs of both layers, [layers · T · H].
  std::vector<float> result() {
    std::vector<float> all;
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    for (std::size_t l = 0; l < kLayers; ++l) {
      served_[l].check();
      std::vector<bf16> out(kTokens * kHidden);
      Memory<space::cuda>::copy_to_host_async(out.data(), output_[l].data(), static_cast<std::size_t>(output_[l].bytes()), stream_);
      check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
      for (bf16 v : out) all.push_back(to_float(v));
    }
    return all;
  }
  /// "" if every expert slot holds the bytes of its expert.
  std::string wrong_slot() {
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    auto const want = eplb::expert_tensors(encoded());
    std::vector<unsigned char> a, b;
    for (int l = 0; l < kLayers; ++l) {
      auto const held = eplb::expert_tensors(stores_[static_cast<std::size_t>(l)]);
      for (int s = 0; s < slots_; ++s) {
        int const e = balancer_->maps().physical_to_logical()(l, rank_ * slots_ + s);
        for (std::size_t t = 0; t < held.size(); ++t) {
          a.resize(static_cast<std::size_t>(held[t].bytes));
          b.resize(a.size());
          Memory<space::cuda>::copy_to_host_async(a.data(), held[t].data + s * held[t].stride, a.size(), stream_);
          Memory<space::cuda>::copy_to_host_async(b.data(), want[t].data + (l * kExperts + e) * want[t].stride, b.size(), stream_);
          check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
          if (a != b) return text("layer ", l, ", expert slot ", s, ", expert ", e, ", ", held[t].name);
        }
      }
    }
    return "";
  }

 private:
  /// All experts of all layers, quantised once in this program.
  static Store& encoded() {
    static Store store = [] {
      Store all(kLayers * kExperts, EplbConfig::hidden, EplbConfig::intermediate, true);
      for (int e = 0; e < kLayers * kExperts; ++e) {
        all.set_expert(e, numbers(2 * e, 2 * EplbConfig::intermediate * EplbConfig::hidden, 0.08F).data(),
                       numbers(2 * e + 1, EplbConfig::hidden * EplbConfig::intermediate, 0.12F).data());
      }
      return all;
    }();
    return store;
  }
  void load(ExpertMaps const& maps) {
    for (int l = 0; l < kLayers; ++l) {
      stores_.emplace_back(slots_, EplbConfig::hidden, EplbConfig::intermediate, true);
      auto const from = eplb::expert_tensors(encoded());
      auto const to = eplb::expert_tensors(stores_.back());
      for (int s = 0; s < slots_; ++s) {
        int const e = l * kExperts + maps.physical_to_logical()(l, rank_ * slots_ + s);
        for (std::size_t t = 0; t < to.size(); ++t) {
          Memory<space::cuda>::copy_async(to[t].data + s * to[t].stride, from[t].data + e * from[t].stride,
                                          static_cast<std::size_t>(to[t].bytes), nullptr);
        }
      }
      check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      hidden_.emplace_back(kTokens * kHidden);
      output_.emplace_back(kTokens * kHidden);
      logits_.emplace_back(kTokens * kExperts);
    }
  }
  void build(Tokens& tokens) {
    for (int l = 0; l < kLayers; ++l) {
      typename Layer::Params p{.max_tokens_per_rank = kTokens,
                               .placement = balancer_ ? balancer_->placement(l) : ExpertPlacement(kExperts, ranks_)};
      of_.set(p);
      if (balancer_) {
        p.mapping = balancer_->mapping(l);
        p.load = balancer_->load(l);
      }
      if constexpr (kBlocks) {
        typename Served::Params block{.layer = p};
        of_.set_block(block, l);
        served_.emplace_back(tokens, stores_[static_cast<std::size_t>(l)].view(), block);
      } else {
        served_.emplace_back(tokens, stores_[static_cast<std::size_t>(l)].view(), p);
      }
      if (balancer_) balancer_->attach(l, served_.back());
    }
  }

  Of of_;
  int rank_, ranks_;
  cudaStream_t stream_;
  int slots_;
  std::deque<Store> stores_;
  std::deque<Buffer<bf16, space::cuda>> hidden_, output_;
  std::deque<Buffer<float, space::cuda>> logits_;
  std::optional<Balancer> balancer_;
  std::deque<Served> served_;
};

/// Outputs that differ by the order of their sums and the rounding of partial sums.
inline void expect_near_outputs(std::vector<float> const& got, std::vector<float> const& want, std::string const& when) {
  ASSERT_EQ(got.size(), want.size());
  float largest = 0;
  for (float v : want) largest = std::max(largest, std::abs(v));
  ASSERT_GT(largest, 0.0F);
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_LE(std::abs(got[i] - want[i]), 0.03F * largest) << when << ", value " << i << ": " << got[i] << ", " << want[i];
  }
}

/// Weights move by messages. Else Peers(bytes): spare buffers of that size in a window of the ranks.
struct ByMessages {
  eplb::PeerBuffers operator()(std::int64_t) const { return {}; }
};

/// Serves until experts have moved three times. (Some plans move none: two ranks whose hot experts lie apart are balanced already.) The
/// forward is captured once and replayed if `graphs`. same_bits: outputs must equal those without load balancing bit for bit.
template <class Quant, class Backend, class Experts, class Of = EplbFixedLayer, class Peers = ByMessages, class WeightsComm, class Group>
void expect_same_while_moving(typename Backend::Comm& tokens, WeightsComm& weights, Group& group, MoveMode mode, bool graphs,
                              Of const& of = {}, bool same_bits = false, Peers const& peers = {}) {
  using Model = DeviceServing<Quant, Backend, Experts, Of, WeightsComm, Group>;
  CudaStream stream;
  WorkerStream worker;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  std::string const what = text(Quant::kName, ", ", Backend::kName, ", ", Experts::kName, ", top ", of.topk, ", ", name(mode));
  Model plain(of, tokens, stream);
  ExpertMaps const maps = ExpertMaps::initial(Model::kLayers, Model::kExperts, (tokens.size() > 1 ? 2 : 4) * tokens.size());
  Model model(of, tokens, stream, weights, group,
              {.maps = maps,
               .options = {.window = 2, .step_interval = 4},
               .mode = mode,
               .mover = {.timeout_ms = 20'000, .peers = peers(Model::buffer_bytes(maps.num_physical() / weights.size()))},
               .timeout_ms = 20'000,
               .on_thread_start = [device] { check_cuda(cudaSetDevice(device), "cudaSetDevice"); },
               .worker_stream = worker});
  model.bring(0);
  model.forward();  // modules load outside the capture
  model.result();
  model.balancer().step({.is_dummy = true}, stream);
  CudaGraph graph;
  if (graphs) graph = CudaGraph(stream, [&] { model.forward(); });
  int finished = 0, committed = 0, before = 0;  // before: those that were committed when a move finished last
  for (int step = 0; step < 2000 && finished < 3; ++step) {
    int const input = step % 32;
    plain.bring(input);
    plain.forward();
    std::vector<float> const want = plain.result();
    model.bring(input);
    if (graphs) {
      graph.launch(stream);
    } else {
      model.forward();
    }
    auto const done = model.balancer().step({}, stream);  // before the forward is known to have ended
    std::vector<float> const got = model.result();
    expect_near_outputs(got, want, text(what, ", step ", step));
    if (same_bits) {
      EXPECT_EQ(got, want) << what << ", step " << step;
    }
    if (testing::Test::HasFatalFailure()) break;
    if (!done.committed_layers.empty()) {
      EXPECT_EQ(model.wrong_slot(), "") << what << ", step " << step;
      committed += static_cast<int>(done.committed_layers.size());
    }
    if (done.finished && committed > before) {
      ++finished;
      before = committed;
    }
    if (model.balancer().pending()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(finished, 3) << what;
  EXPECT_GT(committed, 0) << what;
  EXPECT_GT(model.balancer().stats().slots_changed, 0) << what;
}

}  // namespace moe_test
