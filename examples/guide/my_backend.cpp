// SPDX-License-Identifier: Apache-2.0
// examples/guide/my_backend.cpp: a backend of one's own: one rank that hands its tokens to the experts in reverse order.
#include "examples/guide/demo_layer.hpp"

struct ReverseBackend {
  static constexpr char const* kName = "reverse";
  using Space = moe::space::host;
  using Comm = moe::comm::Self<>;
  static constexpr moe::ActivationFormat kFormat = moe::ActivationFormat::standard;  // rows with ids, not batches by expert
  static constexpr moe::TopKReduction kReduction = moe::TopKReduction::experts;      // the experts multiply the weights and sum over k
  struct Params {};

  template <class Quant>
  static constexpr bool carries() {
    return true;  // any quantised row
  }

  template <class Config, class Quant, class Partial>
  class Exchange {
   public:
    using Space = moe::space::host;
    using Act = typename Config::Act;
    using Payload = typename Quant::template Payload<Act>;
    using Scale = typename Quant::Scale;

    // All memory comes from the arena, which the layer seals when it is constructed: nothing is allocated later.
    Exchange(Comm&, moe::Shape<Config> const& shape, std::int64_t max_tokens, moe::ExpertPlacement const&, Quant const& quant,
             Params const&, moe::Arena<Space>& arena)
        : quant_(quant), hidden_(shape.hidden()), topk_(shape.topk()), max_tokens_(max_tokens) {
      ids_ = arena.template take<std::int32_t>(max_tokens * topk_);
      weights_ = arena.template take<float>(max_tokens * topk_);
      payload_ = arena.template take<Payload>(max_tokens * Quant::payload_cols(hidden_));
      scales_ = arena.template take<Scale>(max_tokens * Quant::scale_cols(hidden_));
      partial_ = arena.template take<Partial>(max_tokens * hidden_);
    }
    std::int64_t max_rows() const { return max_tokens_; }

    moe::StandardTokensOf<Config, Quant> prepare(moe::RoutedTokens<Act, Config::hidden> const& in, moe::HostStream) {
      rows_ = in.hidden.extent(0);
      std::int64_t const cols = Quant::payload_cols(hidden_), scale_cols = Quant::scale_cols(hidden_);
      for (std::int64_t t = 0; t < rows_; ++t) {
        std::int64_t const to = rows_ - 1 - t;
        quant_.template quantize_row<Act>(moe::row_ptr(in.hidden, t), hidden_, payload_ + to * cols, scales_ + to * scale_cols);
        for (std::int64_t j = 0; j < topk_; ++j) {
          ids_[to * topk_ + j] = in.topk_ids(t, j);  // one rank: physical ids are local ids
          weights_[to * topk_ + j] = in.topk_weights(t, j);
        }
      }
      return {moe::make_rows(static_cast<Payload const*>(payload_), rows_, cols),
              moe::make_rows(static_cast<Scale const*>(scales_), rows_, scale_cols),
              moe::make_rows(static_cast<std::int32_t const*>(ids_), rows_, topk_),
              moe::make_rows(static_cast<float const*>(weights_), rows_, topk_)};
    }
    moe::Rows<Partial> expert_output() { return moe::make_rows(partial_, rows_, hidden_); }
    void finalize(moe::Rows<Act, Config::hidden> out, moe::HostStream) {
      for (std::int64_t t = 0; t < rows_; ++t) {
        for (std::int64_t h = 0; h < hidden_; ++h) {
          moe::row_ptr(out, t)[h] = moe::from_float<Act>(partial_[(rows_ - 1 - t) * hidden_ + h]);
        }
      }
    }
    void abandon(moe::HostStream) {}  // a call that was refused: no peer waits here

   private:
    Quant quant_;
    std::int64_t hidden_, topk_, max_tokens_, rows_ = 0;
    std::int32_t* ids_;
    float* weights_;
    Payload* payload_;
    Scale* scales_;
    Partial* partial_;
  };
};

int main() {
  using None = moe::quantization::None;
  using Experts = moe::experts::Reference<>;
  auto const reversed = guide::run<guide::Router, None, ReverseBackend, Experts>({8, 2});
  auto const plain = guide::run<guide::Router, None, moe::backends::NoExpertParallel<>, Experts>({8, 2});
  return guide::compare(reversed, plain, 0.0F);
}
