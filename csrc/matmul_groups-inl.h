// SPDX-License-Identifier: Apache-2.0
// Sums that are scaled by groups of columns: they leave the integers group by group, in ascending order. Tiles of
// int4 and of ternary weights, and ternary rows for few tokens. Included by matmul-inl.h.

using RowFloats = Vector<float, 4 * group_rows>;
using RowSums = Vector<std::int32_t, 4 * group_rows>;

TARGET static void sum_groups(const std::int8_t* codes, std::int64_t groups, std::int64_t group,
                              std::int32_t* sums) {
  for (std::int64_t g = 0; g < groups; ++g) {
    std::int32_t sum = 0;
    for (std::int64_t i = 0; i < group; ++i) sum += codes[g * group + i];
    sums[g] = sum;
  }
}

// The groups of a matrix or of a tile of it and how their sums become floats, for tokens from the first on.
struct GroupSums {
  std::int64_t group, in_row;     // columns of a group, or of a row without groups; groups of a row
  std::int32_t offset;            // added to every code
  const std::int32_t* code_sums;  // [tokens, parts, in_row]
  std::int64_t parts;             // codes, and fine where there is one
  const float* activation_scales;          // [tokens, in_row], or null

  GroupSums(const Matrix& matrix, const Activations& x, const std::int32_t* sums)
      : group(matrix.summed_group() ? matrix.summed_group() : matrix.columns),
        in_row(packed::divide_up(matrix.columns, group)),
        offset(matrix.format == WeightFormat::int4 ? 8 : 1),
        code_sums(sums),
        parts(x.fine ? 2 : 1),
        activation_scales(x.group ? x.scales : nullptr) {}

  TARGET __attribute__((always_inline)) std::int32_t excess(std::int64_t token, int part, std::int64_t g) const {
    return offset * code_sums[(token * parts + part) * in_row + g];
  }
};

// Where the scale of a row's first group lies; those of its next groups are as far apart as a strip has rows.
INLINE std::int64_t scale_index(const Matrix& matrix, std::int64_t row) {
  const std::int64_t strip = matrix.rows_of_strip();
  return row / strip * (matrix.columns / matrix.group) * strip + row % strip;
}

// As many scales as a vector has lanes, of the rows that follow.
INLINE Floats scales_at(const Matrix& matrix, std::int64_t index) {
  if (matrix.scale_type == ScaleType::float32) return load<Floats>(static_cast<const float*>(matrix.group_scales) + index);
  const auto* from = static_cast<const std::uint16_t*>(matrix.group_scales) + index;
  if (matrix.scale_type == ScaleType::float16) return widen_halves(from);
  return bit_cast<Floats>(__builtin_convertvector((load<Vector<std::uint16_t, VECTOR_BYTES / 2>>(from)), Words) << 16);
}

// The scales of row_lanes rows, `row` a multiple of row_lanes; at the end of the matrix, of its last rows.
INLINE Floats row_scales(const Matrix& matrix, std::int64_t row, std::int64_t group) {
  const std::int64_t last = (matrix.rows - 1) / row_lanes * row_lanes;
  return scales_at(matrix, scale_index(matrix, row < last ? row : last) + group * matrix.rows_of_strip());
}

