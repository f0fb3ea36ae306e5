// SPDX-License-Identifier: Apache-2.0
// Products of weights in the layout of lookup.h. Included by matmul-inl.h after matmul_rows-inl.h, with
//   struct LookupTable; LookupTable lookup_table(const uint8* entries)      64 bytes
//   Bytes look_up<BITS>(const LookupTable&, Bytes codes)                    by the low bits, 5 or 6, or by a code of 4

// A row of lookup::layouts. The codes of a row of a strip; bits above them are any. `block` is at the vector
// that is wanted.
template <int WEIGHTS, int BITS, int TOKENS>
struct LookupPlanes {
  static constexpr lookup::Shape shape = {WEIGHTS, BITS};
  static constexpr int count = WEIGHTS, rows = shape.rows(), tokens = TOKENS;
  // Columns from a code, and from a plane of `in_order`, to the next.
  static constexpr int code_step = shape.neighbours() ? 4 : 1, plane_step = shape.neighbours() ? 4 : block_bytes;

  // The vectors of a block, each loaded once.
  INLINE void load_block(const std::uint8_t* from, Bytes* block) {
    constexpr int count = shape.vectors();
    UNROLL for (int i = 0; i < count; ++i) {
      Bytes vector = load_bytes(from + i * block_bytes);
#if defined(__x86_64__)
      __asm__("" : "+v"(vector));  // with block[i] here, GCC stores every vector to the stack
#endif
      block[i] = vector;
    }
  }
  INLINE Bytes vector_of(const Bytes* block, int i) { return block[i]; }
  INLINE Bytes vector_of(const std::uint8_t* block, int i) { return load_bytes(block + i * block_bytes); }
  template <class Block>
  INLINE Bytes codes(const Block* block, int row) {
    const lookup::Places& places = shape.places(row);
    if (places.count == 1) return vector_of(block, places.fields[0].vector);
    Bytes codes = {};
    UNROLL for (int i = 0; i < 3; ++i) {
      const lookup::Field& field = places.fields[i];
      if (i == places.count) break;
      const int mask = ((1 << field.width) - 1) << field.to;
      codes |= shifted_down(vector_of(block, field.vector), field.from - field.to) & std::uint8_t(mask);
    }
    return codes;
  }
  INLINE Bytes next(const lookup::Layout& layout, const Bytes& codes, int p) {
    return look_up<BITS>(lookup_table(layout.digits[p]), codes);
  }
  // Planes of 32-bit words of four codes each, whose weights then are neighbours.
  INLINE void in_order(Bytes* planes) {
    if constexpr (shape.neighbours()) {
      Words w[4];
      UNROLL for (int i = 0; i < 4; ++i) w[i] = bit_cast<Words>(planes[i]);
      UNROLL for (int i = 0; i < 2; ++i) exchange<8, 0x00ff00ff>(w[2 * i], w[2 * i + 1]);
      UNROLL for (int i = 0; i < 2; ++i) exchange<16, 0x0000ffff>(w[i], w[i + 2]);
      UNROLL for (int i = 0; i < 4; ++i) planes[i] = bit_cast<Bytes>(w[i]);
    }
  }
  // Exchanges the high halves of a's fields of 2 COUNT bits and the low ones of b's.
  template <int COUNT, std::uint32_t LOW>
  INLINE void exchange(Words& a, Words& b) {
    const Words high = (a >> COUNT & LOW) | (b & ~LOW);
    a = (a & LOW) | (b & LOW) << COUNT;
    b = high;
  }
};

using TriplePlanes = LookupPlanes<3, 5, 2>;
using QuadPlanes = LookupPlanes<4, 6, tokens_together>;
using ExactQuadPlanes = LookupPlanes<4, 5, 2>;

// dots[t * row_step + r] of a strip and T tokens.
template <class Planes, int T>
TARGET __attribute__((noinline)) static void dot_strip(const lookup::Layout& layout, const std::uint8_t* strip,
                                                       std::int64_t blocks, const std::int8_t* x,
                                                       std::int64_t stride, std::int32_t* dots,
                                                       std::int64_t row_step) {
  constexpr int R = Planes::rows, vectors = Planes::shape.vectors();
  constexpr std::int64_t chunk = small_dots / (Planes::count * block_vectors);
  Accumulators<R, T> a = {};
  for (std::int64_t b = 0; b < blocks;) {
    const std::int64_t end = blocks - b < chunk ? blocks : b + chunk;
    for (; b < end; ++b, strip += vectors * block_bytes, x += Planes::count * block_bytes) {
      UNROLL for (int v = 0; v < block_vectors; ++v) {
        Bytes block[vectors], codes[R];
        Planes::load_block(strip + v * VECTOR_BYTES, block);
        UNROLL for (int r = 0; r < R; ++r) codes[r] = Planes::codes(block, r);
        UNROLL for (int i = 0; i < Planes::count * R; ++i) {
          // By rows, the codes of a line are used soon; by planes, so are the activations of several tokens.
          const int r = T > 1 ? i % R : i / Planes::count, p = T > 1 ? i / R : i % Planes::count;
          Bytes weights = Planes::next(layout, codes[r], p);
          const int line = line_at(v * Planes::count * R + i, block_vectors * Planes::count * R, vectors);
          if (line >= 0) prefetch_with(weights, strip + line * block_bytes);
          UNROLL for (int t = 0; t < T; ++t) {
            const Bytes xs = load_bytes(x + t * stride + p * block_bytes + v * VECTOR_BYTES);
            a.small[t][r] = dot_codes(a.small[t][r], weights, xs);
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
TARGET static void dot_strips(const Matrix& matrix, std::int64_t begin, std::int64_t end, const Activations& x,
                              std::int32_t* dots) {
  const lookup::Layout& layout = lookup::layout_of(matrix.pattern);
  const std::int64_t blocks = Planes::shape.blocks(matrix.columns);
  const std::int8_t* codes = Planes::shape.neighbours() ? x.quads : x.codes;
  const std::int64_t stride = Planes::shape.neighbours() ? quad_stride(x.columns) : x.stride;
  for (std::int64_t r = begin; r < end; r += Planes::rows) {
    const std::uint8_t* strip = matrix.data + r * matrix.row_stride;
    std::int32_t* to = dots + (r - begin);
    for (std::int64_t t = 0, count; t < x.tokens; t += count, to += count * max_rows_a_call) {
      count = t + Planes::tokens <= x.tokens ? Planes::tokens : 1;
      (count > 1 ? dot_strip<Planes, Planes::tokens> : dot_strip<Planes, 1>)(layout, strip, blocks, codes + t * stride,
                                                                             stride, to, max_rows_a_call);
    }
  }
}

TARGET static void lookup_dots(const Matrix& matrix, std::int64_t begin, std::int64_t end, const Activations& x,
                               std::int32_t* dots) {
  const lookup::Shape& shape = lookup::shape_of(matrix.pattern);
  const auto dot = !shape.neighbours() ? dot_strips<TriplePlanes>
                   : shape.bits == 5   ? dot_strips<ExactQuadPlanes>
                                       : dot_strips<QuadPlanes>;
  dot(matrix, begin, end, x, dots);
}
