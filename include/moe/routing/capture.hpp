// SPDX-License-Identifier: Apache-2.0
// routing/capture.hpp: keeps the routing that the capture hook sees, in memory or in a file, for replay and statistics.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

#include "moe/core/array.hpp"
#include "moe/core/error.hpp"
#include "moe/routing/expert_mapping.hpp"

namespace moe::routing {

/// Recorded routing of one layer: rows in the order of the calls.
struct RoutingRecord {
  int topk = 0;
  std::vector<std::int32_t> ids;  ///< [rows, topk] logical
  std::vector<float> weights;     ///< [rows, topk]
  std::int64_t rows() const { return topk == 0 ? 0 : static_cast<std::int64_t>(ids.size()) / topk; }
};

/// One record per layer, filled through hook(). Host memory.
class RoutingRecorder {
 public:
  explicit RoutingRecorder(int num_layers) : layers_(static_cast<std::size_t>(num_layers)) {}

  /// The hook to hand to the layers; borrows this object.
  CaptureHook hook() { return {&observe, this}; }
  RoutingRecord const& layer(int l) const { return layers_.at(static_cast<std::size_t>(l)); }
  int num_layers() const { return static_cast<int>(layers_.size()); }

  /// Adds the valid rows of a call. Throws E_ARG on an unknown layer or another k than before.
  void add(int layer, Rows<std::int32_t const> ids, Rows<float const> weights, std::int64_t num_valid_rows) {
    if (layer < 0 || layer >= num_layers()) {
      throw Error(ErrorCode::argument, text("layer: ", layer, " is out of range [0, ", num_layers(), ")"));
    }
    RoutingRecord& r = layers_[static_cast<std::size_t>(layer)];
    int const k = static_cast<int>(ids.extent(1));
    if (r.topk != 0 && r.topk != k) throw Error(ErrorCode::argument, text("top_k: ", k, ", the record of layer ", layer, " has ", r.topk));
    r.topk = k;
    for (std::int64_t t = 0; t < num_valid_rows; ++t) {
      r.ids.insert(r.ids.end(), row_ptr(ids, t), row_ptr(ids, t) + k);
      r.weights.insert(r.weights.end(), row_ptr(weights, t), row_ptr(weights, t) + k);
    }
  }

  /// Writes "moe-routing-1\n", the layer count, then per layer k, rows, ids and weights; all little-endian, int64 counts. Written under a
  /// temporary name and renamed. Throws E_ARG if the file cannot be written.
  void write(std::filesystem::path const& path) const {
    std::filesystem::path const part = path.string() + ".part";
    {
      std::ofstream out(part, std::ios::binary);
      out.write(kMagic, sizeof kMagic - 1);
      put(out, num_layers());
      for (RoutingRecord const& r : layers_) {
        put(out, r.topk);
        put(out, r.rows());
        out.write(reinterpret_cast<char const*>(r.ids.data()), static_cast<std::streamsize>(r.ids.size() * sizeof(std::int32_t)));
        out.write(reinterpret_cast<char const*>(r.weights.data()), static_cast<std::streamsize>(r.weights.size() * sizeof(float)));
      }
      out.flush();
      if (!out) throw Error(ErrorCode::argument, text("routing record: cannot write ", part.string()));
    }
    std::error_code failed;
    std::filesystem::rename(part, path, failed);
    if (failed) throw Error(ErrorCode::argument, text("routing record: cannot write ", path.string(), ": ", failed.message()));
  }

  /// Reads what write() wrote. Throws E_ARG naming the file and what is wrong with it.
  static RoutingRecorder read(std::filesystem::path const& path) {
    std::ifstream in(path, std::ios::binary | std::ios::ate);
    auto const refuse = [&](char const* what) { throw Error(ErrorCode::argument, text("routing record: ", path.string(), " ", what)); };
    if (!in) refuse("cannot be read");
    std::int64_t left = in.tellg();
    in.seekg(0);
    std::array<char, sizeof kMagic - 1> magic{};
    in.read(magic.data(), magic.size());
    if (!in || std::memcmp(magic.data(), kMagic, magic.size()) != 0) refuse("is not a routing record");
    left -= static_cast<std::int64_t>(magic.size()) + 8;
    std::int64_t const layers = left < 0 ? -1 : get(in);
    if (layers < 0 || layers > left / 16) refuse("has an impossible number of layers");
    RoutingRecorder recorder(static_cast<int>(layers));
    for (RoutingRecord& r : recorder.layers_) {
      left -= 16;
      std::int64_t const k = left < 0 ? -1 : get(in);
      std::int64_t const rows = left < 0 ? -1 : get(in);
      if (k < 0 || k > kMaxTopK || rows < 0 || (k == 0 && rows != 0) || (k > 0 && rows > left / (8 * k))) refuse("is truncated");
      left -= 8 * k * rows;
      r.topk = static_cast<int>(k);
      r.ids.resize(static_cast<std::size_t>(k * rows));
      r.weights.resize(r.ids.size());
      in.read(reinterpret_cast<char*>(r.ids.data()), static_cast<std::streamsize>(r.ids.size() * sizeof(std::int32_t)));
      in.read(reinterpret_cast<char*>(r.weights.data()), static_cast<std::streamsize>(r.weights.size() * sizeof(float)));
    }
    if (!in || left != 0) refuse("is truncated or too long");
    return recorder;
  }

 private:
  static constexpr char kMagic[] = "moe-routing-1\n";
  static_assert(std::endian::native == std::endian::little, "moe: records are little-endian");
  static void put(std::ofstream& out, std::int64_t v) { out.write(reinterpret_cast<char const*>(&v), sizeof v); }
  static std::int64_t get(std::ifstream& in) {
    std::int64_t v = -1;
    in.read(reinterpret_cast<char*>(&v), sizeof v);
    return in ? v : -1;
  }
  static void observe(void* state, int layer, Rows<std::int32_t const> ids, Rows<float const> weights, std::int64_t num_valid_rows) {
    static_cast<RoutingRecorder*>(state)->add(layer, ids, weights, num_valid_rows);
  }
  std::vector<RoutingRecord> layers_;
};

}  // namespace moe::routing
