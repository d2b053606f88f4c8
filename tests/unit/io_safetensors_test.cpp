// SPDX-License-Identifier: Apache-2.0
// tests/unit/io_safetensors_test.cpp: reading and writing safetensors files, and every error in a file.
#include "moe/io/safetensors_writer.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "expect_error.hpp"
#include "moe/io/safetensors.hpp"
#include "temporary_directory.hpp"

namespace {

using moe::Error;
using moe::ErrorCode;
using moe::io::FileDType;
using moe::io::SafetensorsFile;
using moe::io::SafetensorsWriter;
using moe_test::expect_error;
using moe_test::TemporaryDirectory;

std::vector<std::byte> file_of(std::string const& header, std::size_t data_bytes, std::uint64_t length) {
  std::vector<std::byte> out(8 + header.size() + data_bytes);
  for (std::size_t i = 0; i < 8; ++i) out[i] = static_cast<std::byte>(length >> (8 * i));
  std::memcpy(out.data() + 8, header.data(), header.size());
  for (std::size_t i = 0; i < data_bytes; ++i) out[8 + header.size() + i] = static_cast<std::byte>(i);
  return out;
}
std::vector<std::byte> file_of(std::string const& header, std::size_t data_bytes) { return file_of(header, data_bytes, header.size()); }

std::string refusal(std::vector<std::byte> const& bytes) {
  return expect_error(ErrorCode::argument, [&] { SafetensorsFile::from_memory(bytes, "x.safetensors"); });
}
std::string refusal(std::string const& header, std::size_t data_bytes) { return refusal(file_of(header, data_bytes)); }

TEST(Safetensors, ReadsWhatWasWritten) {
  TemporaryDirectory const dir;
  std::vector<float> const f{1.5F, -2.0F, 3.0e-39F, std::numeric_limits<float>::infinity(), 5.0F, 6.0F};
  std::vector<moe::bf16> const b{__float2bfloat16_rn(1.0F), __float2bfloat16_rn(-0.5F)};
  std::vector<std::int32_t> const i{-1, 7, 1 << 30};
  SafetensorsWriter writer;
  writer.add<float>("f", {2, 3}, f);
  writer.add<moe::bf16>("b", {2, 1}, b);
  writer.add<std::int32_t>("ids", {3}, i);
  writer.add<std::uint8_t>("empty", {0, 4}, std::vector<std::uint8_t>{});
  writer.add<double>("scalar", {}, std::vector<double>{0.25});
  writer.set_metadata("format", "pt");
  writer.set_metadata("quote\"d", "a\nb");
  writer.write(dir / "a.safetensors");
  EXPECT_EQ(dir.files(), 1U) << "the temporary name must be gone";

  SafetensorsFile const file(dir / "a.safetensors");
  EXPECT_EQ(file.tensors().size(), 5U);
  EXPECT_EQ(file.metadata().at("quote\"d"), "a\nb");
  EXPECT_EQ(file.read<float>("f"), f);
  EXPECT_EQ(file.read<float>("b"), (std::vector<float>{1.0F, -0.5F}));
  EXPECT_EQ(file.read<std::int32_t>("ids"), i);
  EXPECT_EQ(file.read<std::int64_t>("ids"), (std::vector<std::int64_t>{-1, 7, 1 << 30}));
  EXPECT_TRUE(file.read<std::uint8_t>("empty").empty());
  EXPECT_EQ(file.read<float>("scalar"), (std::vector<float>{0.25F}));
  EXPECT_EQ(file.at("f").shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(file.read_rows<float>(file.at("f"), 1, 1), (std::vector<float>{f[3], f[4], f[5]}));
}

TEST(Safetensors, SameContentsGiveTheSameBytes) {
  TemporaryDirectory const dir;
  std::vector<float> const f{1, 2};
  std::vector<std::uint8_t> const u{9};
  SafetensorsWriter one, two;
  one.add<float>("z", {2}, f);
  one.add<float>("a", {2}, f);
  one.add<std::uint8_t>("m", {1}, u);
  two.add<std::uint8_t>("m", {1}, u);
  two.add<float>("a", {2}, f);
  two.add_lazy("z", FileDType::f32, {2}, [&] {
    auto const bytes = std::as_bytes(std::span(f));
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  });
  one.write(dir / "1");
  two.write(dir / "2");
  auto const contents = [&](char const* name) {
    std::ifstream in(dir / name, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  EXPECT_EQ(contents("1"), contents("2"));
  SafetensorsFile const file(dir / "1");
  EXPECT_EQ(file.at("a").begin, 0U);
  EXPECT_EQ(file.at("z").begin, 8U);
  EXPECT_EQ(file.at("m").begin, 16U) << "narrow types last, so that all are aligned";
}

TEST(Safetensors, CountsTheBytesThatItReads) {
  TemporaryDirectory const dir;
  SafetensorsWriter writer;
  writer.add<float>("a", {8, 4}, std::vector<float>(32));
  writer.add<moe::bf16>("b", {8, 4}, std::vector<moe::bf16>(32));
  writer.write(dir / "a");
  SafetensorsFile const file(dir / "a");
  EXPECT_EQ(file.bytes_read(), 0U);
  (void)file.read_rows<float>(file.at("a"), 2, 3);
  EXPECT_EQ(file.bytes_read(), 3U * 4 * 4);
  (void)file.read_rows<float>(file.at("b"), 0, 1);
  EXPECT_EQ(file.bytes_read(), 48U + 8);
}

TEST(Safetensors, ConvertsEveryDtype) {
  std::string const header =
      R"({"f64":{"dtype":"F64","shape":[1],"data_offsets":[0,8]},"f16":{"dtype":"F16","shape":[2],"data_offsets":[8,12]},)"
      R"("e4m3":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[12,16]},"e5m2":{"dtype":"F8_E5M2","shape":[4],"data_offsets":[16,20]},)"
      R"("e8m0":{"dtype":"F8_E8M0","shape":[3],"data_offsets":[20,23]},"bool":{"dtype":"BOOL","shape":[1],"data_offsets":[23,24]},)"
      R"("i64":{"dtype":"I64","shape":[1],"data_offsets":[24,32]},"i16":{"dtype":"I16","shape":[2],"data_offsets":[32,36]},)"
      R"("i8":{"dtype":"I8","shape":[2],"data_offsets":[36,38]},"u16":{"dtype":"U16","shape":[1],"data_offsets":[38,40]},)"
      R"("u32":{"dtype":"U32","shape":[1],"data_offsets":[40,44]},"u64":{"dtype":"U64","shape":[1],"data_offsets":[44,52]},)"
      R"("f4":{"dtype":"F4","shape":[4],"data_offsets":[52,54]},"c64":{"dtype":"C64","shape":[1],"data_offsets":[54,62]}})";
  auto bytes = file_of(header, 62);
  std::byte* data = bytes.data() + 8 + header.size();
  double const pi = 3.25;
  std::memcpy(data, &pi, 8);
  std::uint8_t const rest[] = {0x00,
                               0x3C,
                               0x01,
                               0x80,
                               /* e4m3: 448, NaN, -2^-9, 1 */ 0x7E,
                               0x7F,
                               0x81,
                               0x38,
                               /* e5m2: 57344, inf, NaN, -1.75*2^-14 */ 0x7B,
                               0x7C,
                               0x7D,
                               0x87,
                               /* e8m0 */ 127,
                               0,
                               255,
                               1};
  std::memcpy(data + 8, rest, sizeof rest);
  std::int64_t const large = 5'000'000'000;
  std::memcpy(data + 24, &large, 8);
  std::int16_t const i16[] = {-300, 300};
  std::memcpy(data + 32, i16, 4);
  std::uint64_t const huge = ~0ULL;
  std::memcpy(data + 44, &huge, 8);

  auto const file = SafetensorsFile::from_memory(bytes, "mem");
  EXPECT_EQ(file.read<float>("f64"), (std::vector<float>{3.25F}));
  EXPECT_EQ(file.read<float>("f16"), (std::vector<float>{1.0F, -5.9604644775390625e-08F}));
  auto const e4m3 = file.read<float>("e4m3");
  EXPECT_EQ(e4m3[0], 448.0F);
  EXPECT_TRUE(std::isnan(e4m3[1]));
  EXPECT_EQ(e4m3[2], -std::ldexp(1.0F, -9));
  EXPECT_EQ(e4m3[3], 1.0F);
  auto const e5m2 = file.read<float>("e5m2");
  EXPECT_EQ(e5m2[0], 57344.0F);
  EXPECT_TRUE(std::isinf(e5m2[1]));
  EXPECT_TRUE(std::isnan(e5m2[2]));
  EXPECT_EQ(e5m2[3], -std::ldexp(1.75F, -14));
  auto const e8m0 = file.read<float>("e8m0");
  EXPECT_EQ(e8m0[0], 1.0F);
  EXPECT_EQ(e8m0[1], std::ldexp(1.0F, -127));
  EXPECT_TRUE(std::isnan(e8m0[2]));
  EXPECT_EQ(file.read<std::int32_t>("bool"), (std::vector<std::int32_t>{1}));
  EXPECT_EQ(file.read<std::int64_t>("i64"), (std::vector<std::int64_t>{large}));
  EXPECT_EQ(file.read<std::int32_t>("i16"), (std::vector<std::int32_t>{-300, 300}));
  EXPECT_EQ(file.raw("f4").size(), 2U);
  EXPECT_EQ(file.raw("c64").size(), 8U);
  // Values or types that the destination cannot hold.
  expect_error(ErrorCode::argument, "5000000000 does not fit into I32", [&] { (void)file.read<std::int32_t>("i64"); });
  expect_error(ErrorCode::argument, "above 2^63", [&] { (void)file.read<std::int64_t>("u64"); });
  expect_error(ErrorCode::argument, "'i64' in 'mem' (I64 [1]): dtype I64, expected a floating-point type",
               [&] { (void)file.read<float>("i64"); });
  expect_error(ErrorCode::argument, "dtype F4", [&] { (void)file.read<float>("f4"); });
  expect_error(ErrorCode::argument, "expected an integer type", [&] { (void)file.read<std::int32_t>("f64"); });
}

TEST(Safetensors, MissingTensorIsNamedWithWhatIsThere) {
  auto const bytes = file_of(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 2);
  auto const file = SafetensorsFile::from_memory(bytes, "x.safetensors");
  EXPECT_EQ(file.find("b"), nullptr);
  EXPECT_EQ(expect_error(ErrorCode::argument, [&] { (void)file.at("b"); }),
            "tensor 'b' is missing in 'x.safetensors', which holds 1 tensors: a");
  expect_error(ErrorCode::argument, "rows [1, 3) are outside shape [2]", [&] { (void)file.read_rows<std::int32_t>(file.at("a"), 1, 2); });
}

TEST(Safetensors, TruncatedFiles) {
  EXPECT_EQ(refusal(std::vector<std::byte>{}), "'x.safetensors': truncated: 0 bytes, a safetensors file has at least 8");
  std::string const header = R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}})";
  auto const whole = file_of(header, 16);
  EXPECT_NO_THROW(SafetensorsFile::from_memory(whole, "x"));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THROW(SafetensorsFile::from_memory(std::span(whole).first(size), "x"), Error) << size;
  }
  auto const text = refusal(header, 12);
  EXPECT_NE(text.find("tensor 'a' (F32 [4]): data_offsets [0, 16] end after the file's 12 data bytes"), std::string::npos) << text;
}

