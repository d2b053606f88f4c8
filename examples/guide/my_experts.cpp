// SPDX-License-Identifier: Apache-2.0
// examples/guide/my_experts.cpp: experts of one's own: the definition, written out for float32 weights and SwiGLU.
#include <type_traits>

#include "examples/guide/demo_layer.hpp"

struct PlainExperts {
  static constexpr char const* kName = "plain";
  using Space = moe::space::host;
  static constexpr bool kBatchInvariant = true;  // a token's bits do not depend on the other tokens
  static constexpr int kSharedMemoryLimit = 0;
  struct Params {};

  // What the rules ask: formats, element types, activations, quantisations, shapes.
  static constexpr bool reads(moe::ActivationFormat f) { return f == moe::ActivationFormat::standard; }
  static constexpr moe::TopKReduction reduction(moe::ActivationFormat) { return moe::TopKReduction::experts; }
  template <class Act, class Weight>
  static constexpr bool supports_element() {
    return std::is_same_v<Act, float> && std::is_same_v<Weight, float>;
  }
  template <class Activation>
  static constexpr bool supports_activation() {
    return std::is_same_v<Activation, moe::activation::Silu>;
  }
  template <class Quant>
  static constexpr bool supports_quantization() {
    return std::is_same_v<Quant, moe::quantization::None>;
  }
  template <class Config, class Quant>
  static constexpr bool fits_shape() {
    return true;
  }
  template <class Config, class Quant>
  static constexpr int shared_memory_bytes() {
    return 0;
  }

  template <class Config, class Quant, moe::ActivationFormat Format>
  class Kernel {
   public:
    using Output = float;
    Kernel(moe::Shape<Config> const& shape, moe::WeightsOf<Config, Quant> const& weights, std::int64_t /*max_rows*/, Quant const&,
           typename Config::Activation const& activation, Params const&, moe::Arena<Space>& arena)
        : hidden_(shape.hidden()), intermediate_(shape.intermediate()), weights_(weights), activation_(activation) {
      activated_ = arena.template take<float>(intermediate_);
    }

    // y[r] = sum over j of w_j * W2 * act(W1 x, W3 x), over the slots that have a local expert. A row without one becomes 0.
    void apply(moe::StandardTokensOf<Config, Quant> const& tokens, moe::Rows<float> y, moe::HostStream) const {
      for (std::int64_t r = 0; r < y.extent(0); ++r) {
        float const* const x = moe::row_ptr(tokens.rows, r);
        for (std::int64_t h = 0; h < hidden_; ++h) y(r, h) = 0.0F;
        for (std::int64_t j = 0; j < tokens.topk_ids.extent(1); ++j) {
          std::int32_t const e = tokens.topk_ids(r, j);
          if (e < 0) continue;
          for (std::int64_t i = 0; i < intermediate_; ++i) {  // w13: gate rows first, then up rows
            activated_[i] = activation_(dot(moe::row_ptr(weights_.w13.codes, e, i), x, hidden_),
                                        dot(moe::row_ptr(weights_.w13.codes, e, intermediate_ + i), x, hidden_));
          }
          for (std::int64_t h = 0; h < hidden_; ++h) {
            y(r, h) += tokens.topk_weights(r, j) * dot(moe::row_ptr(weights_.w2.codes, e, h), activated_, intermediate_);
          }
        }
      }
    }

   private:
    static float dot(float const* a, float const* b, std::int64_t n) {
      float sum = 0.0F;
      for (std::int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
      return sum;
    }
    std::int64_t hidden_, intermediate_;
    moe::WeightsOf<Config, Quant> weights_;
    typename Config::Activation activation_;
    float* activated_;
  };
};

int main() {
  using None = moe::quantization::None;
  using Backend = moe::backends::NoExpertParallel<>;
  auto const plain = guide::run<guide::Router, None, Backend, PlainExperts>({8, 2});
  auto const reference = guide::run<guide::Router, None, Backend, moe::experts::Reference<>>({8, 2});
  return guide::compare(plain, reference, 1e-5F);
}
