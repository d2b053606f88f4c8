// SPDX-License-Identifier: Apache-2.0
// tests/capi/tensors.hpp: arrays with a DLTensor for each, and a layer's worth of them, for the tests of moe.h.
#pragma once

#include <moe/moe.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "moe/c/tensor.hpp"
#include "moe/quantization/format/formats.hpp"

namespace moe_test {

/// Owned host memory and the DLTensor that describes it.
template <class T>
class Array {
 public:
  explicit Array(std::vector<std::int64_t> shape) : shape_(std::move(shape)) {
    std::int64_t const n = std::accumulate(shape_.begin(), shape_.end(), std::int64_t{1}, std::multiplies<>{});
    data_.resize(static_cast<std::size_t>(n));
    bind();
  }
  Array(Array const& other) : shape_(other.shape_), data_(other.data_) { bind(); }
  Array& operator=(Array const&) = delete;

  DLTensor const* operator&() const { return &tensor_; }  // NOLINT: these arrays are only ever passed to C
  DLTensor& tensor() { return tensor_; }
  std::vector<T>& values() { return data_; }
  T& operator[](std::int64_t i) { return data_[static_cast<std::size_t>(i)]; }
  std::int64_t size() const { return static_cast<std::int64_t>(data_.size()); }

 private:
  void bind() {
    tensor_ = {data_.data(), {kDLCPU, 0}, static_cast<std::int32_t>(shape_.size()), moe::c::dl_type<T>(), shape_.data(), nullptr, 0};
  }
  std::vector<std::int64_t> shape_;
  std::vector<T> data_;
  DLTensor tensor_{};
};

/// Uniform, with that standard deviation.
template <class T>
void fill(Array<T>& a, int seed, float scale) {
  std::minstd_rand random(static_cast<unsigned>(seed));
  for (T& v : a.values()) v = moe::from_float<T>(scale * 3.46F * (static_cast<float>(random()) / static_cast<float>(random.max()) - 0.5F));
}

/// Sizes of a small layer.
struct Sizes {
  std::int64_t hidden = 64, intermediate = 128, experts = 8, topk = 2, tokens = 16;
};

/// Weights, inputs and routing of a layer of one rank, random.
template <class T>
struct LayerArrays {
  explicit LayerArrays(Sizes s = {}, std::int64_t local = 0)
      : sizes(s),
        w13({local == 0 ? s.experts : local, 2 * s.intermediate, s.hidden}),
        w2({local == 0 ? s.experts : local, s.hidden, s.intermediate}),
        hidden({s.tokens, s.hidden}),
        logits({s.tokens, s.experts}),
        ids({s.tokens, s.topk}),
        weights({s.tokens, s.topk}),
        output({s.tokens, s.hidden}) {
    fill(w13, 1, 0.1F);
    fill(w2, 2, 0.1F);
    fill(hidden, 3, 1.0F);
    fill(logits, 4, 1.0F);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      for (std::int64_t j = 0; j < s.topk; ++j) {
        ids[t * s.topk + j] = static_cast<std::int32_t>((3 * t + 5 * j) % s.experts);
        weights[t * s.topk + j] = 0.25F * static_cast<float>(j + 1);
      }
    }
  }
  moe_weights view() const {
    moe_weights w = MOE_WEIGHTS_INIT;
    w.w13 = &w13;
    w.w2 = &w2;
    return w;
  }
  moe_runner_config config() const {
    moe_runner_config c = MOE_RUNNER_CONFIG_INIT;
    c.hidden = sizes.hidden;
    c.intermediate = sizes.intermediate;
    c.num_experts = static_cast<std::int32_t>(sizes.experts);
    c.topk = static_cast<std::int32_t>(sizes.topk);
    c.max_tokens_per_rank = sizes.tokens;
    c.num_threads = 1;
    return c;
  }

  Sizes sizes;
  Array<T> w13, w2, hidden;
  Array<float> logits;
  Array<std::int32_t> ids;
  Array<float> weights;
  Array<T> output;
};

