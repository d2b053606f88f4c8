// SPDX-License-Identifier: Apache-2.0
// tests/test_main.cpp: the main of every one-rank test program without its own.
#include "exit_code.hpp"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return moe_test::exit_code(RUN_ALL_TESTS());
}
