// SPDX-License-Identifier: Apache-2.0
// io/safetensors_writer.hpp: writes a safetensors file; it appears under its name only when it is complete.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/io/element.hpp"
#include "moe/io/one_line.hpp"
#include "moe/io/safetensors_header.hpp"

namespace moe::io {

/// A file that is written under a temporary name in the same directory and renamed by commit(); without commit() no file remains.
class AtomicFile {
 public:
  /// Throws E_ARG if the directory cannot be written, or if the path exists and is not a regular file: a rename would replace a device, a
  /// pipe or a link.
  explicit AtomicFile(std::filesystem::path path) : path_(std::move(path)) {
    std::error_code error;
    auto const kind = std::filesystem::symlink_status(path_, error).type();
    using std::filesystem::file_type;
    if (kind != file_type::not_found && kind != file_type::none && kind != file_type::regular) {
      throw Error(ErrorCode::argument,
                  one_line("cannot write '", path_.string(), "': it is ", kind_name(kind), ", expected a regular file or nothing yet"));
    }
    static std::atomic<unsigned> counter{0};
    temporary_ = path_;
    temporary_ += text(".tmp-", ::getpid(), '-', counter++);
    file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file_ < 0) fail("cannot create");
  }
  AtomicFile(AtomicFile const&) = delete;
  AtomicFile& operator=(AtomicFile const&) = delete;
  ~AtomicFile() {
    if (file_ >= 0) ::close(file_);
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
  }

  /// Appends. Throws E_ARG if the device is full or fails.
  void write(std::span<std::byte const> bytes) {
    while (!bytes.empty()) {
      ssize_t const n = ::write(file_, bytes.data(), bytes.size());
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) fail("cannot write");
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
  }
  /// Makes the file appear under its name, replacing an older one.
  void commit() {
    int const closed = ::close(std::exchange(file_, -1));
    if (closed != 0) fail("cannot write");
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot rename the finished file to");
    temporary_.clear();
  }

 private:
  [[noreturn]] void fail(char const* what) {
    int const error = errno;
    if (file_ >= 0) ::close(std::exchange(file_, -1));
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
    throw Error(ErrorCode::argument, one_line(what, " '", path_.string(), "': ", std::strerror(error)));
  }
  static constexpr char const* kind_name(std::filesystem::file_type kind) {
    using std::filesystem::file_type;
    switch (kind) {
      case file_type::directory: return "a directory";
      case file_type::symlink: return "a symbolic link";
      case file_type::block: return "a block device";
      case file_type::character: return "a character device";
      case file_type::fifo: return "a FIFO";
      case file_type::socket: return "a socket";
      default: return "of an unknown kind";
    }
  }

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int file_ = -1;
};

/// Collects tensors and writes them as one file. The order in the file depends on the contents only: widest type first, then by name.
class SafetensorsWriter {
 public:
  /// Adds a tensor whose bytes a function makes when the file is written, so that the tensors need not all be in memory at once.
  /// Throws E_ARG if the name is taken.
  void add_lazy(std::string name, FileDType dtype, std::vector<std::int64_t> shape, std::function<std::vector<std::byte>()> make) {
    insert(std::move(name), dtype, std::move(shape), [make = std::move(make)](AtomicFile& file, std::uint64_t expected) {
      std::vector<std::byte> const bytes = make();
      if (bytes.size() != expected) throw Error(ErrorCode::argument, one_line("a tensor of ", expected, " bytes was given ", bytes.size()));
      file.write(bytes);
    });
  }
  /// Adds a tensor given as bytes of any type. The bytes are borrowed until write().
  void add_bytes(std::string name, FileDType dtype, std::vector<std::int64_t> shape, std::span<std::byte const> bytes) {
    auto const expected = detail::tensor_bytes(dtype, shape);
    if (!expected || *expected != bytes.size()) {
      throw Error(ErrorCode::argument, one_line("tensor '", name, "' of shape ", shape_text(shape), " was given ", bytes.size(), " bytes"));
    }
    insert(std::move(name), dtype, std::move(shape), [bytes](AtomicFile& file, std::uint64_t) { file.write(bytes); });
  }
  /// Adds a tensor. The elements are borrowed until write().
  template <class T>
  // NOLINTNEXTLINE(performance-unnecessary-value-param): they are moved, which the check does not see in a template
  void add(std::string name, std::vector<std::int64_t> shape, std::span<T const> elements) {
    add_bytes(std::move(name), file_dtype_of<T>(), std::move(shape), std::as_bytes(elements));
  }
  /// Adds a tensor that the writer keeps.
  template <class T>
  void add(std::string name, std::vector<std::int64_t> shape, std::vector<T> elements) {
    auto kept = std::make_shared<std::vector<T> const>(std::move(elements));
    add(std::move(name), std::move(shape), std::span<T const>(*kept));
    kept_.push_back(std::move(kept));
  }
  /// Sets an entry of __metadata__.
  void set_metadata(std::string key, std::string value) { metadata_[std::move(key)] = std::move(value); }

