// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_killed_rank_test.cpp: a rank of runners between GPUs kills itself in each stage of a forward, and while experts
// move. The others get an error that names it within twice the deadline and 3 s for load, leave, keep their GPU, and compute in a new group
// what one rank computes. One process per rank, started by this one: four ranks on four GPUs, two on two or three, where cases that need
// more are skipped. Ranks that NCCL believes on hosts of their own may share a GPU and are always four, on one GPU, too.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "exit_code.hpp"
#include "expect_close.hpp"
#include "grid_on_device.hpp"
#include "moe/backends/collective/device/all_to_all_v.hpp"
#include "moe/backends/collective/device/gather_exchange.hpp"
#include "moe/backends/collective/device/no_expert_parallel.hpp"
#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/backends/window/device/one_sided/exchange.hpp"
#include "moe/backends/window/device/pplx/exchange.hpp"
#include "moe/backends/window/device/two_sided/exchange.hpp"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/eplb/recovery.hpp"
#include "moe/eplb/runtime_balancer.hpp"
#include "moe/runner/device/two_queues.hpp"
#include "several_hosts.hpp"
#include "started_ranks.hpp"
#include "word_group.hpp"

namespace {

using namespace moe_test;
using namespace moe_test::grid;
using Window = comm::NcclSymmetric;
using Local = backends::NoExpertParallel<Cuda>;
using Gather = backends::AllGatherReduceScatter<Nccl>;
using AllToAll = backends::AllToAllV<Nccl>;
using LowLatency = backends::LowLatency<Window>;
using HighThroughput = backends::HighThroughput<Window>;
using Naive = backends::Naive<Nccl>;
using OneSided = backends::OneSided<Window>;
using TwoSided = backends::TwoSided<Window>;
using Pplx = backends::Pplx<Window>;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kRanks = 4, kFewRanks = 2;  ///< of a case; the fewer where there are fewer GPUs than kRanks
constexpr int kRows = 5;
constexpr std::int64_t kDeadline = 3000;
constexpr std::int64_t kConnect = 60'000;  ///< for what comes before the deaths: processes may start late
/// For the survivors to meet. They arrive at different times, because each must first get its error and leave the old group. A survivor
/// that never comes costs the others this long.
constexpr std::int64_t kMeet = 30'000;
/// Of waits in which all ranks are alive and connected: a circle of waits shows as an error, not as a test that hangs.
constexpr std::int64_t kAlive = 15'000;
constexpr auto kDeadlinesAndLoad = milliseconds(2 * kDeadline + 3000);
constexpr auto kLeaveWithin = std::chrono::seconds(15);
constexpr auto kOthersArrive = milliseconds(500);  ///< by then the survivors have passed the stages before the death
constexpr int kBetweenSteps = -1;                  ///< the stage of a death outside the forwards; else a Phase
constexpr int kWide = 256;                         ///< a width that every exchange takes

int devices() {
  int found = 0;
  return cudaGetDeviceCount(&found) == cudaSuccess ? found : 0;
}
/// Whether NCCL believes each rank of a form on a host of its own.
bool on_own_hosts(std::string_view form) { return form.starts_with("hosts_"); }

/// The arguments of one rank's process.
struct Role {
  int rank = 0;
  int size = 0;
  std::string file;  ///< what the communicators' files begin with
  std::string form;
  int stage = 0;
  int victim() const { return size - 1; }
  bool dies() const { return rank == victim(); }
  int device() const { return rank % std::max(devices(), 1); }
  std::string stage_name() const { return stage == kBetweenSteps ? "between steps" : std::string(name(static_cast<Phase>(stage))); }
};

Clock::time_point const started = Clock::now();
/// Prints what this rank has reached, in seconds since its process started.
void reached(Role const& role, char const* what) {
  double const seconds = std::chrono::duration<double>(Clock::now() - started).count();
  std::fprintf(stderr, "  %s rank %d, killed in %s: %5.1f s: %s\n", role.form.c_str(), role.rank, role.stage_name().c_str(), seconds, what);
}

[[noreturn]] void die(Role const& role, cudaStream_t stream) {
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");  // this rank's part of the stages before
  std::this_thread::sleep_for(kOthersArrive);
  reached(role, "dies");
  raise(SIGKILL);
  std::abort();
}

/// Ends this process at the start of a stage.
struct Death {
  Role const* role = nullptr;
  bool now = false;
  cudaStream_t stream = nullptr;
  void begin(Phase p) const {
    if (now && static_cast<int>(p) == role->stage) die(*role, stream);
  }
  void end(Phase) const {}
};

std::string differs(std::vector<float> const& got, std::vector<float> const& want) {
  return moe_test::differs_from_one_rank(got, want, 1.5e-2F * moe_test::largest(want));
}
Finding other(Role const& role, std::string const& what) {
  std::fprintf(stderr, "  %s rank %d, killed in %s: %s\n", role.form.c_str(), role.rank, role.stage_name().c_str(), what.c_str());
  return kOther;
}
/// Of the error that a survivor got.
Finding check_error(Role const& role, TransportError const& e, int victim, Clock::duration took) {
  reached(role, text("told after ", std::chrono::duration_cast<milliseconds>(took).count(), " ms: ", e.what()).c_str());
  if (e.code() != ErrorCode::timeout && e.code() != ErrorCode::peer) return kWrongCode;
  if (e.peer() != victim) return kWrongPeer;
  return took > kDeadlinesAndLoad ? kLate : kFine;
}

Nccl connect(Role const& role, std::string const& group, int rank, int size, std::int64_t timeout_ms = kConnect) {
  return Nccl::over_file(text(role.file, ".", group), rank, size, {.timeout_ms = timeout_ms});
}
template <class Params>
void set_window_deadline([[maybe_unused]] Params& backend) {
  if constexpr (requires { backend.window.timeout_ms; }) backend.window.timeout_ms = kDeadline;
}
template <class Backend>
MoeParallel parallel_with(Grid const& g, int rank) {
  BackendFacts facts = Backend::kFacts;
  facts.sequence_parallel = false;
  return parallel_of(g, rank, facts);
}
/// Waits for a forward and throws what was found.
template <class R>
void settle(R& runner, cudaStream_t stream) {
  runner.wait(stream);
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");  // a window's kernels end by themselves
  runner.check();
}

struct Options {
  bool rows_agree = false;
  backends::Sizes sizes = backends::Sizes::automatic;
  int hidden = kHidden;
};
struct HalfParts : Parts {
  using DualBatch = runner::dual_batch::Halves;
};
struct ChunkParts : Parts {
  using Chunking = runner::chunking::Lockstep;
};

/// A rank of a grid. Splits every batch if its parts can; chunks have two rows.
template <class Backend, class P = Parts>
class Rank {
 public:
  using R = Runner<LayerOf<Backend>, P>;
  Rank(MoeParallel const& at, Model const& m, Nccl& layer_group, Nccl* tp, Options const& o = {})
      : placement_(m.experts, at.ep_size),
        store_(experts_of<Store>(m, placement_, at.ep_rank, at.moe_tp_rank, at.moe_tp_size)),
        runner_(comm(layer_group), store_.view(), parameters(m, at, tp, o)) {
    if constexpr (std::is_same_v<P, HalfParts>) runner_.decide_dual_batch(true);
  }
  cudaStream_t stream() const { return stream_; }
  std::vector<float> forward(Rowset& rows, Death const& death = {}) {
    runner_.forward(rows.x(), rows.y(), {}, stream_, death);
    settle(runner_, stream_);
    return rows.result();
  }

