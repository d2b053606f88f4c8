// SPDX-License-Identifier: Apache-2.0
// bench/comm_exchange_bench.cu: AllToAllV and AllGatherReduceScatter over comm::Nccl beside NCCL's own grouped send and receive of the same
// bytes, in turns, slowest rank.
//
//   mpirun -n <GPUs> comm_exchange_bench [--json FILE]
//
// One process per GPU. Hidden 7168, top-8 of 256 experts, uniform random routing. "rows": the records (dispatch) or the outputs (combine)
// alone; "call": a whole prepare() or finalize(), on the stream. GB/s counts the bytes that leave one GPU. Bytes and outputs are checked
// before anything is timed; a wrong result is printed, not timed, and makes the exit code 1.
#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <tuple>
#include <vector>

#include "bench/arguments.hpp"
#include "bench/bench_report.hpp"
#include "bench/rank_gpu.hpp"
#include "moe/backends/collective/device/all_to_all_v.cuh"
#include "moe/backends/collective/device/gather_exchange.cuh"
#include "moe/comm/mpi.hpp"
#include "moe/comm/nccl.hpp"
#include "moe/quantization/fp8_group128.hpp"
#include "moe/quantization/none.hpp"
#include "tests/factor_experts.cuh"

namespace {

using namespace moe;
using comm::Nccl;
using moe_bench::median_and_spread;
constexpr int kHidden = 7168;
constexpr int kTopK = 8;
constexpr int kExperts = 256;
constexpr int kRepeats = 5;

struct Config : LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  struct Activation {};
};
template <class T>
using Device = Buffer<T, space::cuda>;

struct Timed {
  double us;
  double spread;
  double host_us;  ///< time that the host spends in one call
};

class Bench {
 public:
  explicit Bench(comm::Mpi& host) : host_(host), comm_(Nccl::over_communicator(host, {})), report_("comm_exchange_bench") {
    ncclUniqueId id{};
    if (host.rank() == 0) {
      id = Nccl::unique_id();
    }
    host.broadcast(&id, sizeof id, 0, {});
    comm::detail::check_nccl(ncclCommInitRank(&plain_, host.size(), id, host.rank()), "ncclCommInitRank");
  }
  ~Bench() { ncclCommAbort(plain_); }

