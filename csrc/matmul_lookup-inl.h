// SPDX-License-Identifier: Apache-2.0
// Products of weights in the layout of lookup.h. Included by matmul-inl.h after matmul_rows-inl.h, with
//   struct LookupTable; LookupTable lookup_table(const uint8* entries)      64 bytes
//   Bytes look_up(const LookupTable&, Bytes codes)                          by the low six bits

// The codes of a row of a strip; bits above them are any. `block` is at the vector that is wanted.
struct QuadPlanes {
  static constexpr const lookup::Shape& shape = lookup::quads;
  static constexpr int count = shape.weights, rows = shape.rows, tokens = tokens_together;

  INLINE Bytes codes(const std::uint8_t* block, int row) {
    if (row < 3) return load_bytes(block + 64 * row);
    const Bytes high = shifted_down(load_bytes(block), 2) & 0x30;
    const Bytes middle = shifted_down(load_bytes(block + 64), 4) & 0x0c;
    return high | middle | (shifted_down(load_bytes(block + 128), 6) & 3);
  }
  INLINE Bytes next(const Bytes& block, int p) { return look_up(lookup_table(lookup::tables.quads[p]), block); }
  // Planes hold every fourth column.
  INLINE void in_order(Bytes* planes) { interleave<4, std::uint8_t>(planes); }
  static constexpr int plane_step = VECTOR_BYTES, vector_step = 4 * VECTOR_BYTES;
};

struct TriplePlanes {
  static constexpr const lookup::Shape& shape = lookup::triples;
  static constexpr int count = shape.weights, rows = shape.rows, tokens = 2;

  INLINE Bytes codes(const std::uint8_t* block, int row) {
    if (row < 5) return load_bytes(block + 64 * row);
    const Bytes low = shifted_down(load_bytes(block + 64 * (row - 5)), 5) & 7;
    if (row < 7) return low | (shifted_down(load_bytes(block + 64 * (row - 2)), 3) & 0x18);
    return low | (shifted_down(load_bytes(block + 192), 2) & 8) | (shifted_down(load_bytes(block + 256), 1) & 0x10);
  }
  INLINE Bytes next(const Bytes& block, int p) { return look_up(lookup_table(lookup::tables.triples[p]), block); }
  INLINE void in_order(Bytes*) {}
  static constexpr int plane_step = block_bytes, vector_step = VECTOR_BYTES;
};

// dots[t * row_step + r] of a strip and T tokens.
template <class Planes, int T>
TARGET __attribute__((noinline)) static void dot_strip(const std::uint8_t* strip, std::int64_t blocks,
                                                       const std::int8_t* x, std::int64_t stride,
                                                       std::int32_t* dots, std::int64_t row_step) {
  constexpr int R = Planes::rows, vectors = Planes::shape.vectors();
  constexpr std::int64_t chunk = small_dots / (Planes::count * block_vectors);
  Accumulators<R, T> a = {};
  for (std::int64_t b = 0; b < blocks;) {
    const std::int64_t end = blocks - b < chunk ? blocks : b + chunk;
    for (; b < end; ++b, strip += vectors * block_bytes, x += Planes::count * block_bytes) {
      UNROLL for (int i = 0; i < vectors; ++i) prefetch(strip + i * block_bytes);
      UNROLL for (int v = 0; v < block_vectors; ++v) {
        Bytes codes[R];
        UNROLL for (int r = 0; r < R; ++r) codes[r] = Planes::codes(strip + v * VECTOR_BYTES, r);
        UNROLL for (int p = 0; p < Planes::count; ++p) {
          Bytes xs[T];
          UNROLL for (int t = 0; t < T; ++t) {
            xs[t] = load_bytes(x + t * stride + p * block_bytes + v * VECTOR_BYTES);
          }
          UNROLL for (int r = 0; r < R; ++r) {
            const Bytes weights = Planes::next(codes[r], p);
            UNROLL for (int t = 0; t < T; ++t) a.small[t][r] = dot_codes(a.small[t][r], weights, xs[t]);
          }
        }
      }
    }
    widen_all(a);
  }
  UNROLL for (int t = 0; t < T; ++t) {
    UNROLL for (int r = 0; r < R; r += 4) store_sums<4>(a.sums[t] + r, dots + t * row_step + r);
  }
}

// dots [tokens, max_rows_a_call] of rows [begin, end), begin being the first of a strip; writes those of
// the whole last strip.
template <class Planes>
TARGET static void dot_strips(const Matrix& matrix, std::int64_t begin, std::int64_t end, const std::int8_t* x,
                              std::int64_t tokens, std::int64_t stride, std::int32_t* dots) {
  const std::int64_t blocks = Planes::shape.blocks(matrix.columns);
  for (std::int64_t r = begin; r < end; r += Planes::rows) {
    const std::uint8_t* strip = matrix.data + r * matrix.row_stride;
    std::int64_t t = 0;
    const auto at = [&](std::int64_t token) { return dots + token * max_rows_a_call + (r - begin); };
    for (; t + Planes::tokens <= tokens; t += Planes::tokens) {
      dot_strip<Planes, Planes::tokens>(strip, blocks, x + t * stride, stride, at(t), max_rows_a_call);
    }
    for (; t < tokens; ++t) dot_strip<Planes, 1>(strip, blocks, x + t * stride, stride, at(t), max_rows_a_call);
  }
}

TARGET static void lookup_dots(const Matrix& matrix, std::int64_t begin, std::int64_t end, const Activations& x,
                               std::int32_t* dots) {
  if (lookup::is_quads(matrix.pattern)) {
    dot_strips<QuadPlanes>(matrix, begin, end, x.quads, x.tokens, quad_stride(x.columns), dots);
  } else {
    dot_strips<TriplePlanes>(matrix, begin, end, x.codes, x.tokens, x.stride, dots);
  }
}