 private:
  typename Backend::Comm& comm([[maybe_unused]] Nccl& layer_group) {
    if constexpr (std::is_same_v<typename Backend::Comm, Nccl>) {
      return layer_group;
    } else {
      return self_;
    }
  }
  typename R::Params parameters(Model const& m, MoeParallel const& at, Nccl* tp, Options const& o) {
    auto p = grid_params<R>(m, at, placement_, tp, o.rows_agree, weights_);
    set_window_deadline(p.layer.backend);
    if constexpr (requires { p.layer.backend.sizes; }) p.layer.backend.sizes = o.sizes;
    if constexpr (std::is_same_v<P, ChunkParts>) p.chunking.rows = 2;
    return p;
  }

  ExpertPlacement placement_;
  OnDevice weights_;
  Store store_;
  comm::Self<Cuda> self_;
  CudaStream stream_;
  R runner_;
};

// ---- Stages of a forward

/// 12 experts divide evenly over 4 ranks and over the 3 that are left, over 2 and over 1.
Model model(int hidden = kHidden) { return {.form = {false, false, SharedOutput::partial}, .experts = 12, .hidden = hidden}; }

/// Good forwards, then one in which the last rank dies. If that is in a sum of its TP group, other groups learn of it in the next one.
template <class Backend, class P>
Finding forwards(Role const& role, Grid const& g, Options const& o, Clock::time_point& told) {
  Model const m = model(o.hidden);
  Nccl layer_group = connect(role, "layer", role.rank, role.size);
  std::optional<Nccl> tp;
  if (g.tp > 1) tp.emplace(connect(role, text("tp", role.rank / g.tp), role.rank % g.tp, g.tp));
  // A TP group names a rank by its number there.
  bool const beside_victim = role.rank / g.tp == role.victim() / g.tp;
  int const victim = g.tp > 1 && beside_victim ? role.victim() % g.tp : role.victim();
  Rank<Backend, P> rank(parallel_with<Backend>(g, role.rank), m, layer_group, tp ? &*tp : nullptr, o);
  reached(role, "connected");
  std::vector<float> const x = bf16_numbers(50 + role.rank / g.tp, kRows * o.hidden), want = on_one_rank(m, x);
  Rowset rows(x, o.hidden);
  for (int i = 0; i < 3; ++i) {
    if (std::string const wrong = differs(rank.forward(rows), want); !wrong.empty()) return other(role, "before the death: " + wrong);
    layer_group.set_timeout_ms(kDeadline);
    if (tp) tp->set_timeout_ms(kDeadline);
  }
  auto const start = Clock::now();
  try {
    rank.forward(rows, {&role, role.dies(), rank.stream()});
    if (!beside_victim) rank.forward(rows);
    return kNoFailure;
  } catch (TransportError const& e) {
    told = Clock::now();
    return check_error(role, e, victim, told - start);
  } catch (Error const& e) {
    other(role, e.what());
    return kWrongCode;
  }
}

/// The last rank dies, and rank 0 sends no word to anyone until the others have their error: they must not name it.
Finding words(Role const& role, Clock::time_point& told) {
  Nccl comm = connect(role, "words", role.rank, role.size);
  runner::HostWords<Nccl, Cuda> words(comm);
  std::vector<std::int64_t> all(static_cast<std::size_t>(role.size));
  words.gather(role.rank, all.data());
  for (int r = 0; r < role.size; ++r) {
    if (all[static_cast<std::size_t>(r)] != r) return other(role, "before the death: other words");
  }
  reached(role, "connected");
  comm.set_timeout_ms(kDeadline);
  if (role.dies()) {
    if (on_own_hosts(role.form)) std::this_thread::sleep_for(kOthersArrive);  // NCCL's thread may still have a word above to send
    raise(SIGKILL);
  }
  if (role.rank == 0) std::this_thread::sleep_for(kDeadlinesAndLoad);
  auto const start = Clock::now();
  try {
    words.gather(1, all.data());
    return kNoFailure;
  } catch (TransportError const& e) {
    told = Clock::now();
    return check_error(role, e, role.victim(), told - start);
  }
}

/// The ranks that are left, as a data-parallel group of their own.
Finding forwards_in_new_group(Role const& role) {
  Model const m = model();
  Nccl survivors = connect(role, "survivors", role.rank, role.size - 1, kMeet);
  Rank<AllToAll> rank(parallel_with<AllToAll>({1, role.size - 1, 1, true}, role.rank), m, survivors, nullptr);
  survivors.set_timeout_ms(kAlive);
  reached(role, "connected in the new group");
  std::vector<float> const x = bf16_numbers(70 + role.rank, kRows * kHidden), want = on_one_rank(m, x);
  Rowset rows(x);
  for (int i = 0; i < 2; ++i) {
    if (std::string const wrong = differs(rank.forward(rows), want); !wrong.empty()) {
      other(role, "in the new group: " + wrong);
      return kNoNewGroup;
    }
  }
  return kFine;
}

// ---- Experts that move in the background

constexpr int kLayers = 2, kMovingExperts = 6, kSlots = 3;

Model moving_model() { return {.form = {false, false, SharedOutput::none}, .experts = kMovingExperts, .zero = 0}; }

/// Carries weights. After stop() its next message never returns.
class StoppingNccl : public Nccl {
 public:
  explicit StoppingNccl(Nccl&& comm) : Nccl(std::move(comm)) {}
  void stop() { stops_ = true; }
  bool stopped() const { return stopped_; }
  void all_to_all_v(void const* in, std::int64_t const* in_counts, std::int64_t const* in_offsets, void* out,
                    std::int64_t const* out_counts, std::int64_t const* out_offsets, cudaStream_t stream) {
    while (stops_) {
      stopped_ = true;
      std::this_thread::sleep_for(milliseconds(10));
    }
    Nccl::all_to_all_v(in, in_counts, in_offsets, out, out_counts, out_offsets, stream);
  }