  /// Microseconds per call of each function, measured in turns: the slowest rank, median over the repeats.
  std::vector<Timed> time(int calls, std::vector<std::function<void()>> const& functions) {
    std::vector<std::vector<double>> us(functions.size());
    std::vector<double> enqueue(functions.size(), 1e30);
    for (int repeat = -1; repeat < kRepeats; ++repeat) {
      for (std::size_t f = 0; f < functions.size(); ++f) {
        functions[f]();
        stream_.synchronize();
        host_.barrier({});
        begin_.record(stream_);
        auto const start = std::chrono::steady_clock::now();
        for (int i = 0; i < calls; ++i) {
          functions[f]();
        }
        double const spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() * 1e6 / calls;
        end_.record(stream_);
        double mine = 1e3 * static_cast<double>(end_.since(begin_)) / calls;
        double slowest = 0;
        MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, host_.handle());
        if (repeat >= 0) {
          us[f].push_back(slowest);
          enqueue[f] = std::min(enqueue[f], spent);
        }
      }
    }
    std::vector<Timed> out;
    for (std::size_t f = 0; f < functions.size(); ++f) {
      auto const [median, spread] = median_and_spread(us[f]);
      out.push_back({median, spread, enqueue[f]});
    }
    return out;
  }

  /// NCCL's own grouped send and receive, without this library.
  void plain_exchange(std::byte const* in, std::byte* out, std::vector<std::int64_t> const& sent,
                      std::vector<std::int64_t> const& received) {
    ncclGroupStart();
    std::int64_t at = 0, from = 0;
    for (int r = 0; r < host_.size(); ++r) {
      auto const i = static_cast<std::size_t>(r);
      if (r != host_.rank()) {
        ncclSend(in + at, static_cast<std::size_t>(sent[i]), ncclInt8, r, plain_, stream_);
        ncclRecv(out + from, static_cast<std::size_t>(received[i]), ncclInt8, r, plain_, stream_);
      }
      at += sent[i];
      from += received[i];
    }
    comm::detail::check_nccl(ncclGroupEnd(), "ncclGroupEnd", plain_);
  }

  void print(std::string const& name, Timed const& t, double bytes) {
    double const rate = bytes / t.us * 1e-3;
    if (host_.rank() == 0) {
      std::printf("%-52s %9.1f us  (+- %6.1f)  %6.1f GB/s  host %6.1f us\n", name.c_str(), t.us, t.spread / 2, rate, t.host_us);
      std::fflush(stdout);
    }
    report_.add({name, t.us, t.spread, {{"ranks", host_.size()}, {"bytes_out", bytes}, {"gb_per_s", rate}, {"host_us", t.host_us}}});
  }

  /// One batch of this rank: random rows and choices, here and on the device, and how many rows go to and come from every rank.
  struct Batch {
    Batch(comm::Mpi& host, int tokens)
        : tokens(tokens),
          placement(kExperts, host.size(), PlacementStrategy::linear),
          rows_out(static_cast<std::size_t>(host.size()), 0),
          rows_in(rows_out),
          x(std::int64_t{tokens} * kHidden),
          out(std::int64_t{tokens} * kHidden),
          device_ids(std::int64_t{tokens} * kTopK),
          device_weights(std::int64_t{tokens} * kTopK) {
      std::mt19937 random(static_cast<unsigned>(77 + host.rank()));
      std::vector<std::int32_t> all(kExperts);
      for (int e = 0; e < kExperts; ++e) all[static_cast<std::size_t>(e)] = e;
      for (int t = 0; t < tokens; ++t) {
        std::vector<bool> seen(rows_out.size());
        for (int j = 0; j < kTopK; ++j) {
          std::swap(all[static_cast<std::size_t>(j)], all[static_cast<std::size_t>(j) + random() % static_cast<unsigned>(kExperts - j)]);
          ids.push_back(all[static_cast<std::size_t>(j)]);
          auto const to = static_cast<std::size_t>(placement.owner(ids.back()));
          rows_out[to] += seen[to] ? 0 : 1;
          seen[to] = true;
        }
      }
      MPI_Alltoall(rows_out.data(), 1, MPI_INT64_T, rows_in.data(), 1, MPI_INT64_T, host.handle());
      std::normal_distribution<float> normal;
      host_x.resize(static_cast<std::size_t>(tokens) * kHidden);
      weights.resize(ids.size());
      for (bf16& v : host_x) v = from_float<bf16>(normal(random));
      for (float& v : weights) v = static_cast<float>(random() % 1000 + 1) / 1000.0F;
      x.copy_from_host(host_x.data());
      device_weights.copy_from_host(weights.data());
      device_ids.copy_from_host(ids.data());
    }
    RoutedTokens<bf16> in() const {
      return {make_rows(static_cast<bf16 const*>(x.data()), tokens, kHidden),
              make_rows(static_cast<std::int32_t const*>(device_ids.data()), tokens, kTopK),
              make_rows(static_cast<float const*>(device_weights.data()), tokens, kTopK)};
    }

    int tokens;
    ExpertPlacement placement;
    std::vector<std::int32_t> ids;
    std::vector<std::int64_t> rows_out, rows_in;
    std::vector<bf16> host_x;
    std::vector<float> weights;
    Device<bf16> x, out;
    Device<std::int32_t> device_ids;
    Device<float> device_weights;
  };

  template <class Quant>
  void run(int tokens, backends::Sizes sizes) {
    Batch batch(host_, tokens);
    std::string const shape =
        text(tokens, "/", Quant::kQuantizesActivations ? "fp8" : "bf16", "/", sizes == backends::Sizes::fixed ? "fixed" : "exact");
    exchange_rows(batch, moe::detail::WireRow<Config, Quant>(kHidden, kTopK).bytes(), sizes, shape);
    exchange<backends::AllToAllV<Nccl>, Quant>(batch, sizes, "all_to_all_v", shape);
    exchange<backends::AllGatherReduceScatter<Nccl>, Quant>(batch, sizes, "allgather_reduce_scatter", shape);
  }

  moe_bench::Report const& report() const { return report_; }
  bool good() const { return good_; }

 private:
  /// A backend's whole exchange with experts that multiply by a factor: checked, then its calls and the pair timed.
  template <class Backend, class Quant>
  void exchange(Batch& batch, backends::Sizes sizes, std::string const& name, std::string const& shape) {
    int const tokens = batch.tokens;
    Shape<Config> const layer(LayerShape{kHidden, 2048, kExperts, kTopK, false});
    Arena<space::cuda> arena;
    typename Backend::Params params{};
    params.sizes = sizes;
    typename Backend::template Exchange<Config, Quant, bf16> exchange(comm_, layer, tokens, batch.placement, Quant{}, params, arena);
    auto const owned = batch.placement.local_to_physical(host_.rank());
    Device<std::int32_t> physical(static_cast<std::int64_t>(owned.size()));
    physical.copy_from_host(owned.data());
    auto const tokens_here = exchange.prepare(batch.in(), stream_);
    auto const y = exchange.expert_output();
    if (y.extent(0) > 0) {
      moe_test::factor_experts<bf16><<<static_cast<unsigned>(y.extent(0)), 32, kHidden * sizeof(float), stream_>>>(
          Quant{}, tokens_here, physical.data(), static_cast<int>(owned.size()), kHidden, y.data_handle());
      check_launch("factor_experts");
    }
    exchange.finalize(make_rows(batch.out.data(), tokens, kHidden), stream_);
    exchange.wait(stream_);
    std::vector<bf16> host_out(batch.host_x.size());
    batch.out.copy_to_host(host_out.data());
    if (!expect_at_most(name + "/" + shape, output_error<Quant>(batch.host_x, batch.ids, batch.weights, host_out, tokens), 5e-3)) return;

    double dispatch = 0, combine = 0;
    // The halves cannot run alone: the pair is timed, and dispatch is the difference of the pair and its second half.
    std::vector<CudaEvent> marks(3);
    std::vector<double> d, c;
    for (int i = -3; i < 4 * kRepeats; ++i) {
      stream_.synchronize();
      host_.barrier({});
      marks[0].record(stream_);
      exchange.prepare(batch.in(), stream_);
      marks[1].record(stream_);
      exchange.finalize(make_rows(batch.out.data(), tokens, kHidden), stream_);
      marks[2].record(stream_);
      exchange.wait(stream_);
      std::array<double, 2> mine{1e3 * static_cast<double>(marks[1].since(marks[0])), 1e3 * static_cast<double>(marks[2].since(marks[1]))};
      std::array<double, 2> slowest{};
      MPI_Allreduce(mine.data(), slowest.data(), 2, MPI_DOUBLE, MPI_MAX, host_.handle());
      if (i >= 0) {
        d.push_back(slowest[0]);
        c.push_back(slowest[1]);
      }
    }
    std::function<void()> const both = [&] {
      exchange.prepare(batch.in(), stream_);
      exchange.finalize(make_rows(batch.out.data(), tokens, kHidden), stream_);
    };
    auto const pair = time(calls_for(tokens), {both});
    std::tie(dispatch, std::ignore) = median_and_spread(d);
    std::tie(combine, std::ignore) = median_and_spread(c);
    print(name + "/dispatch_call/" + shape, {dispatch, median_and_spread(d).second, 0}, dispatch_bytes_);
    print(name + "/combine_call/" + shape, {combine, median_and_spread(c).second, 0}, combine_bytes_);
    print(name + "/pair_back_to_back/" + shape, pair[0], dispatch_bytes_ + combine_bytes_);
  }
  /// The rows alone, as bytes: NCCL's send and receive beside all_to_all_v, both ways. `record`: bytes of a dispatched row.
  void exchange_rows(Batch const& batch, std::int64_t record, backends::Sizes sizes, std::string const& shape) {
    int const R = host_.size();
    int const me = host_.rank();
    auto bytes_of = [&](std::vector<std::int64_t> rows, std::int64_t row) {
      for (std::size_t r = 0; r < rows.size(); ++r) {
        rows[r] = r == static_cast<std::size_t>(me) ? 0 : (sizes == backends::Sizes::fixed ? batch.tokens : rows[r]) * row;
      }
      return rows;
    };
    auto total = [](std::vector<std::int64_t> const& v) {
      std::int64_t sum = 0;
      for (auto n : v) sum += n;
      return sum;
    };
    auto first = [](std::vector<std::int64_t> const& v) {
      std::vector<std::int64_t> out;
      std::int64_t sum = 0;
      for (auto n : v) {
        out.push_back(sum);
        sum += n;
      }
      return out;
    };
    for (bool combine : {false, true}) {
      std::int64_t const row = combine ? std::int64_t{kHidden} * 2 : record;
      auto const sent = bytes_of(combine ? batch.rows_in : batch.rows_out, row);
      auto const received = bytes_of(combine ? batch.rows_out : batch.rows_in, row);
      auto const sent_at = first(sent);
      auto const received_at = first(received);
      (combine ? combine_bytes_ : dispatch_bytes_) = static_cast<double>(total(sent));
      std::string const what = combine ? "combine_rows/" : "dispatch_rows/";
      Device<std::byte> from(total(sent)), to(total(received));
      std::vector<std::byte> host_from, want;
      for (int r = 0; r < R; ++r) {
        append_pattern(host_from, sent[static_cast<std::size_t>(r)], me, r);
        append_pattern(want, received[static_cast<std::size_t>(r)], r, me);
      }
      from.copy_from_host(host_from.data());
      auto const arrives = [&](std::string const& who, auto const& call) {
        check_cuda(cudaMemset(to.data(), 0xff, to.bytes()), "cudaMemset");
        call();
        stream_.synchronize();
        std::vector<std::byte> got(want.size());
        to.copy_to_host(got.data());
        auto const at = std::mismatch(got.begin(), got.end(), want.begin()).first - got.begin();
        bool const good = at == std::ssize(got);
        if (!good) std::printf("rank %d: %s differs from byte %td of %zu on\n", me, who.c_str(), at, got.size());
        return expect_at_most(who, good ? 0.0 : 1.0, 0.5);
      };
      std::function<void()> const plain = [&] { plain_exchange(from.data(), to.data(), sent, received); };
      std::function<void()> const ours = [&] {
        comm_.all_to_all_v(from.data(), sent.data(), sent_at.data(), to.data(), received.data(), received_at.data(), stream_);
      };
      bool const right = arrives("nccl/" + what + shape, plain);
      if (!arrives("all_to_all_v/" + what + shape, ours) || !right) continue;
      auto const t = time(calls_for(batch.tokens), {plain, ours});
      print("nccl/" + what + shape, t[0], static_cast<double>(total(sent)));
      print("all_to_all_v/" + what + shape, t[1], static_cast<double>(total(sent)));
    }
  }
  static int calls_for(int tokens) { return tokens > 1000 ? 8 : 20; }
  /// Bytes that rank `from` sends to rank `to`.
  static void append_pattern(std::vector<std::byte>& out, std::int64_t bytes, int from, int to) {
    for (std::int64_t i = 0; i < bytes; ++i) out.push_back(static_cast<std::byte>((31 * from + 17 * to + 7 * i + i / 251) & 0xff));
  }
  /// ‖out − want‖ / ‖want‖ of some tokens: row x of the scheme times the weighted sum of the factors of its experts.
  template <class Quant>
  static double output_error(std::vector<bf16> const& x, std::vector<std::int32_t> const& ids, std::vector<float> const& weights,
                             std::vector<bf16> const& out, int tokens) {
    double error = 0, norm = 0;
    std::vector<typename Quant::template Payload<bf16>> codes(kHidden);
    std::vector<typename Quant::Scale> scales(static_cast<std::size_t>(Quant::scale_cols(kHidden)));
    std::vector<float> row(kHidden);
    for (int t = 0; t < tokens; t += std::max(1, tokens / 64)) {
      auto const first = static_cast<std::size_t>(t) * kHidden;
      Quant{}.template quantize_row<bf16>(x.data() + first, kHidden, codes.data(), scales.data());
      Quant{}.template dequantize_row<bf16>(codes.data(), scales.data(), kHidden, row.data());
      double sum = 0;
      for (int j = 0; j < kTopK; ++j) {
        auto const slot = static_cast<std::size_t>(t * kTopK + j);
        sum += static_cast<double>(weights[slot]) * static_cast<double>(moe_test::factor(ids[slot]));
      }
      for (std::size_t h = 0; h < kHidden; ++h) {
        double const want = sum * static_cast<double>(row[h]);
        error += std::pow(static_cast<double>(to_float(out[first + h])) - want, 2);
        norm += want * want;
      }
    }
    return std::sqrt(error / norm);
  }
  /// Collective. Whether no rank's error exceeds the bound; if one does, prints it and records the failure.
  bool expect_at_most(std::string const& name, double error, double most) {
    if (!std::isfinite(error)) error = 1e9;
    double worst = 0;
    MPI_Allreduce(&error, &worst, 1, MPI_DOUBLE, MPI_MAX, host_.handle());
    if (worst < most) return true;
    good_ = false;
    if (host_.rank() == 0) std::printf("%-52s WRONG: differs by %.3e, at most %.0e: not timed\n", name.c_str(), worst, most);
    return false;
  }

  comm::Mpi& host_;
  Nccl comm_;
  ncclComm_t plain_ = nullptr;
  CudaStream stream_;
  CudaEvent begin_, end_;
  double dispatch_bytes_ = 0;
  double combine_bytes_ = 0;
  bool good_ = true;
  moe_bench::Report report_;
};

