// SPDX-License-Identifier: Apache-2.0
// bench/given_routing.hpp: the routing of one rank out of a file, so that two implementations run with the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "moe/core/error.hpp"

namespace moe_bench {

struct RoutingWidths {
  int experts;
  int topk;
};

/// ids and weights [tokens, topk] of one rank. The file: ids int32 [ranks, tokens, topk], then weights float32 of the same shape, in this
/// machine's byte order. E_ARG: a file that cannot be read or has another size, an id that is not an expert or occurs twice in its row, a
/// weight that is not finite.
struct GivenRouting {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;

  GivenRouting(std::string const& file, RoutingWidths widths, int tokens, int rank, int ranks)
      : ids(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(widths.topk)), weights(ids.size()) {
    auto const expect = [&](bool good, auto const&... parts) {
      if (!good) throw moe::Error(moe::ErrorCode::argument, moe::text("--routing: ", file, parts...));
    };
    auto const bytes = static_cast<std::int64_t>(ids.size() * sizeof(std::int32_t));  // of one rank's ids, and of its weights
    std::ifstream in(file, std::ios::binary | std::ios::ate);
    expect(in.good(), " cannot be read");
    std::int64_t const size = in.tellg();
    expect(size == 2 * ranks * bytes, " has ", size, " bytes, expected ", 2 * ranks * bytes, " (", ranks, " ranks, ", tokens,
           " tokens, top ", widths.topk, ", 8 bytes each)");
    in.seekg(rank * bytes).read(reinterpret_cast<char*>(ids.data()), bytes);
    in.seekg((ranks + rank) * bytes).read(reinterpret_cast<char*>(weights.data()), bytes);
    expect(in.good(), " cannot be read");
    for (std::size_t i = 0; i < ids.size(); ++i) {
      std::size_t const row = i - i % static_cast<std::size_t>(widths.topk);
      auto const slot = [&] {
        return moe::text(", rank ", rank, ", slot ", i - row, " of token ", row / static_cast<std::size_t>(widths.topk));
      };
      expect(ids[i] >= 0 && ids[i] < widths.experts, slot(), ": expert ", ids[i], " is outside [0, ", widths.experts, ")");
      expect(std::find(&ids[row], &ids[i], ids[i]) == &ids[i], slot(), ": expert ", ids[i], " occurs twice");
      expect(std::isfinite(weights[i]), slot(), ": the weight ", weights[i], " is not finite");
    }
  }
};

}  // namespace moe_bench
