// SPDX-License-Identifier: Apache-2.0
// Attention over int8 pages, with integer products; `attend` and `append` of isa.h.
//
// A query is quantised once, with one scale. Its probabilities against a page, relative to the largest of
// them and times the scales of the values, are rounded to 0..127. Four codes along the sum lie in a
// 32-bit lane (kv_cache.h), as a matrix unit reads them (matrix_unit.h). Sums are exact, so rounding
// depends on a row and its page alone. NaN makes its scale NaN, and so the result
// of every row that sees it.

#ifndef DOT_SIGNED
#define DOT_SIGNED(sum, a, b) sum_of_fours(sum, a, b)
#define DOT_UNSIGNED(sum, a, b) sum_of_fours(sum, a, b)
INLINE Ints sum_of_fours(Ints sum, const Ints& a, const Ints& b) {
  UNROLL for (int shift = 24; shift >= 0; shift -= 8) sum += (a << shift >> 24) * (b << shift >> 24);
  return sum;
}
#endif
#ifndef DOT_OFFSET
#define DOT_OFFSET 0
#endif

// sums [ROWS][VECTORS] of a [ROWS, depth fours] and b [depth fours, columns], the codes of a from 0 to 127
// if not SIGNED. For each line of b, the line `ahead` bytes further is prefetched, see multiply.
template <int ROWS, int VECTORS, bool SIGNED>
INLINE void multiply_codes(const std::int8_t* a, std::int64_t a_stride, const std::int32_t* sums,
                           const std::int8_t* b, std::int64_t b_stride, std::int64_t depth,
                           std::ptrdiff_t ahead, Ints (&sum)[ROWS][VECTORS]) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const Ints start = SIGNED && DOT_OFFSET ? splat(sums[r] * -DOT_OFFSET) : Ints{};
    UNROLL for (int v = 0; v < VECTORS; ++v) sum[r][v] = start;
  }
  NO_UNROLL for (std::int64_t k = 0; k < depth; ++k) {
    const std::int8_t* line = b + k * b_stride;
    UNROLL for (int byte = 0; byte < VECTORS * VECTOR_BYTES; byte += 64) fetch_ahead(line + ahead + byte);
    Ints vector[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; ++v) vector[v] = load<Ints>(line + v * VECTOR_BYTES);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      std::int32_t four;
      __builtin_memcpy(&four, a + r * a_stride + 4 * k, sizeof four);
      const Ints factor = splat(four);
      UNROLL for (int v = 0; v < VECTORS; ++v) {
        sum[r][v] = SIGNED ? DOT_SIGNED(sum[r][v], factor, vector[v])
                           : DOT_UNSIGNED(sum[r][v], factor, vector[v]);
      }
    }
  }
}

// Operands and results of both products of some rows.
struct Int8Rows {
  const std::int8_t *keys, *values;
  const std::int8_t* queries;        // [rows, four_dim]
  const std::int32_t* query_sums;    // [rows]
  std::int32_t* scores;              // [rows, page_tokens]
  const std::int8_t* probabilities;  // [rows, page_tokens]
  const float *factors, *scales;     // [rows]: of what has been summed before, of the probabilities
  float* out;                        // [rows, padded]
  std::int64_t head_dim, padded, seen;
};

template <int ROWS, int VECTORS>
INLINE void score_tile(const Int8Rows& work, std::int64_t column, std::ptrdiff_t ahead) {
  Ints sum[ROWS][VECTORS];
  const std::int64_t stride = four_dim(work.head_dim);
  multiply_codes<ROWS, VECTORS, true>(work.queries, stride, work.query_sums, work.keys + 4 * column,
                                      4 * page_tokens, stride / 4, ahead, sum);
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int v = 0; v < VECTORS; ++v) store(work.scores + r * page_tokens + column + v * width, sum[r][v]);
  }
}

// Adds the sums of probabilities and values, in codes, to the earlier sums.
INLINE void add_values(const Int8Rows& work, std::int64_t row, std::int64_t column, const Ints& sums) {
  float* out = work.out + row * work.padded + column;
  const Floats added = __builtin_convertvector(sums, Floats) * work.scales[row];
  store(out, FUSED(load_floats(out), splat(work.factors[row]), added));
}

