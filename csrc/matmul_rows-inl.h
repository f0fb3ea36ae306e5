// SPDX-License-Identifier: Apache-2.0
// Few tokens: dot products along the rows, weights decoded in registers. Included by matmul-inl.h.
//
// Rows lie one behind another, so a stretch of rows is one stream. The hardware does not fetch it far
// enough ahead: every line is prefetched prefetch_bytes early, in the order of their addresses and not in
// that of their use, which jumps between the rows that are multiplied together.

constexpr std::int64_t prefetch_bytes = 12288, near_bytes = 3072;

// Into the second cache: the first one's few line buffers would all wait for memory.
INLINE void prefetch(const std::uint8_t* row) { __builtin_prefetch(row + prefetch_bytes, 0, 2); }

// The same, where a kernel computes `value`: of prefetches that follow each other closely most wait, so that a third
// less is read. Shortly before its use a line of the row at `near` goes on to the first cache: two threads read
// up to a twelfth more.
template <class V>
INLINE void prefetch_with(V& value, const std::uint8_t* row, const std::uint8_t* near) {
#if defined(__x86_64__)
  __asm__("prefetcht1 %1\n\tprefetcht0 %2" : "+v"(value) : "m"(row[prefetch_bytes]), "m"(near[near_bytes]));
#else
  static_cast<void>(value);
  prefetch(row);
  __builtin_prefetch(near + near_bytes, 0, 3);
#endif
}
template <class V>
INLINE void prefetch_with(V& value, const std::uint8_t* row) {
  prefetch_with(value, row, row);
}

// Which of `lines` is prefetched at place i of `count` of a kernel, so that they are spread evenly; -1: none.
constexpr int line_at(int i, int count, int lines) {
  if (lines == 1) return i == count / 2 ? 0 : -1;
  return i * lines % count < lines ? i * lines / count : -1;
}

// 0xff in the first `count` lanes: none below 0, at most all.
template <std::int8_t... I>
INLINE Bytes first_lanes(std::int64_t count, std::integer_sequence<std::int8_t, I...>) {
  const std::int8_t most = std::int8_t(count < 0 ? 0 : count > VECTOR_BYTES ? VECTOR_BYTES : count);
  return bit_cast<Bytes>(Vector<std::int8_t>{I...} < splat(most));
}

constexpr int block_bytes = 64, block_vectors = block_bytes / VECTOR_BYTES;
constexpr int i2_planes = 4;  // byte j of a block holds the weights at j + p * (bytes of the block)

// Rows of R that are multiplied at once: halves of a line that are loaded far apart cost a sixth of the reading.
template <int R>
constexpr int rows_at_once = VECTOR_BYTES == 32 ? 1 : R;

// Sums of R rows and T tokens; narrow ones are widened before small_dots more could not be added.
template <int R, int T>
struct Accumulators {
  Sums sums[T][R];
  Small small[T][R];
};

template <int R, int T>
INLINE void widen_all(Accumulators<R, T>& a) {
  UNROLL for (int t = 0; t < T; ++t) {
    UNROLL for (int r = 0; r < R; ++r) {
      a.sums[t][r] = widen(a.sums[t][r], a.small[t][r]);
      a.small[t][r] = Small{};
    }
  }
}

// The first `blocks` blocks of R rows of i2, which are whole.
template <int R, int T>
INLINE void dot_blocks(const Matrix& matrix, const std::uint8_t* row, const std::int8_t* const* x,
                       std::int64_t blocks, Accumulators<R, T>& a) {
  constexpr std::int64_t chunk_blocks = small_dots / (i2_planes * block_vectors);
  for (std::int64_t b = 0; b < blocks;) {
    const std::int64_t end = blocks - b < chunk_blocks ? blocks : b + chunk_blocks;
    for (; b < end; ++b) {
      UNROLL for (int v = 0; v < block_vectors; ++v) {
        Bytes block[R];
        UNROLL for (int r = 0; r < R; ++r) {
          block[r] = load_bytes(row + r * matrix.row_stride + b * block_bytes + v * VECTOR_BYTES);
        }
        UNROLL for (int p = 0; p < i2_planes; ++p) {
          const std::int64_t column = b * packed::i2_block_weights + p * block_bytes + v * VECTOR_BYTES;
          Bytes codes[R];
          UNROLL for (int r = 0; r < R; ++r) codes[r] = plane(block[r], p);
          UNROLL for (int t = 0; t < T; ++t) {
            const Bytes xs = load_bytes(x[t] + column);
            UNROLL for (int r = 0; r < R; ++r) {
              if (v == 0 && p == 0 && t == 0) prefetch_with(codes[r], row + (b * R + r) * block_bytes);
              a.small[t][r] = dot_codes(a.small[t][r], codes[r], xs);
            }
          }
        }
      }
    }
    widen_all(a);
  }
}