TEST(Safetensors, OversizedHeader) {
  EXPECT_NE(refusal(file_of("{}", 0, 1'000'000'000'000ULL))
                .find("no safetensors file: its first 8 bytes give a header length of 1000000000000, at most 100000000"),
            std::string::npos);
  EXPECT_NE(refusal(file_of("{}", 0, ~0ULL)).find("no safetensors file"), std::string::npos);
  EXPECT_NE(refusal(file_of("{}", 0, 3)).find("header length 3 exceeds the 2 bytes that follow"), std::string::npos);
}

TEST(Safetensors, OverlapsHolesAndWrongSizes) {
  auto const two = [](char const* b_offsets) {
    return std::string(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":)") +
           b_offsets + "}}";
  };
  EXPECT_NE(refusal(two("[4,12]"), 12).find("tensor 'b' begins at data byte 4 and overlaps tensor 'a', which ends at 8"),
            std::string::npos);
  EXPECT_NE(refusal(two("[0,8]"), 8).find("overlaps"), std::string::npos);
  EXPECT_NE(refusal(two("[12,20]"), 20).find("leaving a hole after tensor 'a'"), std::string::npos);
  EXPECT_NE(refusal(two("[8,12]"), 12).find("span 4 bytes, the shape needs 8"), std::string::npos);
  EXPECT_NE(refusal(two("[16,8]"), 16).find("run backwards"), std::string::npos);
  EXPECT_NE(refusal(two("[8,16]"), 24).find("cover 16 of 24 data bytes"), std::string::npos);
  EXPECT_NE(refusal(two("[8,18446744073709551615]"), 16).find("end after"), std::string::npos);
  EXPECT_NE(refusal(two("[8,18446744073709551616]"), 16).find("expected integers >= 0"), std::string::npos);
}

