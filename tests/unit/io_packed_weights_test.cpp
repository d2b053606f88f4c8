// SPDX-License-Identifier: Apache-2.0
// tests/unit/io_packed_weights_test.cpp: quantised checkpoints: reading them, and every way in which tensors and quantization_config can be
// wrong or disagree. The values of each packing are checked in tests/tool/packings_test.py.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "at.hpp"
#include "expect_error.hpp"
#include "moe/io/layer_weights.hpp"
#include "moe/io/safetensors_writer.hpp"
#include "temporary_directory.hpp"

namespace {

namespace fs = std::filesystem;
using moe::ErrorCode;
using moe_test::at;
using moe_test::expect_error;
using moe_test::TemporaryDirectory;
using namespace moe::io;
using nlohmann::json;

constexpr std::int64_t kE = 3, kH = 64, kI = 32;
std::string const kRoot = "model.layers.0.mlp.";
struct Stored {
  FileDType dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;
};
using Tensors = std::map<std::string, Stored>;

std::int64_t product(std::vector<std::int64_t> const& shape) {
  std::int64_t n = 1;
  for (std::int64_t d : shape) n *= d;
  return n;
}
/// A tensor with all bytes equal to `fill`.
Stored filled(FileDType dtype, std::vector<std::int64_t> const& shape, int fill = 0) {
  return {dtype, shape, std::vector<std::byte>(at(product(shape) * bits(dtype) / 8), static_cast<std::byte>(fill))};
}
template <class T>
Stored numbers(std::vector<std::int64_t> shape, T value) {
  std::vector<T> v(at(product(shape)), value);
  auto const bytes = std::as_bytes(std::span(v));
  return {file_dtype_of<T>(), shape, {bytes.begin(), bytes.end()}};
}
template <class T>
Stored list(std::vector<std::int64_t> shape, std::vector<T> const& v) {
  auto const bytes = std::as_bytes(std::span(v));
  return {file_dtype_of<T>(), std::move(shape), {bytes.begin(), bytes.end()}};
}

json const kGptq{{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 32}};
json const kAwq{{"quant_method", "awq"}, {"bits", 4}, {"group_size", 32}, {"version", "gemm"}};
json compressed(char const* format, json weights) {
  return {{"quant_method", "compressed-tensors"}, {"format", format}, {"config_groups", {{"group_0", {{"weights", std::move(weights)}}}}}};
}
json const kInt4 = compressed("pack-quantized", {{"num_bits", 4}, {"type", "int"}, {"strategy", "group"}, {"group_size", 32}});
json const kNvfp4 =
    compressed("nvfp4-pack-quantized", {{"num_bits", 4}, {"type", "float"}, {"strategy", "tensor_group"}, {"group_size", 16}});

json const kV4{{"quant_method", "fp8"}, {"scale_fmt", "ue8m0"}, {"weight_block_size", {128, 128}}, {"expert_dtype", "fp4"}};

/// The tensors of one projection [n, k] in each packing.
using Make = void (*)(Tensors& t, std::string const& base, std::int64_t n, std::int64_t k);
void gptq(Tensors& t, std::string const& base, std::int64_t n, std::int64_t k) {
  t[base + ".qweight"] = filled(FileDType::i32, {k / 8, n}, 0x99);      // code 9
  t[base + ".qzeros"] = filled(FileDType::i32, {k / 32, n / 8}, 0x77);  // z - 1
  t[base + ".scales"] = numbers<float>({k / 32, n}, 0.5F);
}
void awq(Tensors& t, std::string const& base, std::int64_t n, std::int64_t k) {
  t[base + ".qweight"] = filled(FileDType::i32, {k, n / 8}, 0x99);
  t[base + ".qzeros"] = filled(FileDType::i32, {k / 32, n / 8}, 0x88);
  t[base + ".scales"] = numbers<float>({k / 32, n}, 0.5F);
}
void packed(Tensors& t, std::string const& base, std::int64_t n, std::int64_t k) {
  t[base + ".weight_packed"] = filled(FileDType::i32, {n, k / 8}, 0x99);
  t[base + ".weight_scale"] = numbers<float>({n, k / 32}, 0.5F);
  t[base + ".weight_shape"] = list<std::int64_t>({2}, {n, k});
}
void nvfp4(Tensors& t, std::string const& base, std::int64_t n, std::int64_t k) {
  t[base + ".weight_packed"] = filled(FileDType::u8, {n, k / 2}, 0x22);       // 1.0
  t[base + ".weight_scale"] = filled(FileDType::f8_e4m3, {n, k / 16}, 0x38);  // 1.0
  t[base + ".weight_global_scale"] = numbers<float>({1}, 2.0F);
}
void mxfp4_v4(Tensors& t, std::string const& base, std::int64_t n, std::int64_t k) {
  t[base + ".weight"] = filled(FileDType::i8, {n, k / 2}, 0x22);      // 1.0
  t[base + ".scale"] = filled(FileDType::f8_e8m0, {n, k / 32}, 126);  // 0.5
}
void int8(Tensors& t, std::string const& base, std::int64_t n, std::int64_t k) {
  t[base + ".weight"] = filled(FileDType::i8, {n, k}, 1);
  t[base + ".weight_scale"] = numbers<float>({n, 1}, 0.5F);
}
void bf16(Tensors& t, std::string const& base, std::int64_t n, std::int64_t k) {
  t[base + ".weight"] = numbers<moe::bf16>({n, k}, moe::bf16(0.5F));
}

Tensors experts(Make make) {
  Tensors t;
  t[kRoot + "gate.weight"] = numbers<float>({kE, kH}, 0.0F);
  for (std::int64_t e = 0; e < kE; ++e) {
    std::string const base = kRoot + "experts." + std::to_string(e) + ".";
    make(t, base + "gate_proj", kI, kH);
    make(t, base + "up_proj", kI, kH);
    make(t, base + "down_proj", kH, kI);
  }
  return t;
}
json config(json const& quantization) {
  json c{{"model_type", "qwen3_moe"}, {"hidden_act", "silu"},     {"hidden_size", kH},      {"moe_intermediate_size", kI},
         {"num_experts", kE},         {"num_experts_per_tok", 2}, {"num_hidden_layers", 1}, {"norm_topk_prob", true}};
  if (!quantization.is_null()) c["quantization_config"] = quantization;
  if (quantization.contains("expert_dtype")) c["expert_dtype"] = quantization["expert_dtype"];
  return c;
}

/// A checkpoint on disk.
class Checkpoint {
 public:
  Checkpoint(Tensors const& tensors, json const& quantization) {
    SafetensorsWriter writer;
    for (auto const& [name, t] : tensors) writer.add_bytes(name, t.dtype, t.shape, t.bytes);
    writer.write(directory_.path() / "model.safetensors");
    std::ofstream(directory_.path() / "config.json") << config(quantization);
  }
  HostLayerWeights<float> load(LoadOptions const& options = {}) const {
    return load_checkpoint_layer<float>(directory_.path(), 0, options);
  }
  fs::path const& path() const { return directory_.path(); }

