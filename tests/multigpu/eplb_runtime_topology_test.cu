// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/eplb_runtime_topology_test.cu: where experts are between GPUs, given from outside: a static placement from a file, with
// which layers start or to which they move; groups that grow, shrink and replace a rank. Outputs keep their bits: low_latency sums a row's
// experts in the order of its choice, wherever they are.
// moe-ranks: 2 4
#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "../expect_error.hpp"
#include "../numbers.hpp"
#include "../random_maps.hpp"
#include "../temporary_directory.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/nccl.hpp"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/eplb/elastic.hpp"
#include "moe/eplb/files.hpp"
#include "moe/eplb/map_tables.hpp"
#include "moe/eplb/move_elastic.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/quantization/none.hpp"
#include "moe/routing/device/route.cuh"
#include "tests/gpu/eplb_device_serving.hpp"

namespace {

using namespace moe_test;
using Cuda = space::cuda;
using quantization::None;
using Window = comm::NcclSymmetric;
using Backend = backends::LowLatency<Window>;
using Mover = eplb::WeightMover<comm::Nccl>;
constexpr int kLayers = 2, kExperts = EplbConfig::num_experts, kHidden = EplbConfig::hidden, kIntermediate = EplbConfig::intermediate;

TEST(EplbTopology, StaticPlacementFromAFile) {
  comm::Mpi host(MPI_COMM_WORLD, {.timeout_ms = 40'000});
  eplb::CommGroup<comm::Mpi> group(host);
  comm::Nccl tokens = comm::Nccl::over_communicator(host, {.timeout_ms = 20'000});
  comm::Nccl weights = comm::Nccl::over_communicator(host, {.timeout_ms = 20'000});
  using Model = DeviceServing<None, Backend, experts::CudaReference, EplbFixedLayer, comm::Nccl, eplb::CommGroup<comm::Mpi>>;
  int const physical = kExperts + 2 * host.size();
  TemporaryDirectory const directory;  // every rank writes the same file
  auto const path = directory / "maps.json";
  eplb::save_maps(path, {{"main", random_maps(kLayers, kExperts, physical, 7)}});
  ExpertMaps const placement = eplb::load_maps(path, "main", kLayers, kExperts, physical);
  ASSERT_EQ(placement, random_maps(kLayers, kExperts, physical, 7));
  moe_test::expect_error(ErrorCode::argument, "the model needs [2, ",
                         [&] { eplb::load_maps(path, "main", kLayers, kExperts, physical + 1); });

  CudaStream stream;
  Model plain({}, tokens, stream);
  auto const params = [](ExpertMaps const& maps) {
    return typename Model::Balancer::Params{.maps = maps,
                                            .options = {.window = 2, .step_interval = 2, .never_rearrange = true},
                                            .mode = MoveMode::pause,
                                            .mover = {.timeout_ms = 20'000},
                                            .timeout_ms = 20'000};
  };
  auto const expect_plain_outputs = [&](Model& model, int steps, auto const& forward) {
    for (int step = 0; step < steps; ++step) {
      SCOPED_TRACE(step);
      plain.bring(8 * step);
      plain.forward();
      std::vector<float> const want = plain.result();
      model.bring(8 * step);
      forward();
      EXPECT_EQ(model.result(), want);
      auto const done = model.balancer().step({}, stream);
      EXPECT_FALSE(done.triggered);
      EXPECT_TRUE(done.committed_layers.empty());
    }
  };
  {
    SCOPED_TRACE("starts with the placement");
    Model model({}, tokens, stream, weights, group, params(placement));
    EXPECT_EQ(model.wrong_slot(), "");
    expect_plain_outputs(model, 5, [&] { model.forward(); });
    EXPECT_EQ(model.balancer().maps(), placement);
    host.barrier({});
  }
  {
    SCOPED_TRACE("moves to the placement");
    Model model({}, tokens, stream, weights, group, params(ExpertMaps::initial(kLayers, kExperts, physical - kExperts)));
    expect_plain_outputs(model, 1, [&] { model.forward(); });
    {
      CudaGraph const graph(stream, [&] { model.forward(); });
      auto const report = model.balancer().move_to(placement, stream);
      EXPECT_EQ(report.layers_changed, kLayers);
      EXPECT_GT(report.moved.slots_changed, 0);
      EXPECT_EQ(model.balancer().maps(), placement);
      EXPECT_EQ(model.wrong_slot(), "");
      expect_plain_outputs(model, 3, [&] { graph.launch(stream); });
    }
    expect_plain_outputs(model, 3, [&] { model.forward(); });
    host.barrier({});
  }
}

// ---- Groups that grow and shrink.

using Layer = ModularKernel<EplbConfig, EplbFixedLayer::Router, None, Backend, experts::CudaReference>;
using Store = experts::WeightStore<EplbConfig, None, Cuda>;

/// All experts of all layers.
Store& all_experts() {
  static Store store = [] {
    Store all(kLayers * kExperts, kHidden, kIntermediate, true);
    for (int e = 0; e < kLayers * kExperts; ++e) {
      int const seed = 2 * e;
      all.set_expert(e, numbers(seed, std::int64_t{2} * kIntermediate * kHidden, 0.08F).data(),
                     numbers(seed + 1, std::int64_t{kHidden} * kIntermediate, 0.12F).data());
    }
    return all;
  }();
  return store;
}

/// The expert slots of one rank in all layers.
class Slots {
 public:
  explicit Slots(int per_rank) : per_rank_(per_rank) {
    for (int l = 0; l < kLayers; ++l) {
      stores_.emplace_back(per_rank, kHidden, kIntermediate, true);
      for (eplb::ExpertTensor const& t : eplb::expert_tensors(stores_.back())) {
        Memory<Cuda>::fill(t.data, 0, static_cast<std::size_t>(t.slots * t.stride));
      }
    }
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  /// map [ranks · L]: this rank's experts of a layer; empty slots stay 0.
  void load(int layer, std::span<std::int32_t const> map, int rank) {
    each(layer, map, rank, [](eplb::ExpertTensor const& to, std::byte* slot, std::byte const* expert) {
      Memory<Cuda>::copy_async(slot, expert, static_cast<std::size_t>(to.bytes), nullptr);
    });
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  /// "" if every slot that the map fills holds the bytes of its expert.
  std::string wrong(int layer, std::span<std::int32_t const> map, int rank) {
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::string found;
    each(layer, map, rank, [&](eplb::ExpertTensor const& at, std::byte* slot, std::byte const* expert) {
      std::vector<unsigned char> a(static_cast<std::size_t>(at.bytes)), b(a.size());
      Memory<Cuda>::copy_to_host(a.data(), slot, a.size());
      Memory<Cuda>::copy_to_host(b.data(), expert, b.size());
      if (a != b && found.empty()) found = text("rank ", rank, ", layer ", layer, ", ", at.name);
    });
    return found;
  }
  std::vector<eplb::LayerTensors> tensors() {
    std::vector<eplb::LayerTensors> out;
    for (Store& store : stores_) out.push_back(eplb::expert_tensors(store));
    return out;
  }
  Store& store(int layer) { return stores_[static_cast<std::size_t>(layer)]; }

 private:
  template <class Call>
  void each(int layer, std::span<std::int32_t const> map, int rank, Call const& call) {
    auto const held = eplb::expert_tensors(store(layer));
    auto const from = eplb::expert_tensors(all_experts());
    for (int s = 0; s < per_rank_; ++s) {
      std::int32_t const e = map[static_cast<std::size_t>(rank * per_rank_ + s)];
      if (e == eplb::kEmptySlot) continue;
      for (std::size_t t = 0; t < held.size(); ++t) {
        call(held[t], held[t].data + s * held[t].stride, from[t].data + (layer * kExperts + e) * from[t].stride);
      }
    }
  }
  int per_rank_;
  std::deque<Store> stores_;
};

/// Layers over one group, whose maps the slots hold.
class Serving {
 public:
  static constexpr int kTokens = 12;
  Serving(comm::Nccl& comm, ExpertMaps const& maps, Slots& slots) : tables_(maps) {
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    for (int l = 0; l < kLayers; ++l) {
      auto const row = maps.physical_to_logical().row(l);
      typename Layer::Params p{.max_tokens_per_rank = kTokens,
                               .placement = ExpertPlacement::from_physical_to_logical(row, kExperts, comm.size())};
      EplbFixedLayer{}.set(p);
      p.mapping = tables_.mapping(l, comm.rank(), comm.size());
      layers_.emplace_back(comm, slots.store(l).view(), p);
    }
  }
  /// Outputs of both layers for the tokens of `who`.
  std::vector<float> forward(int who) {
    std::vector<float> all;
    for (int l = 0; l < kLayers; ++l) {
      int const seed = 10'000 + 100 * who + 10 * l;
      std::vector<bf16> x;
      for (float const v : numbers(seed, kTokens * kHidden, 1.7F)) x.push_back(from_float<bf16>(v));
      hidden_.copy_from_host(x.data());
      logits_.copy_from_host(numbers(seed + 1, kTokens * kExperts, 1.7F).data());
      Memory<Cuda>::fill(output_.data(), 0xff, static_cast<std::size_t>(output_.bytes()));
      check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      Layer& layer = layers_[static_cast<std::size_t>(l)];
      layer.forward(make_rows<kHidden>(static_cast<bf16 const*>(hidden_.data()), kTokens, kHidden),
                    make_rows(static_cast<float const*>(logits_.data()), kTokens, kExperts),
                    make_rows<kHidden>(output_.data(), kTokens, kHidden), {}, stream_);
      layer.wait(stream_);
      output_.copy_to_host(x.data());
      for (bf16 const v : x) all.push_back(to_float(v));
    }
    return all;
  }

 private:
  eplb::MapTables<Cuda> tables_;
  CudaStream stream_;
  Buffer<bf16, Cuda> hidden_{kTokens * kHidden}, output_{kTokens * kHidden};
  Buffer<float, Cuda> logits_{kTokens * kExperts};
  std::deque<Layer> layers_;
};

/// Collective over all ranks: a communicator of those in `members`, in world order; none on the others.
std::optional<comm::Nccl> connect(std::vector<int> const& members, int world_rank) {
  bool const member = std::count(members.begin(), members.end(), world_rank) > 0;
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, member ? 0 : MPI_UNDEFINED, world_rank, &part);
  if (!member) return std::nullopt;
  int rank = 0, size = 1;
  MPI_Comm_rank(part, &rank);
  MPI_Comm_size(part, &size);
  auto const broadcast = [&](void* data, std::size_t bytes) { MPI_Bcast(data, static_cast<int>(bytes), MPI_BYTE, 0, part); };
  std::optional<comm::Nccl> out(comm::Nccl::over(rank, size, broadcast, {.timeout_ms = 20'000}));
  MPI_Comm_free(&part);
  return out;
}
/// The tokens of `who` through all experts on one GPU.
std::vector<float> on_one_rank(int who) {
  comm::Nccl alone = comm::Nccl::over(0, 1, [](void*, std::size_t) {}, {.timeout_ms = 20'000});
  ExpertMaps const maps = ExpertMaps::initial(kLayers, kExperts, 0);
  Slots slots(kExperts);
  for (int l = 0; l < kLayers; ++l) slots.load(l, maps.physical_to_logical().row(l), 0);
  return Serving(alone, maps, slots).forward(who);
}

struct Scaling {
  int old_ranks;
  std::vector<int> leaving;
  int joining, slots_per_rank;
};
/// All ranks of the world take part: the old ones, then the joining ones.
void scale(Scaling const& s, bool in_window) {
  SCOPED_TRACE(text(s.old_ranks, " ranks, ", s.leaving.size(), " leave, ", s.joining, " join, ", in_window ? "window" : "messages"));
  comm::Mpi host(MPI_COMM_WORLD, {.timeout_ms = 40'000});
  eplb::CommGroup<comm::Mpi> group(host);
  comm::Nccl weights = comm::Nccl::over_communicator(host, {.timeout_ms = 20'000});
  int const me = host.rank();
  ASSERT_EQ(s.old_ranks + s.joining, host.size());
  std::vector<float> const want = on_one_rank(me);

  eplb::Table<double> load(kLayers, kExperts);
  for (int e = 0; e < kExperts; ++e) load(0, e) = load(1, kExperts - 1 - e) = 1 + e * e % 7;
  ExpertMaps const current = ExpertMaps::initial(kLayers, kExperts, s.old_ranks * s.slots_per_rank - kExperts);
  eplb::ElasticPlan const plan = eplb::plan_elastic(current, s.old_ranks, s.leaving, s.joining, load);
  Slots slots(s.slots_per_rank);
  for (int l = 0; l < kLayers; ++l) slots.load(l, plan.old_map.row(l), me);
  std::vector<int> old_members;
  for (int r = 0; r < s.old_ranks; ++r) old_members.push_back(r);
  if (std::optional<comm::Nccl> tokens = connect(old_members, me)) {
    Serving serving(*tokens, current, slots);
    EXPECT_EQ(serving.forward(me), want) << "before";
    tokens->barrier(nullptr);
    tokens->synchronize(nullptr);
  }

  std::optional<Window> window;
  Mover::Params params{.timeout_ms = 20'000};
  if (in_window) {
    window.emplace(weights, Mover::bytes_needed(slots.tensors(), s.slots_per_rank));
    params.peers = eplb::peer_buffers(*window);
  }
  Mover mover(weights, slots.tensors(), s.slots_per_rank, params);
  CudaStream stream;
  auto const report = eplb::move_elastic(mover, plan, group, stream);
  mover.wait();
  EXPECT_EQ(report.layers_changed, kLayers);
  for (int l = 0; l < kLayers; ++l) EXPECT_EQ(slots.wrong(l, plan.new_map.row(l), me), "");
  if (std::count(s.leaving.begin(), s.leaving.end(), me) > 0) {
    EXPECT_EQ(mover.stats().bytes_received, 0) << "a leaving rank only sends";
  }
  if (me >= s.old_ranks) {
    EXPECT_EQ(mover.stats().bytes_sent, 0) << "a joining rank only receives";
    EXPECT_GT(mover.stats().bytes_received, 0);
  }

  if (std::optional<comm::Nccl> tokens = connect(plan.union_rank_of_new, me)) {
    EXPECT_EQ(tokens->size(), plan.sizes.num_ranks);
    Serving serving(*tokens, plan.maps, slots);
    EXPECT_EQ(serving.forward(me), want) << "after";
    tokens->barrier(nullptr);
    tokens->synchronize(nullptr);
  }
  host.barrier({});
}

class EplbElastic : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(By, EplbElastic, testing::Bool(), [](auto const& info) { return info.param ? "window" : "messages"; });

TEST_P(EplbElastic, B16_GrowShrinkAndReplace) {
  int n = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &n);
  std::vector<Scaling> const of_two{{1, {}, 1, 16}, {2, {1}, 0, 16}, {2, {0}, 0, 16}};
  std::vector<Scaling> const of_four{{2, {}, 2, 8}, {4, {1, 2}, 0, 8}, {3, {}, 1, 6}, {4, {0}, 0, 6}, {3, {0}, 1, 6}};
  for (Scaling const& s : n == 2 ? of_two : of_four) scale(s, GetParam());
}

}  // namespace
