// SPDX-License-Identifier: Apache-2.0
// tests/unit/comm_window_killed_test.cpp: exchanges between forked processes of which one is killed. Without MPI, which would end them all.
#include "moe/comm/host_window.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <vector>

#include "moe/backends/window/host/high_throughput.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/backends/window/host/one_sided.hpp"
#include "moe/backends/window/host/pplx.hpp"
#include "moe/backends/window/host/two_sided.hpp"
#include "moe/quantization/none.hpp"

namespace {

using moe::ErrorCode;

constexpr std::int64_t kPart = std::int64_t{1} << 20;
constexpr std::int64_t kOffer = 64 * 1024;  // bytes that a rank can gather

/// Memory that forked processes share: a window part and an all_gather buffer for each rank.
struct Shared {
  int ranks;
  char* base;
  explicit Shared(int n)
      : ranks(n),
        base(static_cast<char*>(
            mmap(nullptr, static_cast<std::size_t>(n * (kPart + kOffer)), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~Shared() { munmap(base, static_cast<std::size_t>(ranks * (kPart + kOffer))); }
};

class ForkWindow;

/// The collectives that construction needs, over the last part of the shared memory.
class ForkComm {
 public:
  using Space = moe::space::host;
  ForkComm(Shared& shared, int rank) : shared_(&shared), rank_(rank) {}
  int rank() const { return rank_; }
  int size() const { return shared_->ranks; }
  void all_gather(void const* in, std::int64_t n, void* out, moe::HostStream) {
    std::memcpy(offer(rank_) + 64, in, static_cast<std::size_t>(n));
    meet();
    for (int r = 0; r < size(); ++r) std::memcpy(static_cast<char*>(out) + n * r, offer(r) + 64, static_cast<std::size_t>(n));
    meet();
  }
  void meet() {
    ++round_;
    std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(offer(rank_))).store(round_);
    for (int r = 0; r < size(); ++r) {
      while (std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(offer(r))).load() < round_) sched_yield();
    }
  }
  Shared& shared() { return *shared_; }

 private:
  char* offer(int r) const { return shared_->base + shared_->ranks * kPart + r * kOffer; }
  Shared* shared_;
  int rank_;
  std::uint32_t round_ = 0;
};

class ForkWindow : public moe::comm::HostWindow {
 public:
  using Comm = ForkComm;
  struct Params {
    std::int64_t timeout_ms = 1000;
  };
  ForkWindow(ForkComm& comm, std::int64_t user_bytes, Params const& p) {
    if (user_bytes + 4096 > kPart) throw moe::Error(ErrorCode::capacity, moe::text("window: ", user_bytes, " bytes"));
    std::array<char*, moe::comm::kMaxWindowRanks> parts{};
    for (int r = 0; r < comm.size(); ++r) parts[static_cast<std::size_t>(r)] = comm.shared().base + r * kPart;
    attach(parts.data(), comm.rank(), comm.size(), static_cast<std::size_t>(user_bytes) + 4096, p.timeout_ms);
    comm.meet();
    meet();
  }
};

struct AnyActivation {};
struct Config : moe::LayerDefaults {
  using Activation = AnyActivation;
};

/// Runs body(comm) in a process for each rank; returns each result, or 128 + signal.
std::vector<int> run_ranks(int ranks, std::function<int(ForkComm&)> const& body) {
  Shared shared(ranks);
  std::vector<pid_t> children;
  for (int r = 0; r < ranks; ++r) {
    pid_t const child = fork();
    if (child == 0) {
      ForkComm comm(shared, r);
      int result = 99;
      try {
        result = body(comm);
      } catch (std::exception const& e) {
        std::fprintf(stderr, "rank %d: %s\n", r, e.what());
      }
      _exit(result);
    }
    children.push_back(child);
  }
  std::vector<int> results;
  for (pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    results.push_back(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
  }
  return results;
}

enum class Death { before_dispatch, before_combine };

/// Three good rounds; then the last rank kills itself. 0: this rank got an error in time that names the dead rank, and could leave.
template <class Backend>
int survive(ForkComm& comm, Death death) {
  using Exchange = typename Backend::template Exchange<Config, moe::quantization::None, float>;
  int const experts = 2 * comm.size();
  int const last = comm.size() - 1;
  auto const start = [] { return std::chrono::steady_clock::now(); };
  std::chrono::steady_clock::time_point began;
  {
    moe::Arena<moe::space::host> arena;
    typename Backend::Params params{};
    if constexpr (requires { params.queue_depth; }) params.queue_entry_bytes = 4096;
    Exchange x(comm, moe::Shape<Config>({16, 8, experts, 2}), 4, moe::ExpertPlacement(experts, comm.size()), {}, params, arena);
    std::vector<float> in(4 * 16, 1.0F), out(4 * 16), weights(8, 0.5F);
    std::vector<std::int32_t> ids(8);
    for (std::size_t i = 0; i < 8; ++i) ids[i] = static_cast<std::int32_t>(i) % experts;
    auto round = [&](bool dies_between) {
      x.prepare(
          {moe::make_rows(static_cast<float const*>(in.data()), 4, 16), moe::make_rows(static_cast<std::int32_t const*>(ids.data()), 4, 2),
           moe::make_rows(static_cast<float const*>(weights.data()), 4, 2)},
          {});
      auto y = x.expert_output();
      std::fill_n(y.data_handle(), y.size(), 1.0F);
      if (dies_between && comm.rank() == last) raise(SIGKILL);
      x.finalize(moe::make_rows(out.data(), 4, 16), {});
    };
    for (int i = 0; i < 3; ++i) round(false);
    if (death == Death::before_dispatch && comm.rank() == last) raise(SIGKILL);
    began = start();
    try {
      round(death == Death::before_combine);
      return 1;
    } catch (moe::TransportError const& e) {
      if (e.code() != ErrorCode::timeout && e.code() != ErrorCode::peer) return 2;
      if (e.peer() != last) return 3;
    }
    if (start() - began > std::chrono::milliseconds(2000)) return 4;
    began = start();
  }
  return start() - began > std::chrono::milliseconds(500) ? 5 : 0;  // destruction waits for no rank
}

template <class Backend>
void expect_survivors() {
  for (int ranks : {2, 3, 4}) {
    for (Death death : {Death::before_dispatch, Death::before_combine}) {
      std::vector<int> expected(static_cast<std::size_t>(ranks), 0);
      expected.back() = 128 + SIGKILL;
      EXPECT_EQ(run_ranks(ranks, [&](ForkComm& comm) { return survive<Backend>(comm, death); }), expected)
          << ranks << " ranks, killed before " << (death == Death::before_dispatch ? "dispatch" : "combine");
    }
  }
}

TEST(KilledRank, T10_LowLatency) { expect_survivors<moe::backends::LowLatency<ForkWindow>>(); }
TEST(KilledRank, T10_HighThroughput) { expect_survivors<moe::backends::HighThroughput<ForkWindow>>(); }
TEST(KilledRank, T10_OneSided) { expect_survivors<moe::backends::OneSided<ForkWindow>>(); }
TEST(KilledRank, T10_Pplx) { expect_survivors<moe::backends::Pplx<ForkWindow>>(); }
TEST(KilledRank, T10_TwoSided) { expect_survivors<moe::backends::TwoSided<ForkWindow>>(); }

/// The last rank kills itself between rounds or within one; the others mask it, at once because its process has ended, and continue with
/// the outputs of the others. 0: every output was right.
int go_on_without(ForkComm& comm, Death death) {
  using Backend = moe::backends::LowLatency<ForkWindow>;
  using Exchange = Backend::Exchange<Config, moe::quantization::None, float>;
  int const experts = 2 * comm.size();
  int const last = comm.size() - 1;
  moe::Arena<moe::space::host> arena;
  Backend::Params params{.masks = true};
  params.window.timeout_ms = 20'000;
  Exchange x(comm, moe::Shape<Config>({16, 8, experts, 2}), 4, moe::ExpertPlacement(experts, comm.size()), {}, params, arena);
  std::vector<float> in(4 * 16, 1.0F), out(4 * 16), weights(8, 0.5F);
  std::vector<std::int32_t> ids(8);
  for (std::size_t i = 0; i < 8; ++i) ids[i] = static_cast<std::int32_t>(i * 3) % experts;
  auto const start = std::chrono::steady_clock::now();
  for (int round = 0; round < 8; ++round) {
    bool const dies = round == 3 && comm.rank() == last;
    if (dies && death == Death::before_dispatch) raise(SIGKILL);
    x.prepare(
        {moe::make_rows(static_cast<float const*>(in.data()), 4, 16), moe::make_rows(static_cast<std::int32_t const*>(ids.data()), 4, 2),
         moe::make_rows(static_cast<float const*>(weights.data()), 4, 2)},
        {});
    auto y = x.expert_output();
    std::fill_n(y.data_handle(), y.size(), 1.0F);
    if (dies) raise(SIGKILL);
    x.finalize(moe::make_rows(out.data(), 4, 16), {});
    for (std::size_t t = 0; t < 4; ++t) {
      float wanted = 0;
      for (std::size_t j = 0; j < 2; ++j) wanted += round >= 3 && ids[2 * t + j] / 2 == last ? 0.0F : 0.5F;
      if (out[t * 16] != wanted) return 1;
    }
  }
  if (x.query_mask()[static_cast<std::size_t>(last)] != true) return 2;
  return std::chrono::steady_clock::now() - start > std::chrono::seconds(10) ? 3 : 0;
}

TEST(KilledRank, T11_MaskedSurvivorsGoOn) {
  for (int ranks : {2, 3, 4}) {
    for (Death death : {Death::before_dispatch, Death::before_combine}) {
      std::vector<int> expected(static_cast<std::size_t>(ranks), 0);
      expected.back() = 128 + SIGKILL;
      EXPECT_EQ(run_ranks(ranks, [&](ForkComm& comm) { return go_on_without(comm, death); }), expected)
          << ranks << " ranks, killed before " << (death == Death::before_dispatch ? "dispatch" : "combine");
    }
  }
}

// A process that has ended is noticed before the deadline.
TEST(KilledRank, EndedProcessIsNoticedEarly) {
  auto const results = run_ranks(2, [](ForkComm& comm) {
    ForkWindow w(comm, 4096, {.timeout_ms = 60'000});
    w.barrier();
    if (comm.rank() == 1) raise(SIGKILL);
    auto const start = std::chrono::steady_clock::now();
    try {
      w.barrier();
    } catch (moe::TransportError const& e) {
      if (e.code() != ErrorCode::peer || e.peer() != 1) return 1;
      return std::chrono::steady_clock::now() - start < std::chrono::seconds(10) ? 0 : 2;
    }
    return 3;
  });
  EXPECT_EQ(results, (std::vector<int>{0, 128 + SIGKILL}));
}

}  // namespace
