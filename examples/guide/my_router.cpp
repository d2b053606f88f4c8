// SPDX-License-Identifier: Apache-2.0
// examples/guide/my_router.cpp: a router of one's own: the expert of the largest logit, and its right neighbour with the rest of the
// weight.
#include "examples/guide/demo_layer.hpp"

struct NeighbourRouter {
  static constexpr char const* kName = "neighbour";
  static constexpr bool kWeightOnInput = false;  // the weights multiply the experts' outputs
  struct Params {
    int num_experts = 0;
    float first_weight = 0.75F;
  };

  explicit NeighbourRouter(Params const& p) : params_(p) {
    if (p.num_experts < 2) {
      throw moe::Error(moe::ErrorCode::config, moe::text("num_experts: ", p.num_experts, " must be at least 2"));
    }
  }
  int num_experts() const { return params_.num_experts; }
  int topk() const { return 2; }
  int num_logits() const { return params_.num_experts; }  // width of router_logits
  int num_slots() const { return 2; }                     // width of topk_ids and topk_weights

  template <class Logit>
  void select(moe::routing::RouteArgs<Logit> const& a) const {
    for (std::int64_t t = 0; t < a.topk_ids.extent(0); ++t) {
      int best = 0;
      for (int e = 1; e < params_.num_experts; ++e) {
        if (moe::to_float(a.logits(t, e)) > moe::to_float(a.logits(t, best))) best = e;
      }
      a.topk_ids(t, 0) = best;
      a.topk_ids(t, 1) = (best + 1) % params_.num_experts;
      a.topk_weights(t, 0) = params_.first_weight;
      a.topk_weights(t, 1) = 1.0F - params_.first_weight;
    }
  }

 private:
  Params params_;
};

int main() {
  using None = moe::quantization::None;
  using Backend = moe::backends::NoExpertParallel<>;
  auto const one = guide::run<NeighbourRouter, None, Backend, moe::experts::OneDnn>({.num_experts = 8});
  auto const two = guide::run<NeighbourRouter, None, Backend, moe::experts::Reference<>>({.num_experts = 8});
  return guide::compare(one, two, 1e-5F);
}
