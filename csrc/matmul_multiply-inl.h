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
    dot_piece<FORMAT>(matrix, begin, end, pointers, count, to, max_rows_a_call);
  }
}

TARGET static void unpack_tile(const Matrix& matrix, std::int64_t begin, std::int64_t end,
                               std::int64_t column, std::int64_t count, std::int64_t to_next,
                               std::uint8_t* tile) {
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
                                 std::int64_t r, std::int64_t c) {
  if (r + tile_rows < end) return tile_rows * matrix.row_stride;
  const std::int64_t next = c + column_block(matrix.format, matrix.group);
  if (next >= matrix.columns) return tile_rows * matrix.row_stride - bytes_before(matrix, c);
  return bytes_before(matrix, next) - bytes_before(matrix, c) - (r - begin) * matrix.row_stride;
}

// The integer sums of a piece, as of row_dots. Columns outside, so that activations that do not fit into
// a cache are fetched once for all rows of the piece.
TARGET static void tile_piece(const Matrix& matrix, std::int64_t begin, std::int64_t end,
                              const Activations& x, bool fine, MatmulScratch& scratch) {
  const std::int64_t block = column_block(matrix.format, matrix.group);
  const std::int64_t step = max_rows_a_call * (fine ? 2 : 1);
  for (std::int64_t c = 0; c < matrix.columns; c += block) {
    const std::int64_t count = matrix.columns - c < block ? matrix.columns - c : block;
    const std::int64_t words = packed::divide_up(count, 4);
    for (std::int64_t r = begin; r < end; r += tile_rows) {
      unpack_tile(matrix, r, r + tile_rows < end ? r + tile_rows : end, c, count,
                  to_next_tile(matrix, begin, end, r, c), scratch.tile);
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

// Tokens [begin, begin + count) and what belongs to them.
INLINE Activations some_tokens(Activations x, Product& product, std::int64_t begin, std::int64_t count) {
  product.y += begin * product.y_stride;
  x.tokens = count;
  x.scales += begin;
  x.sums += begin;
  if (x.fine) x.fine_sums += begin;
  return x;
}

// The integer sums of a group of tokens [t, t + m) and rows [r, r + n) onto the float sums.
TARGET static inline void unit_sums_to_floats(const GroupSums& of, std::int64_t index, const float* scales,
                                              const std::int32_t* dots, float* sums, std::int64_t t,
                                              std::int64_t m, std::int64_t r, std::int64_t n) {
  for (std::int64_t token = t; token < t + m; ++token) {
    const Sums excess = splat(of.excess(token, 0, index));
    const std::int64_t which = token * of.in_row + index;
    const Floats activation_scale = splat(of.activation_scales ? of.activation_scales[which] : 1.0f);
    for (std::int64_t row = r; row < r + n; row += row_lanes) {
      const std::int64_t at = token * max_rows_a_call + row;
      Floats value = __builtin_convertvector(load<Sums>(dots + at) - excess, Floats);
      value = value * load<Floats>(scales + row) * activation_scale;
      store(sums + at, (index == 0 ? Floats{} : load<Floats>(sums + at)) + value);
    }
  }
}

// The product of a piece on a matrix unit, for activations that are arranged in tiles (matmul.h). All rows
// of the piece are unpacked before the tokens come, in sixteens: zeros fill the last ones. Sums become
// floats while they are in the L1 cache; y, which is in no cache, is prefetched.
template <class Unit>
TARGET static void unit_piece(const Activations& x, const std::int32_t* group_sums, const Product& product,
                              std::int64_t begin, std::int64_t end, MatmulScratch& scratch) {
  const Matrix& matrix = *product.matrix;
  float* sums = reinterpret_cast<float*>(scratch.dots + max_tokens_a_call * max_rows_a_call);
  const bool is_int8 = matrix.format == WeightFormat::int8, fine = x.fine && is_int8;
  const std::int64_t block = column_block(matrix.format, matrix.group), rows = end - begin;
  const std::int64_t step = max_rows_a_call * (fine ? 2 : 1);
  Unit unit;
  unit.begin();
  for (std::int64_t c = 0; c < matrix.columns; c += block) {
    const std::int64_t count = matrix.columns - c < block ? matrix.columns - c : block;
    for (std::int64_t r = begin; r < end; r += tile_rows) {
      unpack_tile(matrix, r, r + tile_rows < end ? r + tile_rows : end, c, count,
                  to_next_tile(matrix, begin, end, r, c), scratch.tile + (r - begin) * block);
    }
    if (matrix.group) {
      const GroupSums of(matrix, x, group_sums);
      for (std::int64_t g = 0; g < count; g += of.group) {
        const std::int64_t index = (c + g) / of.group;
        for (std::int64_t r = 0; r < rows; r += row_lanes) {
          store(scratch.scales + r, row_scales<Floats>(matrix, begin + r, index));
        }
        unit_block(unit, x.tiles + (c + g) * unit_tile, x.tokens, x.stride, scratch.tile + g * tile_rows, rows, block,
                   of.group / 64, true, scratch.dots, max_rows_a_call, [](auto...) {},
                   [&](std::int64_t t, std::int64_t m, std::int64_t r, std::int64_t n) TARGET {
                     unit_sums_to_floats(of, index, scratch.scales, scratch.dots, sums, t, m, r, n);
                   });
      }
      continue;
    }
    const std::int64_t steps = packed::divide_up(count, 64), at = c * unit_tile;
    const bool is_last = c + block >= matrix.columns;
    const auto nothing = [](std::int64_t, std::int64_t, std::int64_t, std::int64_t) {};
    const auto ask = [&](std::int64_t t, std::int64_t m, std::int64_t r, std::int64_t n) {
      if (!is_last) return;
      for (std::int64_t i = t; i < t + m; ++i) {
        const float* y = product.y + i * product.y_stride + begin + r;
        for (std::int64_t k = 0; k < n; k += 16) __builtin_prefetch(y + k, 1, 3);
      }
    };
    const auto finish = [&](std::int64_t t, std::int64_t m, std::int64_t r, std::int64_t n) TARGET {
      if (!is_last) return;
      Product part = product;
      const Activations tokens = some_tokens(x, part, t, m);
      const std::int32_t* dots = scratch.dots + t * step + r;
      if (is_int8) {
        finish_int8(tokens, part, begin + r, begin + r + n, dots, max_rows_a_call, 128);
      } else if (n == 2 * unit_tile) {  // a constant
        finish_ternary(tokens, part, begin + r, begin + r + 2 * unit_tile, dots, max_rows_a_call, 1);
      } else {
        finish_ternary(tokens, part, begin + r, begin + r + n, dots, max_rows_a_call, 1);
      }
    };
    if (fine) {
      unit_block(unit, x.fine_tiles + at, x.tokens, x.stride, scratch.tile, rows, block, steps, c == 0,
                 scratch.dots + max_rows_a_call, step, nothing, nothing);
    }
    unit_block(unit, x.tiles + at, x.tokens, x.stride, scratch.tile, rows, block, steps, c == 0,
               scratch.dots, step, ask, finish);
  }
  unit.end();
  if (matrix.group) finish_groups(x, product, begin, end, sums, max_rows_a_call);
}

// The float sums of a piece that is scaled by groups: sums [tokens, max_rows_a_call].
TARGET static void group_tile_piece(const Matrix& matrix, std::int64_t begin, std::int64_t end,
                                    const Activations& x, const GroupSums& of, MatmulScratch& scratch) {
  const std::int64_t block = column_block(matrix.format, matrix.group);
  const bool fine = x.fine && matrix.format == WeightFormat::int4;
  float* sums = reinterpret_cast<float*>(scratch.dots);
  for (std::int64_t c = 0; c < matrix.columns; c += block) {
    const std::int64_t count = matrix.columns - c < block ? matrix.columns - c : block;
    const std::int64_t first = c / of.group, groups = packed::divide_up(count, of.group);
    for (std::int64_t r = begin; r < end; r += tile_rows) {
      const std::int64_t last = r + tile_rows < end ? r + tile_rows : end;
      unpack_tile(matrix, r, last, c, count, to_next_tile(matrix, begin, end, r, c), scratch.tile);
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

template <class Unit>
TARGET static void multiply_on(const Activations& x, const std::int32_t* group_sums,
                               const Product& product, std::int64_t begin, std::int64_t end,
                               MatmulScratch& scratch) {
  const Matrix& matrix = *product.matrix;
  const WeightFormat format = matrix.format;
  if constexpr (Unit::is_there) {
    // A step of the unit is 64 columns: groups of 32 go without it.
    if (x.tiles && format != WeightFormat::int4 && matrix.group % 64 == 0) {
      unit_piece<Unit>(x, group_sums, product, begin, end, scratch);
      return;
    }
  }
  const bool of_i2 = format == WeightFormat::i2;
  const bool tiles = x.tokens >= (matrix.group && of_i2 ? strip_tile_from
                                  : matrix.group     ? group_tile_from
                                                     : tile_from[int(format)]);
  const bool is_int8 = format == WeightFormat::int8, is_int4 = format == WeightFormat::int4;
  const bool fine = x.fine && is_int8;
  std::int32_t* dots = scratch.dots;
  float* sums = reinterpret_cast<float*>(dots);
  std::int32_t offset = is_int8 ? int8_offset : 1;
#if defined(NARROW_SUMS)
  const bool wide = tiles && (is_int8 || is_int4);
  if (wide) {
    wide_piece(matrix, begin, end, x, scratch);
    offset = 0;
  }
#else
  constexpr bool wide = false;
#endif
  if (wide) {
  } else if (tiles && (is_int4 || matrix.group)) {
    group_tile_piece(matrix, begin, end, x, GroupSums(matrix, x, group_sums), scratch);
  } else if (tiles) {
    tile_piece(matrix, begin, end, x, fine, scratch);
    offset = is_int8 ? 128 : 1;
  } else if (matrix.in_strips() && !of_i2) {
    const GroupSums of(matrix, x, group_sums);
    for (std::int64_t r = begin; r < end; r += strip_rows) {
      for (std::int64_t t = 0; t < x.tokens; ++t) {
        lookup_strip_sums(matrix, r, x, of, t, sums + t * max_rows_a_call + (r - begin));
      }
    }
  } else if (matrix.in_strips()) {
    const GroupSums of(matrix, x, group_sums);
#define STRIP_SUMS(T) strips_sums<T>(matrix, begin, end, x, of, t, sums + t * max_rows_a_call);
    FOR_TOKEN_GROUPS(x.tokens, STRIP_SUMS)
#undef STRIP_SUMS
  } else if (matrix.group) {
    const GroupSums of(matrix, x, group_sums);
    const auto dot = of.group == 32    ? dot_group_rows<32>
                     : of.group == 64  ? dot_group_rows<64>
                     : of.group == 128 ? dot_group_rows<128>
                                       : dot_group_rows<256>;
    for (std::int64_t r = begin; r < end; r += group_rows) dot(matrix, r, end, x, of, scratch, sums + (r - begin));
  } else if (format == WeightFormat::i2) {
    row_dots<WeightFormat::i2>(matrix, begin, end, x, false, dots);
  } else if (format == WeightFormat::b3) {
    row_dots<WeightFormat::b3>(matrix, begin, end, x, false, dots);
  } else if (format == WeightFormat::lookup) {
    lookup_dots(matrix, begin, end, x, dots);
  } else if (is_int8) {
    row_dots<WeightFormat::int8>(matrix, begin, end, x, fine, dots);
  } else {
    for (std::int64_t r = begin; r < end; r += group_rows) {
      dot_int4_rows(matrix, r, end, x, group_sums, sums + (r - begin), max_rows_a_call);
    }
  }
  if (is_int4 || matrix.group) {
    finish_groups(x, product, begin, end, sums, max_rows_a_call);
  } else if (is_int8) {
    finish_int8(x, product, begin, end, dots, max_rows_a_call, offset);
  } else {
    finish_ternary(x, product, begin, end, dots, max_rows_a_call, offset);
  }
}