 private:
  TemporaryDirectory directory_;
};
void expect_refusal(ErrorCode code, std::string const& part, Tensors const& tensors, json const& quantization,
                    LoadOptions const& options = {}) {
  Checkpoint const checkpoint(tensors, quantization);
  expect_error(code, part, [&] { checkpoint.load(options); });
}
std::string const kGate1 = kRoot + "experts.1.gate_proj";

struct Packing {
  char const* name;
  Make make;
  json quantization;
  float value;
};
std::vector<Packing> packings() {
  return {{"gptq", gptq, kGptq, 0.5F},
          {"awq", awq, kAwq, 0.5F},
          {"packed", packed, kInt4, 0.5F},
          {"nvfp4", nvfp4, kNvfp4, 0.5F},
          {"DeepSeek-V4", mxfp4_v4, kV4, 0.5F},
          {"int8", int8, compressed("int-quantized", {{"num_bits", 8}, {"type", "int"}, {"strategy", "channel"}}), 0.5F},
          {"unquantised layers of a quantised checkpoint", bf16, kGptq, 0.5F}};
}

TEST(PackedWeights, Q10_EveryPackingGivesTheSameMatrices) {
  for (Packing const& p : packings()) {
    SCOPED_TRACE(p.name);
    auto const w = Checkpoint(experts(p.make), p.quantization).load();
    ASSERT_EQ(w.w13.size(), at(kE * 2 * kI * kH));
    ASSERT_EQ(w.w2.size(), at(kE * kH * kI));
    for (float v : w.w13) ASSERT_EQ(v, p.value);
    for (float v : w.w2) ASSERT_EQ(v, p.value);
  }
}

TEST(PackedWeights, ARankReadsTheBytesOfItsOwnExperts) {
  for (Packing const& p : packings()) {
    SCOPED_TRACE(p.name);
    Tensors const tensors = experts(p.make);
    Checkpoint const checkpoint(tensors, p.quantization);
    std::uint64_t bytes = tensors.at(kRoot + "gate.weight").bytes.size();
    for (auto const& [name, t] : tensors) bytes += name.find("experts.2.") != std::string::npos ? t.bytes.size() : 0;
    TensorStore const store(checkpoint.path());
    LayerDescription const d = from_config(HfConfig::from_file(checkpoint.path()), 0);
    (void)LayerLoader::from_checkpoint(store, d, 0).load<float>({.experts = std::vector<int>{2}});
    EXPECT_EQ(store.bytes_read(), bytes);
  }
}

TEST(PackedWeights, M3_MissingTensorsAreNamed) {
  for (auto const& [make, quantization, tensor] : std::vector<std::tuple<Make, json, char const*>>{
           {gptq, kGptq, ".scales"}, {awq, kAwq, ".scales"}, {packed, kInt4, ".weight_scale"}, {nvfp4, kNvfp4, ".weight_scale"}}) {
    Tensors t = experts(make);
    t.erase(kGate1 + tensor);
    expect_refusal(ErrorCode::argument, "tensor '" + kGate1 + tensor + "' is missing in '", t, quantization);
    EXPECT_NO_THROW(Checkpoint(t, quantization).load({.experts = std::vector<int>{0, 2}})) << "another rank's expert is not needed";
  }
  Tensors t = experts(int8);
  t.erase(kGate1 + ".weight_scale");
  expect_refusal(ErrorCode::argument, "an int8 weight needs '" + kGate1 + ".weight_scale_inv' or '" + kGate1 + ".weight_scale'", t, {});
  t = experts(gptq);
  t.erase(kGate1 + ".qweight");
  expect_refusal(ErrorCode::argument, "missing expert weights: layer 0, expert 1, shard gate_proj", t, kGptq);
}

TEST(PackedWeights, M3_WrongShapesNameBoth) {
  Tensors t = experts(gptq);
  t[kGate1 + ".qweight"] = filled(FileDType::i32, {kH / 8 + 1, kI});
  expect_refusal(ErrorCode::argument, "shape [9, 32], expected [8, 32] (quantization_config: gptq with 4 bits, group_size 32)", t, kGptq);
  t = experts(gptq);
  t[kGate1 + ".qzeros"] = filled(FileDType::i32, {kH / 32, kI});
  expect_refusal(ErrorCode::argument, "shape [2, 32], expected [2, 4]", t, kGptq);
  t = experts(gptq);
  t[kGate1 + ".scales"] = numbers<float>({kI, kH / 32}, 1.0F);
  expect_refusal(ErrorCode::argument, "shape [32, 2], expected [2, 32]", t, kGptq);
  t = experts(gptq);
  t[kGate1 + ".g_idx"] = filled(FileDType::i32, {kI});
  expect_refusal(ErrorCode::argument, "shape [32], expected [64]", t, kGptq);
  t = experts(awq);
  t[kGate1 + ".qweight"] = filled(FileDType::i32, {kH, kI});
  expect_refusal(ErrorCode::argument, "shape [64, 32], expected [64, 4] (quantization_config: awq with 4 bits, group_size 32)", t, kAwq);
  t = experts(packed);
  t[kGate1 + ".weight_packed"] = filled(FileDType::i32, {kI, 6});
  expect_refusal(ErrorCode::argument, "shape [32, 6], expected [32, 8] (4 bits)", t, kInt4);
  t = experts(packed);
  t[kGate1 + ".weight_shape"] = list<std::int64_t>({2}, {kI, kH + 8});
  expect_refusal(ErrorCode::argument, "weight_shape' in '", t, kInt4);
  expect_refusal(ErrorCode::argument, "holds [32, 72], expected [32, 64]", t, kInt4);
  t = experts(packed);
  t[kGate1 + ".weight_scale"] = numbers<float>({kI, 3}, 1.0F);
  expect_refusal(ErrorCode::argument, "shape [32, 3], expected [32, groups] with groups dividing 64", t, kInt4);
  t = experts(packed);
  t[kGate1 + ".weight_zero_point"] = filled(FileDType::i32, {kI, 2});
  expect_refusal(ErrorCode::argument, "shape [32, 2], expected [4, 2]", t, kInt4);
  t = experts(nvfp4);
  t[kGate1 + ".weight_packed"] = filled(FileDType::u8, {kI, kH});
  expect_refusal(ErrorCode::argument, "shape [32, 64], expected [32, 32]", t, kNvfp4);
  t = experts(nvfp4);
  t[kGate1 + ".weight_scale"] = filled(FileDType::f8_e4m3, {kI, 2}, 0x38);
  expect_refusal(ErrorCode::argument, "shape [32, 2], expected [32, 4] (nvfp4: 16 elements a scale)", t, kNvfp4);
  t = experts(nvfp4);
  t[kGate1 + ".weight_global_scale"] = numbers<float>({2}, 1.0F);
  expect_refusal(ErrorCode::argument, "shape [2], expected [1]", t, kNvfp4);
  t = experts(mxfp4_v4);
  t[kGate1 + ".scale"] = filled(FileDType::f8_e8m0, {kI, 1}, 126);
  expect_refusal(ErrorCode::argument, "shape [32, 1], expected [32, 2] (mxfp4: 32 elements a scale)", t, kV4);
  t = experts(int8);
  t[kGate1 + ".weight_scale"] = numbers<float>({kI, 3}, 1.0F);
  expect_refusal(ErrorCode::argument, "shape [32, 3], expected [1], [32, 1], [32, groups] or [1, 1]", t, {});
  t = experts(int8);
  t[kGate1 + ".weight_zero_point"] = numbers<float>({kI, 1}, 1.0F);
  expect_refusal(ErrorCode::argument, "expected I8 [32, 1], as the scales", t, {});
}

TEST(PackedWeights, WrongValuesAreNamed) {
  Tensors t = experts(gptq);
  t[kGate1 + ".scales"] = numbers<float>({kH / 32, kI}, std::numeric_limits<float>::quiet_NaN());
  expect_refusal(ErrorCode::argument, "scale 0 is not finite", t, kGptq);
  t = experts(gptq);
  std::vector<std::int32_t> index(kH, 1);
  index[7] = 2;
  t[kGate1 + ".g_idx"] = list<std::int32_t>({kH}, index);
  expect_refusal(ErrorCode::argument, "group 2 of column 7 is out of range [0, 2)", t, kGptq);
  t = experts(nvfp4);
  t[kGate1 + ".weight_scale"] = filled(FileDType::f8_e4m3, {kI, kH / 16}, 0x7F);
  expect_refusal(ErrorCode::argument, "scale 0 is not finite", t, kNvfp4);
  t = experts(nvfp4);
  t[kGate1 + ".weight_global_scale"] = numbers<float>({1}, 0.0F);
  expect_refusal(ErrorCode::argument, "the scale 0 is not above 0", t, kNvfp4);
  t = experts(nvfp4);
  t[kGate1 + ".weight_scale"] = filled(FileDType::u8, {kI, kH / 16}, 0x38);
  expect_refusal(ErrorCode::argument, "dtype U8, expected F8_E4M3", t, kNvfp4);
  t = experts(nvfp4);
  t.erase(kGate1 + ".weight_global_scale");
  expect_refusal(ErrorCode::argument, "nvfp4 needs '" + kGate1 + ".weight_scale_2' or '" + kGate1 + ".weight_global_scale'", t, kNvfp4);
  t[kGate1 + ".weight_scale"] = filled(FileDType::u8, {kI, kH / 16}, 0x70);
  expect_refusal(ErrorCode::config,
                 "holds float4 in groups of 32, but quantization_config (compressed-tensors) announces float4 in groups of 16", t, kNvfp4);
  expect_refusal(ErrorCode::argument, "shape [32, 4], expected [32, 2] (mxfp4: 32 elements a scale)", t, {});
  t = experts(packed);
  t[kGate1 + ".weight_packed"] = filled(FileDType::bf16, {kI, kH / 8});
  expect_refusal(ErrorCode::argument, "dtype BF16, expected I32", t, kInt4);
}

/// Words are I32: wider or narrower integers hold other codes.
TEST(PackedWeights, WordsOfAnotherTypeAreRefused) {
  auto const refused = [](Make make, json const& q, std::string const& tensor, FileDType type, std::vector<std::int64_t> const& shape) {
    Tensors t = experts(make);
    t[kGate1 + tensor] = filled(type, shape);
    expect_refusal(ErrorCode::argument, moe::text("dtype ", name(type), ", expected I32"), t, q);
  };
  refused(gptq, kGptq, ".qweight", FileDType::i8, {kH / 8, kI});
  refused(gptq, kGptq, ".qzeros", FileDType::i64, {kH / 32, kI / 8});
  refused(awq, kAwq, ".qweight", FileDType::i64, {kH, kI / 8});
  refused(packed, kInt4, ".weight_packed", FileDType::i64, {kI, kH / 8});
}

/// A configuration that states zero points, and a matrix without them.
TEST(PackedWeights, ZeroPointsThatAreMissingAreNamed) {
  auto const refused = [](Make make, json q, char const* field, bool value, std::string const& tensor) {
    Tensors t = experts(make);
    t.erase(kGate1 + tensor);
    (q.contains("config_groups") ? q["config_groups"]["group_0"]["weights"] : q)[field] = value;
    expect_refusal(ErrorCode::argument, "gate_proj" + tensor + "' is missing", t, q);
  };
  refused(gptq, kGptq, "sym", false, ".qzeros");
  refused(awq, kAwq, "zero_point", true, ".qzeros");
  refused(packed, kInt4, "symmetric", false, ".weight_zero_point");
  json const int8_rows = compressed("int-quantized", {{"num_bits", 8}, {"type", "int"}, {"strategy", "channel"}});
  refused(int8, int8_rows, "symmetric", false, ".weight_zero_point");
}

/// Finite scales under which the largest code is not: refused by the scale's tensor, whatever the codes are.
TEST(PackedWeights, ScalesUnderWhichWeightsAreInfiniteAreRefused) {
  json const int8_rows = compressed("int-quantized", {{"num_bits", 8}, {"type", "int"}, {"strategy", "channel"}});
  auto const refused = [](Make make, json const& q, std::string const& scale, Stored value, std::string const& why) {
    Tensors t = experts(make);
    t[kGate1 + scale] = std::move(value);
    expect_refusal(ErrorCode::argument, "'" + kGate1 + scale + "' in '", t, q);
    expect_refusal(ErrorCode::argument, why, t, q);
  };
  refused(gptq, kGptq, ".scales", numbers<float>({kH / 32, kI}, 3e37F), "scale 0 is out of range: 3e+37 times 15 is not finite");
  refused(awq, kAwq, ".scales", numbers<float>({kH / 32, kI}, -3e37F), "scale 0 is out of range: -3e+37 times 15 is not finite");
  refused(packed, kInt4, ".weight_scale", numbers<float>({kI, kH / 32}, 3e37F), "scale 0 is out of range: 3e+37 times 15 is not finite");
  refused(int8, int8_rows, ".weight_scale", numbers<float>({kI, 1}, 3e36F), "scale 0 is out of range: 3e+36 times 128 is not finite");
  refused(mxfp4_v4, kV4, ".scale", filled(FileDType::f8_e8m0, {kI, kH / 32}, 253), "exponent 253 in row 0 is out of range, at most 252");
  refused(nvfp4, kNvfp4, ".weight_global_scale", numbers<float>({1}, 1e-37F), "2688 times it finite");
  Tensors t = experts(mxfp4_v4);
  t[kGate1 + ".scale"] = filled(FileDType::f8_e8m0, {kI, kH / 32}, 252);
  EXPECT_NO_THROW(Checkpoint(t, kV4).load());
}

TEST(PackedWeights, TheLastGroupSizesAndWidthsAreRefusedByName) {
  // Groups that no packing has, found in the tensors themselves.
  Tensors t = experts(packed);
  t[kGate1 + ".weight_scale"] = numbers<float>({kI, 8}, 1.0F);
  expect_refusal(ErrorCode::config, "group size 8 is not one of -1, 16, 32, 64, 128, 256", t, {});
  // A group that does not divide K.
  expect_refusal(ErrorCode::config, "a weight [32, 64] is not a multiple of 8 rows and of 128 columns (quantization_config: gptq",
                 experts(gptq), {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 128}});
}

