// SPDX-License-Identifier: Apache-2.0
// tests/unit/io_loading_memory_test.cpp: experts that a checkpoint stores in the layer's scheme are read into their store with little
// memory beside it: at most 1.1 times the packed size at any moment. malloc and operator new are replaced by ones that count bytes.
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <numeric>
#include <vector>

#include "moe/experts/weights.hpp"
#include "moe/io/expert_loader.hpp"
#include "moe/io/layer_weights.hpp"
#include "moe/models/loaded_parts.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/schemes.hpp"
#include "packed_checkpoint.hpp"
#include "temporary_directory.hpp"

extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
void __libc_free(void*);
}

namespace {

std::atomic<std::int64_t> held{0}, most{0};

void* taken(void* p) {
  if (p == nullptr) return p;
  std::int64_t const now = held += static_cast<std::int64_t>(malloc_usable_size(p));
  for (std::int64_t seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
  }
  return p;
}
void given(void* p) {
  if (p != nullptr) held -= static_cast<std::int64_t>(malloc_usable_size(p));
}
void release(void* p) {
  given(p);
  __libc_free(p);
}

}  // namespace

extern "C" {
void* malloc(std::size_t n) { return taken(__libc_malloc(n)); }
void* calloc(std::size_t n, std::size_t size) { return taken(__libc_calloc(n, size)); }
void* realloc(void* p, std::size_t n) {
  given(p);
  return taken(__libc_realloc(p, n));
}
void* aligned_alloc(std::size_t align, std::size_t n) { return taken(__libc_memalign(align, n)); }
int posix_memalign(void** p, std::size_t align, std::size_t n) {
  *p = taken(__libc_memalign(align, n));
  return 0;
}
void free(void* p) { release(p); }
}
void* operator new(std::size_t n) { return taken(__libc_malloc(n)); }
void* operator new[](std::size_t n) { return taken(__libc_malloc(n)); }
void operator delete(void* p) noexcept { release(p); }
void operator delete[](void* p) noexcept { release(p); }
void operator delete(void* p, std::size_t) noexcept { release(p); }
void operator delete[](void* p, std::size_t) noexcept { release(p); }

namespace {

using namespace moe;
using io::FileDType;
using moe_test::TemporaryDirectory;
using nlohmann::json;
using Writer = moe_test::CheckpointWriter;

constexpr moe_test::PackedSizes kSizes{.experts = 64, .hidden = 512, .intermediate = 256};
constexpr int kThreads = 2;

json compressed(char const* format, char const* type, int bits, int group) {
  json weights{{"num_bits", bits}, {"type", type}, {"strategy", group > 0 ? "group" : "channel"}};
  if (group > 0) weights["group_size"] = group;
  return {{"quant_method", "compressed-tensors"}, {"format", format}, {"config_groups", {{"group_0", {{"weights", weights}}}}}};
}

struct Loaded {
  double store = 0;  ///< peak of additional memory during loading, divided by the store's size
  double file = 0;   ///< the same, of the checkpoint's codes and scales
};
template <class Quant>
Loaded load(std::filesystem::path const& directory, bool direct) {
  io::LayerDescription const d = io::from_config(io::HfConfig::from_file(directory), 0);
  io::TensorStore const tensors(directory);
  std::int64_t stored = 0;
  for (std::string_view name : tensors.names()) {
    bool const packed = name.find(".experts.") != std::string_view::npos && !name.ends_with("_shape");
    if (packed) stored += static_cast<std::int64_t>(tensors.at(name).info->size_bytes());
  }
  std::vector<int> experts(static_cast<std::size_t>(kSizes.experts));
  std::iota(experts.begin(), experts.end(), 0);
  HostPool::instance().ensure(kThreads);

  std::int64_t const before = held;
  most = before;
  io::ExpertReader const reader = io::LayerLoader::from_checkpoint(tensors, d, 0).experts();
  Quant const quant{};
  io::ExpertLoader<Quant, float> const loader(tensors, d, reader, quant);
  EXPECT_EQ(loader.direct(), direct);
  experts::WeightStore<models::RuntimeLayer<float, float>, Quant> store(kSizes.experts, kSizes.hidden, kSizes.intermediate, true);
  models::read_into<space::host>(store, loader, experts, kThreads, {});
  auto const peak = static_cast<double>(most - before);
  Loaded const out{peak / static_cast<double>(store.bytes()), peak / static_cast<double>(stored)};
  testing::Test::RecordProperty("peak_of_store", text(out.store));
  std::printf("%s: %.3f of the store's %zu bytes, %.3f of the checkpoint's %lld\n", Quant::kName, out.store, store.bytes(), out.file,
              static_cast<long long>(stored));
  return out;
}

constexpr double kMost = 1.1;

/// Kimi-K2-Thinking's packing. Its scales are bf16, the scheme's float32: a store is 5 bits a weight, the checkpoint 4.5.
TEST(LoadingMemory, Int4InGroupsOf32) {
  TemporaryDirectory const directory;
  moe_test::write_checkpoint(
      directory.path(), compressed("pack-quantized", "int", 4, 32),
      [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
        w.codes(base + ".weight_packed", FileDType::i32, {n, k / 8});
        w.file.add(base + ".weight_scale", {n, k / 32}, std::vector<bf16>(static_cast<std::size_t>(n * k / 32), from_float<bf16>(0.25F)));
        w.file.add(base + ".weight_shape", {2}, std::vector<std::int64_t>{n, k});
      },
      kSizes);
  EXPECT_LT((load<quantization::WNa16<4, 32>>(directory.path(), true).store), kMost);
  EXPECT_LT((load<quantization::W4A8<quantization::Fp8Codec<>, 32>>(directory.path(), true).store), kMost);
  // Control: reading in floating point exceeds the bound.
  EXPECT_GT(load<quantization::None>(directory.path(), false).file, 6.0);
}
TEST(LoadingMemory, Mxfp4) {
  TemporaryDirectory const directory;
  moe_test::write_checkpoint(
      directory.path(), compressed("mxfp4-pack-quantized", "float", 4, 32),
      [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
        w.codes(base + ".weight_packed", FileDType::u8, {n, k / 2});
        w.exponents(base + ".weight_scale", {n, k / 32});
      },
      kSizes);
  EXPECT_LT(load<quantization::Mxfp4W4A16<>>(directory.path(), true).file, kMost);
  EXPECT_LT(load<quantization::Mxfp4Fp8<>>(directory.path(), true).file, kMost);
}
TEST(LoadingMemory, Nvfp4) {
  TemporaryDirectory const directory;
  moe_test::write_checkpoint(
      directory.path(), json{{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}},
      [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
        w.codes(base + ".weight", FileDType::u8, {n, k / 2});
        w.codes(base + ".weight_scale", FileDType::f8_e4m3, {n, k / 16});
        w.file.add(base + ".weight_scale_2", {1}, std::vector<float>{0.01F});
      },
      kSizes);
  EXPECT_LT(load<quantization::Nvfp4W4A16>(directory.path(), true).file, kMost);
}
TEST(LoadingMemory, Int8) {
  TemporaryDirectory const directory;
  moe_test::write_checkpoint(
      directory.path(), compressed("int-quantized", "int", 8, 0),
      [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
        w.codes(base + ".weight", FileDType::i8, {n, k});
        w.scales(base + ".weight_scale", {n, 1});
      },
      kSizes);
  EXPECT_LT(load<quantization::Int8PerChannel>(directory.path(), true).file, kMost);
  EXPECT_LT(load<quantization::Int8PerToken>(directory.path(), true).file, kMost);
}

}  // namespace
