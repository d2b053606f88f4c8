// SPDX-License-Identifier: Apache-2.0
// bench/runner_products_bench.cu: the ways to compute the products of a block around its routed experts, in turns: shared experts, the
// projections of latent experts, gates. Prints for each number of rows the way that the library takes (runner/device/product_choices.hpp)
// and the fastest one. A way is checked against float32 before it is timed: a wrong one is not timed and makes the exit code 1.
//
//   runner_products_bench [--shapes PART,…] [--rows N,…] [--json FILE]
//
// The ways of shared experts: `dense`, as shared::Dense: two products of cuBLASLt in bf16, the activation between them. `stored`, as
// shared::Stored: a kernel that quantises the rows, and a Hopper layer of one expert in e4m3 blocks with the kernels of any activation.
// `layer_fp8_any`: that layer alone, which quantises its rows itself; `layer_fp8`: likewise with the kernels of SwiGLU, which have all
// tiles; `layer_bf16`: likewise in bf16. No Hopper kernel computes a product alone, each computes the two of an expert. So projections are
// compared as a pair, with ReLU between the two of a layer, and each beside the library's own kernel, as are gates.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/arguments.hpp"
#include "bench/bench_report.hpp"
#include "bench/layer_problem.cuh"
#include "bench/products.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/runner/device/dense_shared.cuh"
#include "moe/runner/device/product_choices.hpp"
#include "moe/runner/device/row_kernels.cuh"
#include "moe/runner/device/stored_shared.hpp"

namespace {

using namespace moe;
using Cuda = space::cuda;
using hopper::ContiguousLayer;
using hopper::LocalShape;
using hopper::Scheme;
using moe_test::Pattern;
using moe_test::Problem;
using moe_test::TypedMemory;
using runner::Sums;
using runner::device::kProductChoices;
using runner::device::prefers_small_product;

constexpr int kTurns = 15, kSamples = 16;

/// An error against float32 and the most that it may be.
struct Check {
  double error, bound;
};
/// One way to compute a case.
struct Way {
  std::string name;
  std::function<void(int set, int rows, cudaStream_t)> enqueue;
  void* output;           ///< of set 0
  std::size_t row_bytes;  ///< of the output
  std::function<Check(int rows)> check;
};
struct Case {
  std::string title;
  int sets;
  std::vector<Way> ways;
  std::function<std::string(int rows)> today;  ///< the name of the way that the library takes
};

/// Sets of weights that are together about twice as large as L2, if each has this many bytes.
int sets_of(std::int64_t bytes) { return static_cast<int>(std::clamp<std::int64_t>((std::int64_t{120} << 20) / bytes + 1, 2, 48)); }

/// The rows of a batch that are compared.
std::vector<int> samples_of(int rows) {
  std::vector<int> out(static_cast<std::size_t>(std::min(kSamples, rows)));
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<int>(i * static_cast<std::size_t>(rows) / out.size());
  out.back() = rows - 1;
  return out;
}

struct ReferenceProduct {
  __nv_bfloat16 const* w;  ///< [n, k]
  int const* samples;      ///< rows of x, or null: all
  int count;
  int n;
  int k;
};
/// y [count, n] = x wᵀ in float32, a warp for each value.
template <class X>
__global__ void reference_product(ReferenceProduct const p, X const* x, float* y) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  long long const warps = static_cast<long long>(gridDim.x) * (blockDim.x / 32);
  for (long long i = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; i < 1LL * p.count * p.n; i += warps) {
    long long const row = p.samples == nullptr ? i / p.n : p.samples[i / p.n];
    float sum = 0;
    for (int c = lane; c < p.k; c += 32) sum += static_cast<float>(x[row * p.k + c]) * __bfloat162float(p.w[i % p.n * p.k + c]);
    sum = moe_test::warp_sum(sum);
    if (lane == 0) y[i] = sum;
  }
}

