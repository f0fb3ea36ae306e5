// SPDX-License-Identifier: Apache-2.0
// Few tokens: dot products along the rows, weights decoded in registers. Included by matmul-inl.h.
//
// Rows that are multiplied together lie far apart, so that each is a stream of memory of its own (Streams in
// platform.h says how many). Strips, which need the registers for themselves, are read in turns, a few lines of each.

constexpr int strip_streams = many_streams.strips;
// How many bytes before their use lines are fetched: of rows, of strips for one or two tokens, of strips for more.
constexpr int row_ahead = 512, strip_ahead = 1280, far_ahead = 3072;

// Calls multiply(r, step, count) for `rows` rows in strips of `strip`, r the first row: for `streams` strips that lie
// `step` rows apart, and for those left over at the end, `together` at a time.
template <class Multiply>
INLINE void in_streams(std::int64_t rows, int strip, int streams, int together, Multiply&& multiply) {
  const std::int64_t step = rows / (streams * strip) * strip;
  for (std::int64_t r = 0; r < step; r += strip) multiply(r, step, streams);
  for (std::int64_t r = step * streams; r < rows; r += strip * together) {
    multiply(r, strip, int(std::min<std::int64_t>(packed::divide_up(rows - r, strip), together)));
  }
}

// Fetches the line AHEAD bytes behind `at`, or none, where a kernel computes `value`: of prefetches that follow each other
// closely most wait.
template <int AHEAD, class V>
INLINE void fetch_with(V& value, const std::uint8_t* at) {
  if (AHEAD == 0) return;
#if defined(__x86_64__)
  __asm__("prefetcht0 %1" : "+v"(value) : "m"(at[AHEAD]));
#else
  static_cast<void>(value);
  __builtin_prefetch(at + AHEAD, 0, 3);
#endif
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

// Sums of R rows and T tokens; narrow ones are widened before small_dots more could not be added.
#if defined(NARROW_SUMS)
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
#else
template <int R, int T>
union Accumulators {
  Sums sums[T][R], small[T][R];
};

template <int R, int T>
INLINE void widen_all(Accumulators<R, T>&) {}
#endif

// The first `blocks` blocks of R rows of i2, which are whole.
template <int R, int T, int AHEAD>
INLINE void dot_blocks(const std::uint8_t* row, std::int64_t apart, const std::int8_t* const* x,
                       std::int64_t blocks, Accumulators<R, T>& a) {
  constexpr int places = i2_planes * block_vectors;
  constexpr std::int64_t chunk_blocks = small_dots / places;
  for (std::int64_t b = 0; b < blocks;) {
    const std::int64_t end = blocks - b < chunk_blocks ? blocks : b + chunk_blocks;
    NO_UNROLL for (; b < end; ++b) {
      Bytes block[R][block_vectors];
      // Of one token row after row, so that a line is used up at once; of several plane after plane, so that their
      // activations are.
      UNROLL for (int i = 0; i < (T > 1 ? places : R); ++i) {
        // Of one token with one shift for two planes: codes at bits 2 and 3 count four times, in a sum of their own.
        Small fourfold = {};
        UNROLL for (int j = 0; j < (T > 1 ? R : places); ++j) {
          const int r = T > 1 ? j : i, p = (T > 1 ? i : j) / block_vectors, v = (T > 1 ? i : j) % block_vectors;
          const std::uint8_t* at = row + r * apart + b * block_bytes;
          Bytes& bytes = block[r][v];
          if (p == 0) bytes = load_bytes(at + v * VECTOR_BYTES);
          if (p == 0 && v == 0) fetch_with<AHEAD>(bytes, at);
          const Bytes codes = T > 1 ? plane(bytes, p) : bytes & splat(std::uint8_t(p % 2 ? 12 : 3));
          if (T == 1 && p == 1) bytes = shifted_down(bytes, 4);
          UNROLL for (int t = 0; t < T; ++t) {
            const Bytes xs = load_bytes(x[t] + b * packed::i2_block_weights + p * block_bytes + v * VECTOR_BYTES);
            Small& small = T == 1 && p % 2 ? fourfold : a.small[t][r];
            small = dot_codes(small, codes, xs);
          }
        }
        if (T == 1) a.small[0][i] += fourfold >> 2;
      }
    }
    widen_all(a);
  }
}

template <int R, int T, int AHEAD>
INLINE void dot_i2_rows(const Matrix& matrix, const std::uint8_t* row, std::int64_t apart, const std::int8_t* const* x,
                        Accumulators<R, T>& a) {
  constexpr int block_weights = packed::i2_block_weights;
  const std::int64_t blocks = matrix.columns / block_weights;
  dot_blocks<R, T, AHEAD>(row, apart, x, blocks, a);
  const std::int64_t left = matrix.columns - blocks * block_weights;
  if (left == 0) return;
  const std::int64_t step = packed::i2_plane_bytes(left);
  for (std::int64_t v = 0; v * VECTOR_BYTES < step; ++v) {
    Bytes block[R];
    UNROLL for (int r = 0; r < R; ++r) block[r] = load_bytes(row + r * apart + blocks * block_bytes + v * VECTOR_BYTES);
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

template <int R, int T, int AHEAD>
INLINE void dot_int8_rows(const Matrix& matrix, const std::uint8_t* row, std::int64_t apart,
                          const std::int8_t* const* x, Accumulators<R, T>& a) {
  // Whatever lies behind a row meets activations of zero.
  NO_UNROLL for (std::int64_t c = 0; c < matrix.columns; c += block_bytes) {
    UNROLL for (int r = 0; r < R; ++r) {
      const std::uint8_t* at = row + r * apart + c;
      Bytes weights[block_vectors];
      UNROLL for (int v = 0; v < block_vectors; ++v) weights[v] = load_bytes(at + v * VECTOR_BYTES);
      fetch_with<AHEAD>(weights[block_vectors - 1], at);
      UNROLL for (int v = 0; v < block_vectors; ++v) {
        UNROLL for (int t = 0; t < T; ++t) {
          a.sums[t][r] = dot_int8(a.sums[t][r], weights[v], load_bytes(x[t] + c + v * VECTOR_BYTES));
        }
      }
    }
  }
}

// dots [T, dots_apart] of R rows that lie `step` rows apart, and of T tokens.
template <WeightFormat FORMAT, int R, int T, int AHEAD>
TARGET __attribute__((noinline)) static void dot_rows(const Matrix& matrix, const std::uint8_t* row, std::int64_t step,
                                                      const std::int8_t* const* x, std::int32_t* dots,
                                                      std::int64_t dots_apart) {
  Accumulators<R, T> a = {};
  if constexpr (FORMAT == WeightFormat::i2) {
    dot_i2_rows<R, T, AHEAD>(matrix, row, step * matrix.row_stride, x, a);
  } else {
    dot_int8_rows<R, T, AHEAD>(matrix, row, step * matrix.row_stride, x, a);
  }
  UNROLL for (int t = 0; t < T; ++t) {
    std::int32_t sums[R];
    UNROLL for (int r = 0; r < R; r += 4) store_sums<R < 4 ? 1 : 4>(a.sums[t] + r, sums + r);
    UNROLL for (int r = 0; r < R; ++r) dots[t * dots_apart + r * step] = sums[r];
  }
}

template <WeightFormat FORMAT, int R, int AHEAD = row_ahead>
TARGET static void dot_tokens(const Matrix& matrix, const std::uint8_t* row, std::int64_t step,
                              const std::int8_t* const* x, std::int64_t tokens, std::int32_t* dots,
                              std::int64_t dots_apart) {
  static_assert(tokens_together == 2 || tokens_together == 4);
  constexpr int most = R > 4 || AHEAD == 0 ? 2 : tokens_together;
  while (tokens > 0) {
    const int taken = tokens < most ? int(tokens) : most;
    if (taken == 1) dot_rows<FORMAT, R, 1, AHEAD>(matrix, row, step, x, dots, dots_apart);
    if (taken == 2) dot_rows<FORMAT, R, 2, AHEAD>(matrix, row, step, x, dots, dots_apart);
    if constexpr (most > 2) {
      if (taken == 3) dot_rows<FORMAT, R, 3, AHEAD>(matrix, row, step, x, dots, dots_apart);
      if (taken == 4) dot_rows<FORMAT, R, 4, AHEAD>(matrix, row, step, x, dots, dots_apart);
    }
    x += taken;
    dots += taken * dots_apart;
    tokens -= taken;
  }
}

// dots [tokens, sums_apart] of rows [begin, end), for the activations at x[0 .. tokens).
template <WeightFormat FORMAT>
TARGET static void dot_piece(const Matrix& matrix, std::int64_t begin, std::int64_t end, const std::int8_t* const* x,
                             std::int64_t tokens, std::int32_t* dots) {
  const bool few = tokens <= (FORMAT == WeightFormat::int8 ? 2 : 1) && is_amd;  // codes and fine of one token
  const int streams = few || tokens > 2 ? few_streams.rows : many_streams.rows;
  in_streams(end - begin, 1, streams, 1, [&](std::int64_t r, std::int64_t step, int count) TARGET {
    const auto dot = count == 1                   ? dot_tokens<FORMAT, 1>
                     : count == many_streams.rows ? dot_tokens<FORMAT, many_streams.rows>
                     : few                        ? dot_tokens<FORMAT, few_streams.rows, 0>
                                                  : dot_tokens<FORMAT, few_streams.rows>;
    dot(matrix, matrix.data + (begin + r) * matrix.row_stride, step, x, tokens, dots + r, sums_apart(begin, end));
  });
}
