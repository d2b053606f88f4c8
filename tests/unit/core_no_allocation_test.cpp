// SPDX-License-Identifier: Apache-2.0
// tests/unit/core_no_allocation_test.cpp: forward() allocates no heap memory. malloc and operator new are replaced by counting
// ones. Allocations whose caller lies in oneDNN or the OpenMP runtime are counted apart: they are those libraries' own packing buffers.
#include "moe/moe.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "moe/eplb/map_tables.hpp"
#include "moe/eplb/maps.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/capacity.hpp"
#include "moe/routing/capture.hpp"
#include "moe/routing/simulator.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/runner.hpp"

extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
void __libc_free(void*);
}

namespace {

std::atomic<bool> counting{false};
std::atomic<long> ours{0};
std::atomic<long> theirs{0};
thread_local bool inside = false;

void note(void* caller) {
  if (!counting.load(std::memory_order_relaxed) || inside) {
    return;
  }
  inside = true;
  Dl_info info{};
  bool const foreign = dladdr(caller, &info) != 0 && info.dli_fname != nullptr &&
                       (std::strstr(info.dli_fname, "libdnnl") != nullptr || std::strstr(info.dli_fname, "libgomp") != nullptr);
  (foreign ? theirs : ours).fetch_add(1);
  inside = false;
}

}  // namespace

extern "C" {
void* malloc(std::size_t n) {
  note(__builtin_return_address(0));
  return __libc_malloc(n);
}
void* calloc(std::size_t n, std::size_t size) {
  note(__builtin_return_address(0));
  return __libc_calloc(n, size);
}
void* realloc(void* p, std::size_t n) {
  note(__builtin_return_address(0));
  return __libc_realloc(p, n);
}
void* aligned_alloc(std::size_t align, std::size_t n) {
  note(__builtin_return_address(0));
  return __libc_memalign(align, n);
}
int posix_memalign(void** p, std::size_t align, std::size_t n) {
  note(__builtin_return_address(0));
  *p = __libc_memalign(align, n);
  return 0;
}
}
void* operator new(std::size_t n) {
  note(__builtin_return_address(0));
  return __libc_malloc(n);
}
void* operator new[](std::size_t n) {
  note(__builtin_return_address(0));
  return __libc_malloc(n);
}
void operator delete(void* p) noexcept { __libc_free(p); }
void operator delete[](void* p) noexcept { __libc_free(p); }
void operator delete(void* p, std::size_t) noexcept { __libc_free(p); }
void operator delete[](void* p, std::size_t) noexcept { __libc_free(p); }

namespace {

using namespace moe;

struct Config : LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
};

/// router: of 8 experts, 2 for each row.
template <class Quant, class Experts, class Router = routing::SoftmaxTopK<routing::Renormalize::yes>>
void forward_allocates_nothing(typename Router::Params const& router = {8, 2}) {
  constexpr int kHidden = 256;
  constexpr int kIntermediate = 128;
  constexpr int kExperts = 8;
  using Layer = ModularKernel<Config, Router, Quant, backends::NoExpertParallel<>, Experts>;
  experts::WeightStore<Config, Quant> store(kExperts, kHidden, kIntermediate, true);
  std::vector<float> const w13(2 * kIntermediate * kHidden, 0.01F);
  std::vector<float> const w2(kHidden * kIntermediate, 0.02F);
  for (int e = 0; e < kExperts; ++e) {
    store.set_expert(e, w13.data(), w2.data());
  }
  comm::Self<> self;
  Layer layer(self, store.view(),
              {.shape = {kHidden, kIntermediate, kExperts, 2, false},
               .max_tokens_per_rank = 64,
               .placement = ExpertPlacement(kExperts, 1),
               .router = router});
  std::vector<bf16> hidden(64 * kHidden, from_float<bf16>(0.5F));
  std::vector<bf16> output(hidden.size());
  std::vector<float> logits(64 * kExperts);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    logits[i] = static_cast<float>(i * 7 % 13);
  }
  auto forward = [&](std::int64_t rows) {
    layer.forward(make_rows(static_cast<bf16 const*>(hidden.data()), rows, kHidden),
                  make_rows(static_cast<float const*>(logits.data()), rows, kExperts), make_rows(output.data(), rows, kHidden));
  };
  forward(64);  // the OpenMP runtime and oneDNN initialise here
  ours = 0;
  theirs = 0;
  counting = true;
  forward(64);
  forward(3);
  forward(0);
  counting = false;
  EXPECT_EQ(ours.load(), 0) << "allocations by this library in three forwards";
  testing::Test::RecordProperty("allocations_inside_onednn", static_cast<int>(theirs.load()));
  EXPECT_NE(to_float(output[0]), 0.0F);
}

