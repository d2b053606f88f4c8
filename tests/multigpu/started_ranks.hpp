// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/started_ranks.hpp: a process for each rank, started by the test and not by mpirun, which would end them all when one is
// killed. The last rank kills itself; the others check what they are told.
#pragma once

#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "temporary_directory.hpp"

extern char** environ;

namespace moe_test {

/// The failure that a surviving rank found; its exit status.
enum Finding { kFine, kNoFailure, kWrongCode, kWrongPeer, kLate, kLeftLate, kGpuUnusable, kNoNewGroup, kOther };
inline constexpr char const* kFindings[] = {"fine",      "no failure",   "another error", "another rank named", "told too late",
                                            "left late", "GPU unusable", "no new group",  "see its output"};

/// The ranks of one case.
class StartedRanks {
 public:
  /// Starts `this program --rank RANK SIZE FILE arguments…` for each rank. FILE: a path of this case, of which nothing exists yet. `what`:
  /// the case, for messages.
  StartedRanks(std::string what, int size, std::vector<std::string> const& arguments)
      : what_(std::move(what)), folder_(std::make_unique<TemporaryDirectory>()) {
    for (int rank = 0; rank < size; ++rank) {
      std::vector<std::string> args{"killed_rank", "--rank", std::to_string(rank), std::to_string(size), (*folder_ / "id").string()};
      args.insert(args.end(), arguments.begin(), arguments.end());
      std::vector<char*> argv;
      for (auto& a : args) argv.push_back(a.data());
      argv.push_back(nullptr);
      pid_t child = -1;
      if (posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, argv.data(), environ) != 0) child = -1;
      children_.push_back(child);
    }
  }
  /// Every rank but the last must have succeeded before `end`.
  void expect_survivors(std::chrono::steady_clock::time_point end) {
    for (std::size_t r = 0; r < children_.size(); ++r) {
      ASSERT_GT(children_[r], 0) << what_;
      int status = 0;
      pid_t done = 0;
      while ((done = waitpid(children_[r], &status, WNOHANG)) == 0 && std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      if (done == 0) {
        kill(children_[r], SIGKILL);
        waitpid(children_[r], &status, 0);
        ADD_FAILURE() << what_ << ": rank " << r << " hangs";
      } else if (r + 1 == children_.size()) {
        EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << what_ << ": the last rank was not killed, status " << status;
      } else {
        int const found = WIFEXITED(status) ? WEXITSTATUS(status) : static_cast<int>(kOther);
        EXPECT_EQ(found, static_cast<int>(kFine))
            << what_ << ", rank " << r << ": " << kFindings[std::min(found, static_cast<int>(kOther))];
      }
    }
  }

 private:
  std::string what_;
  std::unique_ptr<TemporaryDirectory> folder_;
  std::vector<pid_t> children_;
};

}  // namespace moe_test
