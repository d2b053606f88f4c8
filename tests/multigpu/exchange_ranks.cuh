// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/exchange_ranks.cuh: ranks (simulated on one GPU, or one GPU each in this process), their inputs, identity experts, and
// their expected outputs, computed on the host. For any exchange.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "moe/backends/window/device/low_latency/calls.hpp"
#include "moe/comm/simulated_peers.hpp"
#include "moe/comm/symmetric_memory.cuh"
#include "moe/core/buffer.hpp"
#include "moe/quantization/format/codecs.hpp"

namespace moe_test {

/// Ranks with a GPU each. `owner` keeps their windows.
struct RealRanks {
  std::vector<moe::comm::WindowView> views;
  std::shared_ptr<void> owner;
};
/// Connects GPU 0, 1, … of this process. Set by nccl_ranks.cuh where it is included; simulated ranks need no NCCL.
inline RealRanks (*connect_real_ranks)(int ranks, std::int64_t window_bytes, std::uint64_t timeout_ns) = nullptr;

/// Ranks that this process drives from one host thread. Real ranks: one GPU each, connected by an NCCL window.
class RankGroup {
 public:
  RankGroup(int ranks, bool simulated, std::size_t window_bytes, std::uint64_t timeout_ns) : simulated_(simulated) {
    auto const bytes = static_cast<std::int64_t>(window_bytes);
    if (simulated) {
      peers_ = std::make_unique<moe::comm::SimulatedPeers>(ranks, bytes, timeout_ns);
    } else if (connect_real_ranks != nullptr) {
      real_ = connect_real_ranks(ranks, bytes, timeout_ns);
    } else {
      throw std::logic_error("real ranks without nccl_ranks.cuh");
    }
    for (int r = 0; r < ranks; ++r) {
      use(r);
      cudaStream_t s;
      moe::check_cuda(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
      streams_.push_back(s);
    }
  }
  ~RankGroup() {
    synchronize();
    for (int r = 0; r < size(); ++r) {
      use(r);
      cudaStreamDestroy(streams_[static_cast<std::size_t>(r)]);
    }
  }
  int size() const { return simulated_ ? peers_->size() : static_cast<int>(real_.views.size()); }
  bool simulated() const { return simulated_; }
  void use(int r) const { moe::check_cuda(cudaSetDevice(simulated_ ? 0 : r), "cudaSetDevice"); }
  cudaStream_t stream(int r) const { return streams_[static_cast<std::size_t>(r)]; }
  moe::comm::WindowView const& view(int r) const { return simulated_ ? peers_->view(r) : real_.views[static_cast<std::size_t>(r)]; }
  void check(int r) const { moe::comm::throw_if_failed(*view(r).failure); }
  void synchronize() const {
    for (int r = 0; r < size(); ++r) {
      use(r);
      moe::check_cuda(cudaStreamSynchronize(stream(r)), "cudaStreamSynchronize");
    }
  }
  void synchronize_and_check() const {
    synchronize();
    for (int r = 0; r < size(); ++r) {
      check(r);
    }
  }

 private:
  bool simulated_;
  std::unique_ptr<moe::comm::SimulatedPeers> peers_;
  RealRanks real_;
  std::vector<cudaStream_t> streams_;
};

/// Device copy of a host vector, on the device that is current.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(std::vector<T> const& host) : buffer_(static_cast<std::int64_t>(host.size())) {
    if (!host.empty()) {
      buffer_.copy_from_host(host.data());
    }
  }
  explicit DeviceArray(std::size_t n, int byte = 0xff) : buffer_(static_cast<std::int64_t>(n)) {
    if (n > 0) {
      moe::Memory<moe::space::cuda>::fill(buffer_.data(), byte, n * sizeof(T));
    }
  }
  T* data() { return buffer_.data(); }
  std::vector<T> host() const {
    std::vector<T> v(static_cast<std::size_t>(buffer_.size()));
    if (!v.empty()) {
      buffer_.copy_to_host(v.data());
    }
    return v;
  }

 private:
  moe::Buffer<T, moe::space::cuda> buffer_;
};

