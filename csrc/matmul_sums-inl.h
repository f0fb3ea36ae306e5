// SPDX-License-Identifier: Apache-2.0
// Products of b3_strips and few tokens, without a multiplication: an index looks up the sum that its weights make of
// their three activations, in tables of a token. For all instruction sets of x86, with 256 bits or 512. Included by
// matmul-inl.h with HAS_SUMS.

using Shorts = Vector<std::int16_t>;
using Entries = Vector<std::int16_t, 32>;
constexpr int strip_vectors = b3_strips::rows / VECTOR_BYTES, vectors_of_rows = b3_strips::rows / row_lanes;
constexpr int sum_table_bytes = VECTOR_BYTES;

#if VECTOR_BYTES == 64
// GCC would load it again for each use.
INLINE Bytes in_register(Bytes v) {
  __asm__("" : "+v"(v));
  return v;
}

// vpermw looks sums up in 16 bits, by an index whose fifth bit is the sign.
INLINE void store_table(const Entries& sums, std::uint8_t* table) {
  store(table, sums);
  store(table + sizeof sums, -sums);
}

// Adds up the codes of a segment, onto sums of the even rows and of the odd ones. A byte is the index of its row; vpermw
// reads the lower one of two.
template <int CODES>
INLINE void add_segment(const std::uint8_t* at, const std::uint8_t* tables, Shorts* sums) {
  constexpr int bytes = b3_strips::segment_bytes(CODES);
  Bytes signs = in_register(load_bytes(at + (bytes - 1) * b3_strips::rows)), pair = signs;
  UNROLL for (int i = 0; i < CODES; ++i) {
    const int from = b3_strips::sign_bit(CODES, i), line = line_at(i, CODES, bytes);
    const Bytes sign = from < 4 ? shifted_up(signs, 4 - from) : shifted_down(signs, from - 4);
    if (i % 2 == 0) pair = in_register(load_bytes(at + i / 2 * b3_strips::rows));
    // sign & 16 | magnitude & ~16
    Bytes index = bit_cast<Bytes>(_mm512_ternarylogic_epi32(bits(sign), bits(shifted_down(pair, i % 2 * 4)), _mm512_set1_epi8(16), 0xe4));
    if (line >= 0) fetch_with<strip_ahead>(index, at + line * block_bytes);
    const Bytes table = in_register(load_bytes(tables + i * sum_table_bytes));
    const __m512i next = _mm512_mulhi_epu16(bits(index), _mm512_set1_epi16(256));  // shifts would wait for look-ups
    sums[0] += bit_cast<Shorts>(_mm512_permutexvar_epi16(bits(index), bits(table)));
    sums[1] += bit_cast<Shorts>(_mm512_permutexvar_epi16(next, bits(table)));
  }
}

// The sums of add_segment by row.
INLINE void in_rows(const Shorts* sums, Sums* rows) {
  Shorts halves[2];
  zip<std::int16_t>(sums[0], sums[1], halves[0], halves[1]);
  UNROLL for (int i = 0; i < 2; ++i) {
    const __m512i half = bit_cast<__m512i>(halves[i]);
    rows[2 * i] = bit_cast<Sums>(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(half)));
    rows[2 * i + 1] = bit_cast<Sums>(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(half, 1)));
  }
}
#else
// A sum is two digits of at most 14, low + 27 high: those of eight codes fit 8 bits.
INLINE void store_table(const Entries& sums, std::uint8_t* table) {
  const Entries high = (sums * 38 + 512) >> 10, low = sums - high * 27;
  const __m256i digits = _mm256_packs_epi16(bit_cast<__m256i>(low), bit_cast<__m256i>(high));
  store(table, _mm256_permute4x64_epi64(digits, 0xd8));
}