/// A matrix [n, k] in bf16 on the device.
struct Matrix {
  __nv_bfloat16 const* values;
  int n;
  int k;
  Rows<bf16 const> rows() const { return make_rows(reinterpret_cast<bf16 const*>(values), n, k); }
  /// Of rows of x [., k]: a row of the result for each sample.
  template <class X>
  TypedMemory<float> reference(X const* x, std::vector<int> const* samples, int count) const {
    TypedMemory<int> picked;
    if (samples != nullptr) {
      picked = TypedMemory<int>(samples->size());
      picked.upload(*samples);
    }
    TypedMemory<float> y(static_cast<std::size_t>(count) * static_cast<std::size_t>(n));
    reference_product<<<512, 256>>>({values, picked.data(), count, n, k}, x, y.data());
    check_cuda(cudaDeviceSynchronize(), "reference_product");
    return y;
  }
};

/// ‖out - want‖ / ‖want‖ over the samples; NaN if out has one. out [., n] of bf16 or float.
template <class Out>
double relative_error(TypedMemory<float> const& want, Out const* out, std::vector<int> const& samples, int n) {
  std::vector<float> const expected = want.download();
  std::vector<Out> row(static_cast<std::size_t>(n));
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    Memory<Cuda>::copy_to_host(row.data(), out + static_cast<std::int64_t>(samples[i]) * n, row.size() * sizeof(Out));
    for (std::size_t c = 0; c < row.size(); ++c) {
      double const r = expected[i * row.size() + c], d = static_cast<double>(to_float(row[c])) - r;
      error += d * d;
      norm += r * r;
    }
  }
  return std::sqrt(error / norm);
}

using Problems = std::vector<std::unique_ptr<Problem>>;

/// Layers of one expert, whose router weight is 1, with rows of their own.
Problems one_expert(int hidden, int width, Scheme scheme, activation::Kind kind, int most, int sets) {
  moe_test::Features features;
  features.options.activation = kind;
  Problems out;
  for (int s = 0; s < sets; ++s) {
    auto const seed = 100 + 10 * static_cast<std::uint64_t>(s);
    out.push_back(std::make_unique<Problem>(LocalShape{1, hidden, width, 1}, scheme, most, Pattern::random, seed, features));
    out.back()->weights.upload(std::vector<float>(static_cast<std::size_t>(most), 1.0F));
  }
  return out;
}

template <class Activation>
hopper::LayerLauncher launcher_of(Scheme scheme) {
  return scheme == Scheme::bf16 ? hopper::layer_launcher<Scheme::bf16, Activation>()
                                : hopper::layer_launcher<Scheme::fp8_block, Activation>();
}

Check check_layer(Problem const& p, void const* out, int rows) {
  return {moe_test::compare(p, out, kSamples, rows).relative, moe_test::tolerance(p.scheme, rows)};
}

/// A Hopper layer with the kernels of Activation. Rows in bf16: it quantises them where its weights are codes.
template <class Activation>
Way layer_way(std::string name, Problems const& problems) {
  struct State {
    std::vector<ContiguousLayer> layers;
    TypedMemory<char> workspace, out;
  };
  auto const state = std::make_shared<State>();
  for (auto const& p : problems) {
    state->layers.emplace_back(p->shape, p->scheme, p->layer_weights(), p->features.options, launcher_of<Activation>(p->scheme));
  }
  Problem const& first = *problems[0];
  std::size_t const row_bytes = static_cast<std::size_t>(first.shape.hidden) * sizeof(bf16);
  state->workspace = TypedMemory<char>(static_cast<std::size_t>(state->layers[0].workspace_bytes(first.tokens)));
  state->out = TypedMemory<char>(static_cast<std::size_t>(first.tokens) * row_bytes);
  void* const out = state->out.data();
  auto const enqueue = [state, &problems](int set, int rows, cudaStream_t stream) {
    auto const s = static_cast<std::size_t>(set);
    hopper::LayerCall call = problems[s]->call(state->out.data());
    call.max_tokens = rows;
    state->layers[s].forward(call, state->workspace.data(), stream);
  };
  return {std::move(name), enqueue, out, row_bytes, [&first, out](int rows) { return check_layer(first, out, rows); }};
}

