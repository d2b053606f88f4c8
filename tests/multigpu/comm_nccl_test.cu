// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/comm_nccl_test.cu: comm::Nccl alone: bootstrap over MPI and over a file, collectives of unequal sizes, deadlines.
// moe-ranks: 2 4 8
#include <gtest/gtest.h>
#include <mpi.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <string>
#include <vector>

#include "../expect_error.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/nccl.hpp"
#include "moe/core/buffer.hpp"

namespace {

using moe::ErrorCode;
using moe::comm::Mpi;
using moe::comm::Nccl;
using moe_test::expect_error;
template <class T>
using Device = moe::Buffer<T, moe::space::cuda>;

Mpi& host() {
  static Mpi comm(MPI_COMM_WORLD);
  return comm;
}

/// Every collective, with sizes that differ and one of zero.
void expect_collectives(Nccl& comm) {
  int const R = comm.size();
  int const me = comm.rank();
  moe::CudaStream stream;
  std::vector<std::int64_t> counts, offsets;
  std::int64_t total = 0;
  for (int r = 0; r < R; ++r) {
    counts.push_back(r == 1 ? 0 : 3 * (r + 1));
    offsets.push_back(total);
    total += counts.back();
  }
  auto const mine = static_cast<std::size_t>(me);
  std::vector<std::uint8_t> own(static_cast<std::size_t>(total), static_cast<std::uint8_t>(me + 1));
  Device<std::uint8_t> in(total), out(total * R);
  in.copy_from_host(own.data());
  std::vector<std::uint8_t> all(static_cast<std::size_t>(total * R));

  comm.all_gather_v(in.data(), counts[mine], out.data(), counts.data(), offsets.data(), stream);
  comm.synchronize(stream);
  out.copy_to_host(all.data());
  for (int r = 0; r < R; ++r) {
    for (std::int64_t i = 0; i < counts[static_cast<std::size_t>(r)]; ++i) {
      ASSERT_EQ(all[static_cast<std::size_t>(offsets[static_cast<std::size_t>(r)] + i)], r + 1);
    }
  }
  // Rank s sends counts[r] bytes to rank r: rank r receives counts[r] from each.
  std::vector<std::int64_t> const received(static_cast<std::size_t>(R), counts[mine]);
  std::vector<std::int64_t> places;
  for (int r = 0; r < R; ++r) places.push_back(r * counts[mine]);
  comm.all_to_all_v(in.data(), counts.data(), offsets.data(), out.data(), received.data(), places.data(), stream);
  comm.barrier(stream);
  comm.synchronize(stream);
  out.copy_to_host(all.data());
  for (std::int64_t i = 0; i < R * counts[mine]; ++i) {
    ASSERT_EQ(all[static_cast<std::size_t>(i)], i / counts[mine] + 1);
  }
  comm.broadcast(in.data(), total, R - 1, stream);
  comm.synchronize(stream);
  in.copy_to_host(own.data());
  EXPECT_EQ(own, std::vector<std::uint8_t>(own.size(), static_cast<std::uint8_t>(R)));

  Device<float> terms(total), sums(total);
  std::vector<float> const term(static_cast<std::size_t>(total), static_cast<float>(me + 1));
  std::vector<float> sum(term.size());
  terms.copy_from_host(term.data());
  comm.all_reduce(terms.data(), total, sums.data(), stream);
  comm.synchronize(stream);
  sums.copy_to_host(sum.data());
  float const whole = static_cast<float>(R * (R + 1)) / 2;
  EXPECT_EQ(sum, std::vector<float>(sum.size(), whole));
  comm.reduce_scatter_v(terms.data(), counts.data(), offsets.data(), sums.data(), stream);
  comm.synchronize(stream);
  sums.copy_to_host(sum.data());
  for (std::int64_t i = 0; i < counts[mine]; ++i) {
    ASSERT_EQ(sum[static_cast<std::size_t>(i)], whole);
  }
  std::vector<int> ids(static_cast<std::size_t>(R));
  comm.all_gather_host(&me, sizeof me, ids.data());
  for (int r = 0; r < R; ++r) EXPECT_EQ(ids[static_cast<std::size_t>(r)], r);
}

TEST(Nccl, BootstrapOverMpi) {
  auto comm = Nccl::over_communicator(host(), {});
  EXPECT_EQ(comm.rank(), host().rank());
  EXPECT_EQ(comm.size(), host().size());
  expect_collectives(comm);
  Nccl moved = std::move(comm);
  expect_collectives(moved);
}

TEST(Nccl, BootstrapOverAFile) {
  std::array<char, 64> path{};
  if (host().rank() == 0) std::snprintf(path.data(), path.size(), "/tmp/moe_nccl_id_%d", static_cast<int>(getpid()));
  host().broadcast(path.data(), static_cast<std::int64_t>(path.size()), 0, {});
  if (host().rank() == 0) usleep(200'000);  // the others wait for the file
  auto comm = Nccl::over_file(path.data(), host().rank(), host().size(), {.timeout_ms = 30'000});
  expect_collectives(comm);
  host().barrier({});
  if (host().rank() == 0) {
    expect_error(ErrorCode::config, "must not exist", [&] { Nccl::over_file(path.data(), 0, 1); });
    std::remove(path.data());
  }
}

TEST(Nccl, PeersThatNeverJoinAreATimeout) {
  expect_error(ErrorCode::timeout, "800 ms", [&] { Nccl(0, 2, Nccl::unique_id(), {.timeout_ms = 800}); });
  expect_error(ErrorCode::timeout, [&] { Nccl::over_file("/tmp/moe_nccl_no_such_id", 1, 2, {.timeout_ms = 200}); });
  Device<int> still_works(4);
  host().barrier({});
}

TEST(Nccl, WorkThatDoesNotEnd) {
  auto comm = Nccl::over_communicator(host(), {.timeout_ms = 20'000});
  moe::CudaStream stream;
  comm.barrier(stream);
  comm.synchronize(stream);
  comm.set_timeout_ms(500);
  if (comm.rank() == 0) {
    Device<float> x(16);
    expect_error(ErrorCode::timeout, [&] {
      comm.all_reduce(x.data(), 16, x.data(), stream);
      comm.synchronize(stream);
    });
    EXPECT_TRUE(comm.failed());
    expect_error(ErrorCode::state, [&] { comm.barrier(stream); });
    moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  host().barrier({});
}

TEST(Nccl, AnotherVersionIsRefused) {
  expect_error(ErrorCode::unsupported, std::to_string(NCCL_VERSION_CODE),
               [] { moe::comm::detail::check_nccl_version(NCCL_VERSION_CODE - 1); });
}

}  // namespace
