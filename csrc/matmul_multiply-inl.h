// SPDX-License-Identifier: Apache-2.0
// MatmulKernels::multiply: rows for few tokens, tiles for many. Included by matmul-inl.h.

// The integer sums of a piece: dots [tokens, max_rows_a_call], of codes and fine in turn where `fine`.
template <WeightFormat FORMAT>
TARGET static void row_dots(const Matrix& matrix, std::int64_t begin, std::int64_t end,
                            const Activations& x, bool fine, std::int32_t* dots) {
  constexpr int most = 64;
  const std::int8_t* pointers[most];
  const int parts = fine ? 2 : 1;
  for (std::int64_t t = 0; t < x.tokens;) {
    int count = 0;
    std::int32_t* to = dots + t * parts * max_rows_a_call;
    for (; t < x.tokens && count < most; ++t) {
      pointers[count++] = x.codes + t * x.stride;
      if (fine) pointers[count++] = x.fine + t * x.stride;
    }
    dot_piece<FORMAT>(matrix, begin, end, pointers, count, to);
  }
}

TARGET static void unpack_tile(const Matrix& matrix, std::int64_t begin, std::int64_t end,
                               std::int64_t column, std::int64_t count, std::int64_t to_next,
                               std::uint8_t* tile) {
  if (matrix.format == WeightFormat::b3_strips) return unpack_b3_strips(matrix, begin, column, count, tile);
  for (std::int64_t r = begin; r < end; r += row_lanes) {
    const std::int64_t last = r + row_lanes < end ? r + row_lanes : end;
    unpack_rows(matrix, r, last, column, count, to_next, tile + tile_columns * (r - begin));
  }
}

// Bytes of a row in front of `column`, a multiple of column_block.
INLINE std::int64_t bytes_before(const Matrix& matrix, std::int64_t column) {
  return Matrix::bytes_per_row(matrix.format, matrix.pattern, column);
}

// Bytes from where the tile of row r and column c comes from to where the one after it does: rows of
// the piece, then columns, then the next piece.
INLINE std::int64_t to_next_tile(const Matrix& matrix, std::int64_t begin, std::int64_t end,
                                 std::int64_t r, std::int64_t c, std::int64_t block) {
  if (r + tile_rows < end) return tile_rows * matrix.row_stride;
  const std::int64_t next = c + block;
  if (next >= matrix.columns) return tile_rows * matrix.row_stride - bytes_before(matrix, c);
  return bytes_before(matrix, next) - bytes_before(matrix, c) - (r - begin) * matrix.row_stride;
}

// The integer sums of a piece, as of row_dots. Columns outside, so that activations that do not fit into
// a cache are fetched once for all rows of the piece.
TARGET static void tile_piece(const Matrix& matrix, std::int64_t begin, std::int64_t end,
                              const Activations& x, bool fine, MatmulScratch& scratch) {
  const std::int64_t block = column_block(matrix.format, matrix.group, matrix.pattern);
  const std::int64_t step = max_rows_a_call * (fine ? 2 : 1);
  for (std::int64_t c = 0; c < matrix.columns; c += block) {
    const std::int64_t count = matrix.columns - c < block ? matrix.columns - c : block;
    const std::int64_t words = packed::divide_up(count, 4);
    for (std::int64_t r = begin; r < end; r += tile_rows) {
      unpack_tile(matrix, r, r + tile_rows < end ? r + tile_rows : end, c, count,
                  to_next_tile(matrix, begin, end, r, c, block), scratch.tile);
#define TILE_DOTS(T)                                                                              \
  {                                                                                               \
    const std::int64_t at = t * x.stride + c;                                                     \
    std::int32_t* to = scratch.dots + t * step + (r - begin);                                     \
    tile_dots<T>(scratch.tile, x.codes + at, x.stride, words, c == 0, to, step);                  \
    if (fine) {                                                                                   \
      tile_dots<T>(scratch.tile, x.fine + at, x.stride, words, c == 0, to + max_rows_a_call, step); \
    }                                                                                             \
  }
      FOR_TOKEN_GROUPS(x.tokens, TILE_DOTS)
#undef TILE_DOTS
    }
  }
}