template <int ROWS, int VECTORS>
INLINE void value_tile(const Int8Rows& work, std::int64_t column, std::ptrdiff_t ahead) {
  Ints sum[ROWS][VECTORS];
  multiply_codes<ROWS, VECTORS, false>(work.probabilities, page_tokens, nullptr,
                                       work.values + 4 * column, 4 * work.padded,
                                       work.seen < quarter ? work.seen : quarter, ahead, sum);
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int v = 0; v < VECTORS; ++v) add_values(work, r, column + v * width, sum[r][v]);
  }
}

template <int ROWS>
TARGET static void score_rows_of(const Int8Rows& work, std::ptrdiff_t ahead) {
  std::int64_t i = 0;
  for (; i + tile_vectors * width <= page_tokens && i < work.seen; i += tile_vectors * width) {
    score_tile<ROWS, tile_vectors>(work, i, ahead);
  }
}

template <int ROWS>
TARGET static void value_rows_of(const Int8Rows& work, std::ptrdiff_t ahead) {
  std::int64_t i = 0;
  for (; i + tile_vectors * width <= work.padded; i += tile_vectors * width) {
    value_tile<ROWS, tile_vectors>(work, i, ahead);
  }
  for (; i < work.padded; i += width) value_tile<ROWS, 1>(work, i, ahead);
}

// Factors that turn probabilities against a page into codes: the scales of the values in units of 1/127 of
// the largest.
struct ValueScales {
  Floats over_largest[page_tokens / width];
  float largest;
};

// Those of the values in [first, visible); others may never have been written.
INLINE ValueScales value_scales_of(const PageView& page, std::int64_t first, std::int64_t visible) {
  ValueScales scales;
  Ints bits[page_tokens / width];  // which order like the numbers, with NaN the largest of all
  UNROLL for (int v = 0; v < page_tokens / width; ++v) {
    scales.over_largest[v] = load_floats(page.value_scales + v * width);
  }
  mask_outside(scales.over_largest, first, visible);
  UNROLL for (int v = 0; v < page_tokens / width; ++v) bits[v] = bit_cast<Ints>(scales.over_largest[v]);
  scales.largest = larger(splat(1e-30f), bit_cast<Floats>(splat(largest_of_page(bits))))[0];
  UNROLL for (int v = 0; v < page_tokens / width; ++v) {
    scales.over_largest[v] = larger(Floats{}, scales.over_largest[v]) * (127.0f / scales.largest);
  }
  return scales;
}