using Fp8 = quantization::Fp8Block<>;
using Dense = runner::shared::Dense<bf16>;
using Stored = runner::shared::Stored<experts::HopperContiguous, bf16, Fp8>;

/// A matrix [rows, cols] of one expert as a policy's parameter.
template <class To>
void set_matrix(To& to, TypedMemory<char> const& codes, std::int64_t rows, std::int64_t cols) {
  using Code = typename decltype(to.codes)::element_type;
  to.codes = make_blocks(reinterpret_cast<Code*>(codes.data()), 1, rows, cols);
  to.rows = rows;
  to.cols = cols;
}
void set_weights(Dense::Params& p, Problem const& q) {
  set_matrix(p.weights.w13, q.w13, 2 * p.intermediate, q.shape.hidden);
  set_matrix(p.weights.w2, q.w2, q.shape.hidden, p.intermediate);
}
void set_weights(Stored::Params& p, Problem const& q) {
  std::int64_t const hidden = q.shape.hidden;
  set_matrix(p.stored.w13, q.w13, 2 * p.intermediate, hidden);
  set_matrix(p.stored.w2, q.w2, hidden, p.intermediate);
  auto const scales = [](TypedMemory<float> const& s) {
    return make_rows(static_cast<float const*>(s.data()), 1, static_cast<std::int64_t>(s.size()));
  };
  p.stored.w13.scales = scales(q.w13_scales);
  p.stored.w2.scales = scales(q.w2_scales);
}

/// A policy of shared experts, on the caller's stream.
template <class Policy>
Way policy_way(std::string name, Problems const& problems) {
  using Part = typename Policy::template Part<Cuda, bf16>;
  struct State {
    Arena<Cuda> arena;
    std::vector<std::unique_ptr<Part>> parts;
  };
  auto const state = std::make_shared<State>();
  Problem const& first = *problems[0];
  std::int64_t const hidden = first.shape.hidden;
  for (auto const& problem : problems) {
    typename Policy::Params p;
    p.count = 1;
    p.intermediate = problem->shape.intermediate;
    p.overlap_rows = 0;
    set_weights(p, *problem);
    state->parts.push_back(std::make_unique<Part>(p, runner::Sizes{hidden, hidden, first.tokens}, state->arena));
  }
  void* const out = state->parts[0]->output().data_handle();
  auto const enqueue = [state, &problems, hidden](int set, int rows, cudaStream_t stream) {
    auto const s = static_cast<std::size_t>(set);
    state->parts[s]->run(make_rows(reinterpret_cast<bf16 const*>(problems[s]->x.data()), rows, hidden), {}, stream);
  };
  return {std::move(name), enqueue, out, static_cast<std::size_t>(hidden) * sizeof(bf16),
          [&first, out](int rows) { return check_layer(first, out, rows); }};
}

/// x [most, k] and y [most, n] of some matrices.
template <class Out>
struct Operands {
  std::vector<Matrix> matrices;
  __nv_bfloat16 const* x;
  int most;
  TypedMemory<Out> y;
  Operands(std::vector<Matrix> w, __nv_bfloat16 const* rows, int most_rows)
      : matrices(std::move(w)), x(rows), most(most_rows), y(static_cast<std::size_t>(most_rows) * static_cast<std::size_t>(n())) {}
  int n() const { return matrices[0].n; }
  int k() const { return matrices[0].k; }
  Rows<bf16 const> x_rows(int rows) const { return make_rows(reinterpret_cast<bf16 const*>(x), rows, k()); }
  Rows<Out> y_rows(int rows) const { return make_rows(y.data(), rows, n()); }

  template <class Enqueue>
  Way way(std::string name, Enqueue const& enqueue) const {
    auto const check = [this](int rows) -> Check {
      std::vector<int> const samples = samples_of(rows);
      TypedMemory<float> const want = matrices[0].reference(x, &samples, static_cast<int>(samples.size()));
      return {relative_error(want, y.data(), samples, n()), std::is_same_v<Out, float> ? 1e-4 : 5e-3};
    };
    return {std::move(name), enqueue, y.data(), static_cast<std::size_t>(n()) * sizeof(Out), check};
  }
};