TEST(Safetensors, AbsurdShapes) {
  auto const shaped = [](char const* shape) {
    return std::string(R"({"a":{"dtype":"F32","shape":)") + shape + R"(,"data_offsets":[0,8]}})";
  };
  EXPECT_NE(refusal(shaped("[-2]"), 8).find("'shape' holds -2, expected numbers >= 0"), std::string::npos);
  EXPECT_NE(refusal(shaped("[2.0]"), 8).find("'shape' holds 2.0"), std::string::npos);
  EXPECT_NE(refusal(shaped("[4294967296,4294967296,4]"), 8).find("below 2^60"), std::string::npos);
  EXPECT_NE(refusal(shaped("[9223372036854775807,2]"), 8).find("below 2^60"), std::string::npos);
  EXPECT_NE(refusal(shaped("[9223372036854775808]"), 8).find("exceeds 2^63 - 1"), std::string::npos);
  EXPECT_NE(refusal(shaped("[[2]]"), 8).find("a list where none belongs"), std::string::npos);
  EXPECT_NE(refusal(shaped("\"2\""), 8).find("is a string"), std::string::npos);
  EXPECT_NE(refusal(shaped("2"), 8).find("number 2 where none belongs"), std::string::npos);
  EXPECT_NE(refusal(shaped("null"), 8).find("null"), std::string::npos);
}