  /// Writes the file. On any error no file is left and an older one is untouched.
  void write(std::filesystem::path const& path) const {
    std::vector<Entry const*> order;
    order.reserve(entries_.size());
    for (auto const& [name_, entry] : entries_) order.push_back(&entry);
    std::ranges::stable_sort(order, std::greater<>{}, [](Entry const* e) { return bits(e->info.dtype); });

    // Writes the header's members in the order of the data; a JSON object would not keep that order.
    std::string json;
    std::uint64_t offset = 0;
    auto const member = [&](std::string const& key, nlohmann::json const& value) {
      json += (json.empty() ? '{' : ',') + nlohmann::json(key).dump() + ':' + value.dump();
    };
    try {
      if (!metadata_.empty()) member("__metadata__", metadata_);
      for (Entry const* e : order) {
        std::uint64_t const end = offset + e->info.end;
        member(e->info.name, {{"dtype", name(e->info.dtype)}, {"shape", e->info.shape}, {"data_offsets", {offset, end}}});
        offset = end;
      }
      json += json.empty() ? "{}" : "}";
    } catch (nlohmann::json::exception const& error) {
      throw Error(ErrorCode::argument, one_line("a name or metadata value is not UTF-8: ", error.what()));
    }
    json.resize((json.size() + 7) / 8 * 8, ' ');
    if (json.size() > kMaxSafetensorsHeader) {
      throw Error(ErrorCode::argument, one_line("header length ", json.size(), " exceeds the limit of ", kMaxSafetensorsHeader, " bytes"));
    }
    std::array<std::byte, 8> length{};
    for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<std::byte>(json.size() >> (8 * i));

    AtomicFile file(path);
    file.write(length);
    file.write(std::as_bytes(std::span(json)));
    for (Entry const* e : order) e->emit(file, e->info.end);
    file.commit();
  }

 private:
  struct Entry {
    TensorInfo info;  ///< end holds the size in bytes
    std::function<void(AtomicFile&, std::uint64_t)> emit;
  };
  void insert(std::string name, FileDType dtype, std::vector<std::int64_t> shape, std::function<void(AtomicFile&, std::uint64_t)> emit) {
    auto const bytes = detail::tensor_bytes(dtype, shape);
    bool const negative = std::ranges::any_of(shape, [](std::int64_t d) { return d < 0; });
    if (!bytes || negative || name == "__metadata__") {
      throw Error(ErrorCode::argument, one_line("cannot write a tensor '", name, "' of shape ", shape_text(shape)));
    }
    TensorInfo info{.name = name, .dtype = dtype, .shape = std::move(shape), .end = *bytes};
    if (!entries_.emplace(name, Entry{std::move(info), std::move(emit)}).second) {
      throw Error(ErrorCode::argument, one_line("tensor '", name, "' was added twice"));
    }
  }

  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
  std::vector<std::shared_ptr<void const>> kept_;
};

}  // namespace moe::io
