// SPDX-License-Identifier: Apache-2.0
// tests/gpu/exchange_window_layers_test.cu: OneSided, TwoSided and Pplx between ranks that share one GPU give the same bits as the
// policies' host protocols between threads, and whole layers with them equal a layer on one host rank.
// moe-alone: it has suites of the same names as exchange_window_test.
#include <gtest/gtest.h>

#include <barrier>
#include <thread>

#include "moe/activation/activation.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/backends/window/host/one_sided.hpp"
#include "moe/backends/window/host/pplx.hpp"
#include "moe/backends/window/host/two_sided.hpp"
#include "moe/comm/host_window.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/reference.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/fp8_group128.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/softmax_topk.hpp"
#include "tests/gpu/exchange_policy_ranks.cuh"
#include "tests/gpu/shared_gpu.cuh"
#include "tests/multigpu/window_harness.cuh"

namespace moe_test {

// Ranks of a layer that share this GPU, as a communicator and a window.

struct SharedPart {
  int ranks = 1;
  std::unique_ptr<moe::comm::SimulatedPeers> peers;
};
struct SharedComm {
  SharedPart* shared = nullptr;
  int me = 0;
  int rank() const { return me; }
  int size() const { return shared->ranks; }
};
class SharedWindow {
 public:
  using Space = moe::space::cuda;
  using Comm = SharedComm;
  struct Params {};
  SharedWindow(SharedComm& comm, std::int64_t user_bytes, Params const&) : comm_(comm) {
    if (comm.shared->peers == nullptr) {
      comm.shared->peers = std::make_unique<moe::comm::SimulatedPeers>(comm.size(), user_bytes, kTimeout);
    }
  }
  int rank() const { return comm_.me; }
  int size() const { return comm_.size(); }
  std::int64_t bytes() const { return comm_.shared->peers->bytes(); }
  void* peer(int r, std::int64_t offset) const { return view().peer[r] + offset; }
  moe::comm::WindowView const& view() const { return comm_.shared->peers->view(comm_.me); }
  void check() const { comm_.shared->peers->check(comm_.me); }

 private:
  SharedComm comm_;
};

}  // namespace moe_test

namespace {

using namespace moe_test;

// ---- The host protocols of the same policies, between threads of this process.

class ThreadRanks {
 public:
  explicit ThreadRanks(int ranks) : barrier_(ranks), parts_(static_cast<std::size_t>(ranks)), in_(parts_.size()) {}
  int size() const { return static_cast<int>(parts_.size()); }
  void meet() { barrier_.arrive_and_wait(); }
  std::vector<void const*>& in() { return in_; }
  char* part(int r, std::size_t bytes) {
    auto& p = parts_[static_cast<std::size_t>(r)];
    p.assign(bytes / sizeof(Line) + 1, Line{});
    return reinterpret_cast<char*>(p.data());
  }
  char* part(int r) { return reinterpret_cast<char*>(parts_[static_cast<std::size_t>(r)].data()); }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::barrier<> barrier_;
  std::vector<std::vector<Line>> parts_;
  std::vector<void const*> in_;
};
class ThreadComm {
 public:
  using Space = moe::space::host;
  ThreadComm(ThreadRanks& all, int rank) : all_(&all), rank_(rank) {}
  int rank() const { return rank_; }
  int size() const { return all_->size(); }
  ThreadRanks& ranks() const { return *all_; }
  void all_gather(void const* in, std::int64_t n, void* out, moe::HostStream) const {
    all_->in()[static_cast<std::size_t>(rank_)] = in;
    all_->meet();
    for (int r = 0; r < size(); ++r) {
      std::memcpy(static_cast<char*>(out) + r * n, all_->in()[static_cast<std::size_t>(r)], static_cast<std::size_t>(n));
    }
    all_->meet();
  }