 private:
  std::atomic<bool> stops_ = false, stopped_ = false;
};

using Stores = std::deque<Store>;

/// A model of two equal layers that serves while its experts move.
template <class Backend>
class Serving {
 public:
  using R = Runner<LayerOf<Backend>, Parts>;
  Serving(MoeParallel const& at, Model const& m, Nccl& tokens, StoppingNccl& weights, WordGroup& group, Stores& stores,
          eplb::ExpertMaps const& maps, int device)
      : model_(m),
        rank_(at.ep_rank),
        balancer(weights, group, tensors(stores),
                 {.maps = maps,
                  .options = {.window = 2, .step_interval = 4},
                  .mode = eplb::MoveMode::background,
                  .mover = {.timeout_ms = 2 * kDeadline},
                  .timeout_ms = kAlive,
                  .on_thread_start = [device] { check_cuda(cudaSetDevice(device), "cudaSetDevice"); },
                  .worker_stream = worker_}) {
    for (int l = 0; l < kLayers; ++l) {
      auto p = grid_params<R>(m, at, balancer.placement(l), nullptr, false, parts_);
      p.layer.mapping = balancer.mapping(l);
      p.layer.load = balancer.load(l);
      set_window_deadline(p.layer.backend);
      runners_.emplace_back(tokens, stores[static_cast<std::size_t>(l)].view(), p);
      balancer.attach(l, runners_.back());
    }
  }
  /// A step's forwards; "" or what is wrong. Tokens depend on rank and step; a common part makes experts hot, others from time to time.
  std::string forward(int step, Death const& death = {}) {
    std::vector<float> x = numbers(100 * step + rank_, kRows * kHidden);
    std::vector<float> const common = numbers(5000 + step / 6, kHidden);
    std::vector<bf16> rows(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      rows[i] = from_float<bf16>(0.4F * x[i] + common[i % kHidden]);
      x[i] = to_float(rows[i]);
    }
    std::vector<float> const want = on_one_rank(model_, x);
    auto const bytes = rows.size() * sizeof(bf16);
    // In stream order: a wait for the whole device would wait for the worker's messages.
    Memory<Cuda>::copy_from_host_async(in_.data(), rows.data(), bytes, stream);
    for (int l = 0; l < kLayers; ++l) {
      R& runner = runners_[static_cast<std::size_t>(l)];
      runner.forward(make_rows(static_cast<bf16 const*>(in_.data()), kRows, kHidden), make_rows(out_.data(), kRows, kHidden), {}, stream,
                     death);
      settle(runner, stream);
      Memory<Cuda>::copy_to_host_async(rows.data(), out_.data(), bytes, stream);
      stream.synchronize();
      std::vector<float> got;
      for (bf16 v : rows) got.push_back(to_float(v));
      if (std::string const wrong = differs(got, want); !wrong.empty()) return text("step ", step, ", layer ", l, ": ", wrong);
    }
    return "";
  }

