// SPDX-License-Identifier: Apache-2.0
// Products on a matrix unit: 16 x 16 sums in a tile, each plus the products of 64 bytes of a line of A with
// 64 of a column of B. A Unit is
//   static constexpr bool is_there
//   begin(), end()                       around the work of a piece
//   zero<C>(); load<I, PASSES>(from, stride); store<C>(to, stride)      a tile: 16 lines of 64 bytes; where it PASSES,
//                                        it should leave the L1 cache to others
//   multiply<C, A, B>()                  C += A B, signed bytes; a line of B holds four of them along the sum for each
//                                        of 16 columns
// Tiles 0 to 3 hold 2 x 2 sums, 4 and 5 those of A, 6 and 7 those of B: four products for four loads.

#pragma once

#include <cstdint>

#include "platform.h"

namespace sparse_bitnet {

struct NoUnit {
  static constexpr bool is_there = false;
};

// Any machine, bit for bit: what tests compare with the reference where there is no such unit.
struct EmulatedUnit {
  static constexpr bool is_there = true;
  std::uint8_t tiles[8][16][64];

  void begin() {}
  void end() {}
  template <int C>
  void zero() {
    __builtin_memset(tiles[C], 0, sizeof tiles[C]);
  }
  template <int I, bool PASSES = false>
  void load(const void* from, std::int64_t stride) {
    for (int i = 0; i < 16; ++i) {
      __builtin_memcpy(tiles[I][i], static_cast<const std::uint8_t*>(from) + i * stride, 64);
    }
  }
  template <int C>
  void store(void* to, std::int64_t stride) {
    for (int i = 0; i < 16; ++i) {
      __builtin_memcpy(static_cast<std::uint8_t*>(to) + i * stride, tiles[C][i], 64);
    }
  }
  template <int C, int A, int B>
  void multiply() {
    for (int token = 0; token < 16; ++token) {
      std::uint32_t sums[16];  // of rows that are not there any bytes: they wrap around
      __builtin_memcpy(sums, tiles[C][token], 64);
      for (int k = 0; k < 64; ++k) {
        const std::int32_t x = std::int8_t(tiles[A][token][k]);
        for (int row = 0; row < 16; ++row) {
          sums[row] += std::uint32_t(x * std::int8_t(tiles[B][k / 4][4 * row + k % 4]));
        }
      }
      __builtin_memcpy(tiles[C][token], sums, 64);
    }
  }
};

#if defined(SPARSE_BITNET_AMX)
// Assembly, since the compilers' own functions do not say that they touch memory.
struct AmxUnit {
  static constexpr bool is_there = true;

  static void begin() {
    struct alignas(64) {
      std::uint8_t palette = 1, start_line = 0, reserved[14] = {};
      std::uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    __asm__ volatile("ldtilecfg %0" : : "m"(shape));
  }
  static void end() { __asm__ volatile("tilerelease"); }

  template <int C>
  void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(C));
  }
  template <int I, bool PASSES = false>
  void load(const void* from, std::int64_t stride) {
    if constexpr (PASSES) {
      __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(I) : "memory");
    } else {
      __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(I) : "memory");
    }
  }
  template <int C>
  void store(void* to, std::int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(C) : "memory");
  }
  template <int C, int A, int B>
  void multiply() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};
#endif

constexpr int unit_tile = 16;
constexpr int unit_side = 2 * unit_tile;  // of 2 x 2 tiles

}  // namespace sparse_bitnet