/// Copies from the device that holds `p`: a window may be mapped for the kernels of other devices but not for their copies.
template <class T>
std::vector<T> read_device(void const* p, std::size_t n) {
  std::vector<T> v(n);
  if (n == 0) return v;
  int here = 0;
  cudaPointerAttributes facts{};
  moe::check_cuda(cudaGetDevice(&here), "cudaGetDevice");
  moe::check_cuda(cudaPointerGetAttributes(&facts, p), "cudaPointerGetAttributes");
  moe::check_cuda(cudaSetDevice(facts.device), "cudaSetDevice");
  moe::Memory<moe::space::cuda>::copy_to_host(v.data(), p, n * sizeof(T));
  moe::check_cuda(cudaSetDevice(here), "cudaSetDevice");
  return v;
}

enum class Routing { uniform, with_gaps, duplicates, one_rank, none };

/// The input of one rank.
struct RankTokens {
  int tokens = 0;
  std::vector<std::uint16_t> x;  ///< bf16 bits [M][H]
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

inline float bf16_value(std::uint16_t bits) {
  std::uint32_t const u = static_cast<std::uint32_t>(bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline std::uint16_t bf16_bits(float f) {
  std::uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffU) > 0x7f800000U) {
    return 0x7fff;
  }
  return static_cast<std::uint16_t>((u + 0x7fffU + ((u >> 16) & 1U)) >> 16);
}
/// Tokens of a rank in one round: all, half, a third, or few and at times none; ranks and rounds (`seed`) differ.
inline int tokens_of(int max_tokens, int rank, unsigned seed) {
  switch ((static_cast<unsigned>(rank) + seed) % 4) {
    case 0: return max_tokens;
    case 1: return max_tokens / 2;
    case 2: return seed % 2 == 0 ? 0 : 1;
    default: return std::max(1, max_tokens / 3);
  }
}

inline RankTokens make_tokens(int rank, int tokens, int hidden, int topk, int experts, int ranks, Routing routing, unsigned seed) {
  RankTokens t;
  t.tokens = tokens;
  std::mt19937 g(seed * 977U + static_cast<unsigned>(rank) + 1U);
  t.x.resize(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(hidden));
  for (std::size_t i = 0; i < t.x.size(); i += 2) {
    std::uint32_t const bits = static_cast<std::uint32_t>(g());
    // Sign, three bits of exponent around one, seven bits of mantissa: cheap, all different.
    auto value = [](std::uint32_t b) { return static_cast<std::uint16_t>((b & 0x8000U) | ((124U + ((b >> 8) & 7U)) << 7) | (b & 0x7fU)); };
    t.x[i] = value(bits);
    t.x[i + 1] = value(bits >> 16);
  }
  std::vector<int> all(static_cast<std::size_t>(experts));
  for (int e = 0; e < experts; ++e) {
    all[static_cast<std::size_t>(e)] = e;
  }
  for (int i = 0; i < tokens; ++i) {
    for (int j = 0; j < topk; ++j) {
      std::swap(all[static_cast<std::size_t>(j)], all[static_cast<std::size_t>(j) + g() % static_cast<unsigned>(experts - j)]);
      int e = all[static_cast<std::size_t>(j)];
      int const local = std::max(1, experts / ranks);
      switch (routing) {
        case Routing::uniform: break;
        case Routing::with_gaps: e = g() % 3 == 0 ? -1 : e; break;
        case Routing::duplicates: e = j % 2 == 1 ? t.ids.back() : e; break;
        case Routing::one_rank: e = (ranks - 1) * local + e % local; break;
        case Routing::none: e = -1; break;
      }
      t.ids.push_back(e);
      t.weights.push_back(static_cast<float>(g() % 1000 + 1) / 1000.0F);
    }
  }
  return t;
}

/// A row as it is sent: codes and scales, or bf16.
struct WireRow {
  std::vector<unsigned char> bytes;
  std::vector<float> scales;
  std::vector<float> values;  ///< what it decodes to, rounded to bf16
};
template <moe::quantization::ScaleFloor Floor>
WireRow wire_row(std::uint16_t const* x, int hidden, bool fp8) {
  using Codec = moe::quantization::Fp8Codec<Floor>;
  WireRow row;
  row.values.resize(static_cast<std::size_t>(hidden));
  if (!fp8) {
    row.bytes.assign(reinterpret_cast<unsigned char const*>(x), reinterpret_cast<unsigned char const*>(x + hidden));
    for (int i = 0; i < hidden; ++i) {
      row.values[static_cast<std::size_t>(i)] = bf16_value(x[i]);
    }
    return row;
  }
  for (int g = 0; g < hidden; g += 128) {
    std::uint32_t amax = 0;
    for (int i = g; i < std::min(g + 128, hidden); ++i) {
      amax = std::max(amax, Codec::magnitude(bf16_value(x[i])));
    }
    float const s = Codec::scale(amax);
    row.scales.push_back(s);
    for (int i = g; i < std::min(g + 128, hidden); ++i) {
      auto const code = Codec::encode(bf16_value(x[i]), s);
      row.bytes.push_back(code);
      row.values[static_cast<std::size_t>(i)] = bf16_value(bf16_bits(Codec::decode(code, s)));
    }
  }
  return row;
}

/// Identity experts: out[i] = the value of row from[i] (or i), for the rows of every expert's batch. One block per row.
static __global__ void identity_batched(char const* rows, float const* scales, std::int32_t const* gather, std::int32_t const* num,
                                        int capacity, int hidden, bool fp8, __nv_bfloat16* out) {
  int const le = static_cast<int>(blockIdx.y);
  for (int i = static_cast<int>(blockIdx.x); i < num[le]; i += static_cast<int>(gridDim.x)) {
    std::size_t const to = static_cast<std::size_t>(le) * capacity + i;
    std::size_t const from = gather != nullptr ? static_cast<std::size_t>(gather[to]) : to;
    for (int h = static_cast<int>(threadIdx.x); h < hidden; h += static_cast<int>(blockDim.x)) {
      float v;
      if (fp8) {
        __nv_fp8_e4m3 code;
        code.__x = static_cast<unsigned char>(rows[from * hidden + h]);
        v = static_cast<float>(code) * scales[from * ((hidden + 127) / 128) + h / 128];
      } else {
        v = __bfloat162float(reinterpret_cast<__nv_bfloat16 const*>(rows)[from * hidden + h]);
      }
      out[to * hidden + h] = __float2bfloat16_rn(v);
    }
  }
}
/// The same over an expert-major list: out[i] = row list[i]; gaps are not written.
static __global__ void identity_listed(char const* rows, float const* scales, int scale_stride, std::int32_t const* list,
                                       std::int32_t const* summary, int hidden, bool fp8, __nv_bfloat16* out) {
  for (int i = static_cast<int>(blockIdx.x); i < summary[1]; i += static_cast<int>(gridDim.x)) {
    int const from = list[i];
    if (from < 0) {
      continue;
    }
    for (int h = static_cast<int>(threadIdx.x); h < hidden; h += static_cast<int>(blockDim.x)) {
      std::size_t const at = static_cast<std::size_t>(from) * hidden + h;
      float v;
      if (fp8) {
        __nv_fp8_e4m3 code;
        code.__x = static_cast<unsigned char>(rows[at]);
        v = static_cast<float>(code) * scales[static_cast<std::size_t>(from) * scale_stride + h / 128];
      } else {
        v = __bfloat162float(reinterpret_cast<__nv_bfloat16 const*>(rows)[at]);
      }
      out[static_cast<std::size_t>(i) * hidden + h] = __float2bfloat16_rn(v);
    }
  }
}
/// Keeps a stream busy for about `ns`, so that ranks arrive at different times.
static __global__ void delay(std::uint64_t ns) {
  std::uint64_t const start = moe::ptx::now_ns();
  while (moe::ptx::now_ns() - start < ns) {
  }
}
/// Delays a stream by up to 40 us, another time for every rank, salt and `delays`. 0: not at all.
inline void random_delay(unsigned delays, int rank, unsigned salt, cudaStream_t stream) {
  if (delays == 0) return;
  delay<<<1, 1, 0, stream>>>((delays * 7919U + static_cast<unsigned>(rank) * 104729U + salt * 31U) % 40000U);
}

/// The device side of one rank's call.
struct RankBuffers {
  DeviceArray<std::uint16_t> x, out;
  DeviceArray<std::int32_t> ids, num;
  DeviceArray<float> weights;
  DeviceArray<std::uint16_t> y;
  moe::detail::ExchangeTokens in;
};
inline RankBuffers make_buffers(RankTokens const& t, int hidden, int local_experts, std::size_t y_rows) {
  RankBuffers b;
  b.x = DeviceArray<std::uint16_t>(t.x);
  b.out = DeviceArray<std::uint16_t>(t.x.size());
  b.ids = DeviceArray<std::int32_t>(t.ids);
  b.weights = DeviceArray<float>(t.weights);
  b.num = DeviceArray<std::int32_t>(static_cast<std::size_t>(local_experts));
  b.y = DeviceArray<std::uint16_t>(y_rows * static_cast<std::size_t>(hidden));
  b.in.tokens = t.tokens;
  b.in.x = reinterpret_cast<__nv_bfloat16 const*>(b.x.data());
  b.in.x_stride = hidden;
  b.in.ids = b.ids.data();
  b.in.weights = b.weights.data();
  return b;
}
inline __nv_bfloat16* as_bf16(DeviceArray<std::uint16_t>& a) { return reinterpret_cast<__nv_bfloat16*>(a.data()); }

/// The output row that identity experts must give. per_rank: rows are summed and rounded per rank first, then in rank order.
inline std::vector<std::uint16_t> expected_output(RankTokens const& t, int token, std::vector<float> const& values, int topk,
                                                  int local_experts, int ranks, bool per_rank) {
  std::vector<std::uint16_t> out(values.size());
  for (std::size_t h = 0; h < values.size(); ++h) {
    float acc = 0.0F;
    auto choice = [&](int j) { return t.ids[static_cast<std::size_t>(token * topk + j)]; };
    auto weight = [&](int j) { return t.weights[static_cast<std::size_t>(token * topk + j)]; };
    if (per_rank) {
      for (int r = 0; r < ranks; ++r) {
        float part = 0.0F;
        bool any = false;
        for (int j = 0; j < topk; ++j) {
          if (choice(j) >= 0 && choice(j) / local_experts == r) {
            part = std::fma(weight(j), values[h], part);
            any = true;
          }
        }
        if (any) {
          acc += bf16_value(bf16_bits(part));
        }
      }
    } else {
      for (int j = 0; j < topk; ++j) {
        if (choice(j) >= 0) {
          acc = std::fma(weight(j), values[h], acc);
        }
      }
    }
    out[h] = bf16_bits(acc);
  }
  return out;
}

template <moe::quantization::ScaleFloor Floor>
std::string check_outputs(RankTokens const& t, RankBuffers const& b, int r, int hidden, int topk, int local_experts, int ranks, bool fp8,
                          bool per_rank, int step) {
  auto const out = b.out.host();
  for (int token = 0; token < t.tokens; token += step) {
    auto const row = wire_row<Floor>(t.x.data() + static_cast<std::size_t>(token) * static_cast<std::size_t>(hidden), hidden, fp8);
    auto const want = expected_output(t, token, row.values, topk, local_experts, ranks, per_rank);
    for (int h = 0; h < hidden; ++h) {
      auto const got = out[static_cast<std::size_t>(token) * static_cast<std::size_t>(hidden) + static_cast<std::size_t>(h)];
      if (bf16_value(got) != bf16_value(want[static_cast<std::size_t>(h)])) {
        return moe::text("rank ", r, " output (", token, ", ", h, "): ", bf16_value(got), ", expected ",
                         bf16_value(want[static_cast<std::size_t>(h)]));
      }
    }
  }
  return "";
}

}  // namespace moe_test
