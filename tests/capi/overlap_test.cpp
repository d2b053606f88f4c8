// SPDX-License-Identifier: Apache-2.0
// tests/capi/overlap_test.cpp: an output that shares memory with what a call reads is refused before anything runs.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "moe/c/overlap.hpp"
#include "tests/capi/arguments.hpp"

namespace {

using namespace moe_test;

TEST(Overlap, Ranges) {
  using moe::c::ByteRows;
  using moe::c::overlap;
  ByteRows const rows{1000, 4, 100, 40};  // [1000, 1040), [1100, 1140), [1200, 1240), [1300, 1340)
  struct Row {
    ByteRows other;
    bool expected;
  };
  for (auto const& [other, expected] : std::vector<Row>{{{1000, 4, 100, 40}, true},
                                                        {{1040, 4, 100, 60}, false},
                                                        {{1039, 4, 100, 60}, true},
                                                        {{1040, 4, 100, 61}, true},  // its row 0 reaches row 1 here
                                                        {{940, 4, 100, 60}, false},
                                                        {{900, 1, 0, 100}, false},
                                                        {{900, 1, 0, 101}, true},
                                                        {{1340, 1, 0, 100}, false},
                                                        {{1339, 1, 0, 100}, true},
                                                        {{1250, 1, 0, 50}, false},
                                                        {{1250, 1, 0, 51}, true},
                                                        {{1050, 3, 70, 20}, true},  // [1050, 1070), [1120, 1140), [1190, 1210)
                                                        {{1050, 2, 90, 20}, false},
                                                        {{1000, 0, 100, 40}, false},
                                                        {{1000, 4, 100, 0}, false},
                                                        {{0, 1, 0, 4000}, true}}) {
    EXPECT_EQ(overlap(rows, other), expected) << other.begin << " " << other.rows << " " << other.stride << " " << other.width;
    EXPECT_EQ(overlap(other, rows), expected) << other.begin << " " << other.rows << " " << other.stride << " " << other.width;
  }
}

TEST(Overlap, BytesOfArrays) {
  Array<float> a({3, 4, 5});
  moe::c::ByteRows const whole = moe::c::bytes_of(*&a);
  EXPECT_EQ(whole.begin, reinterpret_cast<std::uintptr_t>(a.values().data()));
  EXPECT_EQ(whole.last(0) - whole.begin, 240U);
  DLTensor packed = a.tensor();  // two codes a byte
  packed.dtype = {MOE_DL_FLOAT4_E2M1FN, 4, 2};
  EXPECT_EQ(moe::c::bytes_of(packed).width, 60);
  std::int64_t const strides[] = {10, 1};
  std::int64_t const shape[] = {3, 4};
  DLTensor apart = a.tensor();
  apart.ndim = 2;
  apart.shape = const_cast<std::int64_t*>(shape);
  apart.strides = const_cast<std::int64_t*>(strides);
  apart.byte_offset = 8;
  moe::c::ByteRows const rows = moe::c::bytes_of(apart);
  EXPECT_EQ(rows.begin, whole.begin + 8);
  EXPECT_EQ(rows.rows, 3);
  EXPECT_EQ(rows.stride, 40);
  EXPECT_EQ(rows.width, 16);
}

/// Makes `t` an array in Arguments::spare, from its element `first` on.
void move(Arguments& x, DLTensor& t, std::int64_t first) { t.data = x.spare.values().data() + first; }

constexpr std::int64_t kOutput = 16 * 64;  ///< elements

std::vector<std::string> overlaps(char const* name) { return {moe::text("output: its memory overlaps that of ", name, ", expected")}; }

std::vector<Case> cases_of_both() {
  return {
      {"in place", [](Arguments& x) { x.output = x.hidden; }, MOE_E_ARG, overlaps("hidden")},
      {"a row further",
       [](Arguments& x) {
         move(x, x.hidden, 0);
         move(x, x.output, 64);
       },
       MOE_E_ARG, overlaps("hidden")},
      {"its last element",
       [](Arguments& x) {
         move(x, x.hidden, 0);
         move(x, x.output, kOutput - 1);
       },
       MOE_E_ARG, overlaps("hidden")},
      {"the element before",
       [](Arguments& x) {
         move(x, x.hidden, kOutput - 1);
         move(x, x.output, 0);
       },
       MOE_E_ARG, overlaps("hidden")},
      {"w13", [](Arguments& x) { x.output.data = x.w13.data; }, MOE_E_ARG, overlaps("w13")},
      {"w2",
       [](Arguments& x) {
         x.output.data = x.w2.data;
         x.output.byte_offset = (8 * 64 * 128 - kOutput) * sizeof(float);
       },
       MOE_E_ARG, overlaps("w2")},
  };
}

TEST(Overlap, ForwardRouted) {
  std::vector<Case> cases = cases_of_both();
  cases.push_back({"topk_ids",
                   [](Arguments& x) {
                     move(x, x.output, 0);
                     x.output.data = x.ids.data;
                   },
                   MOE_E_ARG, overlaps("topk_ids")});
  cases.push_back({"topk_weights",
                   [](Arguments& x) {
                     move(x, x.output, 0);
                     move(x, x.topk_weights, kOutput - 1);
                   },
                   MOE_E_ARG, overlaps("topk_weights")});
  run(cases, [](Arguments& x) {
    x.config.router = nullptr;
    EXPECT_EQ(x.create(), MOE_OK) << moe_last_error();
    return moe_runner_forward_routed(x.runner, &x.hidden, &x.ids, &x.topk_weights, &x.output, &x.options, nullptr);
  });
  run(cases, [](Arguments& x) { return moe_experts(&x.config, &x.weights, &x.hidden, &x.ids, &x.topk_weights, &x.output, nullptr); });
}

TEST(Overlap, Forward) {
  std::vector<Case> cases = cases_of_both();
  cases.push_back({"router_logits",
                   [](Arguments& x) {
                     move(x, x.logits, 5);
                     move(x, x.output, 0);
                   },
                   MOE_E_ARG, overlaps("router_logits")});
  run(cases, [](Arguments& x) {
    EXPECT_EQ(x.create(), MOE_OK) << moe_last_error();
    return moe_runner_forward(x.runner, &x.hidden, &x.logits, &x.output, &x.options, nullptr);
  });
}

TEST(Overlap, OfBorrowedArrays) {
  Arguments x;
  Array<float> w13_bias({8, 256}), w2_bias({8, 64}), correction({8}), scale({8});
  // Memory that the output may be written to, with a small array at its end.
  DLTensor t{};
  auto const check = [&](char const* name, Array<float>& array, DLTensor const*& member, DLTensor const** other, DLTensor const* others) {
    SCOPED_TRACE(name);
    t = array.tensor();
    move(x, t, kOutput - 1);
    member = &t;
    if (other != nullptr) *other = others;
    ASSERT_EQ(x.create(), MOE_OK) << moe_last_error();
    move(x, x.output, 0);
    expect_refused(moe_runner_forward(x.runner, &x.hidden, &x.logits, &x.output, nullptr, nullptr), MOE_E_ARG, overlaps(name));
    move(x, x.output, kOutput * 4);
    EXPECT_EQ(moe_runner_forward(x.runner, &x.hidden, &x.logits, &x.output, nullptr, nullptr), MOE_OK) << moe_last_error();
    EXPECT_EQ(moe_runner_destroy(x.runner), MOE_OK);
    x.runner = nullptr;
    member = nullptr;
    if (other != nullptr) *other = nullptr;
  };
  check("w13_bias", w13_bias, x.weights.w13_bias, &x.weights.w2_bias, &w2_bias);
  check("w2_bias", w2_bias, x.weights.w2_bias, &x.weights.w13_bias, &w13_bias);
  check("router.correction_bias", correction, x.router.correction_bias, nullptr, nullptr);
  check("router.per_expert_scale", scale, x.router.per_expert_scale, nullptr, nullptr);
}

TEST(Overlap, OfScalesAndTheArraysOfAHashTable) {
  Arguments x;
  x.config.quantization = "fp8_per_token";
  x.config.dtype = "float32";
  Array<std::uint8_t> c13({8, 256, 64}), c2({8, 64, 128});
  Array<float> s13({8, 256}), s2({8, 64});
  ASSERT_EQ(moe_quantize("fp8_per_token", &x.w13, &c13, &s13), MOE_OK) << moe_last_error();
  ASSERT_EQ(moe_quantize("fp8_per_token", &x.w2, &c2, &s2), MOE_OK) << moe_last_error();
  x.weights.w13 = &c13;
  x.weights.w2 = &c2;
  x.weights.w13_scale = &s13;
  x.weights.w2_scale = &s2;
  Array<std::int64_t> table({2048, 2}), tokens({512});  // both as large as the output, or larger
  for (std::int64_t i = 0; i < table.size(); ++i) table[i] = i % 8;
  x.router.selection = "hash_table";
  x.router.hash_table = &table;
  DLTensor first = tokens.tensor();
  std::int64_t const sixteen = 16;
  first.shape = const_cast<std::int64_t*>(&sixteen);
  x.options.token_ids = &first;
  ASSERT_EQ(x.create(), MOE_OK) << moe_last_error();
  auto const forward = [&](void* output) {
    x.output.data = output;
    return moe_runner_forward(x.runner, &x.hidden, &x.logits, &x.output, &x.options, nullptr);
  };
  expect_refused(forward(c13.values().data()), MOE_E_ARG, overlaps("w13"));
  expect_refused(forward(c2.values().data()), MOE_E_ARG, overlaps("w2"));
  expect_refused(forward(s13.values().data()), MOE_E_ARG, overlaps("w13_scale"));
  expect_refused(forward(table.values().data()), MOE_E_ARG, overlaps("router.hash_table"));
  expect_refused(forward(tokens.values().data()), MOE_E_ARG, overlaps("token_ids"));
  EXPECT_EQ(forward(x.spare.values().data()), MOE_OK) << moe_last_error();
}

// Columns of one matrix beside each other, and rows of another width between the rows of hidden.
TEST(Overlap, AdjacentColumnsDoNotOverlap) {
  Arguments x;
  x.config.router = nullptr;
  ASSERT_EQ(x.create(), MOE_OK) << moe_last_error();
  auto const forward = [&] { return moe_runner_forward_routed(x.runner, &x.hidden, &x.ids, &x.topk_weights, &x.output, nullptr, nullptr); };
  std::vector<double> const expected = reference(x.a);
  std::int64_t const strides[] = {128, 1};
  for (std::int64_t i = 0; i < kOutput; ++i) x.spare[i / 64 * 128 + i % 64] = x.a.hidden[i];
  x.hidden.strides = x.output.strides = const_cast<std::int64_t*>(strides);
  move(x, x.hidden, 0);
  move(x, x.output, 64);
  ASSERT_EQ(forward(), MOE_OK) << moe_last_error();
  std::vector<float> out;
  for (std::int64_t i = 0; i < kOutput; ++i) out.push_back(x.spare[i / 64 * 128 + 64 + i % 64]);
  EXPECT_LT(relative_error(out, expected), 1e-5);
  move(x, x.output, 63);
  expect_refused(forward(), MOE_E_ARG, overlaps("hidden"));
}

}  // namespace