 private:
  static std::vector<eplb::LayerTensors> tensors(Stores& stores) {
    std::vector<eplb::LayerTensors> out;
    for (Store& store : stores) out.push_back(eplb::expert_tensors(store));
    return out;
  }

  Model model_;
  int rank_;
  runner::device::PriorityStream worker_{1};
  OnDevice parts_;
  Buffer<bf16, Cuda> in_{kRows * kHidden}, out_{kRows * kHidden};

 public:
  CudaStream stream;
  eplb::RuntimeBalancer<StoppingNccl, WordGroup> balancer;

 private:
  std::deque<R> runners_;
};

void load_expert(Stores& stores, Model const& m, int layer, int expert, int slot) {
  stores[static_cast<std::size_t>(layer)].set_expert(slot, m.w13(expert).data(), m.w2(expert).data());
}

/// Serves until the last rank dies while its worker has a weight to send or to take. `maps`: those in use at the end.
template <class Backend>
Finding serve_until_death(Role const& role, Model const& m, Stores& stores, eplb::ExpertMaps& maps, Clock::time_point& told) {
  Nccl tokens = connect(role, "tokens", role.rank, role.size);
  StoppingNccl weights(connect(role, "weights", role.rank, role.size));
  weights.connect();
  WordGroup group(role.file + ".group", role.rank, role.size, kConnect);
  Serving<Backend> serving(parallel_with<Backend>({1, role.size, 1, true}, role.rank), m, tokens, weights, group, stores, maps,
                           role.device());
  weights.set_timeout_ms(2 * kDeadline);
  reached(role, "connected");
  auto const leave = [&] {  // before memory is freed, which waits for the device
    // Where nothing is under way in this group, it could end later, but NCCL takes seconds for each, and here for both at once.
    if constexpr (std::is_same_v<typename Backend::Comm, Nccl>) tokens.begin_abort();
    serving.balancer.end();
    reached(role, "balancing has ended");
  };
  auto const end = Clock::now() + std::chrono::seconds(40);
  auto start = Clock::now();
  try {
    for (int step = 0; Clock::now() < end; ++step) {
      if (step == 2) {
        tokens.set_timeout_ms(kDeadline);
        group.set_timeout_ms(kDeadline);
      }
      if (role.dies() && step == 7) weights.stop();  // after the first rearrangement: the maps are no longer the first ones
      start = Clock::now();
      std::string const wrong =
          serving.forward(step, {&role, role.dies() && role.stage != kBetweenSteps && weights.stopped(), serving.stream});
      if (!wrong.empty()) return other(role, wrong);
      if (role.dies() && role.stage == kBetweenSteps && weights.stopped()) die(role, serving.stream);
      serving.balancer.step({}, serving.stream);
      if (serving.balancer.pending()) std::this_thread::sleep_for(milliseconds(1));
    }
  } catch (TransportError const& e) {
    told = Clock::now();
    Finding const found = check_error(role, e, role.victim(), told - start);
    maps = serving.balancer.maps();
    leave();
    return found;
  } catch (Error const& e) {
    other(role, e.what());
    leave();
    return kWrongCode;
  }
  return kNoFailure;
}

/// The live ranks load the experts that none of them holds, and serve until experts have moved again.
template <class Backend>
Finding serve_in_new_group(Role const& role, Model const& m, Stores& stores, eplb::ExpertMaps const& maps) {
  int const size = role.size - 1;
  Nccl tokens = connect(role, "tokens.survivors", role.rank, size, kMeet);
  StoppingNccl weights(connect(role, "weights.survivors", role.rank, size, kMeet));
  weights.connect();
  WordGroup group(role.file + ".group.survivors", role.rank, size, kAlive);
  auto const recovery = eplb::recover_held(eplb::gather_held(group, role.rank, maps, role.rank, role.size), kMovingExperts, size);
  eplb::reload_experts(recovery, role.rank, kSlots, [&](int layer, int expert, int slot) { load_expert(stores, m, layer, expert, slot); });
  Serving<Backend> serving(parallel_with<Backend>({1, size, 1, true}, role.rank), m, tokens, weights, group, stores, recovery.maps,
                           role.device());
  for (Nccl* comm : {&tokens, static_cast<Nccl*>(&weights)}) comm->set_timeout_ms(kAlive);
  reached(role, "connected in the new group");
  auto const end = Clock::now() + std::chrono::seconds(30);
  for (int step = 1000, moved = 0; moved == 0; ++step) {
    std::string const wrong = Clock::now() > end ? "no move came to its end" : serving.forward(step);
    if (!wrong.empty()) {
      other(role, "in the new group: " + wrong);
      return kNoNewGroup;
    }
    moved += static_cast<int>(serving.balancer.step({}, serving.stream).committed_layers.size());
    if (serving.balancer.pending()) std::this_thread::sleep_for(milliseconds(1));
  }
  return kFine;
}

// ---- One rank's process

/// The GPU still works.
bool gpu_works() {
  std::vector<int> const words{1, 2, 3};
  std::vector<int> back(3);
  Buffer<int, Cuda> memory(3);
  memory.copy_from_host(words.data());
  memory.copy_to_host(back.data());
  return cudaDeviceSynchronize() == cudaSuccess && back == words;
}
/// The death: first(told), which sets `told` once this rank has its error; the end of all that the group had; the new group.
template <class First, class Then>
Finding survive(Role const& role, First const& first, Then const& then) {
  Clock::time_point told = Clock::now();
  Finding const found = first(told);
  bool const late = Clock::now() - told > kLeaveWithin;
  reached(role, "left");
  if (found != kFine) return found;
  if (late) return kLeftLate;
  if (!gpu_works()) return kGpuUnusable;
  reached(role, "the GPU works");
  Finding const again = then();
  reached(role, "left the new group");
  return again;
}

template <class Backend, class P = Parts>
Finding survives_forward(Role const& role, Grid const& g, Options const& o = {}) {
  return survive(role, [&](auto& told) { return forwards<Backend, P>(role, g, o, told); }, [&] { return forwards_in_new_group(role); });
}
Finding survives_words(Role const& role) {
  return survive(role, [&](auto& told) { return words(role, told); }, [&] { return forwards_in_new_group(role); });
}
template <class Backend>
Finding survives_move(Role const& role) {
  Model const m = moving_model();
  Stores stores;
  eplb::ExpertMaps maps = eplb::ExpertMaps::initial(kLayers, kMovingExperts, kSlots * role.size - kMovingExperts);
  for (int l = 0; l < kLayers; ++l) {
    stores.emplace_back(kSlots, kHidden, kIntermediate, true);
    for (int s = 0; s < kSlots; ++s) load_expert(stores, m, l, maps.physical_to_logical()(l, role.rank * kSlots + s), s);
  }
  return survive(
      role, [&](auto& told) { return serve_until_death<Backend>(role, m, stores, maps, told); },
      [&] { return serve_in_new_group<Backend>(role, m, stores, maps); });
}

Finding play(Role const& role) {
  check_cuda(cudaSetDevice(role.device()), "cudaSetDevice");
  Grid const tp{role.size, 1, 1, true}, dp{1, role.size, 1, true}, both{2, role.size / 2, 1, true};
  Options const wide{.hidden = kWide};
  std::map<std::string, std::function<Finding()>> const forms{
      {"tp_all_to_all_v", [&] { return survives_forward<AllToAll>(role, tp); }},
      {"tp_all_to_all_v_exact", [&] { return survives_forward<AllToAll>(role, tp, {.sizes = backends::Sizes::exact}); }},
      {"tp_all_to_all_v_rows_agree", [&] { return survives_forward<AllToAll>(role, tp, {.rows_agree = true}); }},
      {"tp2_dp2_all_to_all_v", [&] { return survives_forward<AllToAll>(role, both); }},
      {"tp2_dp2_low_latency", [&] { return survives_forward<LowLatency>(role, both); }},
      {"tp_local", [&] { return survives_forward<Local>(role, tp); }},
      {"tp_local_rows_agree", [&] { return survives_forward<Local>(role, tp, {.rows_agree = true}); }},
      {"tp_low_latency", [&] { return survives_forward<LowLatency>(role, tp); }},
      {"dp_low_latency", [&] { return survives_forward<LowLatency>(role, dp); }},
      {"dp_high_throughput", [&] { return survives_forward<HighThroughput>(role, dp); }},
      {"dp_gather", [&] { return survives_forward<Gather>(role, dp); }},
      {"dp_naive", [&] { return survives_forward<Naive>(role, dp); }},
      {"dp_one_sided", [&] { return survives_forward<OneSided>(role, dp, wide); }},
      {"dp_two_sided", [&] { return survives_forward<TwoSided>(role, dp, wide); }},
      {"dp_pplx", [&] { return survives_forward<Pplx>(role, dp, wide); }},
      {"dp_halves", [&] { return survives_forward<LowLatency, HalfParts>(role, dp); }},
      {"dp_chunks", [&] { return survives_forward<LowLatency, ChunkParts>(role, dp); }},
      {"dp_chunks_all_to_all_v", [&] { return survives_forward<AllToAll, ChunkParts>(role, dp); }},
      {"hosts_all_to_all_v", [&] { return survives_forward<AllToAll>(role, dp); }},
      {"hosts_gather", [&] { return survives_forward<Gather>(role, dp); }},
      {"hosts_tp_all_to_all_v", [&] { return survives_forward<AllToAll>(role, tp); }},
      {"hosts_tp2_dp2_all_to_all_v", [&] { return survives_forward<AllToAll>(role, both); }},
      {"words", [&] { return survives_words(role); }},
      {"hosts_words", [&] { return survives_words(role); }},
      {"move_all_to_all_v", [&] { return survives_move<AllToAll>(role); }},
      {"move_low_latency", [&] { return survives_move<LowLatency>(role); }},
      {"move_high_throughput", [&] { return survives_move<HighThroughput>(role); }},
      {"move_gather", [&] { return survives_move<Gather>(role); }},
      {"hosts_move_all_to_all_v", [&] { return survives_move<AllToAll>(role); }},
      {"hosts_move_gather", [&] { return survives_move<Gather>(role); }},
  };
  return forms.at(role.form)();
}

int be_rank(char** argv) {
  Role const role{std::atoi(argv[2]), std::atoi(argv[3]), argv[4], argv[5], std::atoi(argv[6])};
  if (on_own_hosts(role.form)) pretend_own_host(role.rank);
  try {
    return play(role);
  } catch (std::exception const& e) {
    return other(role, e.what());
  }
}

// ---- The cases of this machine

struct Case {
  Case(char const* f, Phase p) : form(f), stage(static_cast<int>(p)) {}
  Case(char const* f, int s) : form(f), stage(s) {}
  std::string form;
  int stage;
};

/// Why a form makes no sense with two ranks; null if it does.
char const* needs_four_ranks(std::string_view form) {
  if (form == "words") return "it takes a rank that keeps another waiting while a third one is dead";
  if (form.starts_with("tp2_dp2_")) return "two ranks are one TP group, and there is no other group to learn of the death";
  if (form.starts_with("move_")) return "the one rank left has too few expert slots for all experts, and no rank to move one to";
  return nullptr;
}
/// The ranks of a form; 0 if it cannot run.
int ranks_of(std::string_view form, int gpus) {
  if (gpus >= kRanks || on_own_hosts(form)) return kRanks;
  return gpus >= kFewRanks && needs_four_ranks(form) == nullptr ? kFewRanks : 0;
}

class KilledRunnerRank : public testing::Test {
 protected:
  static constexpr char const* kNeedsNoHosts = "for fewer than four GPUs: here its cases run in other tests, without hosts of their own";
  int const gpus_ = devices();

