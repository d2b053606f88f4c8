// SPDX-License-Identifier: Apache-2.0
// tests/golden_dir.hpp: where the reference data lies: the whole set if MOE_GOLDEN_DIR names it, else the selection in tests/data.
#pragma once

#include <cstdlib>
#include <filesystem>

namespace moe_test {

inline std::filesystem::path golden_dir() {
  char const* whole = std::getenv("MOE_GOLDEN_DIR");
  return whole != nullptr && *whole != '\0' ? std::filesystem::path(whole) : std::filesystem::path(MOE_TEST_DATA);
}

}  // namespace moe_test
