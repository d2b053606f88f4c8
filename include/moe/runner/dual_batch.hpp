// SPDX-License-Identifier: Apache-2.0
// runner/dual_batch.hpp: a forward in two halves, of which one is exchanged while the other computes. One host thread enqueues both, in the
// order of a schedule (runner/schedule.hpp).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "moe/core/buffer.hpp"
#include "moe/core/contract/communicator.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/contract/params.hpp"
#include "moe/core/error.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/rule.hpp"
#include "moe/layer/options.hpp"
#include "moe/parallel/construction.hpp"
#include "moe/parallel/fingerprint.hpp"
#include "moe/runner/run_schedule.hpp"

namespace moe {

namespace rules {
MOE_RULE(DualBatchNeedsHalves,
         "moe: dual batch over a backend that cannot send and wait apart (its fact asynchronous is false). "
         "Fix: high_throughput, low_latency, low_latency_rank_major, pplx or all_to_all_v, or DualBatch = runner::dual_batch::None "
         "(docs/errors.md#dual-batch)");
MOE_INCLUDED(TwoQueuesOnDevice, "dual batch in the CUDA space", "moe/runner/device/two_queues.hpp");
}  // namespace rules

namespace runner {

/// The two queues of a schedule in a memory space. The device's are in runner/device/two_queues.hpp.
///   TwoQueues(std::size_t steps)
///   void fork(Stream main)            main becomes the compute queue; the other begins after its work so far
///   Stream of(Queue)
///   void record(std::size_t step, Queue), void wait(std::size_t step, Queue)      one step after another
///   void join()                       main goes on after the other queue
template <class Space>
class TwoQueues : rules::TwoQueuesOnDevice::Broken<Space> {};

template <>
class TwoQueues<space::host> {
 public:
  explicit TwoQueues(std::size_t) {}
  void fork(HostStream) {}
  static HostStream of(Queue) { return {}; }
  void record(std::size_t, Queue) {}
  void wait(std::size_t, Queue) {}
  void join() {}
};

namespace dual_batch {

/// A batch is exchanged as a whole.
struct None {
  static constexpr bool kAbsent = true;
  struct Params {};
};

/// From how many rows on every rank a batch is split, and why from there.
struct Threshold {
  std::int64_t min_rows = 0;  ///< above kMostSize: a batch is never split
  std::string_view why;
  constexpr bool never() const { return min_rows > kMostSize; }
  friend constexpr bool operator==(Threshold const&, Threshold const&) = default;
  friend std::ostream& operator<<(std::ostream& out, Threshold const& t) {
    out << "batches are ";
    if (t.never()) return out << "never split: " << t.why;
    return out << "split where every rank has at least " << t.min_rows << " rows: " << t.why;
  }
};

/// The threshold that holds unless Params give one, as measured (docs/log/runner.md, "Dual batch …"). Host space: two ranks of one machine.
/// Device: never, on two H200 and on four H100. Another group or network sets min_rows by its own measurement.
constexpr Threshold default_threshold(SpaceKind space) {
  if (space == SpaceKind::host) {
    return {1024, "from there, on a busy machine, halves took 10 to 16 % less time over MPI and up to 8 % more over windows"};
  }
  return {kMostSize + 1, "on two H200 and on four H100 halves took 2 to 78 % longer, at 128 to 4096 rows a rank"};
}

/// Exchange and experts see a batch in two halves, each over an exchange of its own; all else of the block sees the whole batch.
struct Halves {
  static constexpr bool kAbsent = false;
  struct Params {
    /// A batch is split where every rank has at least this many rows, and 2; 0: default_threshold().
    std::int64_t min_rows = 0;
    /// Multiprocessors that the experts of a half may use, so that the other half's exchange finds some; 0: as those of a whole batch. For
    /// experts with that parameter (Params::workers).
    int expert_workers = 0;
    /// false: there is no second exchange, and no batch is split. The same on all ranks.
    bool second_exchange = true;
  };

  /// What the two halves of one layer need.
  template <class Layer>
  class Halved {
   public:
    using Space = typename Layer::Space;
    using Comm = typename Layer::Comm;
    using Act = typename Layer::Act;
    using Half = typename Layer::Half;

