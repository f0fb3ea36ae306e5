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
      const Bytes part = shifted_down(vector_of(block, field.vector), field.from - field.to);
      const Bytes below = splat(std::uint8_t((1 << field.to) - 1));
      codes = i == 0 ? part : (codes & below) | (part & ~below);
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

// dots [T, dots_apart] of `count` strips, `step` rows apart, whose blocks are read in turns, and a token, or of one strip
// and T tokens. At most STREAMS strips.
template <class Planes, int T, int STREAMS, int AHEAD>
TARGET __attribute__((noinline)) static void dot_strips(const Matrix& matrix, const std::uint8_t* strip, std::int64_t step,
                                                        int count, const std::int8_t* x, std::int64_t stride,
                                                        std::int32_t* dots, std::int64_t dots_apart) {
  constexpr int R = Planes::rows, vectors = Planes::shape.vectors();
  constexpr std::int64_t chunk = small_dots / (Planes::count * block_vectors);
  const lookup::Layout& layout = lookup::layout_of(matrix.pattern);
  const std::int64_t blocks = Planes::shape.blocks(matrix.columns);
  if (STREAMS == 1) count = 1;  // as callers say
  Accumulators<R, T> of_strips[STREAMS] = {};
  for (std::int64_t b = 0; b < blocks;) {
    const std::int64_t end = blocks - b < chunk ? blocks : b + chunk;
    for (; b < end; ++b, strip += vectors * block_bytes, x += Planes::count * block_bytes) {
      NO_UNROLL for (int s = 0; s < count; ++s) {
        const std::uint8_t* from = strip + s * step * matrix.row_stride;
        Accumulators<R, T>& a = of_strips[s];
        UNROLL for (int v = 0; v < block_vectors; ++v) {
          Bytes block[vectors], codes[R];
          Planes::load_block(from + v * VECTOR_BYTES, block);
          UNROLL for (int r = 0; r < R; ++r) codes[r] = Planes::codes(block, r);
          UNROLL for (int i = 0; i < Planes::count * R; ++i) {
            // As in dot_blocks.
            const int r = T > 1 ? i % R : i / Planes::count, p = T > 1 ? i / R : i % Planes::count;
            Bytes weights = Planes::next(layout, codes[r], p);
            const int line = line_at(v * Planes::count * R + i, block_vectors * Planes::count * R, vectors);
            if (line >= 0) fetch_with<AHEAD>(weights, from + line * block_bytes);
            UNROLL for (int t = 0; t < T; ++t) {
              const Bytes xs = load_bytes(x + t * stride + p * block_bytes + v * VECTOR_BYTES);
              a.small[t][r] = dot_codes(a.small[t][r], weights, xs);
            }
          }
        }
      }
    }
    for (int s = 0; s < count; ++s) widen_all(of_strips[s]);
  }
  for (int s = 0; s < count; ++s, dots += step) {
    UNROLL for (int t = 0; t < T; ++t) {
      UNROLL for (int r = 0; r < R; r += 4) store_sums<4>(of_strips[s].sums[t] + r, dots + t * dots_apart + r);
    }
  }
}

// dots [tokens, sums_apart] of rows [begin, end), begin being the first of a strip; writes those of
// the whole last strip.
template <class Planes>
TARGET static void dot_tokens(const Matrix& matrix, std::int64_t begin, std::int64_t end, const Activations& x,
                              std::int32_t* dots) {
  const std::int8_t* codes = Planes::shape.neighbours() ? x.quads : x.codes;
  const std::int64_t stride = Planes::shape.neighbours() ? quad_stride(x.columns) : x.stride;
  const std::int64_t apart = sums_apart(begin, end);
  const bool few = x.tokens == 1 && is_amd;
  const int streams = few ? few_streams.strips : x.tokens > 1 ? 1 : strip_streams;
  in_streams(end - begin, Planes::rows, streams, streams, [&](std::int64_t r, std::int64_t step, int count) TARGET {
    for (std::int64_t t = 0, taken; t < x.tokens; t += taken) {
      taken = t + Planes::tokens <= x.tokens ? Planes::tokens : 1;
      const auto dot = taken > 1 ? dot_strips<Planes, Planes::tokens, 1, far_ahead>
                       : few     ? dot_strips<Planes, 1, 1, 0>
                                 : dot_strips<Planes, 1, strip_streams, strip_ahead>;
      dot(matrix, matrix.data + (begin + r) * matrix.row_stride, step, count, codes + t * stride, stride,
          dots + t * apart + r, apart);
    }
  });
}

TARGET static void lookup_dots(const Matrix& matrix, std::int64_t begin, std::int64_t end, const Activations& x,
                               std::int32_t* dots) {
  const lookup::Shape& shape = lookup::shape_of(matrix.pattern);
  const auto dot = !shape.neighbours() ? dot_tokens<TriplePlanes>
                   : shape.bits == 5   ? dot_tokens<ExactQuadPlanes>
                                       : dot_tokens<QuadPlanes>;
  dot(matrix, begin, end, x, dots);
}
