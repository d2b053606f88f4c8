// SPDX-License-Identifier: Apache-2.0
// tests/fuzz/safetensors_fuzz.cpp: any bytes are either a safetensors file, every tensor of which can be read, or a moe::Error.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "moe/io/safetensors.hpp"
#include "printable_error.hpp"

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
        moe_test::check_printable(error);
      }
      if (file.raw(info).size() != info.size_bytes()) __builtin_trap();
    }
  } catch (moe::Error const& error) {
    moe_test::check_printable(error);
  }
  return 0;
}
