// SPDX-License-Identifier: Apache-2.0
// eplb/async_rearrangement.hpp: a rearrangement in the background of the engine's steps: weights move while forwards run. Layers switch to
// their new maps one at a time, between two steps, in the same step on all ranks.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "moe/comm/deadline.hpp"
#include "moe/core/contract/communicator.hpp"
#include "moe/core/error.hpp"
#include "moe/eplb/group.hpp"
#include "moe/eplb/hold_forwards.hpp"
#include "moe/eplb/maps.hpp"
#include "moe/eplb/rearrange.hpp"
#include "moe/eplb/weight_mover.hpp"

namespace moe::eplb {

/// The result of one step of an asynchronous rearrangement; equal on every rank.
struct AsyncStep {
  int committed_layer = -1;  ///< its new weights and map are in use from now on; -1: none
  bool finished = false;     ///< the rearrangement is complete
  bool operator==(AsyncStep const&) const = default;
};

/// Plans and moves in the background, at most one layer ahead. Until a layer is committed its old map and weights are in use, so every
/// forward sees a map and the weights that belong to it.
///
///     Balancer: step() → rearrange        →  begin(maps, [load, …] { return propose(…).maps; })
///     after each forward, on every rank   →  step(group, commit)
///
/// The mover's communicator belongs to the worker until pending() is false again; `group` is the engine's own.
template <class Comm>
class AsyncRearrangement {
  static_assert(sizeof(Met<NeedsCommunicator<Comm>>) == 1);

 public:
  using StreamType = Stream<typename moe::detail::SpaceOf<Comm>::type>;
  struct Params {
    /// true: a thread plans and moves. false: step() does both, collectively, one layer per step, so that a step takes longer.
    bool background = true;
    /// Milliseconds from a step in which some rank is not ready. E_TIMEOUT if no layer is committed in that time.
    std::int64_t timeout_ms = comm::kDefaultTimeoutMs;
    /// Called first on the worker's thread; device space: must select the device. If it throws, the worker has failed.
    std::function<void()> on_thread_start{};
  };

  /// The mover is borrowed. `stream`: what the worker enqueues on in the device space, E_ARG if it is the default stream; see
  /// RuntimeBalancer::Params::worker_stream. E_UNSUPPORTED if the communicator cannot be used beside another thread's (MPI started below
  /// MPI_THREAD_MULTIPLE).
  explicit AsyncRearrangement(WeightMover<Comm>& mover, Params const& params = {}, StreamType stream = {})
      : mover_(mover), params_(params), stream_(stream) {
    if (params_.background && !facts::allows_threads<Comm>()) {
      throw Error(ErrorCode::unsupported, text("a background rearrangement needs ", Comm::kName,
                                               " started for several threads; set background = false to move inside step()"));
    }
    if constexpr (Comm::Space::kKind == SpaceKind::cuda) {
      if (params_.background && stream == StreamType{}) {
        throw Error(ErrorCode::argument, "a background rearrangement needs a stream of its own: worker_stream is the default stream");
      }
    }
  }
  AsyncRearrangement(AsyncRearrangement const&) = delete;
  AsyncRearrangement& operator=(AsyncRearrangement const&) = delete;
  ~AsyncRearrangement() { stop(); }

  /// A rearrangement is under way (StepInput::rearranging).
  bool pending() const { return pending_; }
  /// A failure ended balancing; the maps in use stay as they are.
  bool disabled() const { return disabled_; }

  /// On all ranks in the same step. `current`: the maps in use. `plan` makes the next maps, equal on every rank; it runs in the worker, so
  /// it must own its copy of the load. E_STATE while one is pending or after a failure.
  void begin(ExpertMaps current, std::function<ExpertMaps()> plan) {
    if (disabled_) throw Error(ErrorCode::state, "asynchronous rearrangement is off after a failure");
    if (pending_) throw Error(ErrorCode::state, "a rearrangement is pending already");
    current_ = std::move(current);
    plan_ = std::move(plan);
    planned_ = cancel_ = consumed_ = false;
    changed_.clear();
    at_ = 0;
    stage_ = Stage::working;
    error_ = nullptr;
    blamed_peer_ = false;
    waiting_since_.reset();
    pending_ = true;
    if (params_.background) worker_ = std::thread([this] { run(); });
  }

