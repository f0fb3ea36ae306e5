// SPDX-License-Identifier: Apache-2.0
// Attention over pages of floats, on top of float_vector-inl.h; merge and finish of isa.h.

// The tile of a product: tile_rows x tile_vectors accumulators in registers, beside tile_vectors of the
// second factor and one broadcast of the first.
constexpr int tile_rows = 6;
constexpr int tile_vectors = FLOAT_REGISTERS == 32 ? 4 : 2;

// Rows whose scores against a page are held at a time.
constexpr int score_rows = 48;

// With at least this many rows, a page is converted to floats once instead of in every product.
constexpr std::int64_t rows_to_widen = 13;

// Fetches a line for a later product: on an EPYC (Zen 4) into the L2 cache, since few lines can be in flight to L1 at once.
INLINE void fetch_ahead(const void* line) { is_amd ? __builtin_prefetch(line, 0, 2) : __builtin_prefetch(line, 0, 3); }

// c [ROWS, VECTORS * width] = (factors ? c * factors[row] : 0) + a [ROWS, depth] b [depth, ...], each
// element one chain of fused multiply-adds in the order of depth. Keys and values are read once, from
// DRAM with long contexts: for each line of b, the one `ahead` bytes further, of a later product, is prefetched.
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
    // A widened page is in the CPU's cache already; float32 pages use the same function without prefetching.
    if constexpr (sizeof(T) < sizeof(float)) {
      UNROLL for (int line = 0; line < VECTORS * width * int(sizeof(T)); line += 64) {
        fetch_ahead(reinterpret_cast<const char*>(row) + ahead + line);
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

// function<count>(...), count from 1 to tile_rows.
#define FOR_ROWS(function, count, ...)           \
  switch (count) {                               \
    case 1: function<1>(__VA_ARGS__); break;     \
    case 2: function<2>(__VA_ARGS__); break;     \
    case 3: function<3>(__VA_ARGS__); break;     \
    case 4: function<4>(__VA_ARGS__); break;     \
    case 5: function<5>(__VA_ARGS__); break;     \
    case 6: function<6>(__VA_ARGS__); break;     \
  }

template <class T>
TARGET static void multiply_rows(int rows, const float* a, std::int64_t a_stride, const T* b,
                                 std::int64_t b_stride, std::int64_t depth, float* c,
                                 std::int64_t c_stride, std::int64_t columns,
                                 const float* factors, std::ptrdiff_t ahead) {
  FOR_ROWS(multiply_columns, rows, a, a_stride, b, b_stride, depth, c, c_stride, columns, factors,
           ahead)
}

// Lanes of keys outside [first, visible) become minus infinity.
INLINE void mask_outside(Floats* of_page, std::int64_t first, std::int64_t visible) {
  if (visible >= page_tokens && first <= 0) return;
  Ints number;
  UNROLL for (int i = 0; i < width; ++i) number[i] = i;
  UNROLL for (int v = 0; v < page_tokens / width; ++v) {
    const Ints key = number + std::int32_t(v * width);
    const Ints seen = (key < std::int32_t(visible)) & (key >= std::int32_t(first));
    of_page[v] = choose(seen, of_page[v], splat(-__builtin_inff()));
  }
}

template <class V>
INLINE auto largest_of_page(const V* of) {
  V top = of[0];
  UNROLL for (int v = 1; v < page_tokens / width; ++v) top = larger(top, of[v]);
  return largest_lane(top);
}

// The running maxima of rows, given their largest scores against a page. `factor` rescales earlier sums;
// `part`, if not null, rescales sums relative to the page's largest score. All rows are computed at once:
// one after another, each would wait for its power.
struct RunningMaximum {
  float largest[score_rows], factor[score_rows];

  TARGET void run(int rows, float* maximum, float* part = nullptr) {
    float before[score_rows];
    for (int r = 0; r < rows; ++r) before[r] = maximum[r];
    for (int r = rows; r % width; ++r) before[r] = largest[r] = 0.0f;
    NO_UNROLL for (int r = 0; r < rows; r += width) {
      const Floats old = load_floats(before + r);
      const Floats now = larger(load_floats(largest + r), splat(-1e30f)), top = larger(old, now);
      store(largest + r, now);
      store(before + r, top);
      store(factor + r, power_of_two(old - top));
      if (part) store(part + r, power_of_two(now - top));
    }
    for (int r = 0; r < rows; ++r) maximum[r] = before[r];
  }
};

// sum [sum_lanes] = sum * factor + added.
INLINE void add_to_sum(float* sum, float factor, const Floats* added) {
  UNROLL for (int v = 0; v < sum_vectors; ++v) {
    store(sum + v * width, FUSED(load_floats(sum + v * width), splat(factor), added[v]));
  }
}

// Keys of the page that a row sees.
INLINE std::int64_t keys_seen(const PageAttention& work, std::int64_t row) {
  const std::int64_t seen = work.visible + row / work.group;
  return seen < page_tokens ? seen : page_tokens;
}

// The first key that a row sees, counted from the page's start; may lie beyond the page.
INLINE std::int64_t first_seen(const PageAttention& work, std::int64_t row) {
  const std::int64_t first = work.visible + row / work.group - work.window;
  return first < 0 ? 0 : first < page_tokens ? first : page_tokens;
}

template <class T>
TARGET static void attend_rows(const PageAttention& work, const T* keys, const T* values,
                               const void* next_keys, std::int64_t first, int rows) {
  const std::int64_t padded = padded_dim(work.head_dim);
  alignas(64) float scores[score_rows * page_tokens];
  RunningMaximum maxima;
  const int blocks = int(packed::divide_up(rows, tile_rows));
  const std::ptrdiff_t to_values = reinterpret_cast<const char*>(values) -
                                   reinterpret_cast<const char*>(keys);
  const std::ptrdiff_t to_next = static_cast<const char*>(next_keys) -
                                 reinterpret_cast<const char*>(values);
  for (int b = 0; b < blocks; ++b) {
    const int begin = rows * b / blocks, count = rows * (b + 1) / blocks - begin;
    const std::int64_t seen = keys_seen(work, first + begin + count - 1);
    multiply_rows<T>(count, work.queries + (first + begin) * work.head_dim, work.head_dim, keys,
                     page_tokens, work.head_dim, scores + begin * page_tokens, page_tokens,
                     packed::round_up(seen, width), nullptr, to_values);
  }
  constexpr int vectors = page_tokens / width;
  for (int r = 0; r < rows; ++r) {
    Floats score[vectors];
    float* of = scores + r * page_tokens;
    UNROLL for (int v = 0; v < vectors; ++v) score[v] = load_floats(of + v * width);
    mask_outside(score, first_seen(work, first + r), keys_seen(work, first + r));
    UNROLL for (int v = 0; v < vectors; ++v) store(of + v * width, score[v]);
    maxima.largest[r] = largest_of_page(score);
  }
  maxima.run(rows, work.state.maximum + first);
  for (int r = 0; r < rows; ++r) {
    Floats added[sum_vectors] = {};
    UNROLL for (int v = 0; v < vectors; ++v) {
      float* score = scores + r * page_tokens + v * width;
      const Floats probability = power_of_two(load_floats(score) - work.state.maximum[first + r]);
      added[v % sum_vectors] += probability;
      store(score, probability);
    }
    add_to_sum(work.state.sum + (first + r) * sum_lanes, maxima.factor[r], added);
  }
  for (int b = 0; b < blocks; ++b) {
    const int begin = rows * b / blocks, count = rows * (b + 1) / blocks - begin;
    // Later values may never have been written.
    const std::int64_t seen = keys_seen(work, first + begin + count - 1);
    multiply_rows<T>(count, scores + begin * page_tokens, page_tokens, values, padded, seen,
                     work.state.out + (first + begin) * padded, padded, padded, maxima.factor + begin,
                     to_next);
  }
}

// Rows of the first tokens may see nothing of a page that later ones see.
INLINE std::int64_t masked_rows(const PageAttention& work) {
  return work.visible >= 1 ? 0 : (1 - work.visible) * work.group;
}

template <class T>
TARGET static void attend_page(const PageAttention& work) {
  const std::int64_t hidden = masked_rows(work);
  const auto attend = [&](const auto* keys, const auto* values, const void* next_keys) TARGET {
    for (std::int64_t row = hidden; row < work.rows; row += score_rows) {
      const std::int64_t left = work.rows - row;
      attend_rows(work, keys, values, next_keys, row, int(left < score_rows ? left : score_rows));
    }
  };
  const T *keys = static_cast<const T*>(work.page.keys), *values = static_cast<const T*>(work.page.values);
  if (sizeof(T) == sizeof(float) || work.rows - hidden < rows_to_widen) return attend(keys, values, work.next_keys);
  const T* next_keys = static_cast<const T*>(work.next_keys);
  const std::int64_t value_count = page_tokens * padded_dim(work.head_dim);
  float *wide_keys = work.wide, *wide_values = work.wide + value_count;
  const auto widen = [](const T* from, const T* ahead, std::int64_t count, float* to) TARGET {
    for (std::int64_t i = 0; i < count; i += width) {
      fetch_ahead(ahead + i);
      store(to + i, load_floats(from + i));
    }
  };
  widen(keys, values, page_tokens * work.head_dim, wide_keys);
  widen(values, next_keys, value_count, wide_values);
  attend(wide_keys, wide_values, wide_keys);
}

// a [count] = a * keep + b * add, count a multiple of sum_lanes.
INLINE void blend(float* a, const float* b, std::int64_t count, const Floats& keep, const Floats& add) {
  for (std::int64_t i = 0; i < count; i += width) store(a + i, load_floats(a + i) * keep + load_floats(b + i) * add);
}

TARGET static void merge(const AttentionState& into, const AttentionState& from,
                         std::int64_t rows, std::int64_t padded) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float a = into.maximum[r], b = from.maximum[r], top = a > b ? a : b;
    const Floats keep = power_of_two(splat(a - top)), add = power_of_two(splat(b - top));
    blend(into.sum + r * sum_lanes, from.sum + r * sum_lanes, sum_lanes, keep, add);
    blend(into.out + r * padded, from.out + r * padded, padded, keep, add);
    into.maximum[r] = top;
  }
}

