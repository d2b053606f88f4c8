// SPDX-License-Identifier: Apache-2.0
// packaging/conan/test_package/program.cpp: the two largest of four logits, for three tokens.
#include <array>
#include <cstdint>
#include <cstdio>
#include <moe/routing/softmax_topk.hpp>

int main() {
  using namespace moe;
  std::array<float, 12> const logits{0, 1, 2, 3, 3, 2, 1, 0, 1, 3, 0, 2};
  std::array<std::int32_t, 6> ids{};
  std::array<float, 6> weights{};
  routing::SoftmaxTopK<routing::Renormalize::yes> const router({.num_experts = 4, .topk = 2});
  router.select(routing::RouteArgs<float>{.logits = make_rows(logits.data(), 3, 4),
                                          .num_valid_rows = 3,
                                          .topk_ids = make_rows(ids.data(), 3, 2),
                                          .topk_weights = make_rows(weights.data(), 3, 2)});
  std::printf("experts %d %d, %d %d, %d %d\n", ids[0], ids[1], ids[2], ids[3], ids[4], ids[5]);
  return ids == std::array<std::int32_t, 6>{3, 2, 0, 1, 1, 3} ? 0 : 1;
}
