// SPDX-License-Identifier: Apache-2.0
// Many tokens: weights unpacked once to tiles of bytes and reused by all tokens. Included by
// matmul-inl.h, with
//   tile_vectors       vectors of rows of a tile; lane i of vector v is row v * lanes + i
//   tile_tokens        tokens whose sums stay in registers
//
// A tile holds, for every four consecutive columns, tile_rows rows of four bytes, so that a vector of
// weights is `lanes` rows and no sum ever has to be taken across lanes. With PAIRED_TILES it is eight columns:
// a vector then holds pairs of rows.

constexpr int tile_rows = tile_vectors * row_lanes;
#if defined(PAIRED_TILES)
constexpr int tile_columns = 8;
#else
constexpr int tile_columns = 4;
#endif

// The rows of one vector of a tile; where the matrix ends, its last row over and over.
struct RowPointers {
  const std::uint8_t* at[row_lanes];
  std::int64_t to_next;  // bytes from here to where the tile after this one comes from
};

INLINE RowPointers row_pointers(const Matrix& matrix, std::int64_t begin, std::int64_t end,
                                std::int64_t to_next) {
  RowPointers rows;
  rows.to_next = to_next;
  for (std::int64_t i = 0; i < row_lanes; ++i) {
    rows.at[i] = matrix.data + (begin + i < end ? begin + i : end - 1) * matrix.row_stride;
  }
  return rows;
}

// The destination of unpacked weights, and what is subtracted from each.
struct TilePlace {
  std::uint8_t* at;
  std::uint8_t offset;

  TARGET __attribute__((always_inline)) TilePlace operator+(std::int64_t bytes) const { return {at + bytes, offset}; }
};

// Four columns of the rows of a vector, of which the first lies at `tile`.
template <class V>
INLINE void store_word(const TilePlace& tile, std::int64_t column, const V& weights) {
  std::uint8_t* to = tile.at + column / tile_columns * tile_columns * tile_rows;
  if constexpr (tile_columns == 4) {
    store(to, weights - tile.offset);
  } else {
    const auto words = bit_cast<Vector<std::int32_t, sizeof(V)>>(weights - tile.offset);
    UNROLL for (int i = 0; i < int(sizeof(V) / 4); ++i) {
      const std::int32_t word = words[i];
      __builtin_memcpy(to + i * tile_columns + column % tile_columns, &word, 4);
    }
  }
}

// A vector of each row, transposed: square[i] holds word i of all rows. The next tile is prefetched while this one is
// unpacked, and arrives while this one is multiplied.
INLINE void load_square(const RowPointers& rows, std::int64_t offset, Bytes* square) {
  UNROLL for (int i = 0; i < row_lanes; ++i) square[i] = load_bytes(rows.at[i] + offset);
  if (offset % block_bytes == 0) {
    UNROLL for (int i = 0; i < row_lanes; ++i) __builtin_prefetch(rows.at[i] + offset + rows.to_next, 0, 3);
  }
  transpose_words(square);
}

// Columns [begin, begin + count) of i2. Blocks are transposed while they are packed: one word then holds four columns
// of each plane.
INLINE void unpack_i2(const RowPointers& rows, std::int64_t columns, std::int64_t begin, std::int64_t count,
                      TilePlace tile) {
  for (std::int64_t c = 0; c < count; c += packed::i2_block_weights) {
    const std::int64_t left = columns - begin - c;
    const std::int64_t step = left < packed::i2_block_weights ? packed::i2_plane_bytes(left) : block_bytes;
    for (std::int64_t v = 0; v < step; v += VECTOR_BYTES) {
      Bytes square[row_lanes];
      load_square(rows, (begin + c) / i2_planes + v, square);
      UNROLL for (int i = 0; i < row_lanes; ++i) {
        if (v + 4 * i >= step) break;
        UNROLL for (int p = 0; p < i2_planes; ++p) store_word(tile, c + p * step + v + 4 * i, plane(square[i], p));
      }
    }
  }
}