    /// Collective. layer_params: those that `layer` was built with.
    Halved(Comm& comm, Layer& layer, typename Layer::Weights const& weights, typename Layer::Params const& layer_params, Params const& p,
           Arena<Space>& arena)
        : comm_(comm),
          threshold_(moe::detail::build(comm, [&] { return checked_threshold(p, layer_params.max_tokens_per_rank); })),
          words_(static_cast<std::size_t>(comm.size())) {
      if constexpr (!facts::is_asynchronous<typename Layer::Backend>()) {
        [[maybe_unused]] rules::DualBatchNeedsHalves::Broken<typename Layer::Backend> const error;
      }
      moe::detail::agree_on_fingerprint(comm, Fingerprint().add("dual batch: second_exchange", static_cast<int>(p.second_exchange)));
      if (!p.second_exchange) return;
      exchange_.emplace(comm, layer.shape(), layer_params.max_tokens_per_rank / 2, layer.all_experts(layer_params.placement),
                        Layer::row_quantization(layer_params.quantization), layer_params.backend, arena);
      moe::detail::build(comm, [&] {
        queues_.emplace(kHost ? kHostDualBatch.size() : kDeviceDualBatch.size());
        take_experts(layer, weights, layer_params, p, arena);
      });
    }

    /// Collective in the host space, instead of splits(). Whether the others' forward runs in two halves; in the CUDA space that is told
    /// from `rows`, the rows that this rank would have had. Never throws.
    bool refuses(std::int64_t rows) noexcept {
      try {
        return splits(kHost ? 0 : rows);
      } catch (Error const&) {  // the communicator reports its failure to the next call as well
        return false;
      }
    }
    /// Collective in the host space. Whether this forward, of `rows` rows on this rank, runs in two halves: on all ranks or on none. CUDA
    /// space: all ranks must have row counts on the same side of min_rows(), as padded batches have.
    bool splits(std::int64_t rows) {
      bool const wanted = rows >= threshold_.min_rows;
      if (!exchange_) return false;
      if (verdict_) return *verdict_;
      if constexpr (kHost) {
        facts::set_phase(comm_, "dual batch");
        char const word = wanted ? 1 : 0;
        std::fill(words_.begin(), words_.end(), word);
        if constexpr (facts::gathers_on_the_host<Comm, HostStream>()) comm_.all_gather(&word, 1, words_.data(), HostStream{});
        return std::all_of(words_.begin(), words_.end(), [](char w) { return w == 1; });
      } else {
        return wanted;
      }
    }
    /// The caller's choice, the same on all ranks, for the forwards from now on; none: decided by the row count. E_STATE for yes without a
    /// second exchange.
    void decide(std::optional<bool> verdict) {
      if (verdict.value_or(false) && !exchange_) {
        throw Error(ErrorCode::state, "dual batch: the runner was built without its second exchange. Fix: second_exchange = true");
      }
      verdict_ = verdict;
    }
    /// Whether a batch can be split.
    bool has_second_exchange() const { return exchange_.has_value(); }
    std::int64_t min_rows() const { return threshold_.min_rows; }
    /// Which batches are split from now on, and why, in words.
    std::string choice() const {
      if (!exchange_) return "batches are never split: there is no second exchange";
      if (verdict_) return text("batches are ", *verdict_ ? "always" : "never", " split: the caller's verdict");
      return text(threshold_);
    }

    /// Collective. The halves of a batch that layer.begin() has routed. shared(stream) enqueues the shared experts. If anything throws,
    /// both halves are given up, and the next forward works.
    template <class Probe, class Shared>
    void run(Layer& layer, typename Layer::Hidden hidden, typename Layer::Output output, ForwardOptions const& options,
             Stream<Space> stream, Probe& probe, Shared const& shared) {
      std::int64_t const rows = hidden.extent(0);
      std::int64_t const head = first_half(rows);
      typename Layer::Kernel& kernel = kernel_ ? *kernel_ : layer.kernel();
      std::array<Half, 2> halves{layer.half(layer.exchange(), kernel, hidden, output, 0, head, options),
                                 layer.half(*exchange_, kernel, hidden, output, head, rows - head, options)};
      queues_->fork(stream);
      try {
        if constexpr (kHost) {
          run_schedule<kHostDualBatch>(halves, *queues_, probe, shared);
        } else {
          run_schedule<kDeviceDualBatch>(halves, *queues_, probe, shared);
        }
      } catch (...) {
        for (Half& half : halves) half.abandon(queues_->of(Queue::communication));
        queues_->join();
        throw;
      }
      queues_->join();
    }