 private:
  ThreadRanks* all_;
  int rank_;
};
class ThreadWindow : public moe::comm::HostWindow {
 public:
  using Comm = ThreadComm;
  struct Params {};
  ThreadWindow(ThreadComm& comm, std::int64_t user_bytes, Params const&) {
    auto const bytes = static_cast<std::size_t>(user_bytes) + moe::comm::kWindowControlBytes;
    auto& ranks = comm.ranks();
    ranks.part(comm.rank(), bytes);
    ranks.meet();
    std::vector<char*> parts;
    for (int r = 0; r < comm.size(); ++r) {
      parts.push_back(ranks.part(r));
    }
    attach(parts.data(), comm.rank(), comm.size(), bytes, 20'000);
    ranks.meet();
    meet();
  }
};

struct Config : moe::LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  using Activation = moe::activation::Silu;
};

/// The identity experts of the device tests, on the host.
template <class Exchange, class Quant>
void host_experts(Exchange& exchange, auto const& tokens, std::int64_t hidden) {
  std::vector<float> row(static_cast<std::size_t>(hidden));
  auto y = exchange.expert_output();
  if constexpr (requires { tokens.expert_num_tokens; }) {
    for (std::int64_t e = 0; e < tokens.rows.extent(0); ++e) {
      for (std::int64_t i = 0; i < tokens.expert_num_tokens(e); ++i) {
        Quant{}.template dequantize_row<bf16>(moe::row_ptr(tokens.rows, e, i), moe::row_ptr(tokens.scales, e, i), hidden, row.data());
        std::transform(row.begin(), row.end(), moe::row_ptr(y, e, i), [](float v) { return moe::from_float<bf16>(v); });
      }
    }
  } else {
    for (std::int64_t t = 0; t < y.extent(0); ++t) {
      Quant{}.template dequantize_row<bf16>(moe::row_ptr(tokens.rows, t), moe::row_ptr(tokens.scales, t), hidden, row.data());
      for (std::int64_t h = 0; h < hidden; ++h) {
        float sum = 0.0F;
        for (std::int64_t j = 0; j < tokens.topk_ids.extent(1); ++j) {
          if (tokens.topk_ids(t, j) >= 0) {
            float const value = moe::to_float(moe::from_float<bf16>(row[static_cast<std::size_t>(h)]));
            sum = std::fma(tokens.topk_weights(t, j), value, sum);
          }
        }
        y(t, h) = moe::from_float<bf16>(sum);
      }
    }
  }
}

/// Weights of few bits: products are exact, so fused and separate arithmetic agree.
void round_weights(RankTokens& t, RankBuffers& b) {
  for (float& w : t.weights) {
    w = std::ceil(w * 16.0F) / 16.0F;
  }
  if (t.tokens > 0) {
    moe::check_cuda(cudaMemcpy(const_cast<float*>(b.in.weights), t.weights.data(), t.weights.size() * 4, cudaMemcpyHostToDevice), "copy");
  }
}
/// The outputs of identity experts through the host protocol, for the tokens of every rank.
template <template <class> class Backend, class Quant>
std::vector<std::vector<bf16>> host_outputs(std::vector<RankTokens> const& brought, int hidden, int topk, int max_tokens,
                                            moe::ExpertPlacement const& placement) {
  using Exchange = typename Backend<ThreadWindow>::template Exchange<Config, Quant, bf16>;
  int const size = static_cast<int>(brought.size());
  ThreadRanks ranks(size);
  std::vector<std::vector<bf16>> outs(brought.size());
  std::vector<std::string> errors(outs.size());
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      try {
        ThreadComm comm(ranks, r);
        moe::Arena<moe::space::host> arena;
        moe::Shape<Config> const shape(
            moe::LayerShape{.hidden = hidden, .intermediate = 128, .num_experts = placement.num_logical(), .topk = topk});
        Exchange exchange(comm, shape, max_tokens, placement, Quant{}, {}, arena);
        auto const& t = brought[static_cast<std::size_t>(r)];
        auto& out = outs[static_cast<std::size_t>(r)];
        out.resize(t.x.size());
        auto const tokens =
            exchange.prepare({moe::make_rows(reinterpret_cast<bf16 const*>(t.x.data()), t.tokens, hidden),
                              moe::make_rows(t.ids.data(), t.tokens, topk), moe::make_rows(t.weights.data(), t.tokens, topk)},
                             {});
        host_experts<Exchange, Quant>(exchange, tokens, hidden);
        exchange.finalize(moe::make_rows(out.data(), t.tokens, hidden), {});
        ranks.meet();
      } catch (std::exception const& e) {
        errors[static_cast<std::size_t>(r)] = e.what();
      }
    });
  }
  for (auto& t : threads) {
    t.join();
  }
  for (auto const& e : errors) EXPECT_EQ(e, "");
  return outs;
}
void expect_same_bits(std::vector<std::uint16_t> const& got, std::vector<bf16> const& wanted, int rank) {
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t h = 0; h < got.size(); ++h) {
    ASSERT_EQ(bf16_value(got[h]), moe::to_float(wanted[h])) << "rank " << rank << " element " << h;
  }
}

