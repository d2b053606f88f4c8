// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/router_scoring.cpp: grouped top-k over the square root of softplus.
// expect: moe: grouped top-k scores by softmax or sigmoid
// prints: Value<
// prints: OneOf<
#include "moe/routing/grouped_topk.hpp"

using moe::routing::GroupScore, moe::routing::Renormalize, moe::routing::Scoring;
#ifdef MOE_FIXED
using Router = moe::routing::GroupedTopK<Scoring::sigmoid, GroupScore::top2_sum, Renormalize::yes>;
#else
using Router = moe::routing::GroupedTopK<Scoring::sqrtsoftplus, GroupScore::top2_sum, Renormalize::yes>;
#endif

static_assert(sizeof(Router) > 0);