  /// Ends an engine step; collective over `group`. Once all ranks hold the next layer, they replace its weights and call
  /// commit(layer, maps), which must make that layer's map of `maps` the one in use; no forward runs meanwhile. hold(layer) is
  /// called before the first byte is replaced, and its result is destroyed after commit(): as rearrange()'s.
  /// Errors occur in the same step on all ranks and end balancing; the last good maps stay in use. A rank whose worker failed throws that
  /// error, the others E_PEER naming that rank. E_TIMEOUT names the ranks that were not ready in time, or one that did not join this step.
  template <BalancingGroup Group, class Commit, class Hold = HoldNone>
  AsyncStep step(Group& group, Commit&& commit, StreamType stream = {}, Hold const& hold = {}) {
    if (!pending_) return {};
    try {
      return step_pending(group, commit, stream, hold);
    } catch (...) {
      disabled_ = true;
      pending_ = false;
      cancel();
      throw;
    }
  }

  /// Cancels a rearrangement after the layer that is being moved. Committed layers keep their new maps, the others their old ones. Waits
  /// for the worker, whose waits end at the communicator's deadline. Not collective.
  void stop() {
    cancel();
    if (worker_.joinable()) worker_.join();
    if (pending_ || disabled_) mover_.discard();
    pending_ = false;
  }

 private:
  using Clock = std::chrono::steady_clock;
  enum class Stage : std::uint8_t { working, ready, unchanged, failed };

  /// What a rank reports in a step.
  struct Word {
    Stage stage = Stage::working;
    bool expired = false;
    ErrorCode code = ErrorCode::internal;
    int layer = -1;
    std::uint64_t encode() const {
      return static_cast<std::uint64_t>(stage) | static_cast<std::uint64_t>(expired) << 8 | static_cast<std::uint64_t>(code) << 16 |
             static_cast<std::uint64_t>(layer + 1) << 32;
    }
    static Word decode(std::uint64_t w) {
      return {static_cast<Stage>(w & 0xff), (w >> 8 & 1) != 0, static_cast<ErrorCode>(w >> 16 & 0xff), static_cast<int>(w >> 32) - 1};
    }
  };

  template <class Group, class Commit, class Hold>
  AsyncStep step_pending(Group& group, Commit&& commit, StreamType stream, Hold const& hold) {
    if (!params_.background) advance();
    Word const mine = state();
    std::vector<Word> words;
    for (std::uint64_t w : group.all_gather(mine.encode())) words.push_back(Word::decode(w));
    auto const all = [&](Stage stage) { return std::ranges::all_of(words, [=](Word const& w) { return w.stage == stage; }); };
    throw_failures(words);
    if (all(Stage::unchanged)) return end({-1, true});
    if (!all(Stage::ready)) {
      throw_expired(words);
      if (!waiting_since_) waiting_since_ = Clock::now();
      return {};
    }
    for (std::size_t r = 1; r < words.size(); ++r) {
      if (words[r].layer != words[0].layer) {
        throw Error(ErrorCode::mismatch, text("rank 0 has layer ", words[0].layer, " ready, rank ", r, " layer ", words[r].layer));
      }
    }
    {
      [[maybe_unused]] auto const held = hold(mine.layer);
      if (mover_.fetched_layer() == mine.layer) mover_.commit(stream);
      commit(mine.layer, std::as_const(next_));
    }
    waiting_since_.reset();
    if (mine.layer == changed_.back()) return end({mine.layer, true});
    {
      std::scoped_lock const lock(mutex_);
      ++at_;
      stage_ = Stage::working;
      consumed_ = true;
    }
    event_.notify_all();
    return {mine.layer, false};
  }

