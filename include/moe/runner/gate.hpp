// SPDX-License-Identifier: Apache-2.0
// runner/gate.hpp: where the router's logits come from: from outside, from a linear layer inside, or from the router networks of a few
// families.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "moe/core/error.hpp"
#include "moe/runner/primitives.hpp"

namespace moe::runner::gate {

/// forward() takes the logits.
struct Outside {
  static constexpr bool kInside = false;
  struct Params {};
};

/// Element of the logits: float32, or the model's activation type.
enum class Precision : std::uint8_t { float32, model };

/// logits = W x (+ b), on the block's untransformed input.
template <class WeightT = float, Precision P = Precision::float32>
struct Linear {
  static constexpr bool kInside = true;
  struct Params {
    Rows<WeightT const> weight = {};  ///< [num_logits, H]
    float const* bias = nullptr;      ///< [num_logits], or null
    /// On the device, float32 weights beside narrower rows are copied in the rows' element if each is a value of it; every_call: they are
    /// read where they lie.
    WeightReads reads = WeightReads::once;
  };

  template <class Space, class Act>
  class Part {
   public:
    using Logit = std::conditional_t<P == Precision::float32, float, Act>;
    Part(Params const& p, Sizes const& sizes, Arena<Space>& arena)
        : width_(checked(p.weight, sizes.hidden)),
          linear_(p.weight, p.bias, Sums::per_row, sizes.max_rows, arena, p.reads),
          logits_(arena.template take<Logit>(sizes.max_rows * width_)) {}
    std::int64_t num_logits() const { return width_; }
    /// How the logits are computed and why, in words; empty where there is no choice.
    std::string choice() const { return runner::detail::choice_of(linear_); }
    /// The weight, if it is not read after the construction; else null.
    void const* unread_weight() const { return runner::detail::unread_weight_of(linear_); }
    Rows<Logit const> logits(Rows<Act const> hidden, Stream<Space> stream) {
      linear_.apply(hidden, make_rows(logits_, hidden.extent(0), width_), stream);
      return make_rows(static_cast<Logit const*>(logits_), hidden.extent(0), width_);
    }

   private:
    /// The rows of the weight; E_ARG for other columns than `hidden`.
    static std::int64_t checked(Rows<WeightT const> const& weight, std::int64_t hidden) {
      if (weight.extent(1) != hidden) {
        throw Error(ErrorCode::argument, text("gate: weight has ", weight.extent(1), " columns, expected hidden ", hidden));
      }
      return weight.extent(0);
    }

    std::int64_t width_;
    runner::Linear<Space, WeightT, Act, Logit> linear_;
    Logit* logits_;
  };
};

/// The router network of Zaya: h = down x + b; r = RMSNorm(h) norm; r = gelu(fc1 r + b); r = gelu(fc2 r + b); logits = out r. R: its width.
struct Mlp {
  Rows<float const> down = {};       ///< [R, H]
  float const* down_bias = nullptr;  ///< [R]
  float const* norm = nullptr;       ///< [R]
  Rows<float const> fc1 = {};        ///< [R, R]
  float const* fc1_bias = nullptr;   ///< [R]
  Rows<float const> fc2 = {};        ///< [R, R]
  float const* fc2_bias = nullptr;   ///< [R]
};

/// Any gate of a known family in float32, chosen at run time.
struct Any {
  static constexpr bool kInside = true;
  enum class Input : std::uint8_t {
    hidden,
    scaled_rms_norm,  ///< x / rms(x) · scale / sqrt(H)
    mlp,              ///< Mlp
  };
  struct Params {
    Input input = Input::hidden;
    Rows<float const> weight = {};  ///< [num_logits, H], or [num_logits, R] after an Mlp
    float const* bias = nullptr;    ///< [num_logits], or null
    float const* scale = nullptr;   ///< [H] of scaled_rms_norm
    float eps = 0.0F;               ///< of both norms
    Mlp mlp{};
    WeightReads reads = WeightReads::once;  ///< as Linear's, of the first matrix
  };

