// SPDX-License-Identifier: Apache-2.0
// bench/products.hpp: the shapes and the command line of runner_products_bench, which of some ways is the fastest, and from which number of
// rows on. Plain host C++.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "bench/arguments.hpp"

namespace moe_bench {

enum class Part {
  shared,       ///< a gated expert that every row visits: width is its intermediate size
  projections,  ///< a pair, into a latent space and out of it: width is that of the space
  gate,         ///< width is the number of experts
};
struct ProductShape {
  Part part;
  int hidden;
  int width;
};
inline std::map<std::string, ProductShape> const kProductShapes{
    {"shared-deepseek-v3", {Part::shared, 7168, 2048}}, {"shared-glm-4.5", {Part::shared, 5120, 1536}},
    {"shared-qwen3-next", {Part::shared, 2048, 512}},   {"latent-nemotron-3-super", {Part::projections, 4096, 1024}},
    {"gate-deepseek-v3", {Part::gate, 7168, 256}},      {"gate-glm-4.5", {Part::gate, 5120, 160}},
    {"gate-qwen3-next", {Part::gate, 2048, 512}}};

struct ProductOptions {
  std::map<std::string, ProductShape> shapes = kProductShapes;
  std::vector<int> rows{1, 8, 32, 64, 128, 256, 512, 1024, 4096};
  std::string json;  ///< a file for the times, or empty
};

/// --shapes PART,… (the shapes whose names contain a part, or all), --rows N,… and --json FILE. Throws BadArgument for others.
inline ProductOptions product_options(int argc, char** argv) {
  ProductOptions o;
  for (int i = 1; i < argc; i += 2) {
    std::string const key = known_name("option", argv[i], {"--shapes", "--rows", "--json"});
    std::string const value = value_of(argc, argv, i);
    if (key == "--json") {
      o.json = value;
    } else if (key == "--rows") {
      o.rows = counts(key, value);
      std::sort(o.rows.begin(), o.rows.end());
      o.rows.erase(std::unique(o.rows.begin(), o.rows.end()), o.rows.end());
    } else {
      Names const parts = split(value);
      o.shapes = find_shapes(kProductShapes, parts.empty() ? "" : parts[0]);
      for (std::string const& part : parts) o.shapes.merge(find_shapes(kProductShapes, part));
    }
  }
  return o;
}

inline constexpr double kNotTimed = std::numeric_limits<double>::infinity();  ///< of a way whose result is wrong
/// By so much of its time another way must be faster than today's: less may change from run to run.
inline constexpr double kMargin = 0.03;

/// The fastest of some ways: today's, unless another one is faster by kMargin.
inline std::size_t fastest(std::vector<double> const& us, std::size_t today) {
  std::size_t best = today;
  for (std::size_t i = 0; i < us.size(); ++i) {
    if (us[i] < us[best]) best = i;
  }
  return us[best] < (1 - kMargin) * us[today] ? best : today;
}

/// "dense up to 64, stored": which way is the fastest for rows in ascending order. A way holds up to the last number of rows that was
/// measured for it.
inline std::string ranges(std::vector<int> const& rows, std::vector<std::string> const& best) {
  std::string out;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    bool const last = i + 1 == rows.size();
    if (!last && best[i + 1] == best[i]) continue;
    out += (out.empty() ? "" : ", ") + best[i];
    if (!last) out += " up to " + std::to_string(rows[i]);
  }
  return out;
}

}  // namespace moe_bench
