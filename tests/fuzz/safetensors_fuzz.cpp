// SPDX-License-Identifier: Apache-2.0
// tests/fuzz/safetensors_fuzz.cpp: any bytes are either a safetensors file, every tensor of which can be read, or a moe::Error.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "moe/io/safetensors.hpp"

namespace {
/// Every error is one printable line, for any names in the file.
void check(moe::Error const& error) {
  std::string const& message = error.message();
  if (message.empty() || message.size() > 4096) __builtin_trap();
  if (std::any_of(message.begin(), message.end(), [](unsigned char c) { return c < 0x20; })) __builtin_trap();
}
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  try {
    auto const file = moe::io::SafetensorsFile::from_memory(std::as_bytes(std::span(data, size)), "fuzz");
    for (auto const& entry : file.tensors()) {
      moe::io::TensorInfo const& info = entry.second;
      try {
        if (moe::io::is_integer(info.dtype)) {
          (void)file.read<std::int32_t>(info);
        } else {
          (void)file.read<float>(info);
          (void)file.read<moe::bf16>(info);
        }
        (void)file.read_rows<float>(info, 1, 1);
      } catch (moe::Error const& error) {
        check(error);
      }
      if (file.raw(info).size() != info.size_bytes()) __builtin_trap();
    }
  } catch (moe::Error const& error) {
    check(error);
  }
  return 0;
}
