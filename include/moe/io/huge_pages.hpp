// SPDX-License-Identifier: Apache-2.0
// io/huge_pages.hpp: huge pages for memory that is about to be filled.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace moe::io {

/// Asks the system to back the whole pages of [data, data + bytes) with huge pages where they were not touched yet: filling gigabytes then
/// takes a fault for each 2 MiB, not for each 4 KiB. A system without huge pages ignores it; no value in the memory changes.
inline void advise_huge_pages(void* data, std::size_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr std::size_t kLeast = std::size_t{4} << 20;  // smaller arrays have no whole huge page for sure
  if (bytes < kLeast) return;
  auto const page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  auto const address = reinterpret_cast<std::uintptr_t>(data);
  std::uintptr_t const first = (address + page - 1) / page * page;
  std::uintptr_t const last = (address + bytes) / page * page;
  ::madvise(static_cast<char*>(data) + (first - address), last - first, MADV_HUGEPAGE);  // advice: a failure changes nothing
#else
  static_cast<void>(data), static_cast<void>(bytes);
#endif
}

}  // namespace moe::io