TEST(PackedWeights, ActivationOrderCannotBeCutBetweenRanks) {
  std::vector<std::int32_t> index(kH), in_order(kH);
  for (std::int32_t k = 0; k < kH; ++k) index[at(k)] = k % 2, in_order[at(k)] = k / 32;
  Tensors t = experts(gptq);
  t[kGate1 + ".g_idx"] = list<std::int32_t>({kH}, index);
  EXPECT_NO_THROW(Checkpoint(t, kGptq).load());
  expect_refusal(ErrorCode::unsupported, "desc_act: column 1 belongs to group 1, not 0; such a matrix cannot be cut", t, kGptq,
                 {.tp_size = 2});
  t[kGate1 + ".g_idx"] = list<std::int32_t>({kH}, in_order);
  EXPECT_EQ(Checkpoint(t, kGptq).load({.tp_rank = 1, .tp_size = 2}).intermediate, kI / 2);
  // compressed-tensors writes -1 where the order of the columns does not matter.
  Tensors c = experts(packed);
  c[kGate1 + ".weight_g_idx"] = numbers<std::int32_t>({kH}, -1);
  EXPECT_NO_THROW(Checkpoint(c, kInt4).load());
}

TEST(PackedWeights, ConfigurationAndTensorsMustAgree) {
  std::string const announces = "but quantization_config (compressed-tensors) announces ";
  expect_refusal(ErrorCode::config, "holds int4 in groups of 32, " + announces + "int4 in groups of 64", experts(packed),
                 compressed("pack-quantized", {{"num_bits", 4}, {"type", "int"}, {"strategy", "group"}, {"group_size", 64}}));
  expect_refusal(ErrorCode::config, "holds int4 in groups of 32, " + announces + "int8 per row", experts(packed),
                 compressed("pack-quantized", {{"num_bits", 8}, {"type", "int"}, {"strategy", "channel"}}));
  expect_refusal(ErrorCode::config, "holds int8 per row, " + announces + "float8", experts(int8),
                 compressed("float-quantized", {{"num_bits", 8}, {"type", "float"}, {"strategy", "tensor"}}));
  expect_refusal(ErrorCode::config, "holds float4 in groups of 16, but quantization_config (fp8) announces float8", experts(nvfp4),
                 {{"quant_method", "fp8"}});
  expect_refusal(ErrorCode::config, "holds float4 in groups of 32, but quantization_config (fp8) announces float8", experts(mxfp4_v4),
                 {{"quant_method", "fp8"}});
  expect_refusal(ErrorCode::unsupported, "'expert_dtype' is \"fp6\"", experts(mxfp4_v4),
                 {{"quant_method", "fp8"}, {"expert_dtype", "fp6"}});
  for (json const& q : {json(), kInt4, json{{"quant_method", "fp8"}}}) {
    expect_refusal(ErrorCode::config, "GPTQ or AWQ codes, but the configuration's quant_method is ", experts(gptq), q);
  }
  expect_refusal(ErrorCode::argument, "shape [8, 32], expected [64, 4] (quantization_config: awq", experts(gptq), kAwq);
}

