// SPDX-License-Identifier: Apache-2.0
// MatmulKernels::multiply: rows for few tokens, tiles for many. Included by matmul-inl.h.

// The integer sums of a piece: dots [tokens, sums_apart], of codes and fine in turn where `fine`.
template <WeightFormat FORMAT>
TARGET static void row_dots(const Matrix& matrix, std::int64_t begin, std::int64_t end,
                            const Activations& x, bool fine, std::int32_t* dots) {
  const std::int64_t apart = sums_apart(begin, end);
  constexpr int most = 64;
  const std::int8_t* pointers[most];
  const int parts = fine ? 2 : 1;
  for (std::int64_t t = 0; t < x.tokens;) {
    int count = 0;
    std::int32_t* to = dots + t * parts * apart;
    for (; t < x.tokens && count < most; ++t) {
      pointers[count++] = x.codes + t * x.stride;
      if (fine) pointers[count++] = x.fine + t * x.stride;
    }
    dot_piece<FORMAT>(matrix, begin, end, pointers, count, to);
  }
}

TARGET static void unpack_tile(const Matrix& matrix, std::int64_t begin, std::int64_t end,
                               std::int64_t column, std::int64_t count, std::int64_t to_next,
                               TilePlace tile) {
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

// The integer sums of a piece, as of row_dots, or where it is scaled by groups the float sums [tokens, sums_apart].
// Columns outside, so that activations that do not fit into a cache are fetched once for all rows of the piece.
TARGET static void tile_piece(const Matrix& matrix, std::int64_t begin, std::int64_t end, const Activations& x,
                              const std::int32_t* group_sums, std::int32_t* dots, MatmulScratch& scratch) {
  const std::int64_t block = column_block(matrix.format, matrix.group, matrix.pattern);
  const bool fine = x.fine && !is_ternary(matrix.format), has_groups = matrix.summed_group() != 0;
  const std::int64_t apart = sums_apart(begin, end), step = apart * (fine && !has_groups ? 2 : 1);
  const GroupSums of(matrix, x, group_sums);
  for (std::int64_t c = 0; c < matrix.columns; c += block) {
    const std::int64_t count = matrix.columns - c < block ? matrix.columns - c : block;
    const std::int64_t words = packed::divide_up(count, 4);
    const std::int64_t first = c / of.group, groups = packed::divide_up(count, of.group);
    for (std::int64_t r = begin; r < end; r += tile_rows) {
      const std::int64_t last = r + tile_rows < end ? r + tile_rows : end;
      unpack_tile(matrix, r, last, c, count, to_next_tile(matrix, begin, end, r, c, block), {scratch.tile, 0});
      if (has_groups) scales_of_tile(matrix, r, last, first, groups, scratch.scales);
      each_token_group(x.tokens, [&](auto T, std::int64_t t) TARGET {
        const std::int8_t *codes = x.codes + t * x.stride + c, *finer = fine ? x.fine + t * x.stride + c : nullptr;
        std::int32_t* to = dots + t * step + (r - begin);
        if (has_groups) {
          float* sums = reinterpret_cast<float*>(to);
          tile_groups<T>(scratch.tile, codes, finer, x.stride, of, t, first, groups, scratch.scales, sums, apart);
        } else {
          tile_dots<T>(scratch.tile, codes, x.stride, words, c == 0, to, step);
          if (fine) tile_dots<T>(scratch.tile, finer, x.stride, words, c == 0, to + apart, step);
        }
      });
    }
  }
}

// Multiplies the integer sums of a group [tokens, unit_side] by its scales and adds them to float sums, a few tokens a
// call. SCALED: activations have scales of groups, too.
template <bool SCALED>
struct GroupConversion {
  static constexpr int vectors = unit_side / row_lanes;
  Floats scales[vectors] = {};
  const std::int32_t* dots = nullptr;
  float* sums = nullptr;
  const float* activation_scale = nullptr;
  std::int64_t to_next_scale = 0, tokens_a_call = 0, left = 0;

  TARGET __attribute__((always_inline)) void convert(std::int64_t count) {
    count = count < left ? count : left;
    left -= count;
    for (; count > 0; --count, dots += unit_side, sums += unit_side) {
      UNROLL for (int v = 0; v < vectors; ++v) {
        Floats value = __builtin_convertvector(load<Sums>(dots + v * row_lanes), Floats) * scales[v];
        if constexpr (SCALED) value *= *activation_scale;
        store(sums + v * row_lanes, load<Floats>(sums + v * row_lanes) + value);
      }
      if constexpr (SCALED) activation_scale += to_next_scale;
    }
  }
  TARGET __attribute__((always_inline)) void operator()() { convert(tokens_a_call); }
};

// Prefetches a block of sums [unit_side, unit_side] into the L1 cache, four lines a call: this block if it is only
// stored, the next one if it is loaded first.
struct SumsAhead {
  const std::int32_t *at = nullptr, *end = nullptr;

  SumsAhead() = default;
  SumsAhead(const std::int32_t* block, bool from_zero)
      : at(block + (from_zero ? 0 : unit_side * unit_side)), end(at + unit_side * unit_side) {}
  TARGET __attribute__((always_inline)) bool is_done() const { return at == end; }
  TARGET __attribute__((always_inline)) void operator()() {
    if (is_done()) return;
    UNROLL for (int i = 0; i < 4; ++i) __builtin_prefetch(at + 16 * i, 1, 3);
    at += 64;
  }
};

// The tiles of tokens t to t + 31, from `column` on, a multiple of 64.
INLINE UnitTiles token_tiles(const Activations& x, bool is_fine, std::int64_t t, std::int64_t column) {
  const auto tile = [&](std::int64_t from) TARGET {
    const std::int8_t* last = is_fine ? x.last_fine : x.last_codes;
    const std::int8_t* codes = (is_fine ? x.fine : x.codes) + from * x.stride;
    return (last && from + unit_tile > x.tokens ? last : codes) + column;
  };
  return {tile(t), x.stride, 64, t + unit_tile < x.tokens ? tile(t + unit_tile) - tile(t) : 0};
}

// The tiles of unit_side rows unpacked at `tile`. The second one: the other half of the lines, or the next tile of rows.
INLINE UnitTiles row_tiles(const std::uint8_t* tile) {
  constexpr std::int64_t line = 4 * tile_rows;
  return {tile, line, unit_tile * line, tile_rows > unit_tile ? 4 * unit_tile : unit_column_block * tile_rows};
}

// The sums of a piece (PieceSums, blocks of unit_side rows) on a matrix unit. 32 rows at a time are unpacked and stay in
// the L1 cache while all tokens meet them. A group's sums become floats while the group after next is multiplied.
template <class Unit, bool SCALED>
TARGET static void unit_piece(const Matrix& matrix, std::int64_t begin, std::int64_t end, const Activations& x,
                              bool fine, std::int32_t* all_dots, MatmulScratch& scratch) {
  const std::int64_t block = unit_column_block, rows = end - begin, group = matrix.group, parts = fine ? 2 : 1;
  const std::uint8_t offset = matrix.format == WeightFormat::int8 ? 128 : 1;
  Unit unit;
  unit.begin();
  std::int32_t* held = nullptr;
  int turn = 0;
  // Those of the last group, whose tiles are held while the next one is begun, and of the two before it.
  GroupConversion<SCALED> conversions[3];
  const auto conversion_of = [&](int by) TARGET -> auto& { return conversions[(turn + 3 - by) % 3]; };
  Nothing nothing;
  for (std::int64_t c = 0; c < matrix.columns; c += block) {
    const std::int64_t count = matrix.columns - c < block ? matrix.columns - c : block;
    const std::int64_t steps = packed::divide_up(group ? group : count, 64);
    for (std::int64_t g = 0; group && g < count / group; ++g) {
      for (std::int64_t r = 0; r < rows; r += row_lanes) {
        store(scratch.scales + g * max_unit_rows + r, row_scales(matrix, begin + r, c / group + g));
      }
    }
    for (std::int64_t r = 0; r < rows; r += unit_side) {
      const std::int64_t n = rows - r < unit_side ? rows - r : unit_side;
      for (std::int64_t in_tile = 0; in_tile < n; in_tile += tile_rows) {
        const std::int64_t row = begin + r + in_tile;
        unpack_tile(matrix, row, row + tile_rows < end ? row + tile_rows : end, c, count,
                    to_next_tile(matrix, begin, end, row, c, block), {scratch.tile + in_tile * block, offset});
      }
      for (std::int64_t t = 0; t < x.tokens; t += unit_side) {
        const std::int64_t m = x.tokens - t < unit_side ? x.tokens - t : unit_side;
        std::int32_t* dots = all_dots + (r * max_tokens_a_call + t * unit_side) * parts;
        const auto add_up = [&](bool is_fine, std::int64_t from, bool first, std::int32_t* to,
                                auto& between) TARGET {
          const UnitTiles tokens_of = token_tiles(x, is_fine, t, from);
          const UnitTiles rows_of = row_tiles(scratch.tile + (from - c) * tile_rows);
          unit_sums<true>(unit, m, n, tokens_of, rows_of, steps, first, to, unit_side * parts, held, between);
        };
        if (!group) {
          SumsAhead ahead(dots, c == 0);
          add_up(false, c, c == 0, dots, ahead);
          if (fine) add_up(true, c, c == 0, dots + unit_side, nothing);
          continue;
        }
        const std::int64_t in_row = matrix.columns / group;
        for (std::int64_t g = 0; g < count / group; ++g) {
          const std::int64_t from = c + g * group;
          turn = (turn + 1) % 3;
          add_up(false, from, true, scratch.group_dots[turn], conversion_of(2));
          conversion_of(2).convert(unit_side);
          GroupConversion<SCALED>& conversion = conversion_of(0);
          UNROLL for (int v = 0; v < unit_side / row_lanes; ++v) {
            conversion.scales[v] = load<Floats>(scratch.scales + g * max_unit_rows + r + v * row_lanes);
          }
          conversion.dots = scratch.group_dots[turn], conversion.sums = reinterpret_cast<float*>(dots);
          conversion.activation_scale = SCALED ? x.scales + t * in_row + from / group : nullptr;
          conversion.to_next_scale = in_row, conversion.left = m;
          conversion.tokens_a_call = packed::divide_up(m, 2 * steps * (n > unit_tile ? 2 : 1));
          if (from == 0) __builtin_memset(dots, 0, unit_side * unit_side * sizeof(float));
        }
      }
    }
  }
  store_unit_sums<2, 2>(unit, held, unit_side * parts);
  conversion_of(1).convert(unit_side);
  conversion_of(0).convert(unit_side);
  unit.end();
}

// finish_token by whole vectors.
TARGET static void finish_by_vectors(const Activations& x, std::int64_t t, const Product& product, std::int64_t begin,
                                     std::int64_t end, const PieceSums& sums, float* y, bool streams) {
  const Matrix& matrix = *product.matrix;
  const bool has_groups = matrix.summed_group() != 0;
  if (x.fine && matrix.format == WeightFormat::int8) return finish_token(x, t, product, begin, end, sums, y, false);
  const float scale = x.group ? 1.0f : x.scales[t], of_all = scale * matrix.scale;
  const std::uint32_t excess = sums.offset * x.sums[t];
  for (std::int64_t first = begin; first < end; first += sums.block) {
    const std::int32_t* dots = sums.dots + (first - begin) * max_tokens_a_call + t * sums.block;
    const std::int64_t last = first + sums.block < end ? first + sums.block : end;
    std::int64_t r = first;
    for (; r + row_lanes <= last; r += row_lanes, dots += row_lanes, y += row_lanes) {
      Floats value;
      if (has_groups) {
        value = load<Floats>(dots) * scale;
      } else {
        const Sums exact = bit_cast<Sums>(load<Words>(dots) - excess);
        value = __builtin_convertvector(exact, Floats);
        value = matrix.scales ? value * (scale * load<Floats>(matrix.scales + r)) : value * of_all;
      }
      if (product.bias) value += load<Floats>(product.bias + r);
      streams ? stream(y, value) : store(y, value);
    }
    if (r < last) finish_rows(x, t, product, r, last, sums, dots, y);
  }
}

template <class Unit>
TARGET static PieceSums multiply_on(const Activations& x, const std::int32_t* group_sums, const Matrix& matrix,
                                    std::int64_t begin, std::int64_t end, std::int32_t* dots, MatmulScratch& scratch) {
  const WeightFormat format = matrix.format;
  const bool of_i2 = format == WeightFormat::i2, is_int8 = format == WeightFormat::int8;
  const bool looks_up = format == WeightFormat::lookup && VECTOR_BYTES == 64, by_sums = format == WeightFormat::b3_strips && x.sum_tables;
  const std::int64_t strips_to = of_i2 ? strip_tile_from : looks_up ? 2 * strip_tile_from / 3 : 0;
  std::int64_t tiles_from = matrix.in_strips() ? strips_to : tile_from[int(format)];
  // An EPYC (Zen 4) shifts and masks weights while it multiplies 512 bits: there tiles pay off later.
  if (of_i2 && VECTOR_BYTES == 64 && is_amd) tiles_from = matrix.in_strips() ? 64 : 192;
  const bool tiles = !by_sums && x.tokens >= tiles_from;
  const bool fine = x.fine && is_int8, few = x.tokens == 1 && is_amd;
  float* sums = reinterpret_cast<float*>(dots);
  std::int32_t offset = is_int8 ? int8_offset : 1;
  std::int64_t rows = sums_apart(begin, end);
#if defined(NARROW_SUMS)
  const bool wide = !x.on_unit && tiles && !is_ternary(format);
  if (wide) {
    wide_piece(matrix, begin, end, x, dots, scratch);
    offset = 0;
  }
#else
  constexpr bool wide = false;
#endif
  if (Unit::is_there && x.on_unit) {
    if constexpr (Unit::is_there) {
      (x.group ? unit_piece<Unit, true> : unit_piece<Unit, false>)(matrix, begin, end, x, fine, dots, scratch);
    }
    offset = 0;
    rows = unit_side;
  } else if (wide) {
  } else if (tiles) {
    tile_piece(matrix, begin, end, x, group_sums, dots, scratch);
    offset = is_int8 ? 128 : 1;
  } else if (by_sums) {
    sum_kernels->sum_strips(matrix, begin, end, x, sums);
    offset = 0;
  } else if (matrix.in_strips() && !of_i2) {
#if VECTOR_BYTES == 64
    const GroupSums of(matrix, x, group_sums);
    const int streams = few ? few_streams.strips : strip_streams;
    in_streams(end - begin, strip_rows, streams, streams, [&](std::int64_t r, std::int64_t step, int count) TARGET {
      for (std::int64_t t = 0, taken; t < x.tokens; t += taken) {
        taken = x.tokens - t > 3 ? 4 : x.tokens - t > 1 ? 2 : 1;
        const auto add_up = taken == 4    ? lookup_strip_sums<4, strip_streams>
                            : taken == 2  ? lookup_strip_sums<2, strip_streams>
                            : few         ? lookup_strip_sums<1, few_streams.strips>
                                          : lookup_strip_sums<1, strip_streams>;
        add_up(matrix, begin + r, step, count, x, of, t, sums + t * rows + r, rows);
      }
    });
#endif
  } else if (matrix.in_strips()) {
    const GroupSums of(matrix, x, group_sums);
    const int streams = x.tokens > 2 ? strips_together : few ? few_streams.strips : strip_streams;
    in_streams(end - begin, strip_rows, streams, 1, [&](std::int64_t r, std::int64_t step, int count) TARGET {
      each_token_group(x.tokens, [&](auto T, std::int64_t t) TARGET {
        constexpr int ahead = T > 2 ? far_ahead : strip_ahead;
        const auto add_up = count > 1 ? strip_sums<strips_together, T, ahead>
                            : few     ? strip_sums<1, T, T == 1 ? 0 : ahead>
                                      : strip_sums<1, T, ahead>;
        add_up(matrix, begin + r, step, count, x, of, t, sums + t * rows + r, rows);
      });
    });
  } else if (format == WeightFormat::i2) {
    row_dots<WeightFormat::i2>(matrix, begin, end, x, false, dots);
  } else if (format == WeightFormat::lookup) {
    lookup_dots(matrix, begin, end, x, dots);
  } else if (is_int8) {
    row_dots<WeightFormat::int8>(matrix, begin, end, x, fine, dots);
  } else {
    in_streams(end - begin, 1, group_rows, 1, [&](std::int64_t r, std::int64_t step, int count) TARGET {
      dot_int4_rows(matrix, begin + r, step, count, x, group_sums, sums + r, rows);
    });
  }
  return {dots, rows, offset};
}