TARGET static void finish(const AttentionState& state, std::int64_t row, std::int64_t head_dim,
                          float* out) {
  Floats sums[sum_vectors];
  __builtin_memcpy(sums, state.sum + row * sum_lanes, sizeof sums);
  const Floats sum = splat(sum_of(sums));
  const float* from = state.out + row * padded_dim(head_dim);
  std::int64_t i = 0;
  for (; i + width <= head_dim; i += width) store(out + i, load_floats(from + i) / sum);
  for (; i < head_dim; ++i) out[i] = from[i] / sum[0];
}

INLINE void narrow(const float* from, float* to, std::int64_t count) {
  __builtin_memcpy(to, from, count * sizeof(float));
}

INLINE void narrow(const float* from, std::uint16_t* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += width) NARROW_HALF(to + i, load_floats(from + i));
}

constexpr std::int64_t max_head_dim = 1024;

template <class T>
TARGET static void append_as(const PageView& page, std::int64_t slot, const float* key,
                             const float* value, std::int64_t head_dim) {
  const std::int64_t padded = padded_dim(head_dim);
  float zero_padded[max_head_dim];
  T narrowed[max_head_dim];
  for (std::int64_t i = head_dim; i < padded; ++i) zero_padded[i] = 0;
  for (std::int64_t i = 0; i < head_dim; ++i) zero_padded[i] = key[i];
  narrow(zero_padded, narrowed, padded);
  T* keys = static_cast<T*>(page.keys) + slot;
  for (std::int64_t i = 0; i < head_dim; ++i) keys[i * page_tokens] = narrowed[i];
  for (std::int64_t i = 0; i < head_dim; ++i) zero_padded[i] = value[i];
  narrow(zero_padded, static_cast<T*>(page.values) + slot * padded, padded);
}
