// SPDX-License-Identifier: Apache-2.0
// io/safetensors.hpp: reads one safetensors file. The header is checked completely before any tensor can be read.
//
// The format: 8 bytes little-endian header length N, N bytes of JSON (tensor name -> dtype, shape, data_offsets relative to the
// end of the header; __metadata__: string -> string), then the tensors' bytes without holes, little-endian, row-major.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/io/element.hpp"
#include "moe/io/mapped_file.hpp"
#include "moe/io/one_line.hpp"
#include "moe/io/safetensors_header.hpp"

namespace moe::io {

/// One safetensors file. Only requested data is read: what is copied as it is stored, into its destination by read calls; what is
/// converted, through a mapping. Safe to read from several threads. E_ARG for a file that is cut off while it is copied.
class SafetensorsFile {
 public:
  /// Maps the file and checks its header. Throws E_ARG naming the file, the tensor, the value and the bound.
  explicit SafetensorsFile(std::filesystem::path const& path) : label_(path.string()) {
    file_ = std::make_shared<MappedFile const>(path);
    bytes_ = file_->bytes();
    header_ = parse_safetensors_header(bytes_, label_);
  }
  /// Reads a file that is already in memory; `label` stands for its name in errors. The bytes are borrowed.
  static SafetensorsFile from_memory(std::span<std::byte const> bytes, std::string label) { return {bytes, std::move(label)}; }

  /// The file's name, as given.
  std::string const& label() const { return label_; }
  /// All tensors by name.
  std::map<std::string, TensorInfo, std::less<>> const& tensors() const { return header_.tensors; }
  /// The __metadata__ map; empty if the file has none.
  std::map<std::string, std::string, std::less<>> const& metadata() const { return header_.metadata; }
  /// Bytes of tensor data that were read so far.
  std::uint64_t bytes_read() const { return bytes_read_->load(std::memory_order_relaxed); }

  /// The tensor of that name, or null.
  TensorInfo const* find(std::string_view tensor) const {
    auto const at = header_.tensors.find(tensor);
    return at == header_.tensors.end() ? nullptr : &at->second;
  }
  /// The tensor of that name. Throws E_ARG if there is none.
  TensorInfo const& at(std::string_view tensor) const {
    TensorInfo const* info = find(tensor);
    if (info == nullptr) {
      throw Error(ErrorCode::argument,
                  one_line("tensor '", tensor, "' is missing in '", label_, "', which holds ", listed_tensors(header_.tensors)));
    }
    return *info;
  }

  /// The bytes of a tensor as stored in the file (little-endian, possibly unaligned). Counts them as read.
  std::span<std::byte const> raw(TensorInfo const& info) const {
    count(info.size_bytes());
    return data(info);
  }
  std::span<std::byte const> raw(std::string_view tensor) const { return raw(at(tensor)); }

  /// Bytes [first, first + count) of a tensor as stored in the file, for packed codes of any dtype. Throws E_ARG on a range outside it.
  void read_bytes(TensorInfo const& info, std::int64_t first, std::int64_t count, std::uint8_t* out) const {
    auto const size = static_cast<std::int64_t>(info.size_bytes());
    if (first < 0 || count < 0 || first > size - count) {
      throw Error(ErrorCode::argument, one_line(where(info), ": bytes [", first, ", ", first + count, ") are outside [0, ", size, ")"));
    }
    this->count(static_cast<std::uint64_t>(count));
    copy(info, static_cast<std::uint64_t>(first), static_cast<std::uint64_t>(count), out);
  }