/// SwiGLU experts by their definition, in double: hidden [T, H], w13 [E, 2I, H], w2 [E, H, I].
inline std::vector<double> reference(Sizes s, std::vector<float> const& hidden, std::vector<float> const& w13, std::vector<float> const& w2,
                                     std::vector<std::int32_t> const& ids, std::vector<float> const& weights) {
  auto at = [](std::vector<float> const& v, std::int64_t i) { return static_cast<double>(v[static_cast<std::size_t>(i)]); };
  std::vector<double> out(static_cast<std::size_t>(s.tokens * s.hidden), 0.0);
  std::vector<double> row(static_cast<std::size_t>(s.intermediate));
  for (std::int64_t slot = 0; slot < s.tokens * s.topk; ++slot) {
    std::int64_t const e = ids[static_cast<std::size_t>(slot)];
    std::int64_t const t = slot / s.topk;
    if (e < 0) continue;
    for (std::int64_t i = 0; i < s.intermediate; ++i) {
      double gate = 0.0;
      double up = 0.0;
      for (std::int64_t h = 0; h < s.hidden; ++h) {
        gate += at(w13, (e * 2 * s.intermediate + i) * s.hidden + h) * at(hidden, t * s.hidden + h);
        up += at(w13, ((e * 2 + 1) * s.intermediate + i) * s.hidden + h) * at(hidden, t * s.hidden + h);
      }
      row[static_cast<std::size_t>(i)] = gate / (1.0 + std::exp(-gate)) * up;
    }
    for (std::int64_t h = 0; h < s.hidden; ++h) {
      double sum = 0.0;
      for (std::int64_t i = 0; i < s.intermediate; ++i) {
        sum += at(w2, (e * s.hidden + h) * s.intermediate + i) * row[static_cast<std::size_t>(i)];
      }
      out[static_cast<std::size_t>(t * s.hidden + h)] += at(weights, slot) * sum;
    }
  }
  return out;
}

template <class T>
std::vector<float> widened(std::vector<T> const& values) {
  std::vector<float> out;
  for (T v : values) out.push_back(moe::to_float(v));
  return out;
}
template <class T>
std::vector<double> reference(LayerArrays<T>& a) {
  return reference(a.sizes, widened(a.hidden.values()), widened(a.w13.values()), widened(a.w2.values()), a.ids.values(),
                   a.weights.values());
}
/// Root mean square of the difference over that of `expected`.
template <class T>
double relative_error(std::vector<T> const& values, std::vector<double> const& expected) {
  double error = 0.0;
  double norm = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    double const d = static_cast<double>(moe::to_float(values[i])) - expected[i];
    error += d * d;
    norm += expected[i] * expected[i];
  }
  return std::sqrt(error / norm);
}

/// The scale of nvfp4 for element `at` of a matrix of `size` elements, whose bytes of scales begin at `bytes`.
inline float nvfp4_scale(std::uint8_t const* bytes, std::int64_t size, std::int64_t at) {
  float global = 0.0F;
  std::memcpy(&global, bytes + (size / 16 + 3) / 4 * 4, sizeof global);
  return moe::quantization::decode_e4m3(bytes[at / 16]) * global;
}

/// [n, rows, cols] of codes and scales as float32, by the definitions at moe_weights.
inline std::vector<float> dequantized(std::string const& scheme, Array<std::uint8_t>& codes, Array<float>& scales,
                                      Array<std::uint8_t>& bytes, std::int64_t rows, std::int64_t cols) {
  static constexpr float kE2m1[8] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
  bool const packed = scheme.starts_with("int4") || scheme.starts_with("mxfp4") || scheme.starts_with("nvfp4");
  std::int64_t const size = rows * cols;
  std::int64_t const n = codes.size() / (packed ? size / 2 : size);
  std::int64_t const group = scheme.starts_with("int4_group128") ? 128 : scheme.starts_with("int4_group64") ? 64 : 32;
  std::vector<float> out;
  for (std::int64_t i = 0; i < n * size; ++i) {
    std::int64_t const m = i / size;
    std::int64_t const r = i % size / cols;
    auto const code = static_cast<std::uint8_t>(packed ? codes[i / 2] >> (i % 2 * 4) & 15 : codes[i]);
    float const e2m1 = (code < 8 ? 1.0F : -1.0F) * kE2m1[code & 7];
    if (scheme == "fp8_block128") {
      std::int64_t const across = (cols + 127) / 128;
      out.push_back(moe::quantization::decode_e4m3(code) * scales[(m * ((rows + 127) / 128) + r / 128) * across + i % cols / 128]);
    } else if (scheme == "fp8_per_token" || scheme == "fp8_per_channel") {
      out.push_back(moe::quantization::decode_e4m3(code) * scales[m * rows + r]);
    } else if (scheme.starts_with("mxfp8")) {
      out.push_back(std::ldexp(moe::quantization::decode_e4m3(code), bytes[i / 32] - 127));
    } else if (scheme.starts_with("int8")) {
      out.push_back(static_cast<float>(static_cast<std::int8_t>(code)) * scales[m * rows + r]);
    } else if (scheme.starts_with("mxfp4")) {
      out.push_back(std::ldexp(e2m1, bytes[i / 32] - 127));
    } else if (scheme == "nvfp4_w4a16") {
      out.push_back(e2m1 * nvfp4_scale(bytes.values().data() + m * (bytes.size() / n), size, i % size));
    } else if (scheme.starts_with("int4_group128_zero")) {
      out.push_back((static_cast<float>(code) - scales[i / group * 2 + 1]) * scales[i / group * 2]);
    } else {
      out.push_back(static_cast<float>(code - 8) * scales[i / group]);
    }
  }
  return out;
}

}  // namespace moe_test
