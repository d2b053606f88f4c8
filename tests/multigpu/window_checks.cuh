// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/window_checks.cuh: what ranks must have received and must give out after a round of one_sided, two_sided or pplx.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "moe/backends/window/device/one_sided/launch.cuh"
#include "moe/backends/window/device/pplx/launch.cuh"
#include "moe/backends/window/device/two_sided/launch.cuh"
#include "tests/multigpu/exchange_ranks.cuh"

namespace moe_test {

using moe::detail::ExchangeTokens;
using moe::detail::OneSidedCalls;
using moe::detail::PeerShape;
using moe::detail::PplxCalls;
using moe::detail::PplxGroup;
using moe::detail::TwoSidedCalls;
using moe::detail::TwoSidedQueues;

/// The order in which outputs are added: by choice; by rank; by rank in the order in which the choices name the ranks.
enum class SumOrder { choices, ranks, named_ranks };

/// The output row that identity experts must give.
inline std::vector<std::uint16_t> expected_sum(RankTokens const& t, int token, std::vector<float> const& values, int topk, int local,
                                               int ranks, SumOrder order) {
  if (order != SumOrder::named_ranks) {
    return expected_output(t, token, values, topk, local, ranks, order == SumOrder::ranks);
  }
  auto const at = static_cast<std::size_t>(token * topk);
  std::vector<int> named;
  for (int j = 0; j < topk; ++j) {
    int const e = t.ids[at + static_cast<std::size_t>(j)];
    if (e >= 0 && std::find(named.begin(), named.end(), e / local) == named.end()) {
      named.push_back(e / local);
    }
  }
  std::vector<std::uint16_t> out(values.size());
  for (std::size_t h = 0; h < values.size(); ++h) {
    float acc = 0.0F;
    for (int r : named) {
      float part = 0.0F;
      for (int j = 0; j < topk; ++j) {
        int const e = t.ids[at + static_cast<std::size_t>(j)];
        if (e >= 0 && e / local == r) {
          part = std::fma(t.weights[at + static_cast<std::size_t>(j)], values[h], part);
        }
      }
      acc += bf16_value(bf16_bits(part));
    }
    out[h] = bf16_bits(acc);
  }
  return out;
}

/// "" or how one received row differs from token `token` of `t`.
inline std::string check_row(PeerShape const& s, RankTokens const& t, int token, char const* bytes, char const* scales) {
  auto const want = wire_row<moe::quantization::ScaleFloor::amax_1e10>(
      t.x.data() + static_cast<std::size_t>(token) * static_cast<std::size_t>(s.hidden), s.hidden, s.fp8);
  if (read_device<unsigned char>(bytes, want.bytes.size()) != want.bytes) {
    return "payload differs";
  }
  if (s.fp8 && read_device<float>(scales, want.scales.size()) != want.scales) {
    return "scales differ";
  }
  return "";
}
/// "" or how the ids and weights of a received row differ.
inline std::string check_choices(PeerShape const& s, RankTokens const& t, int token, int r, std::int32_t const* ids, float const* weights) {
  for (int j = 0; j < s.topk; ++j) {
    auto const i = static_cast<std::size_t>(token * s.topk + j);
    bool const mine = t.ids[i] >= 0 && t.ids[i] / s.local_experts() == r;
    int const id = mine ? t.ids[i] - r * s.local_experts() : -1;
    float const weight = mine ? t.weights[i] : 0.0F;
    if (ids[j] != id || (mine && weights[j] != weight)) {
      return moe::text("choice ", j, ": id ", ids[j], " weight ", weights[j], ", expected ", id, " ", weight);
    }
  }
  return "";
}

/// "" or the first difference between the data that rank r received and the data that all ranks sent. Looks at every `step`-th token's
/// payload.
inline std::string check_rows(std::vector<OneSidedCalls> const& calls, std::vector<RankTokens> const& all, int r, int parity, int step) {
  using moe::text;
  auto const& mine = calls[static_cast<std::size_t>(r)];
  auto const& s = mine.shape();
  auto const& at = mine.layout();
  auto const K = static_cast<std::size_t>(s.topk);
  auto const ids = read_device<std::int32_t>(mine.own<char>(at.ids[parity]), static_cast<std::size_t>(s.rows()) * K);
  auto const weights = read_device<float>(mine.own<char>(at.weights[parity]), static_cast<std::size_t>(s.rows()) * K);
  for (int source = 0; source < s.ranks; ++source) {
    RankTokens const& t = all[static_cast<std::size_t>(source)];
    auto const index = read_device<std::int32_t>(calls[static_cast<std::size_t>(source)].own<char>(at.send_index[parity]),
                                                 static_cast<std::size_t>(t.tokens) * K);
    std::vector<bool> used(static_cast<std::size_t>(s.max_tokens), false);
    int n = 0;
    for (int token = 0; token < t.tokens; ++token) {
      for (std::size_t j = 0; j < K; ++j) {
        std::size_t const i = static_cast<std::size_t>(token) * K + j;
        bool const here = t.ids[i] >= 0 && t.ids[i] / s.local_experts() == r;
        if (!here || index[i] < 0) {
          continue;
        }
        auto const position = static_cast<std::size_t>(index[i]);
        if (position >= used.size() || used[position]) {
          return text("rank ", r, " from ", source, ": row ", position, " given twice");
        }
        used[position] = true;
        ++n;
        std::size_t const row = static_cast<std::size_t>(source) * static_cast<std::size_t>(s.max_tokens) + position;
        auto why = check_choices(s, t, token, r, ids.data() + row * K, weights.data() + row * K);
        if (why.empty() && token % step == 0) {
          why = check_row(s, t, token, mine.own<char>(at.rows[parity]) + row * static_cast<std::size_t>(s.row_bytes()),
                          mine.own<char>(at.scales[parity]) + row * static_cast<std::size_t>(s.scale_stride()) * 4);
        }
        if (!why.empty()) {
          return text("rank ", r, " from ", source, " token ", token, ": ", why);
        }
      }
    }
    int wanted = 0;
    for (int token = 0; token < t.tokens; ++token) {
      wanted += std::any_of(t.ids.begin() + token * s.topk, t.ids.begin() + (token + 1) * s.topk,
                            [&](int e) { return e >= 0 && e / s.local_experts() == r; })
                    ? 1
                    : 0;
    }
    if (n != wanted) {
      return text("rank ", r, " from ", source, ": ", n, " rows, expected ", wanted);
    }
    for (int position = 0; position < s.max_tokens; ++position) {
      std::size_t const row = static_cast<std::size_t>(source * s.max_tokens + position);
      if (used[static_cast<std::size_t>(position)] != (position < n)) {
        return text("rank ", r, " from ", source, ": row ", position, " of ", n);
      }
      for (std::size_t j = 0; j < K && position >= n; ++j) {
        if (ids[row * K + j] != -1) {
          return text("rank ", r, " from ", source, ": row ", position, " past the last has expert ", ids[row * K + j]);
        }
      }
    }
  }
  return "";
}
inline std::string check_rows(std::vector<TwoSidedCalls> const& calls, std::vector<RankTokens> const& all, int r, int parity, int step) {
  using moe::text;
  auto const& mine = calls[static_cast<std::size_t>(r)];
  auto const& s = mine.shape();
  auto const& at = mine.layout();
  auto const K = static_cast<std::size_t>(s.topk);
  auto const ids = read_device<std::int32_t>(mine.own<char>(at.ids[parity]), static_cast<std::size_t>(s.rows()) * K);
  auto const weights = read_device<float>(mine.own<char>(at.weights[parity]), static_cast<std::size_t>(s.rows()) * K);
  std::size_t row = 0;
  for (int source = 0; source < s.ranks; ++source) {
    RankTokens const& t = all[static_cast<std::size_t>(source)];
    for (int token = 0; token < t.tokens; ++token) {
      if (std::none_of(t.ids.begin() + token * s.topk, t.ids.begin() + (token + 1) * s.topk,
                       [&](int e) { return e >= 0 && e / s.local_experts() == r; })) {
        continue;
      }
      auto why = check_choices(s, t, token, r, ids.data() + row * K, weights.data() + row * K);
      if (why.empty() && token % step == 0) {
        why = check_row(s, t, token, mine.own<char>(at.rows[parity]) + row * static_cast<std::size_t>(s.row_bytes()),
                        mine.own<char>(at.scales[parity]) + row * static_cast<std::size_t>(s.scale_stride()) * 4);
      }
      if (!why.empty()) {
        return text("rank ", r, " row ", row, " (token ", token, " of ", source, "): ", why);
      }
      ++row;
    }
  }
  int const n = read_device<std::int32_t>(mine.own<char>(at.summary[parity]), 1)[0];
  return n == static_cast<int>(row) ? "" : text("rank ", r, ": ", n, " rows, expected ", row);
}
inline std::string check_rows(std::vector<PplxCalls> const& calls, std::vector<RankTokens> const& all, int r, int parity, int step) {
  using moe::text;
  auto const& mine = calls[static_cast<std::size_t>(r)];
  auto const& s = mine.shape();
  auto const& at = mine.layout();
  int const L = s.local_experts();
  int const D = mine.group().dp_size;
  auto const num = read_device<std::int32_t>(mine.own<char>(at.num_tokens[parity]), static_cast<std::size_t>(L));
  auto const origins = read_device<std::int32_t>(mine.own<char>(at.origins[parity]), static_cast<std::size_t>(L * at.capacity));
  for (int le = 0; le < L; ++le) {
    int row = le * at.capacity;
    for (int source = 0; source < s.ranks; ++source) {
      RankTokens const& t = all[static_cast<std::size_t>(source)];
      std::vector<int> want;  // source, token and first choice; the order within a source is free
      for (int token = source % D; token < t.tokens; token += D) {
        auto const first = t.ids.begin() + token * s.topk;
        if (auto const found = std::find(first, first + s.topk, r * L + le); found != first + s.topk) {
          want.push_back((source * s.max_tokens + token) * s.topk + static_cast<int>(found - first));
        }
      }
      std::vector<int> got(origins.begin() + row, origins.begin() + row + static_cast<std::ptrdiff_t>(want.size()));
      std::sort(got.begin(), got.end());
      if (got != want) {
        return text("rank ", r, " expert ", le, " from ", source, ": other tokens than expected");
      }
      for (std::size_t i = 0; i < want.size(); ++i, ++row) {
        int const token = origins[static_cast<std::size_t>(row)] / s.topk % s.max_tokens;
        auto const at_row = static_cast<std::size_t>(row);
        auto const why = token % step != 0
                             ? std::string()
                             : check_row(s, t, token, mine.own<char>(at.batch[parity]) + at_row * static_cast<std::size_t>(s.row_bytes()),
                                         mine.own<char>(at.batch_scales[parity]) + at_row * static_cast<std::size_t>(s.groups()) * 4);
        if (!why.empty()) {
          return text("rank ", r, " expert ", le, " row ", row - le * at.capacity, " (token ", token, " of ", source, "): ", why);
        }
      }
    }
    if (num[static_cast<std::size_t>(le)] != row - le * at.capacity) {
      return text("rank ", r, " expert ", le, ": ", num[static_cast<std::size_t>(le)], " rows, expected ", row - le * at.capacity);
    }
  }
  return "";
}

/// "" or the first difference of rank r's output rows, every `step`-th of them.
inline std::string check_sums(PeerShape const& s, SumOrder order, RankTokens const& t, RankBuffers const& b, int r, int step) {
  auto const out = b.out.host();
  for (int token = 0; token < t.tokens; token += step) {
    std::size_t const first = static_cast<std::size_t>(token) * static_cast<std::size_t>(s.hidden);
    auto const row = wire_row<moe::quantization::ScaleFloor::amax_1e10>(t.x.data() + first, s.hidden, s.fp8);
    auto const want = expected_sum(t, token, row.values, s.topk, s.local_experts(), s.ranks, order);
    for (std::size_t h = 0; h < want.size(); ++h) {
      if (bf16_value(out[first + h]) != bf16_value(want[h])) {
        return moe::text("rank ", r, " output (", token, ", ", h, "): ", bf16_value(out[first + h]), ", expected ", bf16_value(want[h]));
      }
    }
  }
  return "";
}

}  // namespace moe_test
