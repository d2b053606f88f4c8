// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/exchange_test.cu: the device backends as policies, one process per GPU: bootstrap, window, prepare and finalize.
// moe-ranks: 2 4 8
#include <gtest/gtest.h>
#include <mpi.h>

#include <optional>

#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/quantization/fp8_group128.hpp"
#include "moe/quantization/none.hpp"
#include "tests/mpi_world.hpp"
#include "tests/multigpu/exchange_harness.cuh"

namespace {

using namespace moe_test;
using moe::bf16;
using moe::check_cuda;
static_assert(moe::Communicator<moe::comm::Nccl>);
static_assert(moe::SymmetricMemory<moe::comm::NcclSymmetric>);
static_assert(moe::PrepareAndFinalize<moe::backends::LowLatency<moe::comm::NcclSymmetric>>);
static_assert(moe::PrepareAndFinalize<moe::backends::HighThroughput<moe::comm::NcclSymmetric>>);
using Fp8Transport = moe::quantization::Fp8Group<128, moe::quantization::ScaleFormat::f32, moe::quantization::ScaleFloor::amax_1e4>;

moe::comm::Nccl communicator() {
  return moe::comm::Nccl::over(world_rank(), world_size(), [](void* data, std::size_t bytes) {
    MPI_Bcast(data, static_cast<int>(bytes), MPI_BYTE, 0, MPI_COMM_WORLD);
  });
}

struct Config : moe::LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  struct Activation {};
};
constexpr int kHidden = 1024;
constexpr int kTopK = 4;
constexpr int kMaxTokens = 24;
constexpr std::int64_t kTimeoutMs = 5'000;

moe::Shape<Config> layer_shape(int experts) {
  return moe::Shape<Config>(moe::LayerShape{.hidden = kHidden, .intermediate = 128, .num_experts = experts, .topk = kTopK});
}
moe::RoutedTokens<bf16> routed(RankBuffers const& b) {
  return {moe::make_rows(b.in.x, b.in.tokens, kHidden), moe::make_rows(b.in.ids, b.in.tokens, kTopK),
          moe::make_rows(b.in.weights, b.in.tokens, kTopK)};
}

/// y[e][i] = row i of block e, decoded.
template <class Payload, class Partial>
__global__ void identity_blocks(Payload const* rows, float const* scales, std::int32_t const* num, int capacity, Partial* y) {
  int const e = static_cast<int>(blockIdx.x);
  for (int i = 0; i < num[e]; ++i) {
    std::size_t const at = static_cast<std::size_t>(e) * capacity + i;
    for (int h = static_cast<int>(threadIdx.x); h < kHidden; h += static_cast<int>(blockDim.x)) {
      float v;
      if constexpr (sizeof(Payload) == 1) {
        __nv_fp8_e4m3 code;
        code.__x = rows[at * kHidden + h];
        v = static_cast<float>(code) * scales[at * (kHidden / 128) + h / 128];
      } else {
        v = __bfloat162float(rows[at * kHidden + h]);
      }
      y[at * kHidden + h] = moe::from_float<Partial>(v);
    }
  }
}
/// y[r] = row r times the sum of its weights, in choice order.
template <class Payload, class Partial>
__global__ void identity_rows(moe::StandardTokens<Payload, float> const tokens, int row_stride, int scale_stride, int record, Partial* y) {
  for (int r = static_cast<int>(blockIdx.x); r < *tokens.num_rows; r += static_cast<int>(gridDim.x)) {
    for (int h = static_cast<int>(threadIdx.x); h < kHidden; h += static_cast<int>(blockDim.x)) {
      float v;
      if constexpr (sizeof(Payload) == 1) {
        __nv_fp8_e4m3 code;
        code.__x = tokens.rows.data_handle()[static_cast<std::size_t>(r) * row_stride + h];
        v = static_cast<float>(code) * tokens.scales.data_handle()[static_cast<std::size_t>(r) * scale_stride + h / 128];
      } else {
        v = __bfloat162float(tokens.rows.data_handle()[static_cast<std::size_t>(r) * row_stride + h]);
      }
      v = __bfloat162float(__float2bfloat16_rn(v));
      float sum = 0.0F;
      for (int j = 0; j < kTopK; ++j) {
        std::size_t const at = static_cast<std::size_t>(r) * record + j;
        if (tokens.topk_ids.data_handle()[at] >= 0) {
          sum = fmaf(tokens.topk_weights.data_handle()[at], v, sum);
        }
      }
      y[static_cast<std::size_t>(r) * kHidden + h] = moe::from_float<Partial>(sum);
    }
  }
}

