// SPDX-License-Identifier: Apache-2.0
// Many tokens with int8 and int4 weights: tiles of 16-bit weights times 16-bit activations, 128 * codes +
// fine, so that one pass gives what codes and fine give together. Included by matmul-inl.h where 8-bit
// products would be slower, with
//   Sums dot_pairs(Sums, Bytes weights, Bytes x)   each 32-bit lane: plus the dot product of 2 int16
//   void widen_words(Bytes words, Bytes* first, Bytes* second)   of every four signed bytes of a lane
//                                                   the first and the second two, as int16
//
// A tile holds, for every two consecutive columns, tile_rows rows of two int16.

// |x| <= 128 * 127 + 64 times |weights| <= 128: the sums of 1024 columns fit into 32 bits.
constexpr std::int64_t wide_block = wide_column_block;
static_assert(wide_block <= 1024);
constexpr std::int64_t wide_tile_bytes = 2 * wide_block * tile_rows;
static_assert(max_rows_a_call % tile_rows == 0 && tile_tokens <= max_wide_tokens);
// Pieces are as small as this needs: of more than few tokens only those of ternary weights are larger.
static_assert(tile_from[int(WeightFormat::int8)] > max_few_tokens && tile_from[int(WeightFormat::int4)] > max_few_tokens);

// Signed bytes of columns [column, column + 4) of a vector of rows.
INLINE void store_wide(std::uint8_t* tile, std::int64_t column, const Bytes& weights) {
  Bytes first, second;
  widen_words(weights, &first, &second);
  store(tile + 2 * column * tile_rows, first);
  store(tile + 2 * (column + 2) * tile_rows, second);
}

// Columns [column, column + count) of rows [begin, end), at most row_lanes, as one vector of a tile; up to
// 64 columns more, within wide_block. `column` is a multiple of wide_block.
TARGET __attribute__((noinline)) static void widen_rows(const Matrix& matrix, std::int64_t begin, std::int64_t end,
                                                        std::int64_t column, std::int64_t count, std::int64_t to_next,
                                                        std::uint8_t* tile) {
  const RowPointers rows = row_pointers(matrix, begin, end, to_next);
  if (matrix.format == WeightFormat::int8) {
    return unpack_int8(rows, column, count, [tile](std::int64_t c, const Bytes& weights)
                       TARGET __attribute__((always_inline)) { store_wide(tile, c, weights); });
  }
  unpack_int4(rows, column, count, [tile](std::int64_t c, const Bytes& weights)
              TARGET __attribute__((always_inline)) { store_wide(tile, c, weights - 8); });
}

// 128 * codes + fine of T tokens: out [T, wide_block]. Whole groups of 64, as activations have them.
template <int T>
INLINE void widen_activations(const std::int8_t* codes, const std::int8_t* fine, std::int64_t stride,
                              std::int64_t count, std::int16_t* out) {
  const std::int64_t whole = packed::round_up(count, 64);
  for (int t = 0; t < T; ++t, out += wide_block) {
    const std::int8_t* coarse = codes + t * stride;
    for (std::int64_t c = 0; c < whole; ++c) out[c] = std::int16_t(coarse[c] * 128);
    if (!fine) continue;
    const std::int8_t* finer = fine + t * stride;
    for (std::int64_t c = 0; c < whole; ++c) out[c] = std::int16_t(out[c] + finer[c]);
  }
}

// Sums over `pairs` pairs of columns.
template <int T>
INLINE void wide_words(const std::uint8_t* tile, const std::int16_t* x, std::int64_t pairs,
                       Sums (&sums)[T][tile_vectors]) {
  for (std::int64_t w = 0; w < pairs; ++w) {
    Bytes weights[tile_vectors];
    UNROLL for (int v = 0; v < tile_vectors; ++v) {
      weights[v] = load_bytes(tile + w * (4 * tile_rows) + v * VECTOR_BYTES);
    }
    UNROLL for (int t = 0; t < T; ++t) {
      const Bytes two = repeat4(x + t * wide_block + 2 * w);
      UNROLL for (int v = 0; v < tile_vectors; ++v) {
        sums[t][v] = dot_pairs(sums[t][v], weights[v], two);
      }
    }
  }
}

