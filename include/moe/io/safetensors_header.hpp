// SPDX-License-Identifier: Apache-2.0
// io/safetensors_header.hpp: parses and checks the header of a safetensors file.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/io/element.hpp"
#include "moe/io/one_line.hpp"

namespace moe::io {

/// "[8, 64]"
inline std::string shape_text(std::span<std::int64_t const> shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) out += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return out + "]";
}

/// One tensor of a file.
struct TensorInfo {
  std::string name = {};
  FileDType dtype = FileDType::f32;
  std::vector<std::int64_t> shape = {};  ///< empty: a scalar
  std::uint64_t begin = 0;               ///< bytes from the end of the header
  std::uint64_t end = 0;

  std::uint64_t size_bytes() const { return end - begin; }
  /// Product of the shape; fits int64 in a checked header.
  std::int64_t elements() const {
    std::int64_t n = 1;
    for (std::int64_t d : shape) n *= d;
    return n;
  }
  std::string shape_text() const { return io::shape_text(shape); }
};

/// The contents of a file's header.
struct SafetensorsHeader {
  std::map<std::string, TensorInfo, std::less<>> tensors;
  std::map<std::string, std::string, std::less<>> metadata;
  std::uint64_t data_begin = 0;  ///< offset of the first data byte in the file
};

/// How errors list what a file or checkpoint holds: "2 tensors: a, b". `tensors` is a map by name; names beyond the eighth are left out.
template <class Map>
std::string listed_tensors(Map const& tensors) {
  constexpr int kShown = 8;
  std::string out = text(tensors.size(), " tensors");
  int shown = 0;
  for (auto const& entry : tensors) {
    if (shown == kShown) return out + ", ...";
    out += (shown++ == 0 ? ": " : ", ") + entry.first;
  }
  return out;
}

/// Longest header that the format allows, in bytes.
inline constexpr std::uint64_t kMaxSafetensorsHeader = 100'000'000;

namespace detail {

/// Receives the JSON events of a header. Anything that is not exactly the format's structure is an error, duplicate keys included.
class HeaderHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderHandler(SafetensorsHeader& header, std::string_view label) : header_(header), label_(label) {}

  bool start_object(std::size_t) override {
    if (depth_ == 0) return ++depth_, true;
    if (depth_ != 1 || in_array_) fail("an object where none belongs");
    ++depth_;
    if (entry_ == "__metadata__") {
      if (std::exchange(has_metadata_, true)) fail("'__metadata__' occurs twice");
      return true;
    }
    tensor_ = TensorInfo{};
    tensor_.name = entry_;
    has_dtype_ = has_shape_ = has_offsets_ = false;
    return true;
  }
  bool key(string_t& k) override {
    (depth_ == 1 ? entry_ : field_) = k;
    return true;
  }
  bool end_object() override {
    --depth_;
    if (depth_ != 1 || entry_ == "__metadata__") return true;
    if (!has_dtype_) fail("'dtype' is missing");
    if (!has_shape_) fail("'shape' is missing");
    if (!has_offsets_) fail("'data_offsets' is missing");
    if (!header_.tensors.emplace(tensor_.name, tensor_).second) fail("the tensor occurs twice");
    return true;
  }
  bool string(string_t& value) override {
    if (depth_ != 2 || in_array_) fail(one_line("string \"", value.substr(0, 40), "\" where none belongs"));
    if (entry_ == "__metadata__") {
      if (!header_.metadata.emplace(field_, value).second) fail(one_line("metadata key '", field_, "' occurs twice"));
      return true;
    }
    if (field_ != "dtype") fail(one_line("field '", field_, "' is a string"));
    if (std::exchange(has_dtype_, true)) fail("'dtype' occurs twice");
    auto const type = file_dtype(value);
    if (!type) {
      std::string known;
      for (auto const& row : kFileDTypes) known += (known.empty() ? "" : ", ") + std::string(row.name);
      fail(one_line("dtype '", value.substr(0, 40), "' is unknown, expected one of ", known));
    }
    tensor_.dtype = *type;
    return true;
  }
  bool start_array(std::size_t) override {
    if (depth_ != 2 || in_array_ || entry_ == "__metadata__") fail("a list where none belongs");
    bool const shape = field_ == "shape";
    if (!shape && field_ != "data_offsets") fail(one_line("field '", field_, "' is unknown"));
    if (std::exchange(shape ? has_shape_ : has_offsets_, true)) fail(one_line("'", field_, "' occurs twice"));
    in_array_ = true;
    numbers_.clear();
    return true;
  }
  bool end_array() override {
    in_array_ = false;
    if (field_ == "shape") {
      for (std::uint64_t d : numbers_) {
        if (d > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) fail(one_line("dimension ", d, " exceeds 2^63 - 1"));
        tensor_.shape.push_back(static_cast<std::int64_t>(d));
      }
    } else {
      if (numbers_.size() != 2) fail(one_line("data_offsets holds ", numbers_.size(), " numbers, expected 2"));
      tensor_.begin = numbers_[0];
      tensor_.end = numbers_[1];
    }
    return true;
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (!in_array_) fail(one_line("number ", value, " where none belongs"));
    numbers_.push_back(value);
    return true;
  }
  bool number_integer(number_integer_t value) override { fail(one_line("'", field_, "' holds ", value, ", expected numbers >= 0")); }
  bool number_float(number_float_t, string_t const& spelled) override {
    fail(one_line("'", field_, "' holds ", spelled.substr(0, 40), ", expected integers >= 0"));
  }
  bool null() override { fail("null where none belongs"); }
  bool boolean(bool) override { fail("a boolean where none belongs"); }
  bool binary(binary_t&) override { fail("binary data where none belongs"); }
  bool parse_error(std::size_t at, std::string const&, nlohmann::json::exception const&) override {
    throw Error(ErrorCode::argument, one_line("'", label_, "': the header is not valid JSON at byte ", 8 + at));
  }