template <class Quant, class Partial>
void low_latency_round_trip() {
  int const R = world_size();
  int const me = world_rank();
  int const experts = 8 * R;
  auto comm = communicator();
  moe::Arena<moe::space::cuda> arena;
  using Backend = moe::backends::LowLatency<moe::comm::NcclSymmetric>;
  typename Backend::Exchange<Config, Quant, Partial> exchange(comm, layer_shape(experts), kMaxTokens, moe::ExpertPlacement(experts, R),
                                                              Quant{}, Backend::Params{.blocks = 32, .window = {kTimeoutMs}}, arena);
  moe::CudaStream stream;
  for (unsigned seed = 0; seed < 6; ++seed) {
    int const tokens = (static_cast<int>(seed) + me) % 3 == 0 ? 0 : kMaxTokens - static_cast<int>(seed);
    auto const mine = make_tokens(me, tokens, kHidden, kTopK, experts, R, seed % 2 == 0 ? Routing::uniform : Routing::with_gaps, seed);
    auto b = make_buffers(mine, kHidden, 8, 0);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::optional<moe::detail::Handle> handle;
    auto const t = [&] {
      if (seed % 3 != 2) {
        return exchange.prepare(routed(b), stream);
      }
      handle = exchange.send(routed(b), stream);
      EXPECT_THROW(exchange.send(routed(b), stream), moe::Error);
      delay<<<1, 1, 0, stream>>>(100000);
      return exchange.receive(*handle, stream);
    }();
    auto y = handle ? exchange.expert_output(*handle) : exchange.expert_output();
    identity_blocks<<<8, 128, 0, stream>>>(t.rows.data_handle(), t.scales.data_handle(), t.expert_num_tokens.data_handle(),
                                           static_cast<int>(t.rows.extent(1)), y.data_handle());
    auto const out = moe::make_rows(as_bf16(b.out), tokens, kHidden);
    handle ? exchange.combine(*handle, out, stream) : exchange.finalize(out, stream);
    stream.synchronize();
    exchange.check();
    EXPECT_EQ(
        (check_outputs<moe::quantization::ScaleFloor::amax_1e4>(mine, b, me, kHidden, kTopK, 8, R, Quant::kQuantizesActivations, false, 1)),
        "")
        << "rank " << me;
  }
}
TEST(LowLatency, T1_T2_RoundTripFp8) { low_latency_round_trip<Fp8Transport, bf16>(); }
TEST(LowLatency, T1_T2_RoundTripUnquantised) { low_latency_round_trip<moe::quantization::None, bf16>(); }
TEST(LowLatency, T1_T2_RoundTripFloatOutputs) { low_latency_round_trip<Fp8Transport, float>(); }

