// SPDX-License-Identifier: Apache-2.0
// tests/unit/comm_abortable_test.cpp: comm::Nccl's calls and aborts over a library that is a few lines of host code, so that the thread
// sanitizer sees them: a communicator is never freed under a call, each is freed once, and a call that only the abort ends holds nothing
// up.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "moe/comm/abortable.hpp"

namespace {

using namespace std::chrono_literals;

/// The library's communicator. Its calls may not overlap, and none may follow free().
struct Comm {
  int calls = 0;  // not atomic: the thread sanitizer reports a call beside another or beside the end
  std::atomic<bool> stuck = false, aborted = false;
  int* freed = nullptr;
  void call() {
    ++calls;
    while (stuck && !aborted) std::this_thread::sleep_for(1ms);
  }
};
/// As ncclCommAbort(): ends the call that is stuck, and frees.
void abort_comm(Comm* comm) {
  comm->aborted = true;
  if (comm->stuck) return;  // the stuck call still has it; its test frees it
  comm->calls = -1;
  ++*comm->freed;
  delete comm;
}
using Comms = moe::comm::detail::Abortable<Comm*, 2>;

Comm* make(int& freed) {
  auto comm = std::make_unique<Comm>();
  comm->freed = &freed;
  return comm.release();
}

TEST(Abortable, CallsEndAndCommunicatorsAreFreedAfterThem) {
  for (int i = 0; i < 200; ++i) {
    std::array<int, 2> freed{};
    {
      Comms comms(abort_comm, 1h);
      comms.add(0, make(freed[0]));
      comms.add(1, make(freed[1]));
      std::atomic<int> made = 0;
      std::thread caller([&] {
        for (;;) {
          Comms::Call const call(comms);
          if (!call.live()) return;
          call[0]->call();
          Comms::Call const nested(comms);  // another thread may have aborted meanwhile: the outer call still has its communicators
          call[1]->call();
          ++made;
        }
      });
      while (made < i % 20) std::this_thread::yield();
      std::thread other([&] { comms.begin_abort(); });
      comms.begin_abort();
      EXPECT_TRUE(comms.failed());
      other.join();
      caller.join();
      comms.abort();
      EXPECT_EQ(freed, (std::array{1, 1}));
    }
    EXPECT_EQ(freed, (std::array{1, 1}));
  }
}

TEST(Abortable, BeginAbortInsideACall) {
  std::array<int, 2> freed{};
  Comms comms(abort_comm, 1h);
  comms.add(0, make(freed[0]));
  {
    Comms::Call const call(comms);
    comms.begin_abort();
    EXPECT_FALSE(Comms::Call(comms).live());
    call[0]->call();  // still there
    comms.add(1, make(freed[1]));
  }
  comms.abort();
  EXPECT_EQ(freed, (std::array{1, 1})) << "what is added after the abort is aborted too";
}

TEST(Abortable, CallThatOnlyTheAbortEnds) {
  int freed = 0;
  std::unique_ptr<Comm> const comm(make(freed));
  Comms comms(abort_comm, 20ms);
  comm->stuck = true;
  comms.add(0, comm.get());
  std::atomic<bool> inside = false;
  std::thread caller([&] {
    Comms::Call const call(comms);
    inside = true;
    call[0]->call();
  });
  while (!inside) std::this_thread::yield();
  comms.begin_abort();  // returns although the call is stuck
  caller.join();
  comms.abort();
  EXPECT_TRUE(comm->aborted);
}

TEST(Abortable, EndsWithItsOwner) {
  int freed = 0;
  {
    Comms comms(abort_comm);
    comms.add(0, make(freed));
    EXPECT_FALSE(comms.failed());
  }
  EXPECT_EQ(freed, 1);
  Comms const none(abort_comm);
  EXPECT_FALSE(none.failed());
}

}  // namespace
