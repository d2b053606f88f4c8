// SPDX-License-Identifier: Apache-2.0
// experts/hopper/tuning_table.hpp: what bench/tune measured on one NVIDIA H200. bench/tune writes this file; choices made by hand stand in
// tuning.hpp. Plain host C++. Beside a choice: rows per expert and, for the shapes {128, 2048, 768, 8} and {32, 7168, 2048, 1}, tile rows
// (x2: in clusters) and microseconds of the whole layer.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/common/problem.hpp"

namespace moe::hopper {

/// The tile for up to `rows` expected rows per expert.
struct TileChoice {
  Scheme scheme;
  std::int64_t rows;
  int tile_rows;
  int cluster;
};

inline constexpr std::int64_t kAnyRows = std::int64_t{1} << 62;

// clang-format off
inline constexpr TileChoice kMeasuredTiles[] = {
    // 16 rows, us: 64 296 160 297; 64 660 160 661
    // 24 rows, us: 64 306 160 307; 64 669 160 677
    // 32 rows, us: 64 317 160 320; 64 682 160 711
    // 40 rows, us: 64 326 160 330; 64 704 160 736
    // 48 rows, us: 64 340 160 339 96 338; 64 717 160 750 96 748
    {Scheme::bf16, 52, 64, 1},
    // 56 rows, us: 64 357 160 344 96 345; 64 758 160 751 96 751
    // 64 rows, us: 64 399 160 351 96 350; 64 888 160 765 96 766
    // 72 rows, us: 64 513 160 413 96 415; 64 980 160 775 96 773
    // 80 rows, us: 64 448 160 367 96 373; 64 953 160 781 96 784
    // 96 rows, us: 64 461 160 380 96 437; 64 1015 160 834 96 954
    // 128 rows, us: 64 558 160 420 160x2 495; 64 1152 160 855 160x2 977
    {Scheme::bf16, kAnyRows, 160, 1},
    // 16 rows, us: 64 163 80 162 128 186 128x2 193; 64 344 80 342 128 371 128x2 365
    {Scheme::fp8_block, 20, 64, 1},
    // 24 rows, us: 64 169 80 166 128 188 128x2 191; 64 358 80 354 128 383 128x2 383
    // 32 rows, us: 64 181 80 176 128 195 128x2 200; 64 369 80 368 128 390 128x2 393
    // 40 rows, us: 64 188 80 185 128 199 128x2 202; 64 384 80 382 128 402 128x2 405
    // 48 rows, us: 64 201 80 197 128 205 128x2 209; 64 395 80 394 128 411 128x2 413
    // 56 rows, us: 64 212 80 204 128 207 128x2 212; 64 424 80 404 128 425 128x2 425
    // 64 rows, us: 64 238 80 213 128 216 128x2 222; 64 495 80 428 128 451 128x2 446
    // 72 rows, us: 64 264 80 228 128 229 128x2 236; 64 548 80 460 128 464 128x2 462
    {Scheme::fp8_block, 76, 80, 1},
    // 80 rows, us: 64 280 80 247 128 246 128x2 251; 64 580 80 516 128 476 128x2 478
    // 96 rows, us: 64 299 80 291 128 260 128x2 266; 64 610 80 601 128 488 128x2 491
    // 128 rows, us: 64 366 80 332 128 313 128x2 345; 64 728 80 659 128 588 128x2 619
    // 192 rows, us: 64 524 80 479 128 406 128x2 443; 64 1062 80 949 128 777 128x2 822
    // 256 rows, us: 64 685 80 628 128 514 128x2 533; 64 1337 80 1221 128 944 128x2 965
    // 512 rows, us: 64 1218 80 1132 128 894 128x2 929; 64 2418 80 2197 128 1607 128x2 1658
    // 1024 rows, us: 64 2375 80 2169 128 1672 128x2 1746; 64 4748 80 4096 128 2926 128x2 3213
    {Scheme::fp8_block, kAnyRows, 128, 1},
};
// clang-format on

}  // namespace moe::hopper