/// Forwards of `most` rows and fewer allocate nothing, after a first one, in which the OpenMP runtime and oneDNN initialise.
template <class R>
void expect_no_allocation(R& runner, std::int64_t most) {
  std::int64_t const width = runner.hidden();
  std::vector<bf16> const hidden(static_cast<std::size_t>(most * width), from_float<bf16>(0.5F));
  std::vector<bf16> output(hidden.size());
  auto forward = [&](std::int64_t rows) { runner.forward(make_rows(hidden.data(), rows, width), make_rows(output.data(), rows, width)); };
  forward(most);
  std::size_t const bytes = runner.bytes();
  ours = 0;
  counting = true;
  forward(most);
  forward(3);
  forward(0);
  counting = false;
  EXPECT_EQ(ours.load(), 0) << "allocations by this library in three forwards";
  EXPECT_EQ(runner.bytes(), bytes);
  EXPECT_NE(to_float(output[0]), 0.0F);
}

struct Parts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using Input = runner::transform::Projection<float>;
  using Output = runner::transform::Projection<float>;
  using Shared = runner::shared::Separate<experts::OneDnn>;
  using End = runner::end::BiasNorm;
};
// A block with a gate, projections, shared experts and a norm.
TEST(NoAllocation, Runner) {
  constexpr int kHidden = 128, kLatent = 64, kIntermediate = 32, kExperts = 8, kRows = 64;
  using Layer = ModularKernel<Config, routing::SoftmaxTopK<routing::Renormalize::yes>, quantization::None, backends::NoExpertParallel<>,
                              experts::OneDnn>;
  experts::WeightStore<Config, quantization::None> store(kExperts, kLatent, kIntermediate, true);
  std::vector<float> const w(2 * kHidden * kHidden, 0.01F);
  for (int e = 0; e < kExperts; ++e) store.set_expert(e, w.data(), w.data());
  comm::Self<> self;
  Runner<Layer, Parts>::Params p{.layer = {.shape = {kLatent, kIntermediate, kExperts, 2, false},
                                           .max_tokens_per_rank = kRows,
                                           .placement = ExpertPlacement(kExperts, 1),
                                           .router = {kExperts, 2}}};
  p.hidden = kHidden;
  p.gate = {make_rows(w.data(), kExperts, kHidden)};
  p.input.weight = make_rows(w.data(), kLatent, kHidden);
  p.output = {.weight = make_rows(w.data(), kHidden, kLatent), .normalise = true};
  p.shared = {.count = 1, .intermediate = kIntermediate};
  p.shared.weights.w13 = {make_blocks(w.data(), 1, 2 * kIntermediate, kHidden),
                          make_rows(p.shared.weights.w13.scales.data_handle(), 1, 0),
                          {},
                          2 * kIntermediate,
                          kHidden};
  p.shared.weights.w2 = {make_blocks(w.data(), 1, kHidden, kIntermediate),
                         make_rows(p.shared.weights.w2.scales.data_handle(), 1, 0),
                         {},
                         kHidden,
                         kIntermediate};
  p.end.normalise = true;
  Runner<Layer, Parts> runner(self, store.view(), p);
  expect_no_allocation(runner, kRows);
}

struct GateParts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
};
struct HalvesParts : GateParts {
  using DualBatch = runner::dual_batch::Halves;
};
struct ChunkParts : GateParts {
  using Chunking = runner::chunking::Lockstep;
};
/// A block with a gate and, if `fused` is not 0, so many shared experts among the routed ones. change(parameters) comes before its
/// construction, then(runner) after it.
template <class Parts, class Backend, class Experts, class Change, class Then>
void block_allocates_nothing(std::int64_t rows, int fused, Change const& change, Then const& then) {
  constexpr int kHidden = 64, kIntermediate = 32, kExperts = 8, kTopK = 2;
  using Layer = ModularKernel<Config, routing::AnyRouter, quantization::None, Backend, Experts>;
  experts::WeightStore<Config, quantization::None> store(kExperts + fused, kHidden, kIntermediate, true);
  std::vector<float> const w(2 * kHidden * kHidden, 0.01F);
  for (int e = 0; e < kExperts + fused; ++e) store.set_expert(e, w.data(), w.data());
  comm::Self<> self;
  typename Runner<Layer, Parts>::Params p{.layer = {.shape = {kHidden, kIntermediate, kExperts + fused, kTopK + fused, false},
                                                    .max_tokens_per_rank = 64,
                                                    .placement = ExpertPlacement(kExperts + fused, 1),
                                                    .router = {.num_experts = kExperts, .topk = kTopK, .num_fused_shared = fused}}};
  p.gate = {make_rows(w.data(), kExperts, kHidden)};
  change(p);
  Runner<Layer, Parts> runner(self, store.view(), p);
  then(runner);
  expect_no_allocation(runner, rows);
}
constexpr auto kNothing = [](auto&) {};
using AllToAll = backends::AllToAllV<comm::Self<>>;