  /// Elements [first, first + count) of a tensor in row-major order, converted to T, into out[count].
  /// T = float, double or bf16: from any floating-point type (rounded to nearest even). T = an integer: from any integer type.
  /// Throws E_ARG on another dtype, on a range outside the tensor, and on an integer that T cannot hold.
  template <class T>
  void read_elements(TensorInfo const& info, std::int64_t first, std::int64_t count, T* out) const {
    if (first < 0 || count < 0 || first > info.elements() - count) {
      throw Error(ErrorCode::argument,
                  one_line(where(info), ": elements [", first, ", ", first + count, ") are outside [0, ", info.elements(), ")"));
    }
    if constexpr (std::is_integral_v<T>) {
      require(info, is_integer(info.dtype), "an integer type");
    } else {
      require(info, is_floating(info.dtype), "a floating-point type");
    }
    std::int64_t const width = bits(info.dtype) / 8;
    std::byte const* from = data(info).data() + first * width;
    this->count(static_cast<std::uint64_t>(count * width));
    if (count == 0) return;
    if (file_dtype_of<T>() == info.dtype) {
      copy(info, static_cast<std::uint64_t>(first * width), static_cast<std::uint64_t>(count * width), out);
    } else if constexpr (std::is_integral_v<T>) {
      detail::for_each_integer(info.dtype, from, count, [&](std::int64_t i, std::optional<std::int64_t> value) {
        if (!value || !std::in_range<T>(*value)) {
          throw Error(ErrorCode::argument,
                      one_line(where(info), ": element ", first + i, " = ", value ? std::to_string(*value) : "above 2^63",
                               " does not fit into ", name(file_dtype_of<T>())));
        }
        out[i] = static_cast<T>(*value);
      });
    } else if constexpr (std::is_same_v<T, double>) {
      detail::for_each_float(info.dtype, from, count, [&](std::int64_t i, float value) { out[i] = value; });
    } else {
      detail::for_each_float(info.dtype, from, count, [&](std::int64_t i, float value) { out[i] = from_float<T>(value); });
    }
  }

  /// A whole tensor, converted to T as by read_elements.
  template <class T>
  std::vector<T> read(TensorInfo const& info) const {
    std::vector<T> out(static_cast<std::size_t>(info.elements()));
    read_elements(info, 0, info.elements(), out.data());
    return out;
  }
  template <class T>
  std::vector<T> read(std::string_view tensor) const {
    return read<T>(at(tensor));
  }
  /// Rows [first, first + rows) along the first dimension, converted to T.
  template <class T>
  std::vector<T> read_rows(TensorInfo const& info, std::int64_t first, std::int64_t rows) const {
    if (info.shape.empty() || first < 0 || rows < 0 || first > info.shape[0] - rows) {
      throw Error(ErrorCode::argument,
                  one_line(where(info), ": rows [", first, ", ", first + rows, ") are outside shape ", info.shape_text()));
    }
    std::int64_t const width = info.shape[0] == 0 ? 0 : info.elements() / info.shape[0];
    std::vector<T> out(static_cast<std::size_t>(rows * width));
    read_elements(info, first * width, rows * width, out.data());
    return out;
  }

  /// "tensor 'x' in 'file' (BF16 [8, 64])": how errors name a tensor.
  std::string where(TensorInfo const& info) const {
    return text("tensor '", info.name, "' in '", label_, "' (", name(info.dtype), ' ', info.shape_text(), ')');
  }

 private:
  SafetensorsFile(std::span<std::byte const> bytes, std::string label)
      : label_(std::move(label)), bytes_(bytes), header_(parse_safetensors_header(bytes, label_)) {}

  std::span<std::byte const> data(TensorInfo const& info) const {
    return bytes_.subspan(static_cast<std::size_t>(header_.data_begin + info.begin), static_cast<std::size_t>(info.size_bytes()));
  }
  /// Bytes [first, first + count) of a tensor as they are stored. The range lies within the tensor.
  void copy(TensorInfo const& info, std::uint64_t first, std::uint64_t count, void* out) const {
    if (count == 0) return;
    if (file_ != nullptr) {
      file_->read(header_.data_begin + info.begin + first, count, out, label_);
    } else {
      std::memcpy(out, data(info).data() + first, static_cast<std::size_t>(count));
    }
  }
  void count(std::uint64_t bytes) const { bytes_read_->fetch_add(bytes, std::memory_order_relaxed); }
  void require(TensorInfo const& info, bool ok, char const* wanted) const {
    if (!ok) throw Error(ErrorCode::argument, one_line(where(info), ": dtype ", name(info.dtype), ", expected ", wanted));
  }

  std::string label_;
  std::span<std::byte const> bytes_;
  std::shared_ptr<MappedFile const> file_;  // null: bytes_ are the caller's
  SafetensorsHeader header_;
  std::unique_ptr<std::atomic<std::uint64_t>> bytes_read_ = std::make_unique<std::atomic<std::uint64_t>>(0);
};

}  // namespace moe::io