template <template <class> class Backend, class Peer, class Quant>
void equals_host_protocol(bool fp8) {
  Case const c{3, 21, 512, 4, 12, fp8, Routing::duplicates};
  PeerRun<Peer> run(c);
  run.bring(1);
  std::vector<RankTokens> brought;
  for (int r = 0; r < c.ranks; ++r) {
    round_weights(run.tokens(r), run.buffer(r));
    brought.push_back(run.tokens(r));
  }
  run.round(0);
  run.group().synchronize_and_check();
  auto const wanted = host_outputs<Backend, Quant>(brought, c.hidden, c.topk, c.max_tokens, moe::ExpertPlacement(c.experts, c.ranks));
  for (int r = 0; r < c.ranks; ++r) expect_same_bits(run.buffer(r).out.host(), wanted[static_cast<std::size_t>(r)], r);
}
/// The policy on the device and on the host with an expert placement that both take.
template <template <class> class Backend, class Quant>
void placements_equal_host_protocol(std::vector<moe::ExpertPlacement> const& placements) {
  for (auto const& placement : placements) {
    SCOPED_TRACE(placement.report());
    int const ranks = placement.ep_size();
    RankSizes const s{.ranks = ranks, .max_tokens = 20, .topk = 3, .experts = placement.num_physical(), .placement = placement};
    typename Backend<SimulatedWindow>::Params params;
    params.window = {kTimeout};
    Ranks<Backend<SimulatedWindow>, Quant> run(s, params);
    for (unsigned seed = 1; seed < 4; ++seed) {
      run.bring(seed, seed == 2 ? Routing::with_gaps : Routing::duplicates);
      std::vector<RankTokens> brought;
      for (int r = 0; r < ranks; ++r) {
        round_weights(run.tokens(r), run.buffer(r));
        brought.push_back(run.brought(r));
      }
      run.round();
      run.synchronize_and_check();
      auto const wanted = host_outputs<Backend, Quant>(brought, s.hidden, s.topk, s.max_tokens, placement);
      for (int r = 0; r < ranks; ++r) expect_same_bits(run.buffer(r).out.host(), wanted[static_cast<std::size_t>(r)], r);
    }
  }
}
using Fp8 = moe::quantization::Fp8Group<>;
using moe::quantization::None;
TEST(OneSidedDevice, EqualsHostProtocol) { equals_host_protocol<moe::backends::OneSided, OneSidedPeer, Fp8>(true); }
TEST(TwoSidedDevice, EqualsHostProtocol) { equals_host_protocol<moe::backends::TwoSided, TwoSidedPeer, None>(false); }
TEST(PplxDevice, EqualsHostProtocol) { equals_host_protocol<moe::backends::Pplx, PplxPeer, Fp8>(true); }

std::vector<moe::ExpertPlacement> even_placements() {
  std::vector<std::int32_t> const replicas{3, 0, 1, 0, 2, 4, 5, 0, 3, 6, 7, 8};
  return {moe::ExpertPlacement(12, 3, moe::PlacementStrategy::round_robin), moe::ExpertPlacement::from_physical_to_logical(replicas, 9, 3)};
}
std::vector<moe::ExpertPlacement> all_placements() {
  auto all = even_placements();
  all.push_back(moe::ExpertPlacement(13, 3));
  all.push_back(moe::ExpertPlacement(11, 4, moe::PlacementStrategy::round_robin));
  all.push_back(moe::ExpertPlacement(3, 4, moe::PlacementStrategy::round_robin, true));
  return all;
}
TEST(OneSidedDevice, T20_PlacementsEqualHostProtocol) { placements_equal_host_protocol<moe::backends::OneSided, Fp8>(all_placements()); }
TEST(TwoSidedDevice, T20_PlacementsEqualHostProtocol) { placements_equal_host_protocol<moe::backends::TwoSided, None>(all_placements()); }
TEST(PplxDevice, T20_PlacementsEqualHostProtocol) { placements_equal_host_protocol<moe::backends::Pplx, Fp8>(even_placements()); }

