// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/forward_arguments.cpp: forward() with one array of another element, rank, width or constness in each call.
// errors: each
// expect: forward(): hidden_states has another element type than the layer's Act. Fix: convert the rows
// prints: double
// prints: float | LayerDefaults::Act
// expect: forward(): hidden_states must have two dimensions, [M, hidden]
// prints: Value<3>
// prints: Value<2>
// expect: forward(): hidden_states is not a view of rows of the layer's hidden width
// prints: , 32
// prints: , 64
// expect: forward(): router_logits must be float, bf16 or f16
// prints: double
// prints: float
// expect: forward(): router_logits must have two dimensions, [M, num_logits]
// prints: Value<1>
// prints: Value<2>
// expect: forward(): router_logits is not a view of rows
// prints: float
// prints: mdspan
// expect: forward(): output has another element type than the layer's Act
// prints: double
// prints: float | LayerDefaults::Act
// expect: forward(): output is a view of const elements, and forward() writes it
// prints: const float
// prints: float | LayerDefaults::Act
// expect: forward(): output must have two dimensions, [M, hidden]
// prints: Value<1>
// prints: Value<2>
// expect: forward(): output is not a view of rows of the layer's hidden width
// prints: float
// prints: mdspan
#include "../archetypes.hpp"

using namespace moe_test;
#ifdef MOE_FIXED
#define ARGUMENT(right, wrong) right
#else
#define ARGUMENT(right, wrong) wrong
#endif

void call(Compose<>& layer, float* data, float const* read, [[maybe_unused]] double* other) {
  auto const hidden = make_rows<64>(read, 4, 64);
  auto const logits = make_rows(data, 4, 4);
  auto const output = make_rows<64>(data, 4, 64);
  layer.forward(ARGUMENT(hidden, make_rows<64>(other, 4, 64)), logits, output);
  layer.forward(ARGUMENT(hidden, Blocks<float>(data, 1, 4, 64)), logits, output);
  layer.forward(ARGUMENT(hidden, make_rows<32>(read, 4, 32)), logits, output);
  layer.forward(hidden, ARGUMENT(logits, make_rows(other, 4, 4)), output);
  layer.forward(hidden, ARGUMENT(logits, Vector<float>(data, 4)), output);
  layer.forward(hidden, ARGUMENT(logits, data), output);
  layer.forward(hidden, logits, ARGUMENT(output, make_rows<64>(other, 4, 64)));
  layer.forward(hidden, logits, ARGUMENT(output, make_rows<64>(read, 4, 64)));
  layer.forward(hidden, logits, ARGUMENT(output, Vector<float>(data, 64)));
  layer.forward(hidden, logits, ARGUMENT(output, data));
}