// i2 in strips, which are tiles but for their bits.
INLINE void unpack_strip(const Matrix& matrix, std::int64_t row, std::int64_t begin, std::int64_t count,
                         TilePlace tile) {
  const std::uint8_t* words = matrix.data + row / strip_rows * strip_rows * matrix.row_stride +
                              row % strip_rows * 4 + begin / strip_columns * 64;
  for (std::int64_t c = 0; c < count; c += strip_columns, words += 64) {
    const Bytes block = load_bytes(words);
    UNROLL for (int p = 0; p < i2_planes; ++p) store_word(tile, c + 4 * p, plane(block, p));
  }
}

// The same of lookup; `begin` is the first of three groups.
INLINE void unpack_lookup_strip(const Matrix& matrix, std::int64_t row, std::int64_t begin, std::int64_t count,
                                TilePlace tile) {
  const lookup::Layout& layout = lookup::layout_of(matrix.pattern);
  const std::int64_t group = matrix.group, first = lookup::strip_place(matrix.columns, group, begin).block;
  const std::uint8_t* block = matrix.data + row / strip_rows * strip_rows * matrix.row_stride + row % strip_rows * 4 +
                              first * TriplePlanes::shape.vectors() * block_bytes;
  for (std::int64_t c = 0; c < count;) {
    const bool is_shared = begin + c + 3 * group <= matrix.columns;
    const std::int64_t step = is_shared ? 4 : 12, apart = is_shared ? group : 4;
    const std::int64_t vectors = packed::divide_up(group, step);
    for (std::int64_t v = 0; v < lookup::strip_blocks(group, is_shared) * TriplePlanes::rows; ++v) {
      const Bytes codes = TriplePlanes::codes(block, int(v % TriplePlanes::rows));
      UNROLL for (int p = 0; p < TriplePlanes::count; ++p) {
        const std::int64_t column = v * step + p * apart;
        if (v >= vectors || (!is_shared && column >= group)) continue;
        store_word(tile, c + column, TriplePlanes::next(layout, codes, p));
      }
      if (v % TriplePlanes::rows == TriplePlanes::rows - 1) block += TriplePlanes::shape.vectors() * block_bytes;
    }
    c += is_shared ? 3 * group : group;
  }
}

// A segment of b3_strips of a tile's rows. 128 bits hold a code of sixteen rows: in a vector lie those of the first four codes,
// then those of the last four, and so on. Side by side, four codes of a row are words of four columns.
template <int CODES>
INLINE void unpack_b3_segment(const std::uint8_t* at, TilePlace tile) {
  static_assert(tile_rows == (quads > 1 ? 8 * quads : 16));
  constexpr int strip = b3_strips::rows, last = b3_strips::segment_bytes(CODES) - 1, in_half = CODES == 3 ? 0 : 2;
  const LookupTable fields = lookup_table(b3_strips::tables.fields);
  const auto bits = load<Vector<std::uint16_t>>(b3_strips::tables.bits);
  for (int half = 0; half < (quads == 1 && CODES > 3 ? 2 : 1); ++half) {
    const Bytes pairs[] = {load_quads(at + half * in_half * strip, at + in_half * strip),
                           load_quads(at + (1 + half * in_half) * strip, at + (1 + in_half) * strip)};
    const Bytes signs = load_quads(at + last * strip, at + last * strip);
    Bytes codes[4], words[4];
    UNROLL for (int i = 0; i < 4; ++i) {
      const Bytes index = i % 2 ? high_nibbles(pairs[i / 2]) : low_nibbles(pairs[i / 2]);
      const Bytes bit = bit_cast<Bytes>(bits << (b3_strips::sign_bit(CODES, i) + 2 * half));
      const Bytes is_negative = bit_cast<Bytes>((signs & bit) != 0);
      codes[i] = (look_up<4>(fields, index) ^ is_negative) - is_negative + 21;
    }
    UNROLL for (int i = 0; i < 4; i += 2) interleave_halves<std::uint8_t>(codes[i], codes[i + 1], words[i], words[i + 1]);
    interleave_halves<std::uint16_t>(words[0], words[2], codes[0], codes[1]);
    interleave_halves<std::uint16_t>(words[1], words[3], codes[2], codes[3]);
    // Of rows 4 i and so on: words that are columns c of the first four codes, or also of the last four.
    const auto put = [&](int i, int c, bool is_first, bool is_last, const Words& four) TARGET {
      UNROLL for (int q = 0; q < quads; ++q) {
        const bool of_last = (quads == 1 ? half : q % 2) == 1;
        if (of_last ? !is_last : !is_first) continue;
        Vector<std::uint8_t, 16> quad;
        __builtin_memcpy(&quad, reinterpret_cast<const char*>(&four) + 16 * q, 16);
        store_word(tile + tile_columns * (q / 2 * 16 + 4 * i), c + (of_last && is_first ? 12 : 0), quad);
      }
    };
    UNROLL for (int i = 0; i < 4; ++i) {
      const Words w = bit_cast<Words>(codes[i]);
      if (CODES == 3) {
        put(i, 0, true, false, (w & 0x00030303) | (w << 20 & 0x03000000));
        put(i, 4, true, false, (w >> 2 & 0x00030303) | (w << 12 & 0x03000000));
        continue;
      }
      UNROLL for (int p = 0; p < 3; ++p) put(i, 4 * p, true, CODES == 8, w >> 2 * p & 0x03030303);
      if (CODES == 6) put(i, 12, false, true, (w & 0x0303) | (w << 14 & 0x03030000));
    }
  }
}

