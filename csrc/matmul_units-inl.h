// SPDX-License-Identifier: Apache-2.0
// Many tokens on a matrix unit: 16 x 16 sums in a tile, each plus the products of 64 bytes of a token with
// 64 of a row. Included by matmul-inl.h. A Unit is
//   static constexpr bool is_there
//   begin(), end()                       around the work of a piece
//   zero<C>(); load<I>(from, stride); store<C>(to, stride)      a tile: 16 lines of 64 bytes
//   multiply<C, A, B>()                  C += A B, signed times unsigned bytes; of B, as
//                                        matmul_tiles-inl.h lays them, lines of 16 rows' four columns
// Tiles 0 to 3 hold 2 x 2 sums, 4 and 5 tokens, 6 and 7 rows: four products for four loads. 32 rows of a
// block stay in the first cache and meet all tokens.

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
  template <int I>
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
          sums[row] += std::uint32_t(x * tiles[B][k / 4][4 * row + k % 4]);
        }
      }
      __builtin_memcpy(tiles[C][token], sums, 64);
    }
  }
};

constexpr int unit_tile = 16;
constexpr int unit_tile_bytes = unit_tile * 64;

// M x N tiles of sums, at `dots` [tokens, row_step], over `steps` times 64 columns: added to what is there
// where `first` is false. The tiles of tokens lie one behind another, x_step between two of the same
// columns; lines of weights 4 * tile_rows apart, and n_step between two tiles of the same columns.
template <int M, int N, class Unit>
TARGET __attribute__((noinline)) static void unit_sums(Unit& unit, const std::int8_t* x, std::int64_t x_step,
                                                       const std::uint8_t* weights, std::int64_t n_step,
                                                       std::int64_t steps, bool first, std::int32_t* dots,
                                                       std::int64_t row_step) {
  const std::int64_t bytes = row_step * 4;
  std::int32_t* below = dots + unit_tile * row_step;
  if (first) {
    unit.template zero<0>();
    if constexpr (N == 2) unit.template zero<1>();
    if constexpr (M == 2) unit.template zero<2>();
    if constexpr (M == 2 && N == 2) unit.template zero<3>();
  } else {
    unit.template load<0>(dots, bytes);
    if constexpr (N == 2) unit.template load<1>(dots + unit_tile, bytes);
    if constexpr (M == 2) unit.template load<2>(below, bytes);
    if constexpr (M == 2 && N == 2) unit.template load<3>(below + unit_tile, bytes);
  }
  constexpr std::int64_t line = 4 * tile_rows;
  for (std::int64_t k = 0; k < steps; ++k, x += unit_tile_bytes, weights += unit_tile * line) {
    unit.template load<6>(weights, line);
    unit.template load<4>(x, 64);
    unit.template multiply<0, 4, 6>();
    if constexpr (N == 2) {
      unit.template load<7>(weights + n_step, line);
      unit.template multiply<1, 4, 7>();
    }
    if constexpr (M == 2) {
      unit.template load<5>(x + x_step, 64);
      unit.template multiply<2, 5, 6>();
      if constexpr (N == 2) unit.template multiply<3, 5, 7>();
    }
  }
  unit.template store<0>(dots, bytes);
  if constexpr (N == 2) unit.template store<1>(dots + unit_tile, bytes);
  if constexpr (M == 2) unit.template store<2>(below, bytes);
  if constexpr (M == 2 && N == 2) unit.template store<3>(below + unit_tile, bytes);
}

// The sums of all tokens and of rows [0, rows) of a block that lies unpacked at `weights`, 32 by 32:
// before(t, count, r, count) and after(...) of each.
template <class Unit, class Before, class After>
INLINE void unit_block(Unit& unit, const std::int8_t* x, std::int64_t tokens, std::int64_t stride,
                       const std::uint8_t* weights, std::int64_t rows, std::int64_t block,
                       std::int64_t steps, bool first, std::int32_t* dots, std::int64_t row_step,
                       Before&& before, After&& after) {
  // The second tile of a pair: the other half of the lines, or the next tile of rows.
  const std::int64_t n_step = tile_rows > unit_tile ? 4 * unit_tile : block * tile_rows;
  const std::int64_t x_step = unit_tile * stride;
  for (std::int64_t r = 0; r < rows; r += 2 * unit_tile) {
    const std::int64_t n = rows - r < 2 * unit_tile ? rows - r : 2 * unit_tile;
    for (std::int64_t t = 0; t < tokens; t += 2 * unit_tile) {
      const std::int64_t m = tokens - t < 2 * unit_tile ? tokens - t : 2 * unit_tile;
      const std::uint8_t* from = weights + r * block;
      std::int32_t* to = dots + t * row_step + r;
      before(t, m, r, n);
      if (m > unit_tile && n > unit_tile) {
        unit_sums<2, 2>(unit, x + t * stride, x_step, from, n_step, steps, first, to, row_step);
      } else if (n > unit_tile) {
        unit_sums<1, 2>(unit, x + t * stride, x_step, from, n_step, steps, first, to, row_step);
      } else if (m > unit_tile) {
        unit_sums<2, 1>(unit, x + t * stride, x_step, from, n_step, steps, first, to, row_step);
      } else {
        unit_sums<1, 1>(unit, x + t * stride, x_step, from, n_step, steps, first, to, row_step);
      }
      after(t, m, r, n);
    }
  }
}
