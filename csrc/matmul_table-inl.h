// SPDX-License-Identifier: Apache-2.0
// Float tables times float activations: multiply_table of isa.h, on top of float_vector-inl.h.

constexpr std::int64_t table_ahead = 1024;  // bytes before their use that the lines of a row are prefetched

template <TableType TYPE>
INLINE Floats load_weights(const std::uint8_t* row, std::int64_t column) {
  if (TYPE == TableType::float32) return load<Floats>(row + 4 * column);
  const auto halves = load<Vector<std::uint16_t, VECTOR_BYTES / 2>>(row + 2 * column);
  return bit_cast<Floats>(__builtin_convertvector(halves, Ints) << 16);
}

template <TableType TYPE>
INLINE float weight_at(const std::uint8_t* row, std::int64_t column) {
  if (TYPE == TableType::float32) return load<float>(row + 4 * column);
  return bit_cast<float>(std::uint32_t(load<std::uint16_t>(row + 2 * column)) << 16);
}

// R rows that lie `step` rows apart (matmul_rows-inl.h). Each has its own sums, in the same order for any R.
template <TableType TYPE, int R, int T>
TARGET static void table_rows(const Table& table, std::int64_t row_index, std::int64_t step, const float* x,
                              float* y) {
  constexpr int bytes = TYPE == TableType::float32 ? 4 : 2;
  const std::uint8_t* row = table.data + row_index * table.row_stride;
  const std::int64_t apart = step * table.row_stride;
  Floats sums[T][R][sum_vectors] = {};
  std::int64_t c = 0;
  for (; c + sum_lanes <= table.columns; c += sum_lanes) {
    UNROLL for (int v = 0; v < sum_vectors; ++v) {
      const std::int64_t column = c + v * width;
      Floats weights[R];
      UNROLL for (int r = 0; r < R; ++r) {
        const std::uint8_t* from = row + r * apart;
        weights[r] = load_weights<TYPE>(from, column);
        if (v == 0) __builtin_prefetch(from + bytes * c + table_ahead, 0, 3);
      }
      UNROLL for (int t = 0; t < T; ++t) {
        const Floats xs = load_floats(x + t * table.columns + column);
        UNROLL for (int r = 0; r < R; ++r) sums[t][r][v] = FUSED(weights[r], xs, sums[t][r][v]);
      }
    }
  }
  UNROLL for (int t = 0; t < T; ++t) {
    UNROLL for (int r = 0; r < R; ++r) {
      float sum = sum_of(sums[t][r]);
      for (std::int64_t i = c; i < table.columns; ++i) {
        sum += weight_at<TYPE>(row + r * apart, i) * x[t * table.columns + i];
      }
      y[t * table.rows + row_index + r * step] = sum;
    }
  }
}

template <TableType TYPE, int R>
TARGET static void table_tokens(const Table& table, std::int64_t row, std::int64_t step, const float* x,
                                std::int64_t tokens, float* y) {
  std::int64_t t = 0;
  constexpr int together = 4 / sum_vectors;
  for (; t + together <= tokens; t += together) {
    table_rows<TYPE, R, together>(table, row, step, x + t * table.columns, y + t * table.rows);
  }
  for (; t < tokens; ++t) {
    table_rows<TYPE, R, 1>(table, row, step, x + t * table.columns, y + t * table.rows);
  }
}

template <TableType TYPE>
TARGET static void table_piece(const float* x, std::int64_t tokens, const Table& table, std::int64_t begin,
                               std::int64_t end, float* y) {
  const std::int64_t step = (end - begin) / 4;
  for (std::int64_t r = begin; r < begin + step; ++r) table_tokens<TYPE, 4>(table, r, step, x, tokens, y);
  for (std::int64_t r = begin + 4 * step; r < end; ++r) table_tokens<TYPE, 1>(table, r, 0, x, tokens, y);
}

TARGET static void multiply_table(const float* x, std::int64_t tokens, const Table& table, std::int64_t begin,
                                  std::int64_t end, float* y) {
  const bool is_float = table.type == TableType::float32;
  const auto piece = is_float ? table_piece<TableType::float32> : table_piece<TableType::bfloat16>;
  piece(x, tokens, table, begin, end, y);
}
