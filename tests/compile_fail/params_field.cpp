// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/params_field.cpp: a field of the router's parameters that does not exist. Where the parameters are a variable of their
// own, compilers name the field.
// errors: any
// expect: tpk
#include "../archetypes.hpp"

using namespace moe_test;
#ifdef MOE_FIXED
#define FIELD(right, wrong) right
#else
#define FIELD(right, wrong) wrong
#endif

Compose<>::Params const params{.max_tokens_per_rank = 8, .placement = ExpertPlacement(4, 1), .router = {.FIELD(topk, tpk) = 2}};