// Fused experts with scales

/// [E, 2I, H] and [E, H, I] (transposed: [E, H, 2I] and [E, I, H]) whose every code is 1.0 in e4m3.
Tensors fused(bool transposed, std::string const& suffix, std::vector<std::int64_t> const& up_scales,
              std::vector<std::int64_t> const& down_scales, FileDType dtype = FileDType::f8_e4m3) {
  Tensors t;
  t[kRoot + "gate.weight"] = numbers<float>({kE, kH}, 0.0F);
  t[kRoot + "experts.gate_up_proj"] = transposed ? filled(dtype, {kE, kH, 2 * kI}, 0x38) : filled(dtype, {kE, 2 * kI, kH}, 0x38);
  t[kRoot + "experts.down_proj"] = transposed ? filled(dtype, {kE, kI, kH}, 0x38) : filled(dtype, {kE, kH, kI}, 0x38);
  for (auto const& [name, shape] : {std::pair{"gate_up_proj", up_scales}, std::pair{"down_proj", down_scales}}) {
    std::vector<float> scales(at(product(shape)));
    for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<float>(i + 1);
    std::string const stacked = kRoot + "experts." + name;
    if (!shape.empty()) t[stacked + suffix] = list<float>(shape, scales);
  }
  return t;
}
json const kBlocks{{"quant_method", "fp8"}, {"weight_block_size", {32, 16}}};  // 32 outputs, 16 inputs
/// Element [row, col] of expert e's w13 [2I, H].
float w13(HostLayerWeights<float> const& w, std::int64_t e, std::int64_t row, std::int64_t col) {
  return w.w13[at((e * 2 * kI + row) * kH + col)];
}

