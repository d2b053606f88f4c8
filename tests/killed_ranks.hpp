// SPDX-License-Identifier: Apache-2.0
// tests/killed_ranks.hpp: tests that start this program as MPI ranks, of which the last kills itself. mpirun needs an option to let
// survivors run.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <string>
#include <vector>

#include "temporary_directory.hpp"

namespace moe_test {

/// Runs a program for at most `seconds`; its exit status, 128 + the signal that ended it, or -1 if it had to be killed.
inline int run_program(std::vector<std::string> arguments, int seconds) {
  std::vector<char*> argv;
  for (std::string& a : arguments) argv.push_back(a.data());
  argv.push_back(nullptr);
  pid_t const child = fork();
  if (child == 0) {
    setpgid(0, 0);
    execvp(argv[0], argv.data());
    _exit(127);
  }
  auto const start = std::chrono::steady_clock::now();
  for (int status = 0;; usleep(20'000)) {
    if (waitpid(child, &status, WNOHANG) == child) return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (std::chrono::steady_clock::now() - start > std::chrono::seconds(seconds)) {
      kill(-child, SIGKILL);
      waitpid(child, &status, 0);
      return -1;
    }
  }
}

inline bool has_open_mpi() { return run_program({"sh", "-c", "mpirun --version 2>/dev/null | grep -q 'Open MPI'"}, 20) == 0; }

/// What a rank found, for the process that started it; "" is written as "fine".
inline void write_finding(std::string const& folder, int rank, std::string const& finding) {
  std::ofstream(folder + "/" + std::to_string(rank)) << (finding.empty() ? "fine" : finding);
}

/// MPI_Finalize of Open MPI 4.1 begins with a fence that sometimes never ends after a rank has died, even in a program without this
/// library. left_out_by_mpirun: mpirun is started with `--mca async_mpi_finalize 1`, which leaves the fence out.
enum class Fence { left_out_by_mpirun, kept };

/// Starts `program --rank ARGUMENTS... FOLDER` as `ranks` MPI ranks for at most `seconds`. All but the last must write that all is fine.
inline void expect_survivors_fine(std::string const& program, int ranks, std::vector<std::string> const& arguments, int seconds,
                                  Fence fence = Fence::left_out_by_mpirun) {
  TemporaryDirectory const folder;
  std::vector<std::string> command{"mpirun", "--oversubscribe", "--enable-recovery", "--bind-to", "none"};
  if (fence == Fence::left_out_by_mpirun) command.insert(command.end(), {"--mca", "async_mpi_finalize", "1"});
  command.insert(command.end(), {"-n", std::to_string(ranks), program, "--rank"});
  command.insert(command.end(), arguments.begin(), arguments.end());
  command.push_back(folder.path().string());
  int const status = run_program(command, seconds);
  EXPECT_NE(status, -1) << "mpirun did not end within " << seconds << " s";
  for (int r = 0; r < ranks; ++r) {
    std::string finding;
    std::ifstream file(folder.path() / std::to_string(r));
    std::getline(file, finding);
    EXPECT_EQ(finding, r == ranks - 1 ? "" : "fine") << "rank " << r << (finding.empty() ? " did not come to its end" : "");
  }
}

}  // namespace moe_test
