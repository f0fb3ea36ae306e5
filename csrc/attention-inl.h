// SPDX-License-Identifier: Apache-2.0
// attend, merge, finish and append of isa.h, on top of float_vector-inl.h.

// The tile of a product: tile_rows x tile_vectors accumulators in registers, beside tile_vectors of the
// second factor and one broadcast of the first.
constexpr int tile_rows = 6;
constexpr int tile_vectors = FLOAT_REGISTERS == 32 ? 4 : 2;

// Rows whose scores against a page are held at a time.
constexpr int score_rows = 48;

// From so many rows on a page is converted to floats once instead of in every product.
constexpr std::int64_t rows_to_widen = 13;

// c [ROWS, VECTORS * width] = (factors ? c * factors[row] : 0) + a [ROWS, depth] b [depth, ...], each
// element one chain of fused multiply-adds in the order of depth. Keys and values are read once, from
// DRAM with long contexts, and the hardware does not fetch them early enough: for each line of b the
// one that lies `ahead` bytes from it is asked for, which a later product reads.
template <int ROWS, int VECTORS, class T>
INLINE void multiply(const float* a, std::int64_t a_stride, const T* b, std::int64_t b_stride,
                     std::int64_t depth, float* c, std::int64_t c_stride, const float* factors,
                     std::ptrdiff_t ahead) {
  Floats sum[ROWS][VECTORS];
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int v = 0; v < VECTORS; ++v) {
      sum[r][v] = factors ? load_floats(c + r * c_stride + v * width) * factors[r] : Floats{};
    }
  }
  NO_UNROLL for (std::int64_t k = 0; k < depth; ++k) {
    const T* row = b + k * b_stride;
    // A widened page is in a cache already; float32 caches, the same function, go without.
    if constexpr (sizeof(T) < sizeof(float)) {
      UNROLL for (int line = 0; line < VECTORS * width * int(sizeof(T)); line += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(row) + ahead + line);
      }
    }
    Floats vector[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; ++v) vector[v] = load_floats(row + v * width);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const Floats factor = splat(a[r * a_stride + k]);
      UNROLL for (int v = 0; v < VECTORS; ++v) sum[r][v] = FUSED(factor, vector[v], sum[r][v]);
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int v = 0; v < VECTORS; ++v) store(c + r * c_stride + v * width, sum[r][v]);
  }
}

// The same for `columns`, a multiple of `width`.
template <int ROWS, class T>
INLINE void multiply_columns(const float* a, std::int64_t a_stride, const T* b,
                             std::int64_t b_stride, std::int64_t depth, float* c,
                             std::int64_t c_stride, std::int64_t columns, const float* factors,
                             std::ptrdiff_t ahead) {
  constexpr int tile = tile_vectors * width;
  std::int64_t i = 0;
  for (; i + tile <= columns; i += tile) {
    multiply<ROWS, tile_vectors>(a, a_stride, b + i, b_stride, depth, c + i, c_stride, factors, ahead);
  }
  for (; i < columns; i += width) {
    multiply<ROWS, 1>(a, a_stride, b + i, b_stride, depth, c + i, c_stride, factors, ahead);
  }
}

template <class T>
TARGET static void multiply_rows(int rows, const float* a, std::int64_t a_stride, const T* b,
                                 std::int64_t b_stride, std::int64_t depth, float* c,
                                 std::int64_t c_stride, std::int64_t columns,
                                 const float* factors, std::ptrdiff_t ahead) {
#define ROWS(count)                                                                          \
  case count:                                                                                \
    return multiply_columns<count>(a, a_stride, b, b_stride, depth, c, c_stride, columns,    \
                                   factors, ahead)
  switch (rows) {
    ROWS(1);
    ROWS(2);
    ROWS(3);
    ROWS(4);
    ROWS(5);
    ROWS(6);
  }
#undef ROWS
}

