// SPDX-License-Identifier: Apache-2.0
// tests/capi/mpi_ranks.cpp: moe.h between ranks over MPI in the host space: every backend beside the definition; bad input of one rank.
#include <mpi.h>

#include <algorithm>
#include <cstdio>

#include "tests/capi/tensors.hpp"

namespace {

using namespace moe_test;

int failed = 0;
int rank = 0;
int ranks = 1;

void expect(bool holds, char const* what, char const* backend) {
  if (holds) return;
  ++failed;
  std::fprintf(stderr, "rank %d: %s (%s): last error: %s\n", rank, what, backend, moe_last_error());
}

template <class T>
Array<T> slice(Array<T>& all, std::int64_t first, std::int64_t count, std::int64_t rows, std::int64_t cols) {
  Array<T> out({count, rows, cols});
  std::copy_n(all.values().begin() + first * rows * cols, count * rows * cols, out.values().begin());
  return out;
}

template <class T>
void run(moe_group_t group, char const* backend) {
  Sizes s;
  s.experts = 9;  // does not divide
  s.tokens = 8 + rank;
  LayerArrays<T> a(s);
  fill(a.hidden, 30 + rank, 1.0F);
  std::int64_t const first = 9 / ranks * rank + std::min(rank, 9 % ranks);
  std::int64_t const count = 9 / ranks + (rank < 9 % ranks ? 1 : 0);
  Array<T> const w13 = slice(a.w13, first, count, 2 * s.intermediate, s.hidden);
  Array<T> const w2 = slice(a.w2, first, count, s.hidden, s.intermediate);
  moe_runner_config config = a.config();
  config.max_tokens_per_rank = 16;
  config.backend = backend;
  moe_weights weights = MOE_WEIGHTS_INIT;
  weights.w13 = &w13;
  weights.w2 = &w2;
  moe_runner_t runner = nullptr;
  expect(moe_runner_create(&config, &weights, group, &runner) == MOE_OK, "create", backend);
  for (int repeat = 0; repeat < 3; ++repeat) {
    expect(moe_runner_forward_routed(runner, &a.hidden, &a.ids, &a.weights, &a.output, nullptr, nullptr) == MOE_OK, "forward", backend);
    expect(relative_error(a.output.values(), reference(a)) < (sizeof(T) == 4 ? 1e-5 : 8e-3), "output", backend);
  }
  // The last rank's hidden states have a wrong dtype: it gets E_ARG, the others E_PEER, and nobody waits.
  DLTensor hidden = a.hidden.tensor();
  if (rank == ranks - 1) hidden.dtype.code = kDLInt;
  moe_status const status = moe_runner_forward_routed(runner, &hidden, &a.ids, &a.weights, &a.output, nullptr, nullptr);
  expect(status == (rank == ranks - 1 ? MOE_E_ARG : MOE_E_PEER), "a refused argument", backend);
  expect(moe_runner_destroy(runner) == MOE_OK, "destroy", backend);

  // Its configuration is wrong.
  if (rank == ranks - 1) config.activation = "swish";
  runner = nullptr;
  moe_status const created = moe_runner_create(&config, &weights, group, &runner);
  expect(created == (rank == ranks - 1 ? MOE_E_CONFIG : MOE_E_PEER) && runner == nullptr, "a refused configuration", backend);
}

}  // namespace

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  for (char const* backend : {"all_to_all_v", "low_latency", "high_throughput"}) {
    for (int wide = 0; wide < 2; ++wide) {
      moe_group_t group = nullptr;
      moe_status const made = wide == 0 ? moe_group_create_mpi_world(20000, &group)
                                        : moe_group_create_mpi(static_cast<std::int32_t>(MPI_Comm_c2f(MPI_COMM_WORLD)), 20000, &group);
      expect(made == MOE_OK, "group", backend);
      std::int32_t r = -1;
      std::int32_t n = -1;
      expect(moe_group_get_rank(group, &r, &n) == MOE_OK && r == rank && n == ranks, "rank", backend);
      if (wide == 0) {
        run<moe::bf16>(group, backend);
      } else {
        run<float>(group, backend);
      }
      expect(moe_group_destroy(group) == MOE_OK, "group_destroy", backend);
    }
  }
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  MPI_Finalize();
  return failed == 0 ? 0 : 1;
}
