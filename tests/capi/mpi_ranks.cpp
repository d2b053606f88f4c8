// SPDX-License-Identifier: Apache-2.0
// tests/capi/mpi_ranks.cpp: moe.h between ranks over MPI in the host space: every backend beside the definition; bad input of one rank;
// two threads with two runners of one group.
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

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

/// This rank's rows and experts of a layer.
template <class T>
struct Problem {
  explicit Problem(char const* backend) : arrays(sizes()), config(arrays.config()) {
    fill(arrays.hidden, 30 + rank, 1.0F);
    config.max_tokens_per_rank = 16;
    config.backend = backend;
    weights.w13 = &w13;
    weights.w2 = &w2;
  }
  moe_status create(moe_group_t group) { return moe_runner_create(&config, &weights, group, &runner); }
  moe_status forward() {
    return moe_runner_forward_routed(runner, &arrays.hidden, &arrays.ids, &arrays.weights, &arrays.output, nullptr, nullptr);
  }
  bool right() { return relative_error(arrays.output.values(), reference(arrays)) < (sizeof(T) == 4 ? 1e-5 : 8e-3); }

  LayerArrays<T> arrays;
  std::int64_t const first = 9 / ranks * rank + std::min(rank, 9 % ranks), count = 9 / ranks + (rank < 9 % ranks ? 1 : 0);
  Array<T> const w13 = slice(arrays.w13, first, count, 2 * arrays.sizes.intermediate, arrays.sizes.hidden);
  Array<T> const w2 = slice(arrays.w2, first, count, arrays.sizes.hidden, arrays.sizes.intermediate);
  moe_runner_config config;
  moe_weights weights = MOE_WEIGHTS_INIT;
  moe_runner_t runner = nullptr;

 private:
  static Sizes sizes() {
    Sizes s;
    s.experts = 9;  // does not divide
    s.tokens = 8 + rank;
    return s;
  }
};

template <class T>
void run(moe_group_t group, char const* backend) {
  Problem<T> p(backend);
  expect(p.create(group) == MOE_OK, "create", backend);
  for (int repeat = 0; repeat < 3; ++repeat) {
    expect(p.forward() == MOE_OK, "forward", backend);
    expect(p.right(), "output", backend);
  }
  // The last rank's hidden states have a wrong dtype: it gets E_ARG, the others E_PEER, before the deadline.
  DLTensor hidden = p.arrays.hidden.tensor();
  if (rank == ranks - 1) hidden.dtype.code = kDLInt;
  moe_status const status =
      moe_runner_forward_routed(p.runner, &hidden, &p.arrays.ids, &p.arrays.weights, &p.arrays.output, nullptr, nullptr);
  expect(status == (rank == ranks - 1 ? MOE_E_ARG : MOE_E_PEER), "a refused argument", backend);
  // Its output is written over its hidden states.
  DLTensor const* const output = rank == ranks - 1 ? &p.arrays.hidden : &p.arrays.output;
  moe_status const over = moe_runner_forward_routed(p.runner, &p.arrays.hidden, &p.arrays.ids, &p.arrays.weights, output, nullptr, nullptr);
  expect(over == (rank == ranks - 1 ? MOE_E_ARG : MOE_E_PEER), "an output that overlaps", backend);
  expect(moe_runner_destroy(p.runner) == MOE_OK, "destroy", backend);

  // Its configuration is wrong.
  if (rank == ranks - 1) p.config.activation = "swish";
  p.runner = nullptr;
  moe_status const created = p.create(group);
  expect(created == (rank == ranks - 1 ? MOE_E_CONFIG : MOE_E_PEER) && p.runner == nullptr, "a refused configuration", backend);
}

/// A thread of rank 0 is in a call on one runner, and waits there for the other ranks, which do not come yet. Until they have come, each
/// call of a second thread on another runner of the group is E_STATE, and none of them reaches the other ranks: the next one is right.
void two_threads(moe_group_t group, char const* backend) {
  Problem<float> one(backend), other(backend);
  expect(one.create(group) == MOE_OK && other.create(group) == MOE_OK, "create two", backend);
  if (rank == 0) {
    std::atomic<bool> ended{false};
    moe_status first = MOE_OK;
    std::thread thread([&] {
      do first = one.forward();
      while (first == MOE_E_STATE);  // the checks below were in the way
      ended = true;
    });
    moe_status status = MOE_OK;
    while (!ended && (status = moe_runner_check(other.runner)) == MOE_OK) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    expect(status == MOE_E_STATE, "check beside a call on another runner of the group", backend);
    expect(other.forward() == MOE_E_STATE, "forward beside a call on another runner of the group", backend);
    expect(std::string(moe_last_error()).find("group: another thread is in a call on it") != std::string::npos, "its text", backend);
    moe_runner_t third = nullptr;
    expect(moe_runner_create(&other.config, &other.weights, group, &third) == MOE_E_STATE && third == nullptr, "create beside it", backend);
    expect(!ended, "the first call waits for the other ranks", backend);
    MPI_Barrier(MPI_COMM_WORLD);  // while the other thread is in MPI
    thread.join();
    expect(first == MOE_OK, "the first call", backend);
  } else {
    MPI_Barrier(MPI_COMM_WORLD);
    expect(one.forward() == MOE_OK, "the first call", backend);
  }
  expect(one.right(), "output of the first call", backend);
  expect(other.forward() == MOE_OK && other.right(), "the second runner after it", backend);
  expect(moe_runner_destroy(one.runner) == MOE_OK && moe_runner_destroy(other.runner) == MOE_OK, "destroy two", backend);
}

}  // namespace

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  expect(level == MPI_THREAD_MULTIPLE, "MPI_THREAD_MULTIPLE", "two threads need it");
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
        two_threads(group, backend);
      }
      expect(moe_group_destroy(group) == MOE_OK, "group_destroy", backend);
    }
  }
  // Each rank for itself.
  moe_group_t none = nullptr;
  for (std::int32_t const handle : {static_cast<std::int32_t>(MPI_Comm_c2f(MPI_COMM_NULL)), 123456789, -7}) {
    expect(moe_group_create_mpi(handle, 0, &none) == MOE_E_ARG && none == nullptr, "no communicator", "group");
    std::string const said = "fortran_communicator: " + std::to_string(handle) + " is not a communicator";
    expect(std::string(moe_last_error()).find(said) != std::string::npos, "its text", "group");
  }
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  MPI_Finalize();
  for (int world = 0; world < 2; ++world) {
    moe_status const late = world == 0 ? moe_group_create_mpi(0, 0, &none) : moe_group_create_mpi_world(0, &none);
    expect(late == MOE_E_STATE && none == nullptr, "a group after the end of MPI", "group");
    expect(std::string(moe_last_error()).find("MPI: MPI_Finalize() was called") != std::string::npos, "its text", "group");
  }
  return failed == 0 ? 0 : 1;
}
