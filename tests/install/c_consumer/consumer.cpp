// SPDX-License-Identifier: Apache-2.0
// tests/install/c_consumer/consumer.cpp: a program in C++11 over moe.h: quantises a matrix.
#include <moe/moe.h>

#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  std::vector<float> matrix(4 * 64, 1.5F);
  std::vector<unsigned char> codes(4 * 32);
  std::vector<float> scales(4 * 2);
  std::vector<std::int64_t> shape = {4, 64}, code_shape = {4, 32}, scale_shape = {4, 2};
  DLTensor const from = {matrix.data(), {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape.data(), nullptr, 0};
  DLTensor const to = {codes.data(), {kDLCPU, 0}, 2, {kDLUInt, 8, 1}, code_shape.data(), nullptr, 0};
  DLTensor const by = {scales.data(), {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, scale_shape.data(), nullptr, 0};
  if (moe_quantize("int4_group32", &from, &to, &by) != MOE_OK) {
    std::fprintf(stderr, "%s\n", moe_last_error());
    return 1;
  }
  return codes[0] == 0xff && scales[0] * 7.0F == 1.5F ? 0 : 2;  // code 15 stands for 7
}
