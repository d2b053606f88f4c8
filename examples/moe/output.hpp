// SPDX-License-Identifier: Apache-2.0
// examples/moe/output.hpp: checks the files to be written before any work is done.
#pragma once

#include <filesystem>
#include <system_error>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/io/one_line.hpp"
#include "moe/io/safetensors_writer.hpp"

namespace moe_tool {

/// E_ARG if `output`, the value of `option`, is one of the input files, under any name, or cannot be written. Leaves no file behind.
inline void check_output(std::filesystem::path const& output, std::vector<std::filesystem::path> const& inputs,
                         char const* option = "--output") {
  for (auto const& input : inputs) {
    std::error_code missing;
    if (std::filesystem::equivalent(output, input, missing)) {
      throw moe::Error(moe::ErrorCode::argument, moe::io::one_line(option, " '", output.string(), "' is the input file '", input.string(),
                                                                   "': inputs are never written"));
    }
  }
  moe::io::AtomicFile const trial(output);
}

}  // namespace moe_tool