    /// Instead of run(). Never throws.
    void abandon(Layer& layer, Stream<Space> stream) {
      typename Layer::Hidden const hidden = make_rows<Layer::Config::hidden>(static_cast<Act const*>(nullptr), 0, layer.shape().hidden());
      typename Layer::Output const output = make_rows<Layer::Config::hidden>(static_cast<Act*>(nullptr), 0, layer.shape().hidden());
      std::array<Half, 2> halves{layer.half(layer.exchange(), layer.kernel(), hidden, output, 0, 0, {}),
                                 layer.half(*exchange_, layer.kernel(), hidden, output, 0, 0, {})};
      // A device combine waits for all ranks, whose second dispatch comes before their first combine: so first both dispatches, of no rows.
      if constexpr (!kHost) {
        try {
          for (Half& half : halves) half.dispatch_send(stream);
          for (Half& half : halves) half.dispatch_receive(stream);
        } catch (Error const&) {  // the group is over, or the exchange reports it to the next call
        }
      }
      for (Half& half : halves) half.abandon(stream);
    }
    /// Of both exchanges; as the layer's. An error of one does not hide that of the other from the next call.
    void wait(Layer& layer, Stream<Space> stream) {
      both([&] { layer.wait(stream); },
           [&] {
             if (!exchange_) return;
             facts::wait(*exchange_, stream);
             // layer.wait() has waited for the stream
             if constexpr (!kHost && !facts::waits<typename Layer::Exchange, Stream<Space>>()) facts::check(*exchange_);
           });
    }
    void check(Layer& layer) {
      both([&] { layer.check(); },
           [&] {
             if (exchange_) facts::check(*exchange_);
           });
    }
    /// The bytes of the weights were replaced in place; as the layer's.
    void weights_changed(Stream<Space> stream) {
      if (kernel_) facts::weights_changed(*kernel_, stream);
    }
    std::size_t window_bytes() const { return exchange_ ? facts::window_bytes(*exchange_) : 0; }

   private:
    static constexpr bool kHost = Space::kKind == SpaceKind::host;

    static Threshold checked_threshold(Params const& p, std::int64_t max_rows) {
      if (p.min_rows < 0 || p.expert_workers < 0) {
        throw Error(ErrorCode::config,
                    text("dual batch: min_rows ", p.min_rows, " and expert_workers ", p.expert_workers, " must be at least 0"));
      }
      if (max_rows < 2 && p.second_exchange)
        throw Error(ErrorCode::config, text("dual batch: max_tokens_per_rank ", max_rows, " cannot be split; at least 2"));
      if (p.min_rows == 0) return default_threshold(Space::kKind);
      return {std::max<std::int64_t>(p.min_rows, 2), "Params::min_rows"};
    }
    /// Rows of the first half. Device kernels get arrays that begin at a multiple of 16 bytes.
    static std::int64_t first_half(std::int64_t rows) {
      std::int64_t const multiple = !kHost && rows >= 16 ? 4 : 1;
      return ((rows + 1) / 2 + multiple - 1) / multiple * multiple;
    }
    void take_experts(Layer& layer, typename Layer::Weights const& weights, typename Layer::Params const& layer_params, Params const& p,
                      Arena<Space>& arena) {
      if (p.expert_workers == 0) return;
      auto experts = layer_params.experts;
      using ExpertsParams = typename Layer::Experts::Params;
      if constexpr (facts::takes_workers<ExpertsParams>()) {
        experts.workers = p.expert_workers;
        if constexpr (facts::shares_workspace<ExpertsParams>()) experts.workspace = nullptr;  // both halves compute at the same time
        if constexpr (facts::takes_expected_rows<ExpertsParams>()) experts.expected_rows = (experts.expected_rows + 1) / 2;
        std::int64_t const rows = std::max<std::int64_t>(layer.exchange().max_rows(), exchange_->max_rows());
        kernel_.emplace(layer.shape(), weights, rows, layer_params.quantization, layer_params.activation, experts, arena);
      } else {
        throw Error(ErrorCode::unsupported, text("dual batch: expert_workers: ", p.expert_workers, ", but ", Layer::Experts::kName,
                                                 " cannot limit its multiprocessors"));
      }
    }

    /// The first error of the two calls, both of which are made.
    template <class First, class Second>
    static void both(First const& first, Second const& second) {
      try {
        first();
      } catch (Error const&) {
        try {
          second();
        } catch (Error const&) {
        }
        throw;
      }
      second();
    }

    Comm& comm_;
    Threshold threshold_;
    std::vector<char> words_;  // [R] votes
    std::optional<typename Layer::Exchange> exchange_;
    std::optional<typename Layer::Kernel> kernel_;
    std::optional<TwoQueues<Space>> queues_;
    std::optional<bool> verdict_;
  };
};

}  // namespace dual_batch
}  // namespace runner
}  // namespace moe