// i2 of one token with one shift for two planes: codes at bits 2 and 3 count four times, in sums of their own.
template <int R>
INLINE void dot_shifted(const Matrix& matrix, const std::uint8_t* row, const std::int8_t* x, std::int64_t blocks,
                        Accumulators<R, 1>& a) {
  constexpr bool is_narrow = small_dots < 1024;
  // Sums of a row that do not wait for each other: of planes and of vectors.
  constexpr int rows = rows_at_once<R>, planes = rows > 1 ? 2 : 4, vectors = rows > 1 || is_narrow ? 1 : block_vectors;
  constexpr int places = 4 * rows * block_vectors;
  constexpr std::int64_t chunk = (is_narrow ? small_dots : 1 << 20) * planes / (16 * block_vectors);
  UNROLL for (int first = 0; first < R; first += rows, row += rows * matrix.row_stride) {
    Sums fourfold[rows] = {};
    for (std::int64_t b = 0; b < blocks;) {
      const std::int64_t end = blocks - b < chunk ? blocks : b + chunk;
      Small small[rows][planes][vectors] = {};
      NO_UNROLL for (; b < end; ++b) {
        UNROLL for (int v = 0; v < block_vectors; ++v) {
          Bytes block[rows];
          UNROLL for (int r = 0; r < rows; ++r) {
            block[r] = load_bytes(row + r * matrix.row_stride + b * block_bytes + v * VECTOR_BYTES);
          }
          UNROLL for (int p = 0; p < 4; ++p) {
            const Bytes xs = load_bytes(x + (4 * b + p) * block_bytes + v * VECTOR_BYTES);
            UNROLL for (int r = 0; r < rows; ++r) {
              Bytes codes = block[r] & splat(std::uint8_t(p % 2 ? 12 : 3));
              const int line = line_at((4 * v + p) * rows + r, places, rows);
              if (line >= 0) prefetch_with(codes, row + (b * rows + line) * block_bytes);
              small[r][p % planes][v % vectors] = dot_codes(small[r][p % planes][v % vectors], codes, xs);
              if (p == 1) block[r] = shifted_down(block[r], 4);
            }
          }
        }
      }
      UNROLL for (int r = 0; r < rows; ++r) {
        UNROLL for (int i = 0; i < planes * vectors; ++i) {
          Sums& sums = i % 2 ? fourfold[r] : a.sums[0][first + r];
          sums = widen(sums, small[r][i % planes][i / planes]);
        }
      }
    }
    UNROLL for (int r = 0; r < rows; ++r) a.sums[0][first + r] += fourfold[r] >> 2;
  }
}

template <int R, int T>
INLINE void dot_i2_rows(const Matrix& matrix, const std::uint8_t* row, const std::int8_t* const* x,
                        Accumulators<R, T>& a) {
  constexpr int block_weights = packed::i2_block_weights;
  const std::int64_t blocks = matrix.columns / block_weights;
  if constexpr (T == 1) {
    dot_shifted<R>(matrix, row, x[0], blocks, a);
  } else {
    dot_blocks<R, T>(matrix, row, x, blocks, a);
  }
  const std::int64_t left = matrix.columns - blocks * block_weights;
  if (left == 0) return;
  const std::int64_t step = packed::i2_plane_bytes(left);
  for (std::int64_t v = 0; v * VECTOR_BYTES < step; ++v) {
    Bytes block[R];
    UNROLL for (int r = 0; r < R; ++r) {
      block[r] = load_bytes(row + r * matrix.row_stride + blocks * block_bytes + v * VECTOR_BYTES);
      if (v == 0) prefetch(row + (blocks * R + r) * block_bytes);
    }
    for (int p = 0; p < i2_planes; ++p) {
      // Bytes behind the block are no weights, and the last weights of the block may be padding.
      const std::int64_t of_plane = left - p * step < step ? left - p * step : step;
      const Bytes valid = first_lanes(of_plane - v * VECTOR_BYTES, std::make_integer_sequence<std::int8_t, VECTOR_BYTES>());
      const std::int64_t column = blocks * block_weights + p * step + v * VECTOR_BYTES;
      UNROLL for (int r = 0; r < R; ++r) {
        const Bytes codes = plane(block[r], p) & valid;
        UNROLL for (int t = 0; t < T; ++t) {
          a.small[t][r] = dot_codes(a.small[t][r], codes, load_bytes(x[t] + column));
        }
      }
    }
  }
  widen_all(a);
}

