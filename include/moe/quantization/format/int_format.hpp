// SPDX-License-Identifier: Apache-2.0
// quantization/format/int_format.hpp: the widths and groups of integer weights that checkpoints use.
#pragma once

#include "moe/core/error.hpp"

namespace moe::quantization {

/// E_CONFIG unless bits are 4 or 8 and the group size is one that checkpoints use (-1: one group per row).
inline void check_int_format(int bits, int group_size) {
  if (bits != 4 && bits != 8) throw Error(ErrorCode::config, text("only 4 and 8 bit weights, got ", bits, " bits"));
  if (group_size != -1 && group_size != 16 && group_size != 32 && group_size != 64 && group_size != 128 && group_size != 256) {
    throw Error(ErrorCode::config, text("group size ", group_size, " is not one of -1, 16, 32, 64, 128, 256"));
  }
}

}  // namespace moe::quantization