// Columns [begin, begin + count) of a tile's rows from `row` on; `begin` is the first of a part.
TARGET static void unpack_b3_strips(const Matrix& matrix, std::int64_t row, std::int64_t begin, std::int64_t count,
                                    TilePlace tile) {
  const std::int64_t part = b3_strips::part_columns(matrix.group), in_strip = row % b3_strips::rows;
  const std::uint8_t* at = matrix.data + (row - in_strip) * matrix.row_stride + in_strip +
                           begin / part * b3_strips::part_bytes(part) * b3_strips::rows;
  for (std::int64_t c = 0, left = part; c < count; left = left > 0 ? left : part) {
    const std::int64_t columns = left < b3_strips::segment_columns ? left : b3_strips::segment_columns;
    (columns == 24 ? unpack_b3_segment<8> : columns == 16 ? unpack_b3_segment<6> : unpack_b3_segment<3>)(at, tile + c * tile_rows);
    at += b3_strips::segment_bytes(b3_strips::codes_of(columns)) * b3_strips::rows, c += columns, left -= columns;
  }
}

// Calls put(column, weights) for every four columns of rows of int8.
template <class Put>
INLINE void unpack_int8(const RowPointers& rows, std::int64_t begin, std::int64_t count, const Put& put) {
  for (std::int64_t c = 0; c < count; c += VECTOR_BYTES) {
    Bytes square[row_lanes];
    load_square(rows, begin + c, square);
    UNROLL for (int i = 0; i < row_lanes; ++i) put(c + 4 * i, square[i]);
  }
}

// The same of int4, weights plus 8. Low and high nibbles are columns 32 apart. Vectors may hold a group more than
// there is.
template <class Put>
INLINE void unpack_int4(const RowPointers& rows, std::int64_t begin, std::int64_t count, const Put& put) {
  constexpr int half = int4_group / 2;
  for (std::int64_t c = 0; c < count; c += 2 * VECTOR_BYTES) {
    Bytes square[row_lanes];
    load_square(rows, (begin + c) / 2, square);
    const std::int64_t in_group = VECTOR_BYTES < half ? c % int4_group : 0;
    UNROLL for (int i = 0; i < row_lanes; ++i) {
      const std::int64_t byte = in_group / 2 + 4 * i;
      const std::int64_t column = c - in_group + byte / half * int4_group + byte % half;
      put(column, low_nibbles(square[i]));
      put(column + half, high_nibbles(square[i]));
    }
  }
}