 private:
  [[noreturn]] void fail(std::string const& what) const {
    throw Error(ErrorCode::argument, one_line("'", label_, "': header", entry_.empty() ? "" : " entry '", entry_.substr(0, 200),
                                              entry_.empty() ? "" : "'", ": ", what));
  }

  SafetensorsHeader& header_;
  std::string_view label_;
  int depth_ = 0;
  bool in_array_ = false, has_metadata_ = false, has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  std::string entry_, field_;
  TensorInfo tensor_;
  std::vector<std::uint64_t> numbers_;
};

/// Bytes of a tensor of that type and shape; nullopt if the number does not fit 64 bits or is not whole.
inline std::optional<std::uint64_t> tensor_bytes(FileDType type, std::span<std::int64_t const> shape) {
  std::uint64_t n = 1;
  bool zero = false;
  for (std::int64_t d : shape) zero = zero || d == 0;
  for (std::int64_t d : shape) {
    if (zero) continue;
    if (__builtin_mul_overflow(n, static_cast<std::uint64_t>(d), &n)) return std::nullopt;
  }
  if (zero) n = 0;
  if (n > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max() / 64)) return std::nullopt;
  std::uint64_t const total = n * static_cast<std::uint64_t>(bits(type));
  return total % 8 == 0 ? std::optional(total / 8) : std::nullopt;
}

}  // namespace detail

/// Parses the header of a file whose bytes are given, and checks all of it: length, JSON, keys, dtypes, shapes, sizes, and that the
/// tensors cover the data exactly once. Throws E_ARG naming `label`, the tensor, the value and the bound.
inline SafetensorsHeader parse_safetensors_header(std::span<std::byte const> file, std::string_view label) {
  auto fail = [&](std::string const& what) { throw Error(ErrorCode::argument, one_line("'", label, "': ", what)); };
  if (file.size() < 8) fail(one_line("truncated: ", file.size(), " bytes, a safetensors file has at least 8"));
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<std::uint8_t>(file[static_cast<std::size_t>(i)]);
  if (length > kMaxSafetensorsHeader) {
    fail(one_line("no safetensors file: its first 8 bytes give a header length of ", length, ", at most ", kMaxSafetensorsHeader));
  }
  if (length > file.size() - 8) fail(one_line("truncated: header length ", length, " exceeds the ", file.size() - 8, " bytes that follow"));

  SafetensorsHeader header;
  header.data_begin = 8 + length;
  char const* json = reinterpret_cast<char const*>(file.data()) + 8;
  if (length == 0 || json[0] != '{') fail("the header does not begin with '{'");
  detail::HeaderHandler handler(header, label);
  nlohmann::json::sax_parse(json, json + length, static_cast<nlohmann::json_sax<nlohmann::json>*>(&handler));

  std::uint64_t const data_bytes = file.size() - header.data_begin;
  std::vector<TensorInfo const*> order;
  order.reserve(header.tensors.size());
  for (auto const& entry : header.tensors) {
    TensorInfo const& t = entry.second;
    auto const where = [&] { return text("tensor '", t.name.substr(0, 200), "' (", name(t.dtype), ' ', t.shape_text(), "): "); };
    auto const offsets = [&] { return text("data_offsets [", t.begin, ", ", t.end, "]"); };
    auto const bytes = detail::tensor_bytes(t.dtype, t.shape);
    if (!bytes) fail(where() + "the size is not a whole number of bytes below 2^60");
    if (t.begin > t.end) fail(where() + offsets() + " run backwards");
    if (t.end > data_bytes) fail(one_line(where(), offsets(), " end after the file's ", data_bytes, " data bytes"));
    if (t.end - t.begin != *bytes) fail(one_line(where(), offsets(), " span ", t.end - t.begin, " bytes, the shape needs ", *bytes));
    order.push_back(&t);
  }
  std::ranges::sort(order,
                    [](TensorInfo const* a, TensorInfo const* b) { return std::pair(a->begin, a->end) < std::pair(b->begin, b->end); });
  std::uint64_t covered = 0;
  TensorInfo const* previous = nullptr;
  for (TensorInfo const* t : order) {
    if (t->begin != covered) {
      fail(one_line("tensor '", t->name.substr(0, 200), "' begins at data byte ", t->begin,
                    t->begin < covered ? " and overlaps" : ", leaving a hole after", previous == nullptr ? " the header" : " tensor '",
                    previous == nullptr ? "" : previous->name.substr(0, 200) + "'", ", which ends at ", covered));
    }
    covered = t->end;
    previous = t;
  }
  if (covered != data_bytes) fail(one_line("the tensors cover ", covered, " of ", data_bytes, " data bytes"));
  return header;
}

}  // namespace moe::io