// Scores [page_tokens] of one row -> probabilities relative to the row's running maximum; keys outside
// [first, visible) get zero. Returns the factor for what has been summed before.
INLINE float soften(float* scores, std::int64_t first, std::int64_t visible, const PageView& page,
                    float* maximum, float* sum) {
  constexpr int vectors = page_tokens / width;
  Floats score[vectors];
  Floats top = splat(-__builtin_inff());
  UNROLL for (int v = 0; v < vectors; ++v) {
    score[v] = load_floats(scores + v * width);
    if (page.key_scales) score[v] *= load_floats(page.key_scales + v * width);
  }
  if (visible < page_tokens || first > 0) {
    Ints number;
    UNROLL for (int i = 0; i < width; ++i) number[i] = i;
    UNROLL for (int v = 0; v < vectors; ++v) {
      const Ints key = number + std::int32_t(v * width);
      const Ints seen = (key < std::int32_t(visible)) & (key >= std::int32_t(first));
      score[v] = choose(seen, score[v], splat(-__builtin_inff()));
    }
  }
  UNROLL for (int v = 0; v < vectors; ++v) top = larger(top, score[v]);
  const float before = *maximum, now = largest_lane(top);
  float factor = 1.0f;
  if (now > before) {
    *maximum = now;
    factor = exponential(splat(before - now))[0];
  }
  const Floats shift = splat(*maximum);
  Floats added = {};
  UNROLL for (int v = 0; v < vectors; ++v) {
    const Floats probability = exponential(score[v] - shift);
    added += probability;
    if (page.value_scales) {
      // Scales of keys that were never written may be anything, also NaN.
      const Floats scale = load_floats(page.value_scales + v * width);
      store(scores + v * width, choose(probability > 0.0f, probability * scale, Floats{}));
    } else {
      store(scores + v * width, probability);
    }
  }
  store(sum, FUSED(load_floats(sum), splat(factor), added));
  return factor;
}

// Keys of the page that a row sees.
INLINE std::int64_t keys_seen(const PageAttention& work, std::int64_t row) {
  const std::int64_t seen = work.visible + row / work.group;
  return seen < page_tokens ? seen : page_tokens;
}

// The first key of the page that a row sees, which can lie behind it.
INLINE std::int64_t first_seen(const PageAttention& work, std::int64_t row) {
  const std::int64_t first = work.visible + row / work.group - work.window;
  return first < 0 ? 0 : first < page_tokens ? first : page_tokens;
}

template <class T>
TARGET static void attend_rows(const PageAttention& work, const T* keys, const T* values,
                               const void* next_keys, std::int64_t first, int rows) {
  const std::int64_t padded = padded_dim(work.head_dim);
  alignas(64) float scores[score_rows * page_tokens];
  float factors[score_rows];
  const int blocks = (rows + tile_rows - 1) / tile_rows;
  const std::ptrdiff_t to_values = reinterpret_cast<const char*>(values) -
                                   reinterpret_cast<const char*>(keys);
  const std::ptrdiff_t to_next = static_cast<const char*>(next_keys) -
                                 reinterpret_cast<const char*>(values);
  for (int b = 0; b < blocks; ++b) {
    const int begin = rows * b / blocks, count = rows * (b + 1) / blocks - begin;
    const std::int64_t seen = keys_seen(work, first + begin + count - 1);
    multiply_rows<T>(count, work.queries + (first + begin) * work.head_dim, work.head_dim, keys,
                     page_tokens, work.head_dim, scores + begin * page_tokens, page_tokens,
                     (seen + width - 1) / width * width, nullptr, to_values);
  }
  for (int r = 0; r < rows; ++r) {
    const std::int64_t row = first + r;
    factors[r] = soften(scores + r * page_tokens, first_seen(work, row), keys_seen(work, row),
                        work.page, work.state.maximum + row, work.state.sum + row * most_lanes);
  }
  for (int b = 0; b < blocks; ++b) {
    const int begin = rows * b / blocks, count = rows * (b + 1) / blocks - begin;
    // Later values may never have been written.
    const std::int64_t seen = keys_seen(work, first + begin + count - 1);
    multiply_rows<T>(count, scores + begin * page_tokens, page_tokens, values, padded, seen,
                     work.state.out + (first + begin) * padded, padded, padded, factors + begin,
                     to_next);
  }
}

template <class T>
TARGET static void attend_page(const PageAttention& work) {
  const T* keys = static_cast<const T*>(work.page.keys);
  const T* values = static_cast<const T*>(work.page.values);
  // Rows of the first tokens may see nothing of a page that later ones see.
  const std::int64_t hidden = work.visible >= 1 ? 0 : (1 - work.visible) * work.group;
  if (sizeof(T) < sizeof(float) && work.rows - hidden >= rows_to_widen) {
    const std::int64_t key_count = page_tokens * work.head_dim;
    const std::int64_t value_count = page_tokens * padded_dim(work.head_dim);
    float* wide_values = work.wide + value_count;
    const T* next_keys = static_cast<const T*>(work.next_keys);
    for (std::int64_t i = 0; i < key_count; i += width) {
      __builtin_prefetch(values + i);
      store(work.wide + i, load_floats(keys + i));
    }
    for (std::int64_t i = 0; i < value_count; i += width) {
      __builtin_prefetch(next_keys + i);
      store(wide_values + i, load_floats(values + i));
    }
    for (std::int64_t row = hidden; row < work.rows; row += score_rows) {
      const std::int64_t left = work.rows - row;
      attend_rows<float>(work, work.wide, wide_values, work.wide, row,
                         int(left < score_rows ? left : score_rows));
    }
    return;
  }
  for (std::int64_t row = hidden; row < work.rows; row += score_rows) {
    const std::int64_t left = work.rows - row;
    attend_rows<T>(work, keys, values, work.next_keys, row,
                   int(left < score_rows ? left : score_rows));
  }
}

