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

template <class Quant, class Experts>
void forward_allocates_nothing() {
  constexpr int kHidden = 256;
  constexpr int kIntermediate = 128;
  constexpr int kExperts = 8;
  using Layer = ModularKernel<Config, routing::SoftmaxTopK<routing::Renormalize::yes>, Quant, backends::NoExpertParallel<>, Experts>;
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
               .router = {kExperts, 2}});
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
  std::vector<bf16> const hidden(kRows * kHidden, from_float<bf16>(0.5F));
  std::vector<bf16> output(hidden.size());
  auto forward = [&](std::int64_t rows) {
    runner.forward(make_rows(hidden.data(), rows, kHidden), make_rows(output.data(), rows, kHidden));
  };
  forward(kRows);  // the OpenMP runtime and oneDNN initialise here
  ours = 0;
  counting = true;
  forward(kRows);
  forward(3);
  forward(0);
  counting = false;
  EXPECT_EQ(ours.load(), 0) << "allocations by this library in three forwards";
  EXPECT_NE(to_float(output[0]), 0.0F);
}

struct HalvesParts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using DualBatch = runner::dual_batch::Halves;
};
TEST(NoAllocation, DualBatch) {
  constexpr int kHidden = 64, kIntermediate = 32, kExperts = 8, kRows = 64;
  using Layer = ModularKernel<Config, routing::SoftmaxTopK<routing::Renormalize::yes>, quantization::None,
                              backends::AllToAllV<comm::Self<>>, experts::OneDnn>;
  experts::WeightStore<Config, quantization::None> store(kExperts, kHidden, kIntermediate, true);
  std::vector<float> const w(2 * kHidden * kHidden, 0.01F);
  for (int e = 0; e < kExperts; ++e) store.set_expert(e, w.data(), w.data());
  comm::Self<> self;
  Runner<Layer, HalvesParts>::Params p{.layer = {.shape = {kHidden, kIntermediate, kExperts, 2, false},
                                                 .max_tokens_per_rank = kRows,
                                                 .placement = ExpertPlacement(kExperts, 1),
                                                 .router = {kExperts, 2}}};
  p.gate = {make_rows(w.data(), kExperts, kHidden)};
  Runner<Layer, HalvesParts> runner(self, store.view(), p);
  std::vector<bf16> const hidden(kRows * kHidden, from_float<bf16>(0.5F));
  std::vector<bf16> output(hidden.size());
  runner.decide_dual_batch(true);
  auto forward = [&](std::int64_t rows) {
    runner.forward(make_rows(hidden.data(), rows, kHidden), make_rows(output.data(), rows, kHidden));
  };
  forward(kRows);  // the OpenMP runtime and oneDNN initialise here
  ours = 0;
  counting = true;
  forward(kRows);
  forward(3);
  forward(0);
  counting = false;
  EXPECT_EQ(ours.load(), 0) << "allocations by this library in three forwards";
  EXPECT_NE(to_float(output[0]), 0.0F);
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
TEST(NoAllocation, OneDnnFp8) { forward_allocates_nothing<quantization::Fp8Block<>, experts::OneDnn>(); }

}  // namespace