/// Products through cuBLASLt, one for each matrix.
template <class Out>
struct BlasProducts {
  using Product = runner::device::BlasLtProduct<bf16, Out>;
  Arena<Cuda> arena;
  std::vector<std::unique_ptr<Product>> products;
  BlasProducts(std::vector<Matrix> const& matrices, Sums sums, int most) {
    for (Matrix const& m : matrices) products.push_back(std::make_unique<Product>(m.rows(), nullptr, sums, most, arena));
  }
  Product const& of(int set) const { return *products[static_cast<std::size_t>(set)]; }
};

template <class Out>
Way blas_way(std::string name, Operands<Out> const& o, Sums sums) {
  auto const blas = std::make_shared<BlasProducts<Out>>(o.matrices, sums, o.most);
  return o.way(std::move(name),
               [blas, &o](int set, int rows, cudaStream_t stream) { blas->of(set).apply(o.x_rows(rows), o.y_rows(rows), stream); });
}
template <class Out>
Way own_way(Operands<Out> const& o) {
  return o.way("small_product", [&o](int set, int rows, cudaStream_t stream) {
    Matrix const& m = o.matrices[static_cast<std::size_t>(set)];
    runner::device::SmallProduct<bf16, bf16, Out> const p{.x = o.x_rows(rows).data_handle(),
                                                          .x_stride = m.k,
                                                          .w = m.rows().data_handle(),
                                                          .w_stride = m.k,
                                                          .bias = nullptr,
                                                          .y = o.y_rows(rows).data_handle(),
                                                          .y_stride = m.n,
                                                          .rows = rows,
                                                          .n = m.n,
                                                          .k = m.k,
                                                          .log_cluster = 0};
    runner::device::small_product(p, runner::device::choose_small_product(rows, m.n, m.k), stream);
  });
}

/// Times the ways of cases and prints a table for each.
class Bench {
 public:
  explicit Bench(moe_bench::ProductOptions options) : options_(std::move(options)) {}