TARGET static void attend(const PageAttention& work) {
  switch (work.type) {
    case CacheType::float32: return attend_page<float>(work);
    case CacheType::float16: return attend_page<std::uint16_t>(work);
    case CacheType::int8: return attend_page<std::int8_t>(work);
  }
}

TARGET static void merge(const AttentionState& into, const AttentionState& from,
                         std::int64_t rows, std::int64_t padded) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float a = into.maximum[r], b = from.maximum[r], top = a > b ? a : b;
    const Floats keep = exponential(splat(a - top)), add = exponential(splat(b - top));
    float* sum = into.sum + r * most_lanes;
    store(sum, load_floats(sum) * keep + load_floats(from.sum + r * most_lanes) * add);
    for (std::int64_t i = r * padded; i < (r + 1) * padded; i += width) {
      store(into.out + i, load_floats(into.out + i) * keep + load_floats(from.out + i) * add);
    }
    into.maximum[r] = top;
  }
}

TARGET static void finish(const AttentionState& state, std::int64_t row, std::int64_t head_dim,
                          float* out) {
  const Floats sum = splat(sum_of_lanes(load_floats(state.sum + row * most_lanes)));
  const float* from = state.out + row * padded_dim(head_dim);
  std::int64_t i = 0;
  for (; i + width <= head_dim; i += width) store(out + i, load_floats(from + i) / sum);
  for (; i < head_dim; ++i) out[i] = from[i] / sum[0];
}

INLINE void narrow(const float* from, float* to, std::int64_t count, float* scale) {
  (void)scale;
  __builtin_memcpy(to, from, count * sizeof(float));
}

INLINE void narrow(const float* from, std::uint16_t* to, std::int64_t count, float* scale) {
  (void)scale;
  for (std::int64_t i = 0; i < count; i += width) NARROW_HALF(to + i, load_floats(from + i));
}

// Rounded half to even by an addition, see quantize-inl.h.
INLINE void narrow(const float* from, std::int8_t* to, std::int64_t count, float* scale) {
  constexpr float round_to_low_bits = 12582912.0f;
  Floats top = {};
  for (std::int64_t i = 0; i < count; i += width) {
    const Floats v = load_floats(from + i);
    top = larger(top, larger(v, -v));
  }
  float largest = largest_lane(top);
  if (largest < 1e-20f) largest = 1e-20f;
  if (largest > 1e30f) largest = 1e30f;
  const Floats inverse = splat(127.0f / largest);
  *scale = largest / 127.0f;
  for (std::int64_t i = 0; i < count; i += width) {
    const Floats scaled = load_floats(from + i) * inverse;
    const Floats bounded = smaller(larger(scaled, splat(-127.0f)), splat(127.0f));
    const Ints code = bit_cast<Ints>(bounded + round_to_low_bits) - 0x4b400000;
    store(to + i, __builtin_convertvector(code, Vector<std::int8_t, VECTOR_BYTES / 4>));
  }
}

constexpr std::int64_t largest_head_dim = 1024;

template <class T>
TARGET static void append_as(const PageView& page, std::int64_t slot, const float* key,
                             const float* value, std::int64_t head_dim) {
  const std::int64_t padded = padded_dim(head_dim);
  float zero_padded[largest_head_dim];
  T narrowed[largest_head_dim];
  for (std::int64_t i = head_dim; i < padded; ++i) zero_padded[i] = 0;
  for (std::int64_t i = 0; i < head_dim; ++i) zero_padded[i] = key[i];
  narrow(zero_padded, narrowed, padded, page.key_scales + slot);
  T* keys = static_cast<T*>(page.keys) + slot;
  for (std::int64_t i = 0; i < head_dim; ++i) keys[i * page_tokens] = narrowed[i];
  for (std::int64_t i = 0; i < head_dim; ++i) zero_padded[i] = value[i];
  narrow(zero_padded, static_cast<T*>(page.values) + slot * padded, padded,
         page.value_scales + slot);
}

TARGET static void append(CacheType type, const PageView& page, std::int64_t slot,
                          const float* key, const float* value, std::int64_t head_dim) {
  switch (type) {
    case CacheType::float32: return append_as<float>(page, slot, key, value, head_dim);
    case CacheType::float16: return append_as<std::uint16_t>(page, slot, key, value, head_dim);
    case CacheType::int8: return append_as<std::int8_t>(page, slot, key, value, head_dim);
  }
}
