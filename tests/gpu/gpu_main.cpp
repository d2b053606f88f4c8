// SPDX-License-Identifier: Apache-2.0
// tests/gpu/gpu_main.cpp: runs the tests on the first GPU, or exits with 77 (skipped) where there is none. --gtest_list_tests needs none.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "exit_code.hpp"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  int devices = 0;
  cudaError_t const status = cudaGetDeviceCount(&devices);
  if (!GTEST_FLAG_GET(list_tests) && (status != cudaSuccess || devices == 0)) {
    std::printf("skipped: no GPU (%s)\n", cudaGetErrorString(status));
    return moe_test::kSkipped;
  }
  return moe_test::exit_code(RUN_ALL_TESTS());
}