  /// Runs the cases at the same time, each in a group of its own; those whose ranks share GPUs run before, one at a time. Prints which
  /// cannot run here.
  void expect_survivors(std::vector<Case> const& cases) {
    std::vector<Case> together;
    for (Case const& c : cases) {
      int const ranks = ranks_of(c.form, gpus_);
      if (ranks == 0) {
        skip(c);
      } else if (ranks > gpus_) {
        run({c});
      } else {
        together.push_back(c);
      }
    }
    run(together);
  }
  /// A test that has skipped some of its cases counts as passed if the others pass.
  static void TearDownTestSuite() { std::printf("%d cases were run, %d skipped\n", all_run_, all_skipped_); }
  void TearDown() override {
    if (run_ == 0 && skipped_ > 0) GTEST_SKIP() << "none of its " << skipped_ << " cases can run on " << gpus_ << " GPUs";
  }

 private:
  static std::string name_of(Case const& c) { return text(c.form, ", killed in ", Role{0, 0, "", c.form, c.stage}.stage_name()); }
  void skip(Case const& c) {
    ++skipped_;
    ++all_skipped_;
    char const* const reason = needs_four_ranks(c.form);
    std::printf("  skipped: %s: needs %d GPUs, found %d: %s\n", name_of(c).c_str(), reason != nullptr ? kRanks : kFewRanks, gpus_,
                reason != nullptr ? reason : "one for each rank");
    std::fflush(stdout);
  }
  void run(std::vector<Case> const& cases) {
    std::vector<std::string> names;
    std::vector<StartedRanks> groups;
    for (Case const& c : cases) {
      int const ranks = ranks_of(c.form, gpus_);
      names.push_back(text(ranks, " ranks, ", name_of(c)));
      groups.emplace_back(names.back(), ranks, std::vector<std::string>{c.form, std::to_string(c.stage)});
      ++run_;
      ++all_run_;
    }
    auto const start = Clock::now();
    for (std::size_t i = 0; i < groups.size(); ++i) {
      groups[i].expect_survivors(start + std::chrono::seconds(90));
      std::printf("  %s: over after %.1f s\n", names[i].c_str(), std::chrono::duration<double>(Clock::now() - start).count());
      std::fflush(stdout);
    }
  }