// The integer sums of group `index` of m tokens from t on and of 32 rows, [.., unit_side], times their scales, onto
// float sums [.., unit_row_step].
template <bool FIRST, bool SCALED>
TARGET static void group_dots_to_floats(const GroupSums& of, std::int64_t index, const float* row_scales, const std::int32_t* dots,
                                 float* sums, std::int64_t t, std::int64_t m) {
  constexpr int vectors = unit_side / row_lanes;
  Floats scales[vectors];
  UNROLL for (int v = 0; v < vectors; ++v) scales[v] = load<Floats>(row_scales + v * row_lanes);
  const std::int64_t sums_a_token = of.parts * of.in_row;
  const std::int32_t* excess = of.code_sums + t * sums_a_token + index;
  const float* activation_scale = SCALED ? of.activation_scales + t * of.in_row + index : nullptr;
  for (std::int64_t i = 0; i < m; ++i, dots += unit_side, sums += unit_row_step, excess += sums_a_token) {
    UNROLL for (int v = 0; v < vectors; ++v) {
      Floats value = __builtin_convertvector(load<Sums>(dots + v * row_lanes) - *excess, Floats) * scales[v];
      if constexpr (SCALED) value = value * *activation_scale;
      store(sums + v * row_lanes, (FIRST ? Floats{} : load<Floats>(sums + v * row_lanes)) + value);
    }
    if constexpr (SCALED) activation_scale += of.in_row;
  }
}

// The sums of a piece on a matrix unit, for activations that are arranged in tiles (matmul.h): as of row_dots, or the
// float sums of groups, [.., unit_row_step]. All rows of a column block are unpacked before the tokens come. 32 rows of
// it then stay in the first cache and meet all tokens, 32 at a time.
template <class Unit>
TARGET static void unit_piece(const Matrix& matrix, std::int64_t begin, std::int64_t end, const Activations& x,
                              bool fine, const std::int32_t* group_sums, MatmulScratch& scratch) {
  constexpr std::int64_t line = 4 * tile_rows;
  const std::int64_t block = column_block(matrix.format, matrix.group, matrix.pattern, true);
  const std::int64_t rows = end - begin, group = matrix.group;
  const std::int64_t step = unit_row_step * (fine ? 2 : 1);
  // The second tile of a pair: the other half of the lines, or the next tile of rows.
  const std::int64_t second = tile_rows > unit_tile ? 4 * unit_tile : block * tile_rows;
  Unit unit;
  unit.begin();
  for (std::int64_t c = 0; c < matrix.columns; c += block) {
    const std::int64_t count = matrix.columns - c < block ? matrix.columns - c : block;
    const std::int64_t steps = packed::divide_up(group ? group : count, 64);
    for (std::int64_t r = begin; r < end; r += tile_rows) {
      unpack_tile(matrix, r, r + tile_rows < end ? r + tile_rows : end, c, count,
                  to_next_tile(matrix, begin, end, r, c, block), scratch.tile + (r - begin) * block);
    }
    for (std::int64_t g = 0; group && g < count / group; ++g) {
      for (std::int64_t r = 0; r < rows; r += row_lanes) {
        store(scratch.scales + g * max_unit_rows + r, row_scales<Floats>(matrix, begin + r, c / group + g));
      }
    }
    for (std::int64_t r = 0; r < rows; r += unit_side) {
      const std::int64_t n = rows - r < unit_side ? rows - r : unit_side;
      for (std::int64_t t = 0; t < x.tokens; t += unit_side) {
        const std::int64_t m = x.tokens - t < unit_side ? x.tokens - t : unit_side;
        const auto add_up = [&](const std::int8_t* tiles, std::int64_t from, bool first, std::int32_t* to,
                                std::int64_t row_step) TARGET {
          const UnitTiles tokens_of = {tiles + t * x.stride + from * unit_tile, 64, unit_tile_bytes, unit_tile * x.stride};
          const UnitTiles rows_of = {scratch.tile + r * block + (from - c) * tile_rows, line, unit_tile * line, second};
          unit_sums<BytesOf::unsigned_b>(unit, m, n, tokens_of, rows_of, steps, first, to, row_step);
        };
        std::int32_t* dots = scratch.dots + t * step + r;
        if (!group) {
          add_up(x.tiles, c, c == 0, dots, step);
          if (fine) add_up(x.fine_tiles, c, c == 0, dots + unit_row_step, step);
          continue;
        }
        const GroupSums of(matrix, x, group_sums);
        float* sums = reinterpret_cast<float*>(dots);
        for (std::int64_t g = 0; g < count / group; ++g) {
          const std::int64_t from = c + g * group;
          const float* scales = scratch.scales + g * max_unit_rows + r;
          add_up(x.tiles, from, true, scratch.group_dots, unit_side);
          const auto to_floats = of.activation_scales
                                     ? from == 0 ? group_dots_to_floats<true, true> : group_dots_to_floats<false, true>
                                 : from == 0 ? group_dots_to_floats<true, false>
                                             : group_dots_to_floats<false, false>;
          to_floats(of, from / group, scales, scratch.group_dots, sums, t, m);
        }
      }
    }
  }
  unit.end();
}