TEST(PackedWeights, FusedFp8ScalesFollowTheOrientationOfTheTensor) {
  // one scale per block of 32 outputs × 16 inputs: [E, 2, 4] and [E, 2, 2], or turned [E, 4, 2] and [E, 2, 2]
  auto w = Checkpoint(fused(false, "_scale_inv", {kE, 2, 4}, {kE, 2, 2}), kBlocks).load();
  EXPECT_EQ(w13(w, 0, 0, 0), 1.0F);
  EXPECT_EQ(w13(w, 0, 31, 63), 4.0F);
  EXPECT_EQ(w13(w, 0, 32, 16), 6.0F);
  EXPECT_EQ(w13(w, 2, 33, 16), 22.0F);
  EXPECT_EQ(w.w2[at((1 * kH + 40) * kI + 20)], 8.0F);
  w = Checkpoint(fused(true, "_scale_inv", {kE, 4, 2}, {kE, 2, 2}), kBlocks).load();
  EXPECT_EQ(w13(w, 0, 31, 63), 7.0F) << "inputs 48 … 63, outputs 0 … 31";
  EXPECT_EQ(w13(w, 0, 32, 16), 4.0F);
  EXPECT_EQ(w.w2[at((1 * kH + 40) * kI + 20)], 8.0F);
  EXPECT_EQ(w.w2[at((1 * kH + 40) * kI + 3)], 6.0F) << "output 40, input 3";
  // one per row, one per column, one per expert, one in all
  w = Checkpoint(fused(false, "_scale", {kE, 2 * kI, 1}, {kE, kH, 1}), {}).load();
  EXPECT_EQ(w13(w, 1, 5, 9), 2 * kI + 6.0F);
  w = Checkpoint(fused(true, "_scale", {kE, 1, 2 * kI}, {kE, 1, kH}), {}).load();
  EXPECT_EQ(w13(w, 1, 5, 9), 2 * kI + 6.0F);
  EXPECT_EQ(w.w2[at((2 * kH + 7) * kI + 1)], 2 * kH + 8.0F);
  for (std::vector<std::int64_t> const& shape : {std::vector<std::int64_t>{kE}, {kE, 1}, {kE, 1, 1}}) {
    w = Checkpoint(fused(true, "_weight_scale", shape, shape), {}).load();
    EXPECT_EQ(w13(w, 2, 5, 9), 3.0F);
  }
  EXPECT_EQ(w13(Checkpoint(fused(false, "_scale", {1}, {1}), {}).load(), 2, 5, 9), 1.0F);
  EXPECT_EQ(w13(Checkpoint(fused(false, "_scale", {1}, {1}, FileDType::i8), {}).load(), 2, 5, 9), 56.0F);
}