// sums [T, sums_apart] of `count` strips of i2 (matmul.h), `step` rows apart, and of tokens from `token` on. S strips are
// multiplied together; a group of these and one of the next S are read in turns.
template <int S, int T, int AHEAD>
TARGET __attribute__((noinline)) static void strip_sums(const Matrix& matrix, std::int64_t row, std::int64_t step,
                                                        int count, const Activations& x, const GroupSums& of,
                                                        std::int64_t token, float* sums, std::int64_t sums_apart) {
  constexpr int of_strip = 64 / VECTOR_BYTES, vectors = S * of_strip;
  // Sums that do not wait for each other, of the planes. Planes that are masked instead of shifted count 4 or 16 times as
  // much, in sums of their own, which 16 bits hold for 128 columns. NEON masks three planes; with 512 bits, two read memory faster.
  constexpr bool is_narrow = small_dots == 64;
  constexpr int most = (is_narrow ? 4 : VECTOR_BYTES == 16 ? 16 : 10) / (T * vectors);
  constexpr int chains = most >= 4 && !is_narrow ? 4 : most >= 2 ? 2 : 1;
  constexpr int masked = VECTOR_BYTES == 16 && chains == 4 ? 3 : 2;
  constexpr std::int64_t most_columns = is_narrow ? 128 : 1 << 20;
  // Codes of i2 are one too high.
  const std::int64_t groups = of.in_row, excess_stride = of.parts * groups;
  const std::int32_t* excess = of.code_sums + token * excess_stride;
  const float* activation_scales = of.activation_scales ? of.activation_scales + token * groups : nullptr;
  const std::int64_t to_next = step * matrix.row_stride, to_next_scale = step * groups, scale = scale_index(matrix, row);
  const std::uint8_t* strips = matrix.data + row * matrix.row_stride;
  const std::int8_t* codes_at = x.codes + token * x.stride;
  for (std::int64_t g = 0; g < groups; ++g, strips += 4 * of.group, codes_at += of.group) {
    NO_UNROLL for (int s = 0; s < count; s += S) {
      const std::uint8_t* words = strips + s * to_next;
      TokenWords<T> tokens(codes_at, x.stride);
      Sums dots[T][vectors] = {};
      for (std::int64_t left = of.group; left > 0; left -= most_columns) {
        Small small[T][vectors][chains] = {};
        const std::uint8_t* end = words + 4 * (left < most_columns ? left : most_columns);
        NO_UNROLL for (; words != end; words += 64) {
          Bytes block[vectors];
          UNROLL for (int v = 0; v < vectors; ++v) {
            block[v] = load_bytes(words + v / of_strip * to_next + v % of_strip * VECTOR_BYTES);
          }
          UNROLL for (int p = 0; p < i2_planes; ++p) {
            Bytes codes[vectors];
            UNROLL for (int v = 0; v < vectors; ++v) {
              codes[v] = chains == 1             ? plane(block[v], p)
                         : masked == 3 && p == 3 ? block[v] >> 6
                                                 : block[v] & splat(std::uint8_t(3 << 2 * (p % masked)));
              if (chains > 1 && masked == 2 && p == 1) block[v] = shifted_down(block[v], 4);
            }
            if (p % 2 == 0 && p / 2 < S) fetch_with<AHEAD>(codes[0], words + p / 2 * to_next);
            UNROLL for (int t = 0; t < T; ++t) {
              const Fours four = tokens.at(t, 0, p);
              UNROLL for (int v = 0; v < vectors; ++v) {
                small[t][v][p % chains] = dot_codes(small[t][v][p % chains], codes[v], four);
              }
            }
          }
          tokens.advance(strip_columns);
        }
        UNROLL for (int i = 0; i < T * vectors * chains; ++i) {
          const int t = i / chains / vectors, v = i / chains % vectors, k = i % chains;
          dots[t][v] += widen(Sums{}, small[t][v][k]) >> (chains == 1 ? 0 : 2 * (k % masked));
        }
      }
      UNROLL for (int v = 0; v < vectors; ++v) {
        const std::int64_t strip = s + v / of_strip, r = v % of_strip * row_lanes;
        const std::int64_t index = scale + strip * to_next_scale + g * strip_rows + r;
        const Floats scales = scales_at(matrix, index);
        UNROLL for (int t = 0; t < T; ++t) {
          Floats value = __builtin_convertvector(dots[t][v] - excess[t * excess_stride + g], Floats) * scales;
          if (activation_scales) value *= activation_scales[t * groups + g];
          float* to = sums + t * sums_apart + strip * step + r;
          store(to, (g == 0 ? Floats{} : load<Floats>(to)) + value);
        }
      }
    }
  }
}

#if VECTOR_BYTES == 64
// The same of strips of lookup. Where one token is all, every other of codes has sums of its own, so that none waits for
// the one before.
template <int T, int STREAMS>
TARGET __attribute__((noinline)) static void lookup_strip_sums(const Matrix& matrix, std::int64_t row, std::int64_t step,
                                                               int count, const Activations& x, const GroupSums& of,
                                                               std::int64_t token, float* sums, std::int64_t sums_apart) {
  using Planes = TriplePlanes;
  constexpr int chains = T > 1 ? 1 : 2, digits = Planes::count, rows = Planes::rows, vectors = Planes::shape.vectors();
  const lookup::Layout& layout = lookup::layout_of(matrix.pattern);
  const std::int64_t groups = of.in_row, scale = scale_index(matrix, row);
  const std::uint8_t* strip = matrix.data + row * matrix.row_stride;
  Floats total[STREAMS][T] = {};
  for (std::int64_t g = 0; g < groups;) {
    const bool is_shared = g + digits <= groups;
    const std::int64_t next = is_shared ? 4 : 4 * digits, apart = is_shared ? of.group : 4;
    const std::int8_t* codes_at = x.codes + token * x.stride + g * of.group;
    Sums all_sums[STREAMS][T][digits][chains] = {};
    for (std::int64_t b = lookup::strip_blocks(of.group, is_shared); b > 0; --b, codes_at += rows * next) {
      NO_UNROLL for (int s = 0; s < count; ++s) {
        const std::uint8_t* from = strip + s * step * matrix.row_stride;
        auto& sums_of = all_sums[s];
        Bytes block[vectors];
        Planes::load_block(from, block);
        UNROLL for (int v = 0; v < rows; ++v) {
          const Bytes codes = Planes::codes(block, v);
          UNROLL for (int p = 0; p < digits; ++p) {
            Bytes weights = Planes::next(layout, codes, p);
            const int line = line_at(v * digits + p, rows * digits, vectors);
            if (line >= 0) fetch_with<STREAMS == 1 ? 0 : strip_ahead>(weights, from + line * block_bytes);
            UNROLL for (int t = 0; t < T; ++t) {
              const Bytes four = repeat4(codes_at + v * next + t * x.stride + p * apart);
              sums_of[t][p][v % chains] = dot_codes(sums_of[t][p][v % chains], weights, four);
            }
          }
        }
      }
      strip += vectors * block_bytes;
    }
    // Of a group, the sums of one digit or of all.
    const auto add_up = [&](int first, int summed) TARGET {
      for (int s = 0; s < count; ++s) {
        const Floats scales = scales_at(matrix, scale + s * step * groups + g * strip_rows);
        UNROLL for (int t = 0; t < T; ++t) {
          Sums dot = Sums{} - of.excess(token + t, 0, g);
          UNROLL for (int i = 0; i < summed * chains; ++i) dot += all_sums[s][t][first + i / chains][i % chains];
          Floats value = __builtin_convertvector(dot, Floats) * scales;
          if (of.activation_scales) value *= of.activation_scales[(token + t) * groups + g];
          total[s][t] += value;
        }
      }
    };
    if (!is_shared) add_up(0, digits), ++g;
    UNROLL for (int p = 0; p < digits && is_shared; ++p, ++g) add_up(p, 1);
  }
  for (int s = 0; s < count; ++s) {
    UNROLL for (int t = 0; t < T; ++t) store(sums + t * sums_apart + s * step, total[s][t]);
  }
}
#endif