template <class Quant, class Partial>
void high_throughput_round_trip() {
  int const R = world_size();
  int const me = world_rank();
  int const experts = 8 * R;
  int const max_tokens = 700;
  auto comm = communicator();
  moe::Arena<moe::space::cuda> arena;
  using Backend = moe::backends::HighThroughput<moe::comm::NcclSymmetric>;
  typename Backend::Exchange<Config, Quant, Partial> exchange(comm, layer_shape(experts), max_tokens, moe::ExpertPlacement(experts, R),
                                                              Quant{}, Backend::Params{.blocks = 8, .window = {kTimeoutMs}}, arena);
  moe::CudaStream stream;
  for (unsigned seed = 0; seed < 6; ++seed) {
    int const tokens = (static_cast<int>(seed) + me) % 4 == 0 ? 0 : max_tokens - 37 * static_cast<int>(seed);
    auto const mine = make_tokens(me, tokens, kHidden, kTopK, experts, R, seed % 2 == 0 ? Routing::uniform : Routing::with_gaps, seed);
    auto b = make_buffers(mine, kHidden, 8, 0);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    auto const t = exchange.prepare(routed(b), stream);
    auto y = exchange.expert_output();
    identity_rows<<<64, 128, 0, stream>>>(t, static_cast<int>(t.rows.stride(0)), static_cast<int>(t.scales.stride(0)),
                                          static_cast<int>(t.topk_ids.stride(0)), y.data_handle());
    exchange.finalize(moe::make_rows(as_bf16(b.out), tokens, kHidden), stream);
    stream.synchronize();
    exchange.check();
    EXPECT_EQ(
        (check_outputs<moe::quantization::ScaleFloor::amax_1e4>(mine, b, me, kHidden, kTopK, 8, R, Quant::kQuantizesActivations, true, 1)),
        "")
        << "rank " << me;
  }
}
TEST(HighThroughput, T1_T2_RoundTripFp8) { high_throughput_round_trip<Fp8Transport, bf16>(); }
TEST(HighThroughput, T1_T2_RoundTripUnquantised) { high_throughput_round_trip<moe::quantization::None, float>(); }

// Section 14: a failed allocation is E_CAPACITY on all ranks, no memory leaks, and the next window works.
TEST(Window, MemoryThatCannotBeHad) {
  auto comm = communicator();
  for (int i = 0; i < 3; ++i) {
    try {
      moe::comm::NcclSymmetric(comm, std::int64_t{1} << 50, {kTimeoutMs});
      ADD_FAILURE() << "no error";
    } catch (moe::Error const& e) {
      EXPECT_EQ(e.code(), moe::ErrorCode::capacity) << e.what();
    }
  }
  moe::comm::NcclSymmetric window(comm, 1 << 20, {kTimeoutMs});
  EXPECT_GE(window.bytes(), 1 << 20);
}

TEST(ExchangeCommunicator, CollectivesOfUnequalSizes) {
  auto comm = communicator();
  int const R = comm.size();
  int const me = comm.rank();
  moe::CudaStream stream;
  std::vector<std::int64_t> counts, offsets;
  std::int64_t total = 0;
  for (int r = 0; r < R; ++r) {
    counts.push_back(r == 1 ? 0 : 64 * (r + 1));
    offsets.push_back(total);
    total += counts.back();
  }
  std::vector<std::uint8_t> own(static_cast<std::size_t>(counts[static_cast<std::size_t>(me)]), static_cast<std::uint8_t>(me + 1));
  DeviceArray<std::uint8_t> in(own), out(static_cast<std::size_t>(total), 0);
  comm.all_gather_v(in.data(), counts[static_cast<std::size_t>(me)], out.data(), counts.data(), offsets.data(), stream);
  comm.barrier(stream);
  stream.synchronize();
  auto const all = out.host();
  for (int r = 0; r < R; ++r) {
    for (std::int64_t i = 0; i < counts[static_cast<std::size_t>(r)]; ++i) {
      ASSERT_EQ(all[static_cast<std::size_t>(offsets[static_cast<std::size_t>(r)] + i)], r + 1);
    }
  }
}

TEST(ExchangeCommunicator, AnotherVersionIsRefused) {
  try {
    moe::comm::detail::check_nccl_version(22803);
    int running = 0;
    ncclGetVersion(&running);
    EXPECT_EQ(running, 22803);
  } catch (moe::Error const& e) {
    EXPECT_EQ(e.code(), moe::ErrorCode::unsupported);
  }
}

}  // namespace
