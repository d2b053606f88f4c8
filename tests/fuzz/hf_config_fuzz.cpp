// SPDX-License-Identifier: Apache-2.0
// tests/fuzz/hf_config_fuzz.cpp: any text is either a configuration that describes its layers, or a moe::Error.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "moe/io/block_metadata.hpp"
#include "moe/io/layer_description_json.hpp"
#include "moe/io/layer_from_config.hpp"
#include "printable_error.hpp"

namespace {
/// A layer must be constructible from a description.
void check(moe::io::LayerDescription const& d) {
  bool const sound = d.hidden >= 1 && d.hidden <= moe::io::kMaxConfigValue && d.intermediate >= 1 && d.router.num_experts >= 1 &&
                     d.router.topk >= 1 && d.router.topk <= d.router.num_experts + d.router.num_zero_experts &&
                     d.shared.intermediate >= 0 && d.latent >= 0;
  if (!sound) __builtin_trap();
  (void)moe::io::to_json(d);
}
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  std::string_view const text(reinterpret_cast<char const*>(data), size);
  try {
    auto const config = moe::io::HfConfig::from_text(text, "fuzz");
    for (std::int64_t layer : {0, 1, 5}) {
      try {
        check(moe::io::from_config(config, layer));
      } catch (moe::Error const& error) {
        moe_test::check_printable(error);
      }
    }
  } catch (moe::Error const& error) {
    moe_test::check_printable(error);
  }
  try {
    moe::io::Metadata map;
    auto const json = moe::io::parse_json(text, "fuzz");
    for (auto const& [key, value] : json.items()) {
      if (value.is_string()) map[key] = value.get<std::string>();
    }
    check(moe::io::from_block_metadata(map, "fuzz"));
  } catch (moe::Error const& error) {
    moe_test::check_printable(error);
  }
  return 0;
}
