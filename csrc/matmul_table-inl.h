// SPDX-License-Identifier: Apache-2.0
// Float tables times float activations. Included by matmul-inl.h.

INLINE Floats widen_bfloat16(const std::uint8_t* from) {
  const auto halves = load<Vector<std::uint16_t, VECTOR_BYTES / 2>>(from);
  return bit_cast<Floats>(__builtin_convertvector(halves, Vector<std::uint32_t>) << 16);
}

template <TableType TYPE>
INLINE Floats load_weights(const std::uint8_t* row, std::int64_t column) {
  if constexpr (TYPE == TableType::float32) {
    return load<Floats>(row + 4 * column);
  } else {
    return widen_bfloat16(row + 2 * column);
  }
}

template <TableType TYPE>
INLINE float weight_at(const std::uint8_t* row, std::int64_t column) {
  if constexpr (TYPE == TableType::float32) {
    float value;
    __builtin_memcpy(&value, row + 4 * column, 4);
    return value;
  } else {
    std::uint16_t half;
    __builtin_memcpy(&half, row + 2 * column, 2);
    return bit_cast<float>(std::uint32_t(half) << 16);
  }
}

// Each row has its own sums, in the same order however many rows are taken together.
template <TableType TYPE, int R, int T>
TARGET static void table_rows(const Table& table, std::int64_t row_index, const float* x,
                              std::int64_t x_stride, float* y, std::int64_t y_stride) {
  constexpr int width = VECTOR_BYTES / 4;
  constexpr int bytes = TYPE == TableType::float32 ? 4 : 2;
  const std::uint8_t* row = table.data + row_index * table.row_stride;
  Floats sums[T][R] = {};
  std::int64_t c = 0;
  for (; c + width <= table.columns; c += width) {
    Floats weights[R];
    UNROLL for (int r = 0; r < R; ++r) {
      weights[r] = load_weights<TYPE>(row + r * table.row_stride, c);
      prefetch(row + r * table.row_stride + bytes * c);
    }
    UNROLL for (int t = 0; t < T; ++t) {
      const Floats xs = load<Floats>(x + t * x_stride + c);
      UNROLL for (int r = 0; r < R; ++r) sums[t][r] = multiply_add(weights[r], xs, sums[t][r]);
    }
  }
  UNROLL for (int t = 0; t < T; ++t) {
    UNROLL for (int r = 0; r < R; ++r) {
      float sum = sum_lanes(sums[t][r]);
      for (std::int64_t i = c; i < table.columns; ++i) {
        sum += weight_at<TYPE>(row + r * table.row_stride, i) * x[t * x_stride + i];
      }
      y[t * y_stride + row_index + r] = sum;
    }
  }
}

template <TableType TYPE, int R>
TARGET static void table_tokens(const Table& table, std::int64_t row, const float* x,
                                std::int64_t tokens, std::int64_t x_stride, float* y,
                                std::int64_t y_stride) {
  std::int64_t t = 0;
  for (; t + 4 <= tokens; t += 4) {
    table_rows<TYPE, R, 4>(table, row, x + t * x_stride, x_stride, y + t * y_stride, y_stride);
  }
  for (; t < tokens; ++t) {
    table_rows<TYPE, R, 1>(table, row, x + t * x_stride, x_stride, y + t * y_stride, y_stride);
  }
}

template <TableType TYPE>
TARGET static void table_piece(const float* x, std::int64_t tokens, std::int64_t x_stride,
                               const Table& table, std::int64_t begin, std::int64_t end,
                               float* y, std::int64_t y_stride) {
  std::int64_t r = begin;
  for (; r + 4 <= end; r += 4) table_tokens<TYPE, 4>(table, r, x, tokens, x_stride, y, y_stride);
  for (; r < end; ++r) table_tokens<TYPE, 1>(table, r, x, tokens, x_stride, y, y_stride);
}

TARGET static void multiply_table(const float* x, std::int64_t tokens, std::int64_t x_stride,
                                  const Table& table, std::int64_t begin, std::int64_t end,
                                  float* y, std::int64_t y_stride) {
  if (table.type == TableType::float32) {
    table_piece<TableType::float32>(x, tokens, x_stride, table, begin, end, y, y_stride);
  } else {
    table_piece<TableType::bfloat16>(x, tokens, x_stride, table, begin, end, y, y_stride);
  }
}