// Strips of lookup; up to a block more. Codes are transposed, not weights.
template <class Planes>
INLINE void unpack_lookup(const Matrix& matrix, std::int64_t row, std::int64_t begin, std::int64_t count,
                          std::int64_t to_next, TilePlace tile) {
  constexpr int block_columns = Planes::shape.block_columns(), block_size = Planes::shape.vectors() * block_bytes;
  const lookup::Layout& layout = lookup::layout_of(matrix.pattern);
  for (std::int64_t c = 0; c < count; c += block_columns) {
    for (int v = 0; v < block_vectors; ++v) {
      Bytes square[row_lanes];
      UNROLL for (int i = 0; i < row_lanes; ++i) {
        const int in_strip = row_lanes % Planes::rows == 0 ? i % Planes::rows : int(row + i) % Planes::rows;
        const std::uint8_t* block = matrix.data + (row + i - in_strip) * matrix.row_stride +
                                    (begin + c) / block_columns * block_size;
        if (in_strip == 0 && v == 0) {
          UNROLL for (int j = 0; j < block_size; j += block_bytes) __builtin_prefetch(block + j + to_next, 0, 3);
        }
        square[i] = Planes::codes(block + v * VECTOR_BYTES, in_strip);
      }
      transpose_words(square);
      UNROLL for (int i = 0; i < row_lanes; ++i) {
        Bytes planes[Planes::count];
        UNROLL for (int p = 0; p < Planes::count; ++p) planes[p] = Planes::next(layout, square[i], p);
        Planes::in_order(planes);
        const std::int64_t column = c + Planes::code_step * (v * VECTOR_BYTES + 4 * i);
        UNROLL for (int p = 0; p < Planes::count; ++p) store_word(tile, column + p * Planes::plane_step, planes[p]);
      }
    }
  }
}

// Columns [column, column + count) of rows [begin, end), at most row_lanes, as one vector of a tile:
// weights plus 1, 128 or 8, by format, less the offset. May write up to 64 columns more, within the column block.
// `column` is a multiple of column_block; to_next as of RowPointers.
TARGET __attribute__((noinline)) static void unpack_rows(const Matrix& matrix, std::int64_t begin, std::int64_t end,
                                                         std::int64_t column, std::int64_t count, std::int64_t to_next,
                                                         TilePlace tile) {
  if (matrix.in_strips()) {
    if (matrix.format == WeightFormat::lookup) return unpack_lookup_strip(matrix, begin, column, count, tile);
    return unpack_strip(matrix, begin, column, count, tile);
  }
  const RowPointers rows = row_pointers(matrix, begin, end, to_next);
  switch (matrix.format) {
    case WeightFormat::lookup: {
      const lookup::Shape& shape = lookup::shape_of(matrix.pattern);
      if (!shape.neighbours()) return unpack_lookup<TriplePlanes>(matrix, begin, column, count, to_next, tile);
      if (shape.bits == 5) return unpack_lookup<ExactQuadPlanes>(matrix, begin, column, count, to_next, tile);
      return unpack_lookup<QuadPlanes>(matrix, begin, column, count, to_next, tile);
    }
    case WeightFormat::i2: return unpack_i2(rows, matrix.columns, column, count, tile);
    case WeightFormat::b3_strips: return;  // see unpack_b3_strips
    case WeightFormat::int8:
      return unpack_int8(rows, column, count, [tile](std::int64_t c, const Bytes& weights)
                         TARGET __attribute__((always_inline)) { store_word(tile, c, to_unsigned(weights)); });
    case WeightFormat::int4:
      return unpack_int4(rows, column, count, [tile](std::int64_t c, const Bytes& weights)
                         TARGET __attribute__((always_inline)) { store_word(tile, c, weights); });
  }
}

// Activations of each of T tokens, `stride` bytes apart, by fours. Few base addresses, each good for four tokens: more
// would not fit the registers.
template <int T>
struct TokenWords {
  const std::int8_t* base[(T + 3) / 4];
  std::int64_t stride, stride3;

  TARGET __attribute__((always_inline)) TokenWords(const std::int8_t* x, std::int64_t apart) : stride(apart), stride3(3 * apart) {
    UNROLL for (int b = 0; b < (T + 3) / 4; ++b) base[b] = x + 4 * b * stride;
  }
  TARGET __attribute__((always_inline)) void advance(std::int64_t columns) {
    UNROLL for (int b = 0; b < (T + 3) / 4; ++b) base[b] += columns;
  }
  TARGET __attribute__((always_inline)) Fours at(int t, std::int64_t column, int number) const {
    return fours(base[t / 4] + (t % 4 == 3 ? stride3 : t % 4 * stride) + column, number);
  }
};

