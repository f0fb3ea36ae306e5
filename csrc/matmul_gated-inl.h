// SPDX-License-Identifier: Apache-2.0
// A product that gates another, both at once on a matrix unit. Included by matmul-inl.h after matmul_multiply-inl.h.

#include "gate-inl.h"

// What turns the integer sums of 16 rows of a gate, and beside them of the 16 that it gates, into values.
struct GatedRows {
  Activation activation;
  bool streams;
  std::int64_t count, y_stride;  // of the 16 rows, those that there are
  Floats scales[2][unit_tile / row_lanes];
};

// Gates sums [tokens, unit_side] into y [tokens, y_stride]: a token every second call, once `ahead` is done. Members
// are scalars, so that a copy stays in registers.
struct Gating {
  const GatedRows* conversion = nullptr;
  const std::int32_t *sums = nullptr, *end = nullptr;
  const float* token_scale = nullptr;
  float* y = nullptr;
  std::int64_t calls = 0;
  SumsAhead ahead = {};

  TARGET __attribute__((always_inline)) void gate_token() {
    float part[unit_tile], *to = conversion->count < unit_tile ? part : y;
    UNROLL for (int v = 0; v < unit_tile; v += row_lanes) {
      Floats values[2];
      UNROLL for (int i = 0; i < 2; ++i) {
        const Floats exact = __builtin_convertvector(load<Sums>(sums + i * unit_tile + v), Floats);
        values[i] = exact * (*token_scale * conversion->scales[i][v / row_lanes]);
      }
      const Floats gated = gated_vector(conversion->activation, values[0], values[1]);
      conversion->streams ? stream(to + v, gated) : store(to + v, gated);
    }
    if (to == part) __builtin_memcpy(y, part, conversion->count * sizeof(float));
    sums += unit_side, y += conversion->y_stride, ++token_scale;
  }
  // Tiles of the block before are stored in the first four calls, and read after them.
  static_assert(unit_side * unit_side / 64 >= 4);
  TARGET __attribute__((always_inline)) void operator()() {
    if (!ahead.is_done()) return ahead();
    if (sums < end && ++calls % 2 == 0) gate_token();
  }
  TARGET void finish() { while (sums < end) gate_token(); }
};

// MatmulKernels::multiply_gated. 16 rows of each matrix are unpacked side by side, as if they were 32 of one, and
// stay in the L1 cache while all tokens meet them. Vectors gate their sums while the unit multiplies the next ones.
template <class Unit>
TARGET static void unit_gated(const Activations& x, const Product* pair, std::int64_t begin, std::int64_t end, float* y,
                              bool streams, MatmulScratch& scratch) {
  constexpr std::int64_t block = unit_column_block;
  Unit unit;
  unit.begin();
  std::int32_t* held = nullptr;
  Gating gating;
  GatedRows gated[2];
  for (std::int64_t r = begin; r < end; r += unit_tile) {
    const int turn = (r - begin) / unit_tile % 2;
    std::int32_t* sums = scratch.dots + turn * unit_side * max_tokens_a_call;
    GatedRows& conversion = gated[turn];
    conversion = {*pair[1].gated_by, streams, end - r < unit_tile ? end - r : unit_tile, pair->y_stride, {}};
    for (std::int64_t i = 0; i < 2 * conversion.count; ++i) {
      const Matrix& matrix = *pair[i % 2].matrix;
      const float scale = matrix.scales ? matrix.scales[r + i / 2] : matrix.scale;
      conversion.scales[i % 2][i / 2 / row_lanes][i / 2 % row_lanes] = scale;
    }
    for (std::int64_t c = 0; c < x.columns; c += block) {
      const bool is_last = c + block >= x.columns;
      const std::int64_t count = is_last ? x.columns - c : block, steps = packed::divide_up(count, 64);
      for (std::int64_t at = 0; at < unit_side; at += row_lanes) {
        const Matrix& matrix = *pair[at / unit_tile].matrix;
        const std::int64_t row = r + at % unit_tile, row_end = row + row_lanes < end ? row + row_lanes : end;
        const std::int64_t next = is_last ? unit_tile * matrix.row_stride : bytes_before(matrix, c + block);
        const TilePlace place = {scratch.tile + at / tile_rows * tile_rows * block + at % tile_rows * tile_columns,
                                 std::uint8_t(matrix.format == WeightFormat::int8 ? 128 : 1)};
        if (row < end) unpack_rows(matrix, row, row_end, c, count, next - bytes_before(matrix, c), place);
      }
      for (std::int64_t t = 0; t < x.tokens; t += unit_side) {
        const std::int64_t m = x.tokens - t < unit_side ? x.tokens - t : unit_side;
        std::int32_t* to = sums + t * unit_side;
        gating.ahead = SumsAhead(to, c == 0);
        if (is_last && t > 0) gating.end = to;
        unit_sums<true>(unit, m, unit_side, token_tiles(x, false, t, c), row_tiles(scratch.tile), steps, c == 0, to,
                        unit_side, held, gating);
        if (!is_last || t > 0) continue;
        gating.finish();
        gating = {&conversion, sums, sums, x.scales, y + (r - begin)};
      }
    }
    gating.end = sums + x.tokens * unit_side;
  }
  store_unit_sums<2, 2>(unit, held, unit_side);
  gating.finish();
  unit.end();
}