  template <class Space, class Act>
  class Part {
   public:
    using Logit = float;
    Part(Params const& p, Sizes const& sizes, Arena<Space>& arena) : params_(p), width_(p.weight.extent(0)) {
      std::int64_t const rows = sizes.max_rows;
      std::int64_t const r = p.mlp.down.extent(0);
      check(sizes.hidden, r);
      logits_ = arena.template take<float>(rows * width_);
      switch (p.input) {
        case Input::hidden: from_hidden_.emplace(p.weight, p.bias, Sums::per_row, rows, arena, p.reads); return;
        case Input::scaled_rms_norm: a_ = arena.template take<float>(rows * sizes.hidden); break;
        case Input::mlp:
          down_.emplace(p.mlp.down, p.mlp.down_bias, Sums::per_row, rows, arena, p.reads);
          fc1_.emplace(p.mlp.fc1, p.mlp.fc1_bias, Sums::per_row, rows, arena);
          fc2_.emplace(p.mlp.fc2, p.mlp.fc2_bias, Sums::per_row, rows, arena);
          a_ = arena.template take<float>(rows * r);
          b_ = arena.template take<float>(rows * r);
          break;
      }
      last_.emplace(p.weight, p.bias, Sums::per_row, rows, arena);
    }
    std::int64_t num_logits() const { return width_; }
    /// How the product with the block's rows is computed and why, in words; empty where there is no choice.
    std::string choice() const {
      return of_first([](auto const& product) { return runner::detail::choice_of(product); });
    }
    /// The matrix of that product, if it is not read after the construction; else null.
    void const* unread_weight() const {
      return of_first([](auto const& product) { return runner::detail::unread_weight_of(product); });
    }

    Rows<float const> logits(Rows<Act const> hidden, Stream<Space> stream) {
      std::int64_t const m = hidden.extent(0);
      Rows<float> const logits = make_rows(logits_, m, width_);
      if (params_.input == Input::hidden) {
        from_hidden_->apply(hidden, logits, stream);
      } else {
        last_->apply(params_.input == Input::mlp ? through_mlp(hidden, stream) : normed(hidden, stream), logits, stream);
      }
      return make_rows(static_cast<float const*>(logits_), m, width_);
    }

   private:
    void check(std::int64_t hidden, std::int64_t r) const {
      auto expect = [](char const* what, std::int64_t value, std::int64_t wanted) {
        if (value != wanted) throw Error(ErrorCode::argument, text("gate: ", what, " is ", value, ", expected ", wanted));
      };
      bool const mlp = params_.input == Input::mlp;
      expect("columns of the weight", params_.weight.extent(1), mlp ? r : hidden);
      if (mlp) expect("columns of the first projection", params_.mlp.down.extent(1), hidden);
    }
    Rows<float const> normed(Rows<Act const> hidden, Stream<Space> stream) {
      std::int64_t const h = hidden.extent(1);
      RowKernels<Space>::rms_norm(hidden, params_.scale, params_.eps, 1.0F / std::sqrt(static_cast<float>(h)),
                                  make_rows(a_, hidden.extent(0), h), stream);
      return make_rows(static_cast<float const*>(a_), hidden.extent(0), h);
    }
    Rows<float const> through_mlp(Rows<Act const> hidden, Stream<Space> stream) {
      std::int64_t const r = params_.mlp.down.extent(0);
      Rows<float> const a = make_rows(a_, hidden.extent(0), r);
      Rows<float> const b = make_rows(b_, hidden.extent(0), r);
      down_->apply(hidden, b, stream);
      RowKernels<Space>::template rms_norm<float, float>(b, params_.mlp.norm, params_.eps, 1.0F, a, stream);
      fc1_->apply(a, b, stream);
      RowKernels<Space>::gelu(b, stream);
      fc2_->apply(b, a, stream);
      RowKernels<Space>::gelu(a, stream);
      return a;
    }

    template <class X>
    using Product = std::optional<runner::Linear<Space, float, X, float>>;
    /// f() of the product that reads the block's rows; nothing without one.
    template <class F>
    auto of_first(F const& f) const {
      auto const& first = from_hidden_ ? from_hidden_ : down_;
      return first ? f(*first) : decltype(f(*first)){};
    }
    Params params_;
    std::int64_t width_;
    Product<Act> from_hidden_, down_;
    Product<float> fc1_, fc2_, last_;
    float* logits_ = nullptr;
    float* a_ = nullptr;
    float* b_ = nullptr;
  };
};

}  // namespace moe::runner::gate
