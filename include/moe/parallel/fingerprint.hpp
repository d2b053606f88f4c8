// SPDX-License-Identifier: Apache-2.0
// parallel/fingerprint.hpp: checks that all ranks have the same configuration: named fields, a hash, and the first field that differs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"

namespace moe {

/// FNV-1a, 64 bits: the same on every platform. `seed` chains calls.
constexpr std::uint64_t fnv1a(std::string_view bytes, std::uint64_t seed = 0xcbf29ce484222325ULL) {
  for (char c : bytes) seed = (seed ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return seed;
}

/// Every value that all ranks of a group must share, in a fixed order. Host memory.
class Fingerprint {
 public:
  /// Appends a field. Names and values hold no newline; values print with operator<<.
  template <class T>
  Fingerprint& add(std::string_view field, T const& value) {
    fields_.emplace_back(std::string(field), text(value));
    return *this;
  }

  std::vector<std::pair<std::string, std::string>> const& fields() const { return fields_; }
  std::uint64_t hash() const { return fnv1a(encode()); }

  /// One "name=value" line a field.
  std::string encode() const {
    std::string out;
    for (auto const& [field, value] : fields_) out.append(field).append(1, '=').append(value).append(1, '\n');
    return out;
  }
  /// Inverse of encode(). E_MISMATCH on text that is not a fingerprint (a peer of another version).
  static Fingerprint decode(std::string_view lines) {
    Fingerprint out;
    while (!lines.empty()) {
      std::size_t const end = lines.find('\n');
      std::size_t const equals = lines.find('=');
      if (end == std::string_view::npos || equals == std::string_view::npos || equals > end) {
        throw Error(ErrorCode::mismatch, "a rank sent a configuration fingerprint that cannot be read");
      }
      out.add(lines.substr(0, equals), lines.substr(equals + 1, end - equals - 1));
      lines.remove_prefix(end + 1);
    }
    return out;
  }

  bool operator==(Fingerprint const&) const = default;

 private:
  std::vector<std::pair<std::string, std::string>> fields_;
};

/// E_MISMATCH naming the first field (in field order) whose value differs between ranks, the lowest rank that differs from rank 0,
/// and both values. `ranks[r]` is rank r's fingerprint; as all ranks see the same vector, all throw the same error.
inline void check_identical(std::vector<Fingerprint> const& ranks) {
  if (ranks.empty()) return;
  auto const& expected = ranks.front().fields();
  for (std::size_t f = 0;; ++f) {
    bool any = false;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      auto const& fields = ranks[r].fields();
      any = any || f < fields.size();
      bool const here = f < fields.size();
      if (here != (f < expected.size()) || (here && fields[f].first != expected[f].first)) {
        throw Error(ErrorCode::mismatch, text("field ", f < expected.size() ? expected[f].first : fields[f].first,
                                              " is not part of the configuration of both rank 0 and rank ", r));
      }
      if (here && fields[f].second != expected[f].second) {
        throw Error(ErrorCode::mismatch, text("ranks disagree about ", expected[f].first, ": rank 0 has ", expected[f].second, ", rank ", r,
                                              " has ", fields[f].second));
      }
    }
    if (!any) return;
  }
}

/// Collective: `all_gather(std::string) -> std::vector<std::string>` over the group. Raises check_identical's error on all ranks.
template <class AllGather>
void check_identical_over(Fingerprint const& mine, AllGather&& all_gather) {
  std::vector<Fingerprint> ranks;
  for (std::string const& lines : all_gather(mine.encode())) ranks.push_back(Fingerprint::decode(lines));
  check_identical(ranks);
}

}  // namespace moe