TEST(NoAllocation, DualBatch) {
  block_allocates_nothing<HalvesParts, AllToAll, experts::OneDnn>(64, 0, kNothing, [](auto& runner) { runner.decide_dual_batch(true); });
}
TEST(NoAllocation, Chunks) {
  for (ChunkMode const mode : {ChunkMode::exact, ChunkMode::min_one}) {
    for (std::int64_t const most_rows : {0, 300}) {
      block_allocates_nothing<ChunkParts, AllToAll, experts::OneDnn>(
          300, 0, [&](auto& p) { p.chunking = {.rows = 16, .mode = mode, .most_rows = most_rows}; }, kNothing);
    }
  }
}
TEST(NoAllocation, RoutesInside) {
  block_allocates_nothing<GateParts, backends::NoExpertParallel<>, experts::Monolithic<experts::Reference<>>>(64, 0, kNothing, kNothing);
}
TEST(NoAllocation, FusedSharedExperts) {
  block_allocates_nothing<GateParts, backends::NoExpertParallel<>, experts::OneDnn>(64, 2, kNothing, kNothing);
  block_allocates_nothing<GateParts, AllToAll, experts::OneDnn>(64, 2, kNothing, kNothing);
}
// A mapping, and the load that balancing counts.
TEST(NoAllocation, CountedLoad) {
  eplb::ExpertMaps const maps = eplb::ExpertMaps::initial(1, 8, 0);
  eplb::MapTables<space::host> tables(maps);
  block_allocates_nothing<GateParts, AllToAll, experts::OneDnn>(
      64, 0,
      [&](auto& p) {
        p.layer.mapping = tables.mapping(0, 0, 1);
        p.layer.load = {.load_counter = tables.load_counter(0)};
      },
      kNothing);
  eplb::Table<std::int32_t> load(1, maps.num_physical());
  tables.take_load(load);
  std::int64_t counted = 0;
  for (std::int32_t const slots : load.flat()) counted += slots;
  EXPECT_EQ(counted, 2 * (64 + 64 + 3)) << "two experts a row, of four forwards";
}

TEST(NoAllocation, TheCounterCounts) {
  ours = 0;
  counting = true;
  std::vector<int> v(100);
  void* volatile p = std::malloc(10);
  counting = false;
  std::free(p);
  EXPECT_EQ(ours.load(), 2);
  EXPECT_EQ(v.size(), 100U);
}
TEST(NoAllocation, Reference) { forward_allocates_nothing<quantization::None, experts::Reference<>>(); }
TEST(NoAllocation, OneDnn) { forward_allocates_nothing<quantization::None, experts::OneDnn>(); }
TEST(NoAllocation, CapacityTopK) {
  routing::CapacityTopK::Params const tight{.config = {.num_experts = 8, .topk = 2}, .capacity_factor = 1.0};
  forward_allocates_nothing<quantization::None, experts::Reference<>, routing::CapacityTopK>(tight);
}
TEST(NoAllocation, Simulator) {
  routing::RoutingRecord record;
  record.topk = 2;
  for (std::int32_t i = 0; i < 2 * 64; ++i) {
    record.ids.push_back(i % 8);
    record.weights.push_back(0.5F);
  }
  for (char const* const strategy :
       {"uniform_random", "normal_routing", "balanced", "zipf", "hot_expert", "hot_rank", "one_rank", "empty_rank", "replay"}) {
    SCOPED_TRACE(strategy);
    routing::Simulator::Params const p{.strategy = strategy, .num_experts = 8, .topk = 2, .num_ranks = 2, .record = &record};
    forward_allocates_nothing<quantization::None, experts::Reference<>, routing::Simulator>(p);
  }
}
TEST(NoAllocation, OneDnnFp8) { forward_allocates_nothing<quantization::Fp8Block<>, experts::OneDnn>(); }

}  // namespace