// Adds up the codes of a segment, onto sums of each vector's even eights of rows and of the odd ones.
template <int CODES>
INLINE void add_segment(const std::uint8_t* at, const std::uint8_t* tables, Shorts* sums) {
  Bytes low[strip_vectors] = {}, high[strip_vectors] = {};
  constexpr int bytes = b3_strips::segment_bytes(CODES), by_sign[] = {7, 5, 3, 1, 6, 4, 2, 0};
  // vpsignb takes the sign of a byte, and zero for zero: a set bit below keeps it from being that.
  Bytes signs[strip_vectors], sign[strip_vectors];
  UNROLL for (int v = 0; v < strip_vectors; ++v) {
    signs[v] = load_bytes(at + (bytes - 1) * b3_strips::rows + v * VECTOR_BYTES);
    sign[v] = CODES == 3 ? signs[v] : signs[v] | 1;
  }
  UNROLL for (int i = 0; i < 8; ++i) {
    const int code = by_sign[i], line = line_at(i, 8, bytes);
    if (line >= 0) fetch_with<strip_ahead>(sign[0], at + line * block_bytes);
    if (code >= CODES && CODES == 3) continue;
    if (code < CODES) {
      const std::uint8_t* table = tables + code * sum_table_bytes;
      const __m256i of_low = _mm256_broadcastsi128_si256(load<__m128i>(table));
      const __m256i of_high = _mm256_broadcastsi128_si256(load<__m128i>(table + 16));
      UNROLL for (int v = 0; v < strip_vectors; ++v) {
        const Bytes pair = load_bytes(at + code / 2 * b3_strips::rows + v * VECTOR_BYTES);
        const Bytes index = code % 2 ? high_nibbles(pair) : low_nibbles(pair);
        low[v] += bit_cast<Bytes>(_mm256_sign_epi8(_mm256_shuffle_epi8(of_low, bits(index)), bits(sign[v])));
        high[v] += bit_cast<Bytes>(_mm256_sign_epi8(_mm256_shuffle_epi8(of_high, bits(index)), bits(sign[v])));
      }
    }
    UNROLL for (int v = 0; v < strip_vectors; ++v) {
      sign[v] = i == 0 && CODES != 3 ? (signs[v] + signs[v]) | 1 : sign[v] + sign[v];
      __asm__("" : "+x"(low[v]), "+x"(high[v]), "+x"(sign[v]));  // one code after another: more do not fit the registers
    }
  }
  UNROLL for (int v = 0; v < strip_vectors; ++v) {
    Bytes digits[2];
    interleave_halves<std::uint8_t>(low[v], high[v], digits[0], digits[1]);
    UNROLL for (int i = 0; i < 2; ++i) {
      sums[2 * v + i] += bit_cast<Shorts>(_mm256_maddubs_epi16(_mm256_set1_epi16(27 << 8 | 1), bits(digits[i])));
    }
  }
}

INLINE void in_rows(const Shorts* sums, Sums* rows) {
  UNROLL for (int i = 0; i < vectors_of_rows; ++i) {
    const __m256i eights = bit_cast<__m256i>(sums[i / 4 * 2 + i % 2]);
    rows[i] = bit_cast<Sums>(_mm256_cvtepi16_epi32(i / 2 % 2 ? _mm256_extracti128_si256(eights, 1) : _mm256_castsi256_si128(eights)));
  }
}
#endif

// Writes the tables of the codes of a segment.
template <int CODES>
INLINE void segment_tables(const std::int8_t* codes, std::uint8_t* tables) {
  constexpr int columns = b3_strips::columns_of(CODES);
  Entries weights[3], sums[CODES] = {};
  UNROLL for (int p = 0; p < 3; ++p) {  // from code 0 on
    weights[p] = __builtin_convertvector((load<Vector<std::uint8_t, 16>>(lookup::layout_of({1, 1}).digits[p] + 13)), Entries) - 1;
  }
  UNROLL for (int c = 0; c < columns; ++c) {
    const b3_strips::Place place = b3_strips::place_of(CODES, c);
    sums[place.code] += weights[place.digit] * std::int16_t(codes[c]);
  }
  UNROLL for (int i = 0; i < CODES; ++i) store_table(sums[i], tables + i * sum_table_bytes);
}

TARGET static void sum_tables(const std::int8_t* codes, std::int64_t part, std::uint8_t* tables) {
  for (std::int64_t s = part / b3_strips::segment_columns; s > 0; --s) {
    segment_tables<8>(codes, tables);
    codes += b3_strips::segment_columns, tables += 8 * sum_table_bytes;
  }
  if (const std::int64_t left = part % b3_strips::segment_columns) {
    left == 8 ? segment_tables<3>(codes, tables) : segment_tables<6>(codes, tables);
  }
}

// Strips that are read in turns, `apart` bytes from one to the next, and how far they are.
struct Strips {
  const std::uint8_t *at, *tables;
  std::int64_t apart;
  int count;
};

