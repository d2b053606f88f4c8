// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/killed_rank_test.cu: a rank is killed in the middle of rounds, over NCCL and over NCCL windows. The others must get an
// error that names the rank within the deadline, leave, keep their GPU and be able to build a new group. One process per GPU, started by
// this one and not by mpirun, which would end them all.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "exit_code.hpp"
#include "moe/backends/collective/device/all_to_all_v.cuh"
#include "moe/backends/collective/device/gather_exchange.cuh"
#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/backends/window/device/one_sided/launch.cuh"
#include "moe/backends/window/device/pplx/launch.cuh"
#include "moe/backends/window/device/two_sided/launch.cuh"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/quantization/none.hpp"
#include "started_ranks.hpp"

namespace {

using namespace moe_test;
using moe::bf16;
using moe::ErrorCode;
using moe::text;
using moe::backends::Sizes;
using moe::comm::Nccl;
using Window = moe::comm::NcclSymmetric;
using Clock = std::chrono::steady_clock;

struct Config : moe::LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  struct Activation {};
};
constexpr int kHidden = 512;
constexpr int kTopK = 2;
constexpr int kTokens = 16;
constexpr int kDeadlineMs = 1500;
constexpr int kConnectMs = 60'000;  ///< for construction: processes may start late
constexpr auto kLeaveWithin = std::chrono::seconds(10);

/// When the last rank dies in the fourth round.
enum class Death { before_dispatch, before_combine, under_way };
constexpr char const* name(Death d) {
  return d == Death::before_dispatch ? "before dispatch" : d == Death::before_combine ? "before combine" : "with kernels under way";
}

/// The arguments of one rank's process.
struct Role {
  int rank = 0;
  int size = 0;
  std::string id;  ///< file of the communicator's id
  std::string backend;
  Death death = Death::before_dispatch;
  Sizes sizes = Sizes::exact;
  bool last() const { return rank == size - 1; }
};

/// Three good rounds, then the last rank kills itself in the fourth. Checks the others' error.
template <class Backend>
Finding rounds(Role const& role, Nccl& comm) {
  using Exchange = typename Backend::template Exchange<Config, moe::quantization::None, bf16>;
  constexpr bool kWindowed = requires(typename Backend::Params p) { p.window; };
  typename Backend::Params params{};
  if constexpr (kWindowed) {
    params.window.timeout_ms = kDeadlineMs;
    params.blocks = 16;
  } else {
    params.sizes = role.sizes;
  }
  int const experts = 4 * role.size;
  moe::Arena<moe::space::cuda> arena;
  Exchange exchange(comm, moe::Shape<Config>({.hidden = kHidden, .intermediate = 128, .num_experts = experts, .topk = kTopK}), kTokens,
                    moe::ExpertPlacement(experts, role.size), {}, params, arena);
  moe::Buffer<bf16, moe::space::cuda> x(kTokens * kHidden), out(kTokens * kHidden);
  moe::Buffer<std::int32_t, moe::space::cuda> ids(kTokens * kTopK);
  moe::Buffer<float, moe::space::cuda> weights(kTokens * kTopK);
  std::vector<std::int32_t> const host_ids = [&] {
    std::vector<std::int32_t> v;
    for (int i = 0; i < kTokens * kTopK; ++i) v.push_back(i % experts);  // every rank has rows at every other
    return v;
  }();
  ids.copy_from_host(host_ids.data());
  moe::Memory<moe::space::cuda>::fill(x.data(), 0, kTokens * kHidden * sizeof(bf16));
  moe::Memory<moe::space::cuda>::fill(weights.data(), 0, kTokens * kTopK * sizeof(float));
  moe::CudaStream stream;
  moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  comm.set_timeout_ms(kDeadlineMs);
  auto settle = [&] {
    if constexpr (kWindowed) {
      stream.synchronize();
      exchange.check();
    } else {
      exchange.wait(stream);
    }
  };
  auto round = [&](bool dies) {
    if (dies && role.death == Death::before_dispatch) raise(SIGKILL);
    exchange.prepare({moe::make_rows(static_cast<bf16 const*>(x.data()), kTokens, kHidden),
                      moe::make_rows(static_cast<std::int32_t const*>(ids.data()), kTokens, kTopK),
                      moe::make_rows(static_cast<float const*>(weights.data()), kTokens, kTopK)},
                     stream);
    if (dies && role.death == Death::before_combine) settle();
    if (dies) raise(SIGKILL);
    exchange.finalize(moe::make_rows(out.data(), kTokens, kHidden), stream);
    settle();
  };
  for (int i = 0; i < 3; ++i) round(false);
  auto const start = Clock::now();
  try {
    round(role.last());
    if (role.death == Death::under_way) round(role.last());  // this rank's part of the round may have completed
    return kNoFailure;
  } catch (moe::TransportError const& e) {
    auto const took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count();
    std::fprintf(stderr, "  %s rank %d of %d, killed %s: after %d ms: %s: %s\n", role.backend.c_str(), role.rank, role.size,
                 name(role.death), static_cast<int>(took), moe::name(e.code()).data(), e.what());
    if (e.code() != ErrorCode::timeout && e.code() != ErrorCode::peer) return kWrongCode;
    if (e.peer() != role.size - 1) return kWrongPeer;
    if (took > kDeadlineMs + 1000) return kLate;
  }
  return kFine;
}