  static inline int all_run_ = 0, all_skipped_ = 0;  // of all tests
  int run_ = 0, skipped_ = 0;
};

/// Two cases at a time: with four at a time, survivors on four H100 left later than kLeaveWithin. NCCL frees memory slowly where many
/// processes of a host do it at once, which may be the cause.
TEST_F(KilledRunnerRank, StagesOfAForwardThatIsReduced) {
  expect_survivors({{"tp_all_to_all_v", Phase::route}, {"tp_all_to_all_v", Phase::experts}});
  expect_survivors({{"tp_all_to_all_v", Phase::combine}, {"tp_all_to_all_v", Phase::reduction}});
}
TEST_F(KilledRunnerRank, GroupsThatAgreeInEachForwardOrNever) {
  expect_survivors({{"tp_all_to_all_v_exact", Phase::dispatch},
                    {"tp_local", Phase::route},
                    {"tp_local", Phase::reduction},
                    {"tp_local_rows_agree", Phase::reduction},
                    {"tp_all_to_all_v_rows_agree", Phase::experts}});
}
TEST_F(KilledRunnerRank, WindowsAndTwoGroups) {
  expect_survivors({{"tp_low_latency", Phase::experts},
                    {"tp_low_latency", Phase::reduction},
                    {"tp2_dp2_all_to_all_v", Phase::experts},
                    {"dp_high_throughput", Phase::experts}});
}
TEST_F(KilledRunnerRank, DataParallelRanks) {
  expect_survivors({{"dp_low_latency", Phase::route},
                    {"dp_low_latency", Phase::combine},
                    {"dp_gather", Phase::dispatch},
                    {"dp_gather", Phase::combine}});
}
TEST_F(KilledRunnerRank, OneWhoseGroupKeepsAnotherWaiting) {
  expect_survivors({{"words", kBetweenSteps}, {"tp2_dp2_all_to_all_v", Phase::reduction}});
  expect_survivors({{"tp2_dp2_low_latency", Phase::reduction}, {"tp2_dp2_low_latency", Phase::combine}});
}
TEST_F(KilledRunnerRank, HalvesAndChunks) {
  expect_survivors({{"dp_halves", Phase::dispatch}, {"dp_halves", Phase::combine}});
  expect_survivors({{"dp_chunks", Phase::experts}, {"dp_chunks_all_to_all_v", Phase::combine}});
}
/// Each rank on a host of its own, as NCCL believes: rows travel through sockets, which close with the process.
TEST_F(KilledRunnerRank, OnSeveralHosts) {
  expect_survivors({{"hosts_all_to_all_v", Phase::experts}, {"hosts_gather", Phase::combine}});
  expect_survivors({{"hosts_tp_all_to_all_v", Phase::reduction}});
}
/// The next two tests: what needs four ranks, and a GPU for each unless they are on hosts of their own.
TEST_F(KilledRunnerRank, GroupsOnSeveralHosts) {
  if (gpus_ >= kRanks) GTEST_SKIP() << kNeedsNoHosts;
  expect_survivors({{"hosts_words", kBetweenSteps}});
  expect_survivors({{"hosts_tp2_dp2_all_to_all_v", Phase::experts}, {"hosts_tp2_dp2_all_to_all_v", Phase::reduction}});
}
TEST_F(KilledRunnerRank, WhileExpertsMoveOnSeveralHosts) {
  if (gpus_ >= kRanks) GTEST_SKIP() << kNeedsNoHosts;
  expect_survivors({{"hosts_move_all_to_all_v", Phase::experts}, {"hosts_move_all_to_all_v", kBetweenSteps}});
  expect_survivors({{"hosts_move_gather", Phase::dispatch}});
}
TEST_F(KilledRunnerRank, OtherTransports) {
  expect_survivors({{"dp_naive", Phase::route}, {"dp_naive", Phase::combine}});
  expect_survivors({{"dp_one_sided", Phase::dispatch}, {"dp_one_sided", Phase::combine}});
  expect_survivors({{"dp_two_sided", Phase::experts}, {"dp_two_sided", Phase::combine}});
  expect_survivors({{"dp_pplx", Phase::route}, {"dp_pplx", Phase::combine}});
  expect_survivors({{"dp_high_throughput", Phase::dispatch}, {"dp_high_throughput", Phase::combine}});
}
TEST_F(KilledRunnerRank, WhileExpertsMoveBesideOtherTransports) {
  expect_survivors({{"move_high_throughput", Phase::combine}, {"move_gather", Phase::dispatch}});
}
TEST_F(KilledRunnerRank, WhileExpertsMoveOverNccl) {
  expect_survivors({{"move_all_to_all_v", Phase::experts}, {"move_all_to_all_v", kBetweenSteps}});
}
TEST_F(KilledRunnerRank, WhileExpertsMoveBesideAWindow) {
  expect_survivors({{"move_low_latency", Phase::experts}, {"move_low_latency", kBetweenSteps}});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 7 && std::string(argv[1]) == "--rank") return be_rank(argv);
  testing::InitGoogleTest(&argc, argv);
  setenv("OMP_NUM_THREADS", "1", 1);  // of the ranks, of which there are many
  if (devices() < 1) {
    std::printf("skipped: needs a GPU\n");
    return moe_test::kSkipped;
  }
  return moe_test::exit_code(RUN_ALL_TESTS());
}