TEST(PackedWeights, FusedStacksReadOnlyTheirOwnExperts) {
  Tensors const tensors = fused(true, "_scale_inv", {kE, 4, 2}, {kE, 2, 2});
  Checkpoint const checkpoint(tensors, kBlocks);
  TensorStore const store(checkpoint.path());
  LayerDescription const d = from_config(HfConfig::from_file(checkpoint.path()), 0);
  (void)LayerLoader::from_checkpoint(store, d, 0).load<float>({.experts = std::vector<int>{1}});
  EXPECT_EQ(store.bytes_read(), at(kE * kH * 4 + 3 * kI * kH + (8 + 4) * 4)) << "the router, one expert's codes and its scales";
}

TEST(PackedWeights, FusedErrorsAreNamed) {
  expect_refusal(ErrorCode::argument, "an e4m3 weight needs '" + kRoot + "experts.gate_up_proj_scale_inv' or '", fused(false, "", {}, {}),
                 {});
  expect_refusal(ErrorCode::argument, "shape [3, 2, 5], expected [1], [3, 64, 1], [3, 64, groups] or [3, 2, 4]",
                 fused(false, "_scale_inv", {kE, 2, 5}, {kE, 2, 2}), kBlocks);
  expect_refusal(ErrorCode::argument, "shape [2, 2, 4], expected [1], [3, 64, 1]", fused(false, "_scale_inv", {2, 2, 4}, {kE, 2, 2}),
                 kBlocks);
  expect_refusal(ErrorCode::unsupported, "fused weights of dtype U8 cannot be read", fused(false, "_scale", {1}, {1}, FileDType::u8), {});
  expect_refusal(ErrorCode::config, "holds float8, but quantization_config (gptq) announces int4 in groups of 32",
                 fused(false, "_scale", {1}, {1}), kGptq);
  Tensors t = fused(false, "_scale", {kE, 1, 1}, {kE, 1, 1});
  t[kRoot + "experts.down_proj_scale"] = list<float>({kE, 1, 1}, {1.0F, 1.0F, 1e36F});
  expect_refusal(ErrorCode::argument, "down_proj_scale' in '", t, {});
  expect_refusal(ErrorCode::argument, "scale 2 is out of range: 1e+36 times 448 is not finite", t, {});
  t = fused(false, "_scale", {1}, {1});
  t[kRoot + "experts.gate_up_proj"].bytes[70] = std::byte{0xFF};
  expect_refusal(ErrorCode::argument, "NaN code at row 1, column 6", t, {});
}

}  // namespace
