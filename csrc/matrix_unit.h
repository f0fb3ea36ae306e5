// SPDX-License-Identifier: Apache-2.0
// Products on a matrix unit: 16 x 16 sums in a tile, each plus the products of 64 bytes of a line of A with
// 64 of a column of B. A Unit is
//   static constexpr bool is_there
//   begin(), end()                       around the work of a piece
//   zero<C>(); load<I, PASSES>(from, stride); store<C>(to, stride)      a tile: 16 lines of 64 bytes; where it PASSES,
//                                        it should leave the first cache to others
//   multiply<BYTES, C, A, B>()           C += A B: bytes of A are signed; a line of B holds four bytes along
//                                        the sum for each of 16 columns
// Tiles 0 to 3 hold 2 x 2 sums, 4 and 5 those of A, 6 and 7 those of B: four products for four loads.

#pragma once

#include <cstdint>

#include "platform.h"

namespace sparse_bitnet {

enum class BytesOf { signed_b, unsigned_b };

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
  template <BytesOf BYTES, int C, int A, int B>
  void multiply() {
    for (int token = 0; token < 16; ++token) {
      std::uint32_t sums[16];  // of rows that are not there any bytes: they wrap around
      __builtin_memcpy(sums, tiles[C][token], 64);
      for (int k = 0; k < 64; ++k) {
        const std::int32_t x = std::int8_t(tiles[A][token][k]);
        for (int row = 0; row < 16; ++row) {
          const std::uint8_t y = tiles[B][k / 4][4 * row + k % 4];
          sums[row] += std::uint32_t(x * (BYTES == BytesOf::signed_b ? std::int8_t(y) : y));
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
  template <BytesOf BYTES, int C, int A, int B>
  void multiply() {
    if constexpr (BYTES == BytesOf::signed_b) {
      __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
    } else {
      __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
    }
  }
};
#endif

constexpr int unit_tile = 16;
constexpr int unit_tile_bytes = unit_tile * 64;
constexpr int unit_side = 2 * unit_tile;  // of 2 x 2 tiles

// Where the tiles of A or B lie: bytes between two lines, to the next 64 along the sum, and to the second
// tile of a pair.
struct UnitTiles {
  const void* first;
  std::int64_t line, step, second;

  const void* at(std::int64_t k, bool is_second) const {
    return static_cast<const std::uint8_t*>(first) + k * step + is_second * second;
  }
};

// M x N tiles of sums, at `sums` [.., row_step], over `steps` times 64 bytes: added to what is there where
// `from_zero` is false.
template <BytesOf BYTES, int M, int N, class Unit>
__attribute__((noinline)) static void unit_tiles_of_sums(Unit& unit, const UnitTiles& a, const UnitTiles& b,
                                                         std::int64_t steps, bool from_zero,
                                                         std::int32_t* sums, std::int64_t row_step) {
  // Weights, which are unsigned, stay; activations and sums pass.
  constexpr bool passes = BYTES == BytesOf::unsigned_b;
  const std::int64_t bytes = row_step * 4;
  std::int32_t* below = sums + unit_tile * row_step;
  if (from_zero) {
    unit.template zero<0>();
    if constexpr (N == 2) unit.template zero<1>();
    if constexpr (M == 2) unit.template zero<2>();
    if constexpr (M == 2 && N == 2) unit.template zero<3>();
  } else {
    unit.template load<0, passes>(sums, bytes);
    if constexpr (N == 2) unit.template load<1, passes>(sums + unit_tile, bytes);
    if constexpr (M == 2) unit.template load<2, passes>(below, bytes);
    if constexpr (M == 2 && N == 2) unit.template load<3, passes>(below + unit_tile, bytes);
  }
  for (std::int64_t k = 0; k < steps; ++k) {
    unit.template load<6>(b.at(k, false), b.line);
    unit.template load<4, passes>(a.at(k, false), a.line);
    unit.template multiply<BYTES, 0, 4, 6>();
    if constexpr (N == 2) {
      unit.template load<7>(b.at(k, true), b.line);
      unit.template multiply<BYTES, 1, 4, 7>();
    }
    if constexpr (M == 2) {
      unit.template load<5, passes>(a.at(k, true), a.line);
      unit.template multiply<BYTES, 2, 5, 6>();
      if constexpr (N == 2) unit.template multiply<BYTES, 3, 5, 7>();
    }
  }
  unit.template store<0>(sums, bytes);
  if constexpr (N == 2) unit.template store<1>(sums + unit_tile, bytes);
  if constexpr (M == 2) unit.template store<2>(below, bytes);
  if constexpr (M == 2 && N == 2) unit.template store<3>(below + unit_tile, bytes);
}

// The same of m lines of A and n columns of B, 1 to 32 each, in whole tiles.
template <BytesOf BYTES, class Unit>
static inline void unit_sums(Unit& unit, std::int64_t m, std::int64_t n, const UnitTiles& a, const UnitTiles& b,
                             std::int64_t steps, bool from_zero, std::int32_t* sums, std::int64_t row_step) {
  if (m > unit_tile && n > unit_tile) {
    unit_tiles_of_sums<BYTES, 2, 2>(unit, a, b, steps, from_zero, sums, row_step);
  } else if (n > unit_tile) {
    unit_tiles_of_sums<BYTES, 1, 2>(unit, a, b, steps, from_zero, sums, row_step);
  } else if (m > unit_tile) {
    unit_tiles_of_sums<BYTES, 2, 1>(unit, a, b, steps, from_zero, sums, row_step);
  } else {
    unit_tiles_of_sums<BYTES, 1, 1>(unit, a, b, steps, from_zero, sums, row_step);
  }
}

}  // namespace sparse_bitnet