int run(std::string const& json) {
  comm::Mpi host(MPI_COMM_WORLD);
  if (!moe_bench::take_gpu(host.rank(), host.size())) return 77;
  Bench bench(host);
  using Fp8 = quantization::Fp8Group<>;
  bench.run<quantization::None>(8, backends::Sizes::fixed);
  bench.run<quantization::None>(8, backends::Sizes::exact);
  bench.run<quantization::None>(128, backends::Sizes::fixed);
  bench.run<quantization::None>(128, backends::Sizes::exact);
  bench.run<quantization::None>(4096, backends::Sizes::exact);
  bench.run<Fp8>(4096, backends::Sizes::exact);
  bool const written = host.rank() != 0 || json.empty() || bench.report().write(json);
  return written && bench.good() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  std::string json;
  try {
    for (int i = 1; i < argc; i += 2) {
      moe_bench::known_name("option", argv[i], {"--json"});
      json = moe_bench::value_of(argc, argv, i);
    }
  } catch (moe_bench::BadArgument const& error) {
    return moe_bench::refuse("comm_exchange_bench", error);
  }
  MPI_Init(&argc, &argv);
  int result = 1;
  try {
    result = run(json);
  } catch (std::exception const& e) {
    std::printf("error: %s\n", e.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return result;
}