// The float sums of a piece that is scaled by groups: sums [tokens, max_rows_a_call].
TARGET static void group_tile_piece(const Matrix& matrix, std::int64_t begin, std::int64_t end,
                                    const Activations& x, const GroupSums& of, MatmulScratch& scratch) {
  const std::int64_t block = column_block(matrix.format, matrix.group, matrix.pattern);
  const bool fine = x.fine && matrix.format == WeightFormat::int4;
  float* sums = reinterpret_cast<float*>(scratch.dots);
  for (std::int64_t c = 0; c < matrix.columns; c += block) {
    const std::int64_t count = matrix.columns - c < block ? matrix.columns - c : block;
    const std::int64_t first = c / of.group, groups = packed::divide_up(count, of.group);
    for (std::int64_t r = begin; r < end; r += tile_rows) {
      const std::int64_t last = r + tile_rows < end ? r + tile_rows : end;
      unpack_tile(matrix, r, last, c, count, to_next_tile(matrix, begin, end, r, c, block), scratch.tile);
      scales_of_tile(matrix, r, last, first, groups, scratch.scales);
#define TILE_GROUPS(T)                                                                            \
  {                                                                                               \
    const std::int64_t at = t * x.stride + c;                                                     \
    tile_groups<T>(scratch.tile, x.codes + at, fine ? x.fine + at : nullptr, x.stride, of, t,      \
                   first, groups, scratch.scales, sums + t * max_rows_a_call + (r - begin));      \
  }
      FOR_TOKEN_GROUPS(x.tokens, TILE_GROUPS)
#undef TILE_GROUPS
    }
  }
}

// The sums of a piece -> y, past the caches where it `streams`.
TARGET static void finish(const Activations& x, const Product& product, std::int64_t begin, std::int64_t end,
                          const std::int32_t* dots, std::int64_t step, std::int32_t offset, MatmulScratch& scratch) {
  const std::int64_t dots_a_token = step * (x.fine && product.matrix->format == WeightFormat::int8 ? 2 : 1);
  for (std::int64_t t = 0; t < x.tokens; ++t, dots += dots_a_token) {
    float* y = product.y + t * product.y_stride + begin;
    finish_token(x, t, product, begin, end, dots, step, offset, product.streams ? scratch.streamed : y);
    if (!product.streams) continue;
    std::int64_t r = 0;
    for (; r + row_lanes <= end - begin; r += row_lanes) stream(y + r, load<Floats>(scratch.streamed + r));
    for (; r < end - begin; ++r) y[r] = scratch.streamed[r];
  }
}

