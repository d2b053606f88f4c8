// SPDX-License-Identifier: Apache-2.0
// io/progress_line.hpp: what LoadOptions::progress and load_runner's options take to show on a terminal how far loading is.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

namespace moe::io {

/// A line "<what>: 45 % of 1155 MiB" that is written over with each percent and cleared at the end, or when the last copy goes.
class ProgressLine {
 public:
  struct Params {
    std::string what = "reading experts";
    bool shown = true;                                   ///< false on all ranks but one
    std::FILE* to = stderr;                              ///< borrowed
    bool terminal_only = true;                           ///< nothing is written to a file or a pipe
    std::int64_t least_bytes = std::int64_t{256} << 20;  ///< shorter loads show nothing
  };
  ProgressLine() : ProgressLine(Params{}) {}
  explicit ProgressLine(Params params) : line_(std::make_shared<Line>(std::move(params))) {}

  /// By one thread at a time.
  void operator()(std::int64_t done, std::int64_t total) const { line_->show(done, total); }

 private:
  struct Line {
    Params p;
    std::int64_t percent = -1;
    bool drawn = false;

    explicit Line(Params params) : p(std::move(params)) { p.shown = p.shown && (!p.terminal_only || ::isatty(::fileno(p.to)) != 0); }
    Line(Line const&) = delete;
    Line& operator=(Line const&) = delete;
    ~Line() { clear(); }
    void show(std::int64_t done, std::int64_t total) {
      if (!p.shown || total < p.least_bytes || total <= 0 || 100 * done / total == percent) return;
      percent = 100 * done / total;
      if (done >= total) return clear();
      drawn = true;
      std::fprintf(p.to, "\r%s: %3lld %% of %lld MiB", p.what.c_str(), static_cast<long long>(percent),
                   static_cast<long long>(total >> 20));
      std::fflush(p.to);
    }
    void clear() {
      if (!drawn) return;
      std::fprintf(p.to, "\r%*s\r", static_cast<int>(p.what.size()) + 32, "");
      std::fflush(p.to);
      drawn = false;
    }
  };
  std::shared_ptr<Line> line_;
};

}  // namespace moe::io