  Word state() {
    std::scoped_lock const lock(mutex_);
    Word word{stage_, waiting_since_ && Clock::now() - *waiting_since_ > std::chrono::milliseconds(params_.timeout_ms)};
    if (stage_ == Stage::ready) word.layer = changed_[at_];
    if (stage_ == Stage::failed) {
      try {
        std::rethrow_exception(error_);
      } catch (Error const& e) {
        word.code = e.code();
      } catch (...) {
      }
    }
    return word;
  }
  /// If every reported failure is E_PEER, the failed rank's own report follows at most one step later (it calls fail() before the others
  /// can notice), and all ranks wait for it.
  void throw_failures(std::vector<Word> const& words) {
    auto const is_failed = [](Word const& w) { return w.stage == Stage::failed; };
    auto failed = std::ranges::find_if(words, [=](Word const& w) { return is_failed(w) && w.code != ErrorCode::peer; });
    if (failed == words.end()) {
      failed = std::ranges::find_if(words, is_failed);
      if (failed == words.end() || !std::exchange(blamed_peer_, true)) return;
    }
    std::exception_ptr own;
    {
      std::scoped_lock const lock(mutex_);
      own = error_;
    }
    if (own) std::rethrow_exception(own);
    throw Error(ErrorCode::peer, text("asynchronous rearrangement failed on rank ", failed - words.begin(), " with ", name(failed->code)));
  }
  void throw_expired(std::vector<Word> const& words) const {
    if (std::ranges::none_of(words, &Word::expired)) return;
    std::string late;
    for (std::size_t r = 0; r < words.size(); ++r) {
      if (words[r].stage == Stage::working) late += text(late.empty() ? "" : ", ", r);
    }
    throw Error(ErrorCode::timeout, text("asynchronous rearrangement: rank ", late, " not ready within ", params_.timeout_ms, " ms"));
  }
  AsyncStep end(AsyncStep result) {
    cancel();
    if (worker_.joinable()) worker_.join();
    pending_ = false;
    return result;
  }
  void cancel() {
    {
      std::scoped_lock const lock(mutex_);
      cancel_ = true;
    }
    event_.notify_all();
  }

  /// The worker. Cancelled only between layers: there all ranks' workers have moved the same layers, and none waits for a stopped peer.
  void run() {
    for (;;) {
      advance();
      std::unique_lock lock(mutex_);
      if (stage_ != Stage::ready) return;
      event_.wait(lock, [this] { return consumed_ || cancel_; });
      if (!consumed_) return;
      consumed_ = false;
    }
  }
  /// One piece of work: the plan first, then a layer into the spare buffer.
  void advance() {
    if (stage_ != Stage::working) return;  // only this thread leaves that stage
    try {
      if (!planned_) make_plan();
      if (!changed_.empty()) fetch(changed_[at_]);
      std::scoped_lock const lock(mutex_);
      stage_ = changed_.empty() ? Stage::unchanged : Stage::ready;
    } catch (...) {
      fail(std::current_exception());
    }
  }
  /// The first failure counts.
  void fail(std::exception_ptr error) {
    std::scoped_lock const lock(mutex_);
    if (!error_) error_ = std::move(error);
    stage_ = Stage::failed;
  }
  /// The worker's first action.
  void make_plan() {
    std::exception_ptr failed;
    try {
      if (params_.background && params_.on_thread_start) params_.on_thread_start();
      next_ = plan_();
      detail::check_rearrangement(mover_, current_, next_);
    } catch (...) {
      failed = std::current_exception();
    }
    if (failed) {
      fail(failed);
      try {
        mover_.agree_on(std::nullopt, stream_);  // so that the other workers do not wait for this one's maps
      } catch (Error const&) {
      }
      std::rethrow_exception(failed);
    }
    mover_.agree_on(next_.hash(), stream_);
    for (int layer = 0; layer < current_.num_layers(); ++layer) {
      if (current_.layer_differs(layer, next_)) changed_.push_back(layer);
    }
    planned_ = true;
  }
  void fetch(int layer) {
    auto const old_row = current_.physical_to_logical().row(layer);
    auto const new_row = next_.physical_to_logical().row(layer);
    if (std::ranges::equal(old_row, new_row)) return;  // only the order of replicas changes
    mover_.wait();                                     // until the previous layer has left the buffer
    mover_.fetch(layer, old_row, new_row, stream_);
    mover_.wait();
  }

  WeightMover<Comm>& mover_;
  Params params_;
  StreamType stream_;
  bool pending_ = false;
  bool disabled_ = false;
  bool blamed_peer_ = false;  // all failures of the previous step were E_PEER
  std::optional<Clock::time_point> waiting_since_;

  // Owned by the worker until a layer is ready, then by step() until the layer is consumed.
  ExpertMaps current_, next_;
  std::function<ExpertMaps()> plan_;
  bool planned_ = false;
  std::vector<int> changed_;  // layers, ascending

  std::thread worker_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable event_;
  Stage stage_ = Stage::working;
  std::size_t at_ = 0;  // index into changed_
  bool consumed_ = false;
  bool cancel_ = false;
  std::exception_ptr error_;
};

}  // namespace moe::eplb