INLINE void prefetch_range(const std::int8_t* from, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// Scores of `rows` rows, a multiple of unit_tile, on a matrix unit: of a page, keys and values both lie as its
// tiles of B are read.
template <class Unit>
INLINE void unit_scores(Unit& unit, const Int8Rows& work, std::int64_t rows) {
  std::int32_t* held = nullptr;
  Nothing nothing;
  const std::int64_t stride = four_dim(work.head_dim), line = 4 * page_tokens;
  for (std::int64_t r = 0; r < rows; r += 2 * unit_tile) {
    const UnitTiles queries = {work.queries + r * stride, stride, 64, unit_tile * stride};
    for (std::int64_t i = 0; i < work.seen; i += 2 * unit_tile) {
      const UnitTiles keys = {work.keys + 4 * i, line, unit_tile * line, 4 * unit_tile};
      unit_sums<false>(unit, rows - r, 2 * unit_tile, queries, keys, stride / 64, true,
                       work.scores + r * page_tokens + i, page_tokens, held, nothing);
    }
  }
  store_unit_sums<2, 2>(unit, held, page_tokens);
}

// The values of the same rows, whose scores are not needed any more: their place takes the sums.
template <class Unit>
INLINE void unit_values(Unit& unit, const Int8Rows& work, std::int64_t rows) {
  std::int32_t* held = nullptr;
  Nothing nothing;
  const std::int64_t line = 4 * work.padded;
  for (std::int64_t first = 0; first < rows; first += 2 * unit_tile) {
    const std::int64_t left = rows - first, m = left < 2 * unit_tile ? left : 2 * unit_tile;
    const UnitTiles probabilities = {work.probabilities + first * page_tokens, page_tokens, 0,
                                     unit_tile * page_tokens};
    for (std::int64_t i = 0; i < work.padded; i += 2 * unit_tile) {
      const std::int64_t after = work.padded - i, n = after < 2 * unit_tile ? after : 2 * unit_tile;
      const UnitTiles values = {work.values + 4 * i, line, 0, 4 * unit_tile};
      unit_sums<false>(unit, m, n, probabilities, values, 1, true, work.scores, page_tokens, held, nothing);
      store_unit_sums<2, 2>(unit, held, page_tokens);
      held = nullptr;
      for (std::int64_t r = 0; r < m; ++r) {
        for (std::int64_t k = 0; k < n; k += width) {
          add_values(work, first + r, i + k, load<Ints>(work.scores + r * page_tokens + k));
        }
      }
    }
  }
}
static_assert(page_tokens == 64 && score_rows % unit_tile == 0);

// Sums of codes [page_tokens] of one row -> scores in floats, at the same place. Returns the largest.
INLINE float scale_scores(const PageAttention& work, std::int64_t row, std::int32_t* scores) {
  Floats score[page_tokens / width];
  UNROLL for (int v = 0; v < page_tokens / width; ++v) {
    const Floats scale = load_floats(work.page.key_scales + v * width) * work.query_scales[row];
    score[v] = __builtin_convertvector(load<Ints>(scores + v * width), Floats) * scale;
  }
  mask_outside(score, first_seen(work, row), keys_seen(work, row));
  UNROLL for (int v = 0; v < page_tokens / width; ++v) store(scores + v * width, score[v]);
  return largest_of_page(score);
}

// Scores in floats -> probabilities relative to the page's largest, times the values' scales, as codes. Adds them
// to `added`, without the scales.
INLINE void probability_codes(const std::int32_t* scores, float largest, const ValueScales& values,
                              std::int8_t* codes, Floats* added) {
  constexpr int vectors = page_tokens / width;
  Ints code[vectors];
  UNROLL for (int v = 0; v < vectors; ++v) {
    const Floats probability = power_of_two(load<Floats>(scores + v * width) - largest);
    added[v % sum_vectors] += probability;
    code[v] = bit_cast<Ints>(probability * values.over_largest[v] + round_to_low_bits) & 0xff;
  }
  UNROLL for (int v = 0; v < vectors / 4; ++v) {
    store(codes + 4 * v * width, code[v] | code[v + vectors / 4] << 8 | code[v + vectors / 2] << 16 |
                                     code[v + vectors / 4 * 3] << 24);
  }
}

// The operands of the rows from `row` on; `seen` of the page's keys are used.
INLINE Int8Rows rows_from(const Int8Rows& work, int row, std::int64_t seen) {
  return {work.keys, work.values, work.queries + row * four_dim(work.head_dim), work.query_sums + row,
          work.scores + row * page_tokens, work.probabilities + row * page_tokens, work.factors + row,
          work.scales + row, work.out + row * work.padded, work.head_dim, work.padded, seen};
}

// `unit`: the matrix unit, or null if it must not be used.
template <class Unit>
TARGET static void attend_int8(const PageAttention& work, Unit* unit, std::int64_t first, int rows) {
  alignas(64) std::int32_t scores[score_rows * page_tokens];
  alignas(64) std::int8_t probabilities[score_rows * page_tokens];
  float scales[score_rows], part[score_rows];
  RunningMaximum maxima;
  const std::int64_t padded = padded_dim(work.head_dim);
  const std::int8_t* keys = static_cast<const std::int8_t*>(work.page.keys);
  const std::int8_t* values = static_cast<const std::int8_t*>(work.page.values);
  const std::ptrdiff_t to_next = static_cast<const std::int8_t*>(work.next_keys) - values;
  const Int8Rows all = {keys, values, work.query_codes + first * four_dim(work.head_dim), work.query_sums + first,
                        scores, probabilities, maxima.factor, scales, work.state.out + first * padded,
                        work.head_dim, padded, 0};
  const int on_unit = unit ? rows / unit_tile * unit_tile : 0;  // the first ones
  if constexpr (Unit::is_there) {
    if (on_unit) {
      prefetch_range(values, page_tokens * padded);
      unit_scores(*unit, rows_from(all, 0, keys_seen(work, first + on_unit - 1)), on_unit);
    }
  }
  const int left = rows - on_unit, blocks = int(packed::divide_up(left, tile_rows));
  for (int b = 0; b < blocks; ++b) {
    const int begin = on_unit + left * b / blocks, end = on_unit + left * (b + 1) / blocks;
    const Int8Rows some = rows_from(all, begin, keys_seen(work, first + end - 1));
    FOR_ROWS(score_rows_of, end - begin, some, b == 0 ? values - keys : 0)  // one block prefetches for all
  }
  for (int r = 0; r < rows; ++r) {
    maxima.largest[r] = scale_scores(work, first + r, scores + r * page_tokens);
  }
  maxima.run(rows, work.state.maximum + first, part);
  const ValueScales whole = value_scales_of(work.page, 0, page_tokens);
  for (int r = 0; r < rows; ++r) {
    const std::int64_t hidden = first_seen(work, first + r), seen = keys_seen(work, first + r);
    ValueScales own;
    const ValueScales* values = &whole;
    if (hidden > 0 || seen < page_tokens) {
      own = value_scales_of(work.page, hidden, seen);
      values = &own;
    }
    Floats added[sum_vectors] = {};
    probability_codes(scores + r * page_tokens, maxima.largest[r], *values, probabilities + r * page_tokens, added);
    UNROLL for (Floats& sum : added) sum *= part[r];
    add_to_sum(work.state.sum + (first + r) * sum_lanes, maxima.factor[r], added);
    scales[r] = part[r] * values->largest / 127.0f;
  }
  if constexpr (Unit::is_there) {
    if (on_unit) {
      prefetch_range(values + to_next, page_tokens * four_dim(work.head_dim));
      unit_values(*unit, all, on_unit);
    }
  }
  for (int b = 0; b < blocks; ++b) {
    const int begin = on_unit + left * b / blocks, end = on_unit + left * (b + 1) / blocks;
    const Int8Rows some = rows_from(all, begin, keys_seen(work, first + end - 1));
    FOR_ROWS(value_rows_of, end - begin, some, b == 0 ? to_next : 0)  // as above
  }
}

template <class Unit>
TARGET static void attend(const PageAttention& work) {
  switch (work.type) {
    case CacheType::float32: return attend_page<float>(work);
    case CacheType::float16: return attend_page<std::uint16_t>(work);
    case CacheType::int8: break;
    case CacheType::int4: return attend<Unit>(unpacked(work));
  }
  const std::int64_t hidden = masked_rows(work);
  Unit unit;
  Unit* used = nullptr;
  if constexpr (Unit::is_there) {
    if (work.rows - hidden >= unit_tile && four_dim(work.head_dim) % 64 == 0) {
      used = &unit;
      unit.begin();
    }
  }
  for (std::int64_t row = hidden; row < work.rows; row += score_rows) {
    const std::int64_t left = work.rows - row;
    attend_int8(work, used, row, int(left < score_rows ? left : score_rows));
  }
  if constexpr (Unit::is_there) {
    if (used) unit.end();
  }
}

TARGET static void append_int8(const PageView& page, std::int64_t slot, const float* key,
                               const float* value, std::int64_t head_dim) {
  const std::int64_t padded = padded_dim(head_dim);
  std::int8_t codes[max_head_dim] = {};
  std::int8_t *keys = static_cast<std::int8_t*>(page.keys) + 4 * slot,
              *values = static_cast<std::int8_t*>(page.values) + slot % quarter * 4 * padded + slot / quarter;
  quantize_int8(key, Dtype::float32, 1, head_dim, codes, page.key_scales + slot);
  for (std::int64_t i = 0; i < head_dim; i += 4) {
    __builtin_memcpy(keys + i * page_tokens, codes + i, 4);
  }
  quantize_int8(value, Dtype::float32, 1, head_dim, codes, page.value_scales + slot);
  for (std::int64_t i = 0; i < padded; ++i) values[4 * i] = codes[i];
}

TARGET static void append(CacheType type, const PageView& page, std::int64_t slot,
                          const float* key, const float* value, std::int64_t head_dim) {
  switch (type) {
    case CacheType::float32: return append_as<float>(page, slot, key, value, head_dim);
    case CacheType::float16: return append_as<std::uint16_t>(page, slot, key, value, head_dim);
    case CacheType::int8: return append_int8(page, slot, key, value, head_dim);
    case CacheType::int4: return append_int4(page, slot, key, value, head_dim);
  }
}