Finding play(Role const& role) {
  std::map<std::string, Finding (*)(Role const&, Nccl&)> const all{
      {"naive", &rounds<moe::backends::Naive<Nccl>>},
      {"allgather_reduce_scatter", &rounds<moe::backends::AllGatherReduceScatter<Nccl>>},
      {"all_to_all_v", &rounds<moe::backends::AllToAllV<Nccl>>},
      {"low_latency", &rounds<moe::backends::LowLatency<Window>>},
      {"high_throughput", &rounds<moe::backends::HighThroughput<Window>>},
      {"one_sided", &rounds<moe::backends::OneSided<Window>>},
      {"two_sided", &rounds<moe::backends::TwoSided<Window>>},
      {"pplx", &rounds<moe::backends::Pplx<Window>>},
  };
  moe::check_cuda(cudaSetDevice(role.rank), "cudaSetDevice");
  Clock::time_point leaving;
  Finding found = kFine;
  {
    Nccl comm = Nccl::over_file(role.id, role.rank, role.size, {.timeout_ms = kConnectMs});
    found = all.at(role.backend)(role, comm);  // destroys the exchange and its window before it returns
    leaving = Clock::now();
  }
  if (found != kFine) return found;
  auto const took = Clock::now() - leaving;
  if (took > kLeaveWithin) return kLeftLate;

  // The GPU still works, and the survivors can continue in a new group.
  std::vector<int> words{1, 2, 3}, back(3);
  moe::Buffer<int, moe::space::cuda> memory(3);
  memory.copy_from_host(words.data());
  memory.copy_to_host(back.data());
  if (cudaDeviceSynchronize() != cudaSuccess || back != words) return kGpuUnusable;
  Nccl survivors = Nccl::over_file(role.id + ".survivors", role.rank, role.size - 1, {.timeout_ms = 20'000});
  int const me = role.rank;
  std::vector<int> ranks(static_cast<std::size_t>(role.size - 1), -1);
  survivors.all_gather_host(&me, sizeof me, ranks.data());
  for (int r = 0; r < role.size - 1; ++r) {
    if (ranks[static_cast<std::size_t>(r)] != r) return kNoNewGroup;
  }
  return kFine;
}

/// The process of one rank.
int be_rank(char** argv) {
  Role role{std::atoi(argv[2]),
            std::atoi(argv[3]),
            argv[4],
            argv[5],
            static_cast<Death>(std::atoi(argv[6])),
            static_cast<Sizes>(std::atoi(argv[7]))};
  try {
    return play(role);
  } catch (std::exception const& e) {
    std::fprintf(stderr, "%s rank %d of %d, killed %s: %s\n", role.backend.c_str(), role.rank, role.size, name(role.death), e.what());
    return kOther;
  }
}

/// All kinds of death run at the same time, each in a separate group.
void expect_survivors(std::string const& backend, std::vector<Death> const& deaths, std::vector<Sizes> const& sizes) {
  int devices = 0;
  cudaGetDeviceCount(&devices);
  for (int size : {2, 4}) {
    if (size > devices) continue;
    std::vector<StartedRanks> groups;
    for (Death death : deaths) {
      for (Sizes s : sizes) {
        groups.emplace_back(
            text(backend, s == Sizes::fixed ? ", fixed sizes" : "", ", ", size, " ranks, killed ", name(death)), size,
            std::vector<std::string>{backend, std::to_string(static_cast<int>(death)), std::to_string(static_cast<int>(s))});
      }
    }
    auto const end = Clock::now() + std::chrono::seconds(60);
    for (auto& group : groups) group.expect_survivors(end);
  }
}

class KilledRank : public testing::TestWithParam<char const*> {};
class KilledWindowRank : public testing::TestWithParam<char const*> {};
std::string name_of(testing::TestParamInfo<char const*> const& info) { return info.param; }

TEST_P(KilledRank, T10_SurvivorsAreToldAndLeave) {
  expect_survivors(GetParam(), {Death::before_dispatch, Death::before_combine}, {Sizes::exact, Sizes::fixed});
}
INSTANTIATE_TEST_SUITE_P(Nccl, KilledRank, testing::Values("naive", "allgather_reduce_scatter", "all_to_all_v"), name_of);

TEST_P(KilledWindowRank, T10_SurvivorsAreToldAndLeave) {
  expect_survivors(GetParam(), {Death::before_dispatch, Death::before_combine, Death::under_way}, {Sizes::exact});
}
INSTANTIATE_TEST_SUITE_P(NcclWindow, KilledWindowRank, testing::Values("low_latency", "high_throughput", "one_sided", "two_sided", "pplx"),
                         name_of);

}  // namespace

int main(int argc, char** argv) {
  if (argc == 8 && std::string(argv[1]) == "--rank") {
    return be_rank(argv);
  }
  testing::InitGoogleTest(&argc, argv);
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < 2) {
    std::printf("skipped: needs 2 GPUs, found %d\n", devices);
    return 77;
  }
  return moe_test::exit_code(RUN_ALL_TESTS());
}