// ---- Whole layers: the policies over a window of ranks on this GPU, CudaReference experts.

static_assert(moe::SymmetricMemory<SharedWindow>);
static_assert(moe::PrepareAndFinalize<moe::backends::OneSided<SharedWindow>>);
static_assert(moe::PrepareAndFinalize<moe::backends::TwoSided<SharedWindow>>);
static_assert(moe::PrepareAndFinalize<moe::backends::Pplx<SharedWindow>>);

constexpr int kHidden = 256;
constexpr int kIntermediate = 128;
constexpr int kExperts = 12;
constexpr int kTopK = 3;
constexpr int kMaxTokens = 24;
using Router = moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>;

template <class Store>
void fill_experts(Store& store, int first, int count) {
  for (int e = 0; e < count; ++e) {
    std::mt19937 gen(static_cast<unsigned>(first + e));
    std::normal_distribution<float> normal;
    std::vector<float> w13(2 * kIntermediate * kHidden);
    std::vector<float> w2(kHidden * kIntermediate);
    for (float& v : w13) v = normal(gen) / std::sqrt(static_cast<float>(kHidden));
    for (float& v : w2) v = normal(gen) / std::sqrt(static_cast<float>(kIntermediate));
    store.set_expert(e, w13.data(), w2.data());
  }
}

