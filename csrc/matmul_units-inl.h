// SPDX-License-Identifier: Apache-2.0
// Many tokens on a matrix unit: the blocks of matrix_unit.h over all tokens and rows of a piece. 32 rows of
// a block stay in the first cache and meet all tokens. Included by matmul-inl.h.

// The sums of all tokens and of rows [0, rows) of a block that lies unpacked at `weights`, 32 by 32:
// before(t, count, r, count) and after(...) of each.
template <class Unit, class Before, class After>
INLINE void unit_block(Unit& unit, const std::int8_t* x, std::int64_t tokens, std::int64_t stride,
                       const std::uint8_t* weights, std::int64_t rows, std::int64_t block,
                       std::int64_t steps, bool first, std::int32_t* dots, std::int64_t row_step,
                       Before&& before, After&& after) {
  constexpr std::int64_t line = 4 * tile_rows;
  // The second tile of a pair: the other half of the lines, or the next tile of rows.
  const std::int64_t n_step = tile_rows > unit_tile ? 4 * unit_tile : block * tile_rows;
  for (std::int64_t r = 0; r < rows; r += 2 * unit_tile) {
    const std::int64_t n = rows - r < 2 * unit_tile ? rows - r : 2 * unit_tile;
    for (std::int64_t t = 0; t < tokens; t += 2 * unit_tile) {
      const std::int64_t m = tokens - t < 2 * unit_tile ? tokens - t : 2 * unit_tile;
      before(t, m, r, n);
      const UnitTiles tokens_of = {x + t * stride, 64, unit_tile_bytes, unit_tile * stride};
      const UnitTiles rows_of = {weights + r * block, line, unit_tile * line, n_step};
      unit_sums<BytesOf::unsigned_b>(unit, m, n, tokens_of, rows_of, steps, first, dots + t * row_step + r, row_step);
      after(t, m, r, n);
    }
  }
}
