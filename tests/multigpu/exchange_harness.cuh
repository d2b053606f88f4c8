// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/exchange_harness.cuh: the expected results of the low-latency and the high-throughput exchange, computed on the host.
// Shared by the tests and the benchmark.
#pragma once

#include "moe/backends/window/device/high_throughput/calls.hpp"
#include "moe/backends/window/device/low_latency/calls.hpp"
#include "tests/multigpu/exchange_ranks.cuh"

namespace moe_test {

/// "" or the first difference between the data that rank `r` received and the data that all ranks sent. Looks at every `step`-th token's
/// payload.
inline std::string check_low_latency_rows(moe::detail::LowLatencyCalls const& calls, std::vector<RankTokens> const& all,
                                          RankBuffers const& b, int r, int parity, int step) {
  using moe::text;
  auto const& s = calls.shape();
  int const L = s.local_experts();
  auto const num = b.num.host();
  auto const batch = static_cast<std::size_t>(L) * static_cast<std::size_t>(s.capacity());
  auto const sources = read_device<std::int32_t>(calls.own<char>(calls.layout().sources[parity]), batch);
  for (int le = 0; le < L; ++le) {
    std::size_t n = 0;
    for (int src = 0; src < s.ranks; ++src) {
      RankTokens const& t = all[static_cast<std::size_t>(src)];
      for (int i = 0; i < t.tokens * s.topk; ++i) {
        if (t.ids[static_cast<std::size_t>(i)] != r * L + le) {
          continue;
        }
        int const token = i / s.topk;
        auto const first = t.ids.begin() + static_cast<std::ptrdiff_t>(token) * s.topk;
        if (std::find(first, t.ids.begin() + i, r * L + le) != t.ids.begin() + i) {
          continue;  // an expert gets one row of a token
        }
        std::size_t const at = static_cast<std::size_t>(le) * static_cast<std::size_t>(s.capacity()) + n++;
        int const source = src * s.max_tokens + token;
        if (sources[at] != source) {
          return text("rank ", r, " expert ", le, " row ", n - 1, ": source ", sources[at], ", expected ", source);
        }
        if (token % step != 0) {
          continue;
        }
        auto const row = wire_row<moe::quantization::ScaleFloor::amax_1e4>(
            t.x.data() + static_cast<std::size_t>(token) * static_cast<std::size_t>(s.hidden), s.hidden, s.fp8);
        std::size_t const index = s.per_rank ? static_cast<std::size_t>(source) : at;
        auto const bytes =
            read_device<unsigned char>(calls.own<char>(calls.layout().rows[parity]) + index * row.bytes.size(), row.bytes.size());
        if (bytes != row.bytes) {
          return text("rank ", r, " expert ", le, " row ", n - 1, ": payload differs");
        }
        if (s.fp8) {
          auto const scales =
              read_device<float>(calls.own<char>(calls.layout().scales[parity]) + index * row.scales.size() * 4, row.scales.size());
          if (scales != row.scales) {
            return text("rank ", r, " expert ", le, " row ", n - 1, ": scales differ");
          }
        }
      }
    }
    if (num[static_cast<std::size_t>(le)] != static_cast<int>(n)) {
      return text("rank ", r, " expert ", le, ": ", num[static_cast<std::size_t>(le)], " rows, expected ", n);
    }
  }
  return "";
}

/// "" or the first difference in what rank `r` received from the high-throughput dispatch.
inline std::string check_high_throughput_rows(moe::detail::HighThroughputCalls const& calls, std::vector<RankTokens> const& all, int r,
                                              int parity, int routing_parity, int step) {
  using moe::text;
  auto const& s = calls.shape();
  auto const& at = calls.layout();
  int const L = s.local_experts();
  auto const K = static_cast<std::size_t>(s.topk);
  auto const rows = static_cast<std::size_t>(s.rows());
  auto const summary = read_device<std::int32_t>(calls.own<char>(at.summary[routing_parity]), 2 + 2 * static_cast<std::size_t>(L));
  auto const W = static_cast<std::size_t>(at.record_words);
  auto const records = read_device<std::int32_t>(calls.own<char>(at.records[parity]), rows * W);
  auto id_of = [&](std::size_t row, std::size_t j) { return records[row * W + j]; };
  auto weight_of = [&](std::size_t row, std::size_t j) {
    float f;
    std::memcpy(&f, &records[row * W + K + j], 4);
    return f;
  };
  auto source_of = [&](std::size_t row) { return records[row * W + (s.lists ? 3 : 2) * K]; };
  std::vector<std::vector<std::int32_t>> lists(static_cast<std::size_t>(L));
  std::size_t n = 0;
  for (int src = 0; src < s.ranks; ++src) {
    RankTokens const& t = all[static_cast<std::size_t>(src)];
    for (int token = 0; token < t.tokens; ++token) {
      bool here = false;
      for (std::size_t j = 0; j < K; ++j) {
        int const e = t.ids[static_cast<std::size_t>(token) * K + j];
        here = here || (e >= 0 && e / L == r);
      }
      if (!here) {
        continue;
      }
      if (source_of(n) != src * s.max_tokens + token) {
        return text("rank ", r, " row ", n, ": source ", source_of(n), ", expected ", src * s.max_tokens + token);
      }
      for (std::size_t j = 0; j < K; ++j) {
        int const e = t.ids[static_cast<std::size_t>(token) * K + j];
        bool const mine = e >= 0 && e / L == r;
        int const want = mine ? e - r * L : -1;
        float const w = mine ? t.weights[static_cast<std::size_t>(token) * K + j] : 0.0F;
        if (id_of(n, j) != want || weight_of(n, j) != w) {
          return text("rank ", r, " row ", n, " choice ", j, ": id ", id_of(n, j), " weight ", weight_of(n, j), ", expected ", want, " ",
                      w);
        }
        if (mine) {
          lists[static_cast<std::size_t>(want)].push_back(static_cast<std::int32_t>(n));
        }
      }
      if (token % step == 0) {
        auto const row = wire_row<moe::quantization::ScaleFloor::amax_1e10>(
            t.x.data() + static_cast<std::size_t>(token) * static_cast<std::size_t>(s.hidden), s.hidden, s.fp8);
        if (read_device<unsigned char>(calls.own<char>(at.rows[parity]) + n * row.bytes.size(), row.bytes.size()) != row.bytes) {
          return text("rank ", r, " row ", n, ": payload differs");
        }
        if (s.fp8 && read_device<float>(calls.own<char>(at.scales[parity]) + n * static_cast<std::size_t>(at.scale_stride) * 4,
                                        row.scales.size()) != row.scales) {
          return text("rank ", r, " row ", n, ": scales differ");
        }
      }
      ++n;
    }
  }
  if (summary[0] != static_cast<int>(n)) {
    return text("rank ", r, ": ", summary[0], " rows, expected ", n);
  }
  for (std::size_t i = n * K; i < rows * K; ++i) {
    if (id_of(i / K, i % K) != -1) {
      return text("rank ", r, " row ", i / K, " past the last: id ", id_of(i / K, i % K));
    }
  }
  if (s.lists) {
    std::size_t first = 0;
    auto const list = read_device<std::int32_t>(calls.own<char>(at.list[parity]), static_cast<std::size_t>(s.list_size()));
    for (int le = 0; le < L; ++le) {
      auto const& want = lists[static_cast<std::size_t>(le)];
      auto const i = static_cast<std::size_t>(le);
      if (summary[2 + i] != static_cast<int>(want.size()) || summary[2 + static_cast<std::size_t>(L) + i] != static_cast<int>(first)) {
        return text("rank ", r, " expert ", le, ": ", summary[2 + i], " rows from ", summary[2 + static_cast<std::size_t>(L) + i],
                    ", expected ", want.size(), " from ", first);
      }
      std::size_t const padded = (want.size() + static_cast<std::size_t>(s.alignment) - 1) / static_cast<std::size_t>(s.alignment) *
                                 static_cast<std::size_t>(s.alignment);
      for (std::size_t k = 0; k < padded; ++k) {
        int const expected = k < want.size() ? want[k] : -1;
        if (list[first + k] != expected) {
          return text("rank ", r, " expert ", le, " list entry ", k, ": ", list[first + k], ", expected ", expected);
        }
      }
      first += padded;
    }
    if (summary[1] != static_cast<int>(first)) {
      return text("rank ", r, ": list of ", summary[1], " entries, expected ", first);
    }
  }
  return "";
}

}  // namespace moe_test