/// The same weights, router and inputs on `ranks` device ranks and on one host rank.
template <template <class> class Backend, class Quant>
void layer_equals_host(int ranks, double tolerance) {
  using Local = moe::ModularKernel<Config, Router, Quant, moe::backends::NoExpertParallel<moe::space::host>, moe::experts::Reference<>>;
  using Layer = moe::ModularKernel<Config, Router, Quant, Backend<SharedWindow>, moe::experts::CudaReference>;
  moe::LayerShape const shape{.hidden = kHidden, .intermediate = kIntermediate, .num_experts = kExperts, .topk = kTopK};
  moe::experts::WeightStore<Config, Quant, moe::space::host> all(kExperts, kHidden, kIntermediate, true);
  fill_experts(all, 0, kExperts);
  moe::comm::Self<moe::space::host> self;
  Local local(self, all.view(),
              {.shape = shape,
               .max_tokens_per_rank = kMaxTokens,
               .placement = moe::ExpertPlacement(kExperts, 1),
               .router = typename Router::Params{kExperts, kTopK}});

  SharedPart shared;
  shared.ranks = ranks;
  std::vector<SharedComm> comms;
  for (int r = 0; r < ranks; ++r) comms.push_back({&shared, r});
  std::vector<std::unique_ptr<moe::experts::WeightStore<Config, Quant, moe::space::cuda>>> stores;
  std::vector<std::unique_ptr<moe::comm::WindowManager<SharedWindow>>> managers;  // two layers of each rank share its window
  std::vector<std::unique_ptr<Layer>> layers, later_layers;
  std::vector<std::unique_ptr<moe::CudaStream>> streams;
  for (int r = 0; r < ranks; ++r) {
    stores.push_back(
        std::make_unique<moe::experts::WeightStore<Config, Quant, moe::space::cuda>>(kExperts / ranks, kHidden, kIntermediate, true));
    fill_experts(*stores.back(), r * (kExperts / ranks), kExperts / ranks);
    managers.push_back(std::make_unique<moe::comm::WindowManager<SharedWindow>>(comms[static_cast<std::size_t>(r)]));
    for (auto* list : {&layers, &later_layers}) {
      typename Layer::Params params{.shape = shape,
                                    .max_tokens_per_rank = kMaxTokens,
                                    .placement = moe::ExpertPlacement(kExperts, ranks),
                                    .router = typename Router::Params{kExperts, kTopK}};
      params.backend.blocks = 8;
      params.backend.programmatic = false;
      params.backend.manager = managers.back().get();
      list->push_back(std::make_unique<Layer>(comms[static_cast<std::size_t>(r)], stores.back()->view(), params));
    }
    streams.push_back(std::make_unique<moe::CudaStream>());
  }
  for (unsigned seed = 0; seed < 3; ++seed) {
    std::vector<std::vector<float>> want(static_cast<std::size_t>(ranks));
    std::vector<DeviceArray<bf16>> x, y, later_y;
    std::vector<DeviceArray<float>> logits;
    for (int r = 0; r < ranks; ++r) {
      int const rows = (r + static_cast<int>(seed)) % 3 == 0 ? 0 : kMaxTokens - 5 * r;
      std::mt19937 gen(100 * seed + static_cast<unsigned>(r));
      std::normal_distribution<float> normal;
      std::vector<bf16> hx(static_cast<std::size_t>(rows * kHidden)), hy(hx.size());
      std::vector<float> hz(static_cast<std::size_t>(rows * kExperts));
      for (auto& v : hx) v = moe::from_float<bf16>(normal(gen));
      for (auto& v : hz) v = normal(gen);
      local.forward(moe::make_rows(static_cast<bf16 const*>(hx.data()), rows, kHidden),
                    moe::make_rows(static_cast<float const*>(hz.data()), rows, kExperts), moe::make_rows(hy.data(), rows, kHidden));
      for (auto v : hy) want[static_cast<std::size_t>(r)].push_back(moe::to_float(v));
      x.emplace_back(hx);
      logits.emplace_back(hz);
      y.emplace_back(hx.size());
      later_y.emplace_back(hx.size());
    }
    moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    for (int r = 0; r < ranks; ++r) {
      auto const i = static_cast<std::size_t>(r);
      auto const rows = static_cast<std::int64_t>(want[i].size()) / kHidden;
      auto const forward = [&](Layer& layer, bf16* out) {
        layer.forward(moe::make_rows(static_cast<bf16 const*>(x[i].data()), rows, kHidden),
                      moe::make_rows(static_cast<float const*>(logits[i].data()), rows, kExperts), moe::make_rows(out, rows, kHidden), {},
                      static_cast<cudaStream_t>(*streams[i]));
      };
      forward(*layers[i], y[i].data());
      forward(*later_layers[i], later_y[i].data());
    }
    for (int r = 0; r < ranks; ++r) {
      auto const i = static_cast<std::size_t>(r);
      streams[i]->synchronize();
      layers[i]->exchange().check();
      later_layers[i]->exchange().check();
      auto const got = y[i].host();
      double error = 0, norm = 0;
      for (std::size_t h = 0; h < got.size(); ++h) {
        ASSERT_TRUE(std::isfinite(moe::to_float(got[h]))) << "rank " << r;
        error += std::pow(static_cast<double>(moe::to_float(got[h])) - static_cast<double>(want[i][h]), 2);
        norm += std::pow(static_cast<double>(want[i][h]), 2);
      }
      EXPECT_LE(std::sqrt(error), tolerance * std::sqrt(norm)) << "rank " << r << " of " << ranks;
      // The same layer once more: the same bits.
      auto const later = later_y[i].host();
      for (std::size_t h = 0; h < got.size(); ++h) {
        ASSERT_EQ(moe::to_float(later[h]), moe::to_float(got[h])) << "the second layer, rank " << r << ", element " << h;
      }
    }
  }
  EXPECT_THROW(layers[0]->exchange().finalize(moe::make_rows(static_cast<bf16*>(nullptr), 0, kHidden), nullptr), moe::Error);
}
TEST(DeviceLayers, F4_OneSidedEqualsHost) { layer_equals_host<moe::backends::OneSided, Fp8>(2, 3e-2); }
TEST(DeviceLayers, F4_TwoSidedEqualsHost) { layer_equals_host<moe::backends::TwoSided, None>(3, 6e-3); }
TEST(DeviceLayers, F4_PplxEqualsHost) { layer_equals_host<moe::backends::Pplx, Fp8>(4, 3e-2); }

}  // namespace
