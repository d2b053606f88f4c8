// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/runner_logits.cpp: a runner with its gate inside gets logits, one with its gate outside gets none.
// errors: each
// expect: the runner has its gate inside, and forward() was called with logits
// prints: gate::Linear | Parts::Gate
// expect: the runner has its gate outside, and forward() was called without logits
// prints: gate::Outside | RunnerDefaults::Gate
#include "../archetypes.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/runner.hpp"

using namespace moe_test;
struct Parts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
};

void call(Runner<Compose<>, Parts>& inside, Runner<Compose<>>& outside, float* data, float const* read) {
  auto const hidden = make_rows(read, 4, 64);
  auto const logits = make_rows(read, 4, 4);
  auto const output = make_rows(data, 4, 64);
#ifdef MOE_FIXED
  inside.forward(hidden, output);
  outside.forward(hidden, logits, output);
#else
  inside.forward(hidden, logits, output);
  outside.forward(hidden, output);
#endif
}