TEST(Safetensors, WrongStructure) {
  EXPECT_NE(refusal("", 0).find("does not begin with '{'"), std::string::npos);
  EXPECT_NE(refusal("[]", 0).find("does not begin with '{'"), std::string::npos);
  EXPECT_NE(refusal("{\"a\":", 0).find("not valid JSON"), std::string::npos);
  EXPECT_NE(refusal("{} x", 0).find("not valid JSON"), std::string::npos);
  EXPECT_NE(refusal("{\"\xff\":{}}", 0).find("not valid JSON"), std::string::npos);
  EXPECT_NE(
      refusal(R"({"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}})", 8).find("dtype 'F33' is unknown, expected one of F64, F32"),
      std::string::npos);
  EXPECT_NE(refusal(R"({"a":{"shape":[2],"data_offsets":[0,8]}})", 8).find("entry 'a': 'dtype' is missing"), std::string::npos);
  EXPECT_NE(refusal(R"({"a":{"dtype":"F32","data_offsets":[0,8]}})", 8).find("'shape' is missing"), std::string::npos);
  EXPECT_NE(refusal(R"({"a":{"dtype":"F32","shape":[2]}})", 8).find("'data_offsets' is missing"), std::string::npos);
  EXPECT_NE(refusal(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", 8).find("holds 1 numbers"), std::string::npos);
  EXPECT_NE(refusal(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1}})", 8).find("number 1"), std::string::npos);
  EXPECT_NE(refusal(R"({"a":7})", 0).find("number 7"), std::string::npos);
  EXPECT_NE(refusal(R"({"__metadata__":{"k":1}})", 0).find("number 1"), std::string::npos);
  EXPECT_NO_THROW(SafetensorsFile::from_memory(file_of(R"({"__metadata__":{"k":"v"}}   )", 0), "x"));
}

