// SPDX-License-Identifier: Apache-2.0
// tests/gpu/device_rows.hpp: rows quantised on the device, as bytes, so that tests that read reference files need no nvcc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "moe/core/types.hpp"

namespace moe_test {

struct DeviceRows {
  std::vector<std::byte> codes, scales;  ///< all rows, one after the other
};
/// x [rows, cols] through the scheme of this name. parameter: the scale of per_tensor, the global scale of nvfp4.
DeviceRows quantize_on_device(std::string const& scheme, std::vector<float> const& x, std::int64_t cols, float parameter = 0.0F);
DeviceRows quantize_on_device(std::string const& scheme, std::vector<moe::bf16> const& x, std::int64_t cols);

}  // namespace moe_test
