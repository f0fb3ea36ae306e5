// SPDX-License-Identifier: Apache-2.0
// int4 rows: a scale for every group of 64 weights, so sums leave the integers group by group, in
// ascending order. Included by matmul-inl.h.

constexpr int unit_bytes = VECTOR_BYTES > 32 ? VECTOR_BYTES : 32;
constexpr int unit_vectors = unit_bytes / VECTOR_BYTES;
constexpr int unit_groups = unit_bytes / 32;

// x of the two halves of the groups that one unit of packed bytes holds, in the order of the bytes.
INLINE void load_halves(const std::int8_t* x, Bytes* low, Bytes* high) {
  if constexpr (VECTOR_BYTES > 32) {
    Vector<std::uint64_t> lows, highs;
    unzip<std::uint64_t, 4>(load<Vector<std::uint64_t>>(x), load<Vector<std::uint64_t>>(x + VECTOR_BYTES), lows,
                            highs);
    *low = bit_cast<Bytes>(lows);
    *high = bit_cast<Bytes>(highs);
  } else {
    UNROLL for (int v = 0; v < unit_vectors; ++v) {
      low[v] = load_bytes(x + v * VECTOR_BYTES);
      high[v] = load_bytes(x + 32 + v * VECTOR_BYTES);
    }
  }
}

// sums [tokens, sums_apart] of `count` rows, `step` apart; one alone is taken eight times.
TARGET static void dot_int4_rows(const Matrix& matrix, std::int64_t row, std::int64_t step, int count,
                                 const Activations& x, const std::int32_t* group_sums, float* sums,
                                 std::int64_t sums_apart) {
  const std::int64_t groups = packed::divide_up(matrix.columns, int4_group);
  const std::uint8_t* rows[group_rows];
  const float* scales[group_rows];
  for (std::int64_t i = 0; i < group_rows; ++i) {
    const std::int64_t r = row + (count > 1 ? i * step : 0);
    rows[i] = matrix.data + r * matrix.row_stride;
    scales[i] = matrix.scales + r * groups;
  }
  const int parts = x.fine ? 2 : 1;
  for (std::int64_t t = 0; t < x.tokens; ++t) {
    const std::int32_t* of_groups = group_sums + t * parts * groups;
    RowFloats total = {};
    for (std::int64_t g = 0; g < groups; g += unit_groups) {
      RowSums dots[2][unit_groups];
      Bytes low[2][unit_vectors], high[2][unit_vectors];
      load_halves(x.codes + t * x.stride + g * int4_group, low[0], high[0]);
      if (x.fine) load_halves(x.fine + t * x.stride + g * int4_group, low[1], high[1]);
      Sums by_row[2][group_rows];
      UNROLL for (int i = 0; i < group_rows; ++i) {
        by_row[0][i] = by_row[1][i] = Sums{};
        UNROLL for (int v = 0; v < unit_vectors; ++v) {
          const std::uint8_t* bytes = rows[i] + g * (int4_group / 2) + v * VECTOR_BYTES;
          Bytes packed_bytes = load_bytes(bytes);
          if (v == 0) fetch_with<row_ahead>(packed_bytes, bytes);
          const Bytes lows = low_nibbles(packed_bytes), highs = high_nibbles(packed_bytes);
          by_row[0][i] = dot_nibbles(by_row[0][i], lows, low[0][v]);
          by_row[0][i] = dot_nibbles(by_row[0][i], highs, high[0][v]);
          if (x.fine) {
            by_row[1][i] = dot_nibbles(by_row[1][i], lows, low[1][v]);
            by_row[1][i] = dot_nibbles(by_row[1][i], highs, high[1][v]);
          }
        }
      }
      reduce_groups(by_row[0], dots[0]);
      if (x.fine) reduce_groups(by_row[1], dots[1]);
      UNROLL for (int u = 0; u < unit_groups; ++u) {
        if (g + u >= groups) break;
        RowFloats scale;
        UNROLL for (int i = 0; i < group_rows; ++i) scale[i] = scales[i][g + u];
        RowFloats value = __builtin_convertvector(dots[0][u] - 8 * of_groups[g + u], RowFloats);
        if (x.fine) {
          const RowSums fine = dots[1][u] - 8 * of_groups[groups + g + u];
          value += __builtin_convertvector(fine, RowFloats) * (1.0f / 128.0f);
        }
        total += value * scale;
      }
    }
    for (int i = 0; i < count; ++i) sums[t * sums_apart + i * step] = total[i];
  }
}