// The scales of a tile's rows, as floats [groups, tile_rows].
INLINE void scales_of_tile(const Matrix& matrix, std::int64_t begin, std::int64_t end, std::int64_t first,
                           std::int64_t groups, float* out) {
  if (matrix.group) {
    for (std::int64_t g = 0; g < groups; ++g) {
      for (int i = 0; i < tile_rows; i += row_lanes) {
        store(out + g * tile_rows + i, row_scales(matrix, begin + i, first + g));
      }
    }
    return;
  }
  const std::int64_t in_row = packed::divide_up(matrix.columns, int4_group);
  for (std::int64_t i = 0; i < tile_rows; ++i) {
    const float* from = matrix.scales + (begin + i < end ? begin + i : end - 1) * in_row + first;
    for (std::int64_t g = 0; g < groups; ++g) out[g * tile_rows + i] = from[g];
  }
}

// One group of T tokens, onto the sums of a tile's rows.
template <int T>
INLINE void tile_group(const std::uint8_t* tile, const std::int8_t* x, std::int64_t stride, std::int64_t words,
                       std::int64_t most, Sums (&sums)[T][tile_vectors]) {
  if constexpr (std::is_same_v<Small, Sums>) {
    tile_words<T>(tile, x, stride, words, sums);
  } else {
    for (std::int64_t w = 0; w < words; w += most) {
      Small small[T][tile_vectors] = {};
      tile_words<T>(tile + w * (4 * tile_rows), x + 4 * w, stride, words - w < most ? words - w : most, small);
      UNROLL for (int t = 0; t < T; ++t) {
        UNROLL for (int v = 0; v < tile_vectors; ++v) sums[t][v] = widen(sums[t][v], small[t][v]);
      }
    }
  }
}

// sums [T, sums_apart] of a tile's rows over groups [first, first + groups) of a column block, added to what
// is there but for first = 0, of tokens from `token` on. scales [groups, tile_rows]. With fine codes the integers
// are 128 times as large, which float32 holds for groups of 64.
template <int T>
TARGET static void tile_groups(const std::uint8_t* tile, const std::int8_t* codes, const std::int8_t* fine,
                               std::int64_t stride, const GroupSums& of, std::int64_t token, std::int64_t first,
                               std::int64_t groups, const float* scales, float* sums, std::int64_t sums_apart) {
  const std::int64_t most = of.offset == 8 ? nibble_dots : small_dots, words = of.group / 4;
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::uint8_t* group = tile + g * of.group * tile_rows;
    Sums dots[T][tile_vectors];
    UNROLL for (int t = 0; t < T; ++t) {
      UNROLL for (int v = 0; v < tile_vectors; ++v) dots[t][v] = Sums{} - of.excess(token + t, 0, first + g);
    }
    tile_group<T>(group, codes + g * of.group, stride, words, most, dots);
    if (fine) {
      UNROLL for (int t = 0; t < T; ++t) {
        UNROLL for (int v = 0; v < tile_vectors; ++v) {
          dots[t][v] = dots[t][v] * 128 - of.excess(token + t, 1, first + g);
        }
      }
      tile_group<T>(group, fine + g * of.group, stride, words, most, dots);
    }
    UNROLL for (int t = 0; t < T; ++t) {
      float factor = fine ? 1.0f / 128.0f : 1.0f;
      if (of.activation_scales) factor *= of.activation_scales[(token + t) * of.in_row + first + g];
      UNROLL for (int v = 0; v < tile_vectors; ++v) {
        float* to = sums + t * sums_apart + v * row_lanes;
        const Floats value = __builtin_convertvector(dots[t][v], Floats) *
                             load<Floats>(scales + g * tile_rows + v * row_lanes) * factor;
        store(to, (first + g == 0 ? Floats{} : load<Floats>(to)) + value);
      }
    }
  }
}