// `words` groups of four columns of T tokens, `stride` bytes apart, onto small[t][v].
#if defined(PAIRED_TILES)
template <int T>
INLINE void tile_words(const std::uint8_t* tile, const std::int8_t* x, std::int64_t stride,
                       std::int64_t words, Small (&small)[T][tile_vectors]) {
  constexpr int pairs = (T + 1) / 2;
  Sums sums[pairs][2 * tile_vectors] = {};
  // Of an odd last word the other half meets the zeros behind a token.
  for (std::int64_t w = 0; w < words; w += 2, x += tile_columns) {
    Bytes tokens[pairs];
    UNROLL for (int p = 0; p < pairs; ++p) {
      const Vector<std::uint64_t> both = {load<std::uint64_t>(x + 2 * p * stride),
                                          load<std::uint64_t>(x + (2 * p + 1 < T ? 2 * p + 1 : 2 * p) * stride)};
      tokens[p] = bit_cast<Bytes>(both);
    }
    UNROLL for (int v = 0; v < 2 * tile_vectors; ++v) {
      const Bytes rows = load_bytes(tile + w * (4 * tile_rows) + v * VECTOR_BYTES);
      UNROLL for (int p = 0; p < pairs; ++p) sums[p][v] = dot_pairs(sums[p][v], rows, tokens[p]);
    }
  }
  UNROLL for (int p = 0; p < pairs; ++p) {
    UNROLL for (int v = 0; v < tile_vectors; ++v) {
      Sums first, second;
      unzip<std::int32_t>(sums[p][2 * v], sums[p][2 * v + 1], first, second);
      small[2 * p][v] += first;
      if (2 * p + 1 < T) small[2 * p + 1][v] += second;
    }
  }
}
#else
template <int T>
INLINE void tile_words(const std::uint8_t* tile, const std::int8_t* x, std::int64_t stride,
                       std::int64_t words, Small (&small)[T][tile_vectors]) {
  const TokenWords<T> tokens(x, stride);
  constexpr int together = std::is_same_v<Fours, Bytes> ? 1 : 4;
  for (std::int64_t first = 0; first < words; first += together) {
    UNROLL for (int i = 0; i < together; ++i) {
      if (i > 0 && first + i >= words) break;
      Bytes weights[tile_vectors];
      UNROLL for (int v = 0; v < tile_vectors; ++v) {
        weights[v] = load_bytes(tile + (first + i) * (4 * tile_rows) + v * VECTOR_BYTES);
      }
      UNROLL for (int t = 0; t < T; ++t) {
        const Fours four = tokens.at(t, 4 * first, i);
        UNROLL for (int v = 0; v < tile_vectors; ++v) small[t][v] = dot_codes(small[t][v], weights[v], four);
      }
    }
  }
}
#endif

// dots [T, row_step] of a tile's rows, added to what is there where `first` is false.
template <int T>
TARGET static void tile_dots(const std::uint8_t* tile, const std::int8_t* x, std::int64_t stride,
                             std::int64_t words, bool first, std::int32_t* dots,
                             std::int64_t row_step) {
  for (std::int64_t w = 0; w < words; w += small_dots, first = false) {
    const std::int64_t count = words - w < small_dots ? words - w : small_dots;
    Small small[T][tile_vectors] = {};
    tile_words<T>(tile + w * (4 * tile_rows), x + 4 * w, stride, count, small);
    UNROLL for (int t = 0; t < T; ++t) {
      UNROLL for (int v = 0; v < tile_vectors; ++v) {
        std::int32_t* to = dots + t * row_step + v * row_lanes;
        store(to, widen(first ? Sums{} : load<Sums>(to), small[t][v]));
      }
    }
  }
}

// body(T, t) for groups of T tokens from t on, as even as they get, T a constant of at most tile_tokens.
template <class Body, int... T>
INLINE void each_token_group(std::int64_t tokens, Body&& body, std::integer_sequence<int, T...>) {
  for (std::int64_t t = 0, left = packed::divide_up(tokens, tile_tokens), size; left > 0; --left, t += size) {
    size = (tokens - t) / left;
    ((size == T + 1 ? body(std::integral_constant<int, T + 1>(), t) : void()), ...);
  }
}
template <class Body>
INLINE void each_token_group(std::int64_t tokens, Body&& body) {
  each_token_group(tokens, body, std::make_integer_sequence<int, tile_tokens>());
}
