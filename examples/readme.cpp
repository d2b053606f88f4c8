#include <cstdio>
#include <moe/moe.hpp>

struct Config : moe::LayerDefaults {  // a dimension that is left out is given at run time instead
  static constexpr int hidden = 64, intermediate = 128, num_experts = 8, topk = 2;
  using Activation = moe::activation::Silu;
};
using Router = moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>;
using None = moe::quantization::None;
using Layer = moe::ModularKernel<Config, Router, None, moe::backends::NoExpertParallel<>, moe::experts::OneDnn>;

int main() {
  std::vector<float> w13(2 * 128 * 64, 0.01F), w2(64 * 128, 0.01F), hidden(16 * 64, 1.0F), logits(16 * 8, 0.0F), output(16 * 64);
  moe::experts::WeightStore<Config, None> weights(8, 64, 128, true);
  for (int expert = 0; expert < 8; ++expert) weights.set_expert(expert, w13.data(), w2.data());
  moe::comm::Self<> self;
  Layer layer(self, weights.view(), {.max_tokens_per_rank = 16, .placement = moe::ExpertPlacement(8, 1), .router = {8, 2}});
  layer.forward(moe::make_rows<64, float const>(hidden.data(), 16, 64), moe::make_rows<moe::dynamic, float const>(logits.data(), 16, 8),
                moe::make_rows<64>(output.data(), 16, 64));  // no allocation: a layer takes all its memory when it is constructed
  std::printf("expert %d, output %f\n", layer.topk_ids()(0, 0), output[0]);
}