// int8: a sum s becomes the part s >> 7 of the codes' sum and s & 127 of the fine ones', the next row of
// dots: together they are the same number.
template <int T>
TARGET static void wide_dots(const std::uint8_t* tile, const std::int16_t* x, std::int64_t pairs,
                             bool fine, bool first, std::int32_t* dots, std::int64_t row_step) {
  Sums sums[T][tile_vectors] = {};
  wide_words<T>(tile, x, pairs, sums);
  UNROLL for (int t = 0; t < T; ++t) {
    UNROLL for (int v = 0; v < tile_vectors; ++v) {
      std::int32_t* to = dots + t * row_step + v * row_lanes;
      store(to, (first ? Sums{} : load<Sums>(to)) + (sums[t][v] >> 7));
      if (!fine) continue;
      to += max_rows_a_call;
      store(to, (first ? Sums{} : load<Sums>(to)) + (sums[t][v] & 127));
    }
  }
}

// int4: sums [T, row_step] over `groups` groups, scales [groups, tile_rows]. Each group's sum is exact
// as a float.
template <int T>
TARGET static void wide_int4(const std::uint8_t* tile, const std::int16_t* x, const float* scales,
                             std::int64_t groups, bool first, float* sums, std::int64_t row_step) {
  for (std::int64_t g = 0; g < groups; ++g, first = false) {
    Sums dots[T][tile_vectors] = {};
    wide_words<T>(tile + g * (2 * int4_group * tile_rows), x + g * int4_group, int4_group / 2, dots);
    UNROLL for (int t = 0; t < T; ++t) {
      UNROLL for (int v = 0; v < tile_vectors; ++v) {
        float* to = sums + t * row_step + v * row_lanes;
        const Floats scale = load<Floats>(scales + g * tile_rows + v * row_lanes);
        const Floats value = __builtin_convertvector(dots[t][v], Floats) * (1.0f / 128.0f);
        store(to, (first ? Floats{} : load<Floats>(to)) + value * scale);
      }
    }
  }
}

// The sums of a piece: of int8 integers as of row_dots, of int4 floats [tokens, max_rows_a_call]. All rows
// of the piece are unpacked before the tokens are widened, which is then done once.
TARGET static void wide_piece(const Matrix& matrix, std::int64_t begin, std::int64_t end,
                              const Activations& x, std::int32_t* dots, MatmulScratch& scratch) {
  const bool int4 = matrix.format == WeightFormat::int4;
  const std::int64_t step = max_rows_a_call * (x.fine && !int4 ? 2 : 1);
  const std::int64_t row_bytes = wide_block / (int4 ? 2 : 1);
  const std::int64_t tiles = packed::divide_up(end - begin, tile_rows);
  constexpr std::int64_t tile_groups = wide_block / int4_group;
  for (std::int64_t c = 0; c < matrix.columns; c += wide_block) {
    const std::int64_t count = matrix.columns - c < wide_block ? matrix.columns - c : wide_block;
    const std::int64_t groups = packed::divide_up(count, int4_group);
    const bool last_block = c + wide_block >= matrix.columns;
    const std::int64_t to_next =
        last_block ? (end - begin) * matrix.row_stride - c / wide_block * row_bytes : row_bytes;
    // Whole tiles: sums of rows that are not there are thrown away, but must not overflow.
    for (std::int64_t r = begin; r < begin + tiles * tile_rows; r += row_lanes) {
      const std::int64_t tile = (r - begin) / tile_rows, lane = (r - begin) % tile_rows;
      widen_rows(matrix, r, r + row_lanes < end ? r + row_lanes : end, c, count, to_next,
                 scratch.tile + tile * wide_tile_bytes + 4 * lane);
    }
    for (std::int64_t i = 0; int4 && i < tiles; ++i) {
      scales_of_tile(matrix, begin + i * tile_rows, end, c / int4_group, groups,
                  scratch.scales + i * tile_groups * tile_rows);
    }
    each_token_group(x.tokens, [&](auto T, std::int64_t t) TARGET {
      const std::int64_t at = t * x.stride + c;
      std::int16_t* wide = scratch.activations;
      widen_activations<T>(x.codes + at, x.fine ? x.fine + at : nullptr, x.stride, count, wide);
      for (std::int64_t i = 0; i < tiles; ++i) {
        const std::uint8_t* tile = scratch.tile + i * wide_tile_bytes;
        std::int32_t* to = dots + t * step + i * tile_rows;
        if (int4) {
          const float* scales = scratch.scales + i * tile_groups * tile_rows;
          wide_int4<T>(tile, wide, scales, groups, c == 0, reinterpret_cast<float*>(to), step);
        } else {
          wide_dots<T>(tile, wide, packed::divide_up(count, 2), x.fine, c == 0, to, step);
        }
      }
    });
  }
}