  /// False for a wrong result, or a report that cannot be written.
  bool run() {
    auto const start = std::chrono::steady_clock::now();
    for (auto const& [name, shape] : options_.shapes) {
      switch (shape.part) {
        case moe_bench::Part::shared: shared(name, shape); break;
        case moe_bench::Part::projections: projections(name, shape); break;
        case moe_bench::Part::gate: gate(name, shape); break;
      }
    }
    std::printf("%.0f s\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    return (options_.json.empty() || report_.write(options_.json)) && good_;
  }

 private:
  int most() const { return *std::max_element(options_.rows.begin(), options_.rows.end()); }

  void shared(std::string const& name, moe_bench::ProductShape const& shape) {
    std::int64_t const values = std::int64_t{3} * shape.hidden * shape.width;
    int const sets = sets_of(values);  // bytes in e4m3
    auto const kind = activation::Kind::silu;
    Problems const wide = one_expert(shape.hidden, shape.width, Scheme::bf16, kind, most(), sets);
    Problems const codes = one_expert(shape.hidden, shape.width, Scheme::fp8_block, kind, most(), sets);
    measure(
        {text(name, ": hidden ", shape.hidden, ", a shared expert of ", shape.width),
         sets,
         {policy_way<Dense>("dense", wide), policy_way<Stored>("stored", codes), layer_way<hopper::AnyActivation>("layer_fp8_any", codes),
          layer_way<hopper::FastSilu>("layer_fp8", codes), layer_way<hopper::FastSilu>("layer_bf16", wide)},
         [](int) { return kProductChoices.shared_in_scheme ? "stored" : "dense"; }});
  }

  void projections(std::string const& name, moe_bench::ProductShape const& shape) {
    int const hidden = shape.hidden, latent = shape.width, sets = sets_of(std::int64_t{2} * hidden * latent);
    Problems const wide = one_expert(hidden, latent, Scheme::bf16, activation::Kind::relu_no_mul, most(), sets);
    Problems const codes = one_expert(hidden, latent, Scheme::fp8_block, activation::Kind::relu_no_mul, most(), sets);
    std::vector<Matrix> in_matrices, out_matrices;
    for (auto const& p : wide) {
      in_matrices.push_back({reinterpret_cast<__nv_bfloat16 const*>(p->w13.data()), latent, hidden});
      out_matrices.push_back({reinterpret_cast<__nv_bfloat16 const*>(p->w2.data()), hidden, latent});
    }
    auto const* const x = reinterpret_cast<__nv_bfloat16 const*>(wide[0]->x.data());
    TypedMemory<__nv_bfloat16> const z(static_cast<std::size_t>(most()) * static_cast<std::size_t>(latent));
    moe_test::fill_normal<<<256, 256>>>(z.data(), static_cast<long long>(z.size()), 7, 1.0F);
    check_cuda(cudaDeviceSynchronize(), "rows");
    Operands<bf16> const in(in_matrices, x, most()), out(out_matrices, z.data(), most());
    auto const alone = [&](char const* way, Operands<bf16> const& o) {
      measure({text(name, ": ", way, " the latent space, ", o.k(), " inputs, ", o.n(), " outputs"),
               sets,
               {blas_way("cublaslt", o, Sums::blocked), own_way(o)},
               [&o](int rows) { return prefers_small_product(Sums::blocked, false, rows, o.n()) ? "small_product" : "cublaslt"; }});
    };
    alone("into", in);
    alone("out of", out);
    auto const first = std::make_shared<BlasProducts<bf16>>(in_matrices, Sums::blocked, most());
    auto const second = std::make_shared<BlasProducts<bf16>>(out_matrices, Sums::blocked, most());
    Way pair = out.way("cublaslt", [&](int set, int rows, cudaStream_t stream) {
      first->of(set).apply(in.x_rows(rows), in.y_rows(rows), stream);
      second->of(set).apply(make_rows(static_cast<bf16 const*>(in.y.data()), rows, latent), out.y_rows(rows), stream);
    });
    pair.check = [&](int rows) -> Check {
      std::vector<int> const samples = samples_of(rows);
      int const count = static_cast<int>(samples.size());
      TypedMemory<float> const inner = in_matrices[0].reference(x, &samples, count);
      return {relative_error(out_matrices[0].reference(inner.data(), nullptr, count), out.y.data(), samples, hidden), 5e-3};
    };
    measure({text(name, ": both in one, hidden ", hidden, ", latent ", latent),
             sets,
             {std::move(pair), layer_way<hopper::AnyActivation>("layer_bf16", wide), layer_way<hopper::AnyActivation>("layer_fp8", codes)},
             [](int) { return "cublaslt"; }});
  }

  void gate(std::string const& name, moe_bench::ProductShape const& shape) {
    int const hidden = shape.hidden, experts = shape.width, sets = sets_of(std::int64_t{2} * hidden * experts);
    auto const values = static_cast<std::size_t>(hidden) * static_cast<std::size_t>(experts);
    TypedMemory<__nv_bfloat16> const w(values * static_cast<std::size_t>(sets));
    TypedMemory<__nv_bfloat16> const x(static_cast<std::size_t>(most()) * static_cast<std::size_t>(hidden));
    moe_test::fill_normal<<<1024, 256>>>(w.data(), static_cast<long long>(w.size()), 5, 1.0F / std::sqrt(static_cast<float>(hidden)));
    moe_test::fill_normal<<<1024, 256>>>(x.data(), static_cast<long long>(x.size()), 6, 1.0F);
    check_cuda(cudaDeviceSynchronize(), "gate");
    std::vector<Matrix> matrices;
    for (int s = 0; s < sets; ++s) matrices.push_back({w.data() + values * static_cast<std::size_t>(s), experts, hidden});
    Operands<float> const o(matrices, x.data(), most());
    measure(
        {text(name, ": hidden ", hidden, ", ", experts, " experts, float32 logits"),
         sets,
         {blas_way("cublaslt_per_row", o, Sums::per_row), blas_way("cublaslt", o, Sums::blocked), own_way(o)},
         [experts](int rows) { return prefers_small_product(Sums::per_row, true, rows, experts) ? "small_product" : "cublaslt_per_row"; }});
  }

  /// The sets of weights in turn in each graph, the graphs of the ways in turns.
  std::vector<double> times(Case const& c, int rows) {
    std::vector<std::unique_ptr<moe_bench::Replay>> replays;
    for (Way const& way : c.ways) {
      check_cuda(cudaMemset(way.output, 0xFF, static_cast<std::size_t>(rows) * way.row_bytes), "cudaMemset");  // NaN
      way.enqueue(0, rows, nullptr);
      check_cuda(cudaDeviceSynchronize(), way.name.c_str());
      Check const check = way.check(rows);
      replays.emplace_back();
      if (!(check.error <= check.bound)) {
        std::printf("%6d  %s: WRONG: differs from float32 by %.2e, at most %.0e: not timed\n", rows, way.name.c_str(), check.error,
                    check.bound);
        good_ = false;
        continue;
      }
      auto const round = [&](cudaStream_t stream) {
        for (int s = 0; s < c.sets; ++s) way.enqueue(s, rows, stream);
      };
      replays.back() = std::make_unique<moe_bench::Replay>(moe_bench::rounds_of(c.sets, round), c.sets, round);
      replays.back()->warm_up(5);
    }
    std::vector<std::vector<double>> us(c.ways.size());
    for (int turn = 0; turn < kTurns; ++turn) {
      for (std::size_t i = 0; i < us.size(); ++i) {
        if (replays[i] != nullptr) us[i].push_back(replays[i]->us());
      }
    }
    std::vector<double> medians;
    for (std::size_t i = 0; i < us.size(); ++i) {
      medians.push_back(moe_bench::kNotTimed);
      if (us[i].empty()) continue;
      auto const [median, spread] = moe_bench::median_and_spread(us[i]);
      medians.back() = median;
      report_.add({text(c.title, "/", rows, "/", c.ways[i].name), median, spread});
    }
    return medians;
  }

  void measure(Case const& c) {
    std::printf("%s; %d sets of weights; us\n  rows", c.title.c_str(), c.sets);
    for (Way const& way : c.ways) std::printf(" %16s", way.name.c_str());
    std::printf("  %-16s  fastest\n", "today");
    std::vector<std::string> todays, best;
    for (int const rows : options_.rows) {
      std::vector<double> const us = times(c, rows);
      todays.push_back(c.today(rows));
      auto const named = std::find_if(c.ways.begin(), c.ways.end(), [&](Way const& w) { return w.name == todays.back(); });
      auto const today = static_cast<std::size_t>(named - c.ways.begin());
      std::size_t const fastest = moe_bench::fastest(us, today);
      best.push_back(c.ways[fastest].name);
      std::printf("%6d", rows);
      for (double const t : us) std::printf(" %16.2f", t);
      std::printf("  %-16s  %s", todays.back().c_str(), best.back().c_str());
      if (fastest != today && std::isfinite(us[today])) std::printf(", %.0f %% less", 100 * (1 - us[fastest] / us[today]));
      std::printf("\n");
      std::fflush(stdout);
    }
    std::printf("  today:   %s\n  fastest: %s\n\n", moe_bench::ranges(options_.rows, todays).c_str(),
                moe_bench::ranges(options_.rows, best).c_str());
  }

  moe_bench::ProductOptions options_;
  moe_bench::Report report_{"runner_products_bench"};
  bool good_ = true;
};

}  // namespace

int main(int argc, char** argv) try {
  return Bench(moe_bench::product_options(argc, argv)).run() ? 0 : 1;
} catch (moe_bench::BadArgument const& error) {
  return moe_bench::refuse("runner_products_bench", error);
} catch (std::exception const& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