TEST(Safetensors, DuplicateKeys) {
  std::string const a = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  EXPECT_NE(refusal("{" + a + "," + a + "}", 8).find("entry 'a': the tensor occurs twice"), std::string::npos);
  EXPECT_NE(refusal(R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8).find("'dtype' occurs twice"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}})", 8).find("'shape' occurs twice"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"__metadata__":{"k":"v","k":"w"}})", 0).find("'k' occurs twice"), std::string::npos);
}

TEST(Safetensors, DeepNestingIsRefusedNotFollowed) {
  std::string header = "{\"a\":";
  header.append(5'000'000, '[');
  EXPECT_NE(refusal(header, 0).find("a list where none belongs"), std::string::npos);
}

TEST(Safetensors, NotAFile) {
  TemporaryDirectory const dir;
  expect_error(ErrorCode::argument, "No such file", [&] { SafetensorsFile(dir / "none"); });
  expect_error(ErrorCode::argument, "not a regular file", [&] { SafetensorsFile(dir / "."); });
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  expect_error(ErrorCode::argument, "not a regular file", [&] { SafetensorsFile(dir / "pipe"); });
}

TEST(SafetensorsWriter, AnErrorLeavesNoFileAndKeepsTheOldOne) {
  TemporaryDirectory const dir;
  {
    std::ofstream old(dir / "out");
    old << "old";
  }
  SafetensorsWriter writer;
  writer.add<float>("a", {1}, std::vector<float>{1});
  writer.add_lazy("b", FileDType::u8, {4}, []() -> std::vector<std::byte> { throw Error(ErrorCode::argument, "no bytes"); });
  EXPECT_EQ(expect_error(ErrorCode::argument, [&] { writer.write(dir / "out"); }), "no bytes");
  EXPECT_EQ(dir.files(), 1U);
  EXPECT_EQ(std::filesystem::file_size(dir / "out"), 3U);
  expect_error(ErrorCode::argument, "cannot create", [&] { SafetensorsWriter().write(dir / "no/such/out"); });
}

TEST(SafetensorsWriter, RefusesToReplaceAnythingButARegularFile) {
  namespace fs = std::filesystem;
  TemporaryDirectory const dir;
  fs::create_directory(dir / "folder");
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  std::ofstream(dir / "old") << "old";
  fs::create_symlink(dir / "old", dir / "link");
  fs::create_symlink(dir / "nothing", dir / "dangling");
  std::size_t const files = dir.files();
  auto const refused = [&](char const* name) { return expect_error(ErrorCode::argument, [&] { SafetensorsWriter().write(dir / name); }); };
  EXPECT_EQ(refused("folder"),
            "cannot write '" + (dir / "folder").string() + "': it is a directory, expected a regular file or nothing yet");
  EXPECT_NE(refused("pipe").find("it is a FIFO"), std::string::npos);
  EXPECT_NE(refused("link").find("it is a symbolic link"), std::string::npos);
  EXPECT_NE(refused("dangling").find("it is a symbolic link"), std::string::npos);
  EXPECT_EQ(dir.files(), files);
  EXPECT_TRUE(fs::is_fifo(dir / "pipe"));
  EXPECT_TRUE(fs::is_symlink(dir / "link"));
  EXPECT_EQ(fs::file_size(dir / "old"), 3U);
  SafetensorsWriter().write(dir / "old");
  EXPECT_GT(fs::file_size(dir / "old"), 3U);
}

TEST(SafetensorsWriter, RefusesWhatTheFormatCannotHold) {
  SafetensorsWriter writer;
  writer.add<float>("a", {1}, std::vector<float>{1});
  EXPECT_EQ(expect_error(ErrorCode::argument, [&] { writer.add<float>("a", {1}, std::vector<float>{1}); }), "tensor 'a' was added twice");
  expect_error(ErrorCode::argument, "of shape [2] was given 4 bytes", [&] { writer.add<float>("b", {2}, std::vector<float>{1}); });
  expect_error(ErrorCode::argument, "'c' of shape [-1]", [&] { writer.add<float>("c", {-1}, std::vector<float>{}); });
  expect_error(ErrorCode::argument, "cannot write", [&] { writer.add<float>("__metadata__", {1}, std::vector<float>{1}); });
}

}  // namespace