// The codes of a segment of each of the strips, onto sums [strips, 2 strip_vectors].
template <int CODES>
INLINE void add_segment(Strips& strips, Shorts (*sums)[2 * strip_vectors]) {
  NO_UNROLL for (int s = 0; s < strips.count; ++s) {
    add_segment<CODES>(strips.at + s * strips.apart, strips.tables, sums[s]);
  }
  strips.at += b3_strips::segment_bytes(CODES) * b3_strips::rows;
  strips.tables += CODES * sum_table_bytes;
}

// sums of a token and strips that are `step` rows apart. Scales are there for all rows of a strip.
template <ScaleType SCALE>
TARGET static void sum_grouped_rows(const Matrix& of_all, std::int64_t row, std::int64_t step, Strips strips,
                                 const float* activation_scales, float* sums) {
  Matrix matrix = of_all;  // with a constant type of scales
  matrix.scale_type = SCALE;
  const std::int64_t groups = matrix.columns / matrix.group, segments = matrix.group / b3_strips::segment_columns;
  std::int64_t scale = scale_index(matrix, row);
  Floats totals[strip_streams][vectors_of_rows] = {};
  for (std::int64_t g = 0; g < groups; ++g, scale += b3_strips::rows) {
    Shorts dots[strip_streams][2 * strip_vectors] = {};
    NO_UNROLL for (std::int64_t i = 0; i < segments; ++i) add_segment<8>(strips, dots);
    matrix.group == 128 ? add_segment<3>(strips, dots) : add_segment<6>(strips, dots);
    const float activation_scale = activation_scales ? activation_scales[g] : 1.0f;
    NO_UNROLL for (int s = 0; s < strips.count; ++s) {
      Sums rows[vectors_of_rows];
      in_rows(dots[s], rows);
      UNROLL for (int i = 0; i < vectors_of_rows; ++i) {
        const Floats scales = scales_at(matrix, scale + s * step * groups + i * row_lanes);
        totals[s][i] += __builtin_convertvector(rows[i], Floats) * scales * activation_scale;
      }
    }
  }
  for (int s = 0; s < strips.count; ++s) __builtin_memcpy(sums + s * step, totals[s], sizeof totals[s]);
}

// The same without group scales: integers.
TARGET static void sum_whole_rows(const Matrix& matrix, std::int64_t step, Strips strips, std::int32_t* sums) {
  constexpr std::int64_t most = 10;  // segments, whose sums 16 bits hold
  Sums totals[strip_streams][vectors_of_rows] = {};
  for (std::int64_t left = packed::divide_up(matrix.columns, b3_strips::segment_columns); left > 0; left -= most) {
    Shorts dots[strip_streams][2 * strip_vectors] = {};
    NO_UNROLL for (std::int64_t i = left < most ? left : most; i > 0; --i) add_segment<8>(strips, dots);
    NO_UNROLL for (int s = 0; s < strips.count; ++s) {
      Sums rows[vectors_of_rows];
      in_rows(dots[s], rows);
      UNROLL for (int i = 0; i < vectors_of_rows; ++i) totals[s][i] += rows[i];
    }
  }
  for (int s = 0; s < strips.count; ++s) __builtin_memcpy(sums + s * step, totals[s], sizeof totals[s]);
}

TARGET static void sum_strips(const Matrix& matrix, std::int64_t begin, std::int64_t end, const Activations& x,
                              float* sums) {
  const std::int64_t part = b3_strips::part_columns(matrix.group), parts = packed::divide_up(matrix.columns, part);
  const auto sum = matrix.scale_type == ScaleType::float16    ? sum_grouped_rows<ScaleType::float16>
                   : matrix.scale_type == ScaleType::bfloat16 ? sum_grouped_rows<ScaleType::bfloat16>
                                                              : sum_grouped_rows<ScaleType::float32>;
  in_streams(end - begin, b3_strips::rows, strip_streams, strip_streams, [&](std::int64_t r, std::int64_t step, int count) TARGET {
    for (std::int64_t t = 0; t < x.tokens; ++t) {
      const std::uint8_t* tables = x.sum_tables + t * parts * b3_strips::part_codes(part) * sum_table_bytes;
      const Strips strips = {matrix.data + (begin + r) * matrix.row_stride, tables, step * matrix.row_stride, count};
      float* to = sums + t * sums_apart(begin, end) + r;
      if (matrix.group) {
        sum(matrix, begin + r, step, strips, x.group ? x.scales + t * parts : nullptr, to);
      } else {
        sum_whole_rows(matrix, step, strips, reinterpret_cast<std::int32_t*>(to));
      }
    }
  });
}