template <class Unit>
TARGET static void multiply_on(const Activations& x, const std::int32_t* group_sums,
                               const Product& product, std::int64_t begin, std::int64_t end,
                               MatmulScratch& scratch) {
  const Matrix& matrix = *product.matrix;
  const WeightFormat format = matrix.format;
  const bool of_i2 = format == WeightFormat::i2;
  const bool looks_up = format == WeightFormat::lookup && VECTOR_BYTES == 64, by_sums = format == WeightFormat::b3_strips && x.sum_tables;
  const std::int64_t strips_to = of_i2 ? strip_tile_from : looks_up ? 2 * strip_tile_from / 3 : 0;
  const bool tiles = !by_sums && x.tokens >= (matrix.in_strips() ? strips_to : tile_from[int(format)]);
  const bool is_int8 = format == WeightFormat::int8, is_int4 = format == WeightFormat::int4;
  // For one token, 256 bits read rows of int8 from memory a sixth faster (measured on a Zen 4).
  if constexpr (VECTOR_BYTES == 64) {
    if (is_int8 && x.tokens == 1 && !x.tiles) return matmul_avx2.multiply(x, group_sums, product, begin, end, scratch);
  }
  const bool fine = x.fine && is_int8;
  std::int32_t* dots = scratch.dots;
  float* sums = reinterpret_cast<float*>(dots);
  std::int32_t offset = is_int8 ? int8_offset : 1;
  std::int64_t step = max_rows_a_call;
#if defined(NARROW_SUMS)
  const bool wide = !x.tiles && tiles && (is_int8 || is_int4);
  if (wide) {
    wide_piece(matrix, begin, end, x, scratch);
    offset = 0;
  }
#else
  constexpr bool wide = false;
#endif
  if (Unit::is_there && x.tiles) {
    if constexpr (Unit::is_there) unit_piece<Unit>(matrix, begin, end, x, fine, group_sums, scratch);
    offset = is_int8 ? 128 : 1;
    step = unit_row_step;
  } else if (wide) {
  } else if (tiles && (is_int4 || matrix.group)) {
    group_tile_piece(matrix, begin, end, x, GroupSums(matrix, x, group_sums), scratch);
  } else if (tiles) {
    tile_piece(matrix, begin, end, x, fine, scratch);
    offset = is_int8 ? 128 : 1;
  } else if (by_sums) {
    sum_kernels->sum_strips(matrix, begin, end, x, sums);
    offset = 0;
  } else if (matrix.in_strips() && !of_i2) {
#if VECTOR_BYTES == 64
    const GroupSums of(matrix, x, group_sums);
    for (std::int64_t r = begin; r < end; r += strip_rows) {
      for (std::int64_t t = 0, count; t < x.tokens; t += count) {
        count = x.tokens - t > 3 ? 4 : x.tokens - t > 1 ? 2 : 1;
        const auto add_up = count == 4 ? lookup_strip_sums<4> : count == 2 ? lookup_strip_sums<2> : lookup_strip_sums<1>;
        add_up(matrix, r, x, of, t, sums + t * max_rows_a_call + (r - begin));
      }
    }
#endif
  } else if (matrix.in_strips()) {
    const GroupSums of(matrix, x, group_sums);
#define STRIP_SUMS(T) strips_sums<T>(matrix, begin, end, x, of, t, sums + t * max_rows_a_call);
    FOR_TOKEN_GROUPS(x.tokens, STRIP_SUMS)
#undef STRIP_SUMS
  } else if (format == WeightFormat::i2) {
    row_dots<WeightFormat::i2>(matrix, begin, end, x, false, dots);
  } else if (format == WeightFormat::lookup) {
    lookup_dots(matrix, begin, end, x, dots);
  } else if (is_int8) {
    row_dots<WeightFormat::int8>(matrix, begin, end, x, fine, dots);
  } else {
    for (std::int64_t r = begin; r < end; r += group_rows) {
      dot_int4_rows(matrix, r, end, x, group_sums, sums + (r - begin));
    }
  }
  finish(x, product, begin, end, dots, step, offset, scratch);
}