template <int R, int T>
INLINE void dot_int8_rows(const Matrix& matrix, const std::uint8_t* row,
                          const std::int8_t* const* x, Accumulators<R, T>& a) {
  constexpr int rows = rows_at_once<R>, vectors = rows > 1 ? 1 : block_vectors, places = T * rows * block_vectors;
  UNROLL for (int first = 0; first < R; first += rows, row += rows * matrix.row_stride) {
    Sums sums[T][rows][vectors] = {};
    // Whatever lies behind a row meets activations of zero.
    NO_UNROLL for (std::int64_t c = 0; c < matrix.columns; c += block_bytes) {
      UNROLL for (int v = 0; v < block_vectors; ++v) {
        const std::int64_t column = c + v * VECTOR_BYTES;
        Bytes weights[rows];
        UNROLL for (int r = 0; r < rows; ++r) weights[r] = load_bytes(row + r * matrix.row_stride + column);
        UNROLL for (int t = 0; t < T; ++t) {
          const Bytes xs = load_bytes(x[t] + column);
          UNROLL for (int r = 0; r < rows; ++r) {
            const int line = line_at((v * T + t) * rows + r, places, rows);
            if (line >= 0) prefetch_with(weights[r], row + c * rows + line * block_bytes);
            sums[t][r][v % vectors] = dot_int8(sums[t][r][v % vectors], weights[r], xs);
          }
        }
      }
    }
    UNROLL for (int i = 0; i < T * rows * vectors; ++i) {
      const int t = i / vectors / rows, r = i / vectors % rows;
      a.sums[t][first + r] += sums[t][r][i % vectors];
    }
  }
}

// dots [T, max_rows_a_call] of R rows and T tokens.
template <WeightFormat FORMAT, int R, int T>
TARGET __attribute__((noinline)) static void dot_rows(const Matrix& matrix, const std::uint8_t* row,
                                                      const std::int8_t* const* x, std::int32_t* dots) {
  Accumulators<R, T> a = {};
  if constexpr (FORMAT == WeightFormat::i2) {
    dot_i2_rows<R, T>(matrix, row, x, a);
  } else {
    dot_int8_rows<R, T>(matrix, row, x, a);
  }
  UNROLL for (int t = 0; t < T; ++t) store_sums<R>(a.sums[t], dots + t * max_rows_a_call);
}

template <WeightFormat FORMAT, int R>
TARGET static void dot_tokens(const Matrix& matrix, const std::uint8_t* row, const std::int8_t* const* x,
                              std::int64_t tokens, std::int32_t* dots) {
  static_assert(tokens_together == 2 || tokens_together == 4);
  while (tokens > 0) {
    const int taken = tokens < tokens_together ? int(tokens) : tokens_together;
    if (taken == 1) dot_rows<FORMAT, R, 1>(matrix, row, x, dots);
    if (taken == 2) dot_rows<FORMAT, R, 2>(matrix, row, x, dots);
    if constexpr (tokens_together > 2) {
      if (taken == 3) dot_rows<FORMAT, R, 3>(matrix, row, x, dots);
      if (taken == 4) dot_rows<FORMAT, R, 4>(matrix, row, x, dots);
    }
    x += taken;
    dots += taken * max_rows_a_call;
    tokens -= taken;
  }
}

// dots [tokens, max_rows_a_call] of rows [begin, end), for the activations at x[0 .. tokens).
template <WeightFormat FORMAT>
TARGET static void dot_piece(const Matrix& matrix, std::int64_t begin, std::int64_t end, const std::int8_t* const* x,
                             std::int64_t tokens, std::int32_t* dots) {
  for (std::int64_t r = begin, count; r < end; r += count) {
    count = r + rows_together <= end ? rows_together : 1;
    const auto dot = count > 1 ? dot_tokens<FORMAT, rows_together> : dot_tokens<FORMAT, 1>;
    dot(matrix, matrix.data + r * matrix.row_stride, x, tokens, dots + (r - begin));
  }
}
