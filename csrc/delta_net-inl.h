// SPDX-License-Identifier: Apache-2.0
// dot, convolve and delta_rule of isa.h. Only passes over the state are fused, see delta_net.h.

// Partial sums of `dot`, the same everywhere.
constexpr int dot_lanes = 64;

TARGET static float dot(const float* a, const float* b, std::int64_t n) {
  constexpr int vectors = dot_lanes / width;
  Floats sums[vectors] = {};
  std::int64_t i = 0;
  for (; i + dot_lanes <= n; i += dot_lanes) {
    UNROLL for (int v = 0; v < vectors; ++v) {
      sums[v] += load_floats(a + i + v * width) * load_floats(b + i + v * width);
    }
  }
  float lane[dot_lanes];
  __builtin_memcpy(lane, sums, sizeof lane);
  for (; i < n; ++i) lane[i % dot_lanes] += a[i] * b[i];
  for (int half = dot_lanes / 2; half >= 1; half /= 2) {
    for (int k = 0; k < half; ++k) lane[k] += lane[k + half];
  }
  return lane[0];
}

// From the last token to the first, whose inputs are then still there.
TARGET static void convolve(const Convolution& work) {
  for (std::int64_t token = work.tokens; token-- > 0;) {
    float* row = work.rows + token * work.stride;
    for (std::int64_t c = 0; c < work.columns; c += width) {
      Floats sum = {};
      for (std::int64_t tap = 0; tap < work.taps; ++tap) {
        const std::int64_t before = work.taps - 1 - tap;
        const float* from = before <= token ? row - before * work.stride
                                            : work.past + (token + tap) * work.columns;
        sum += load_floats(work.weights + tap * work.stride + c) * load_floats(from + c);
      }
      store(row + c, sum / (1.0f + bounded_exponential(-sum)));
    }
  }
}

// VECTORS * width columns of a state [key_dim, slab_columns] in slabs. UPDATE: state = decay * state + key * change.
// READ: its products with a key and a query, which may be those of the next token, are added up.
template <int VECTORS, bool UPDATE, bool READ>
TARGET static void pass_over(float* state, std::int64_t key_dim, float decay, const float* key, const Floats* change,
                             const float* read_key, const float* read_query, Floats* with_key, Floats* with_query) {
  constexpr int in_slab = int(slab_columns) / width;
  const std::int64_t slab = key_dim * slab_columns;
  Floats of_key[VECTORS] = {}, of_query[VECTORS] = {};
  for (std::int64_t i = 0; i < key_dim; ++i) {
    const auto place = [&](int v) { return state + v / in_slab * slab + i * slab_columns + v % in_slab * width; };
    // All are loaded before any is stored: slabs lie multiples of 4 KiB apart, where loads wait for stores.
    Floats s[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; ++v) s[v] = load_floats(place(v));
    if constexpr (UPDATE) {
      UNROLL for (int v = 0; v < VECTORS; ++v) s[v] = FUSED(splat(key[i]), change[v], decay * s[v]);
      UNROLL for (int v = 0; v < VECTORS; ++v) store(place(v), s[v]);
    }
    if constexpr (READ) {
      UNROLL for (int v = 0; v < VECTORS; ++v) {
        of_key[v] = FUSED(s[v], splat(read_key[i]), of_key[v]);
        of_query[v] = FUSED(s[v], splat(read_query[i]), of_query[v]);
      }
    }
  }
  UNROLL for (int v = 0; v < VECTORS; ++v) {
    with_key[v] = of_key[v];
    with_query[v] = of_query[v];
  }
}

// Columns [column, column + VECTORS * width) of all tokens: their part of the state stays in the caches. The pass that
// updates it for a token reads it for the next one.
template <int VECTORS>
TARGET static void delta_columns(const DeltaRule& work, std::int64_t column) {
  float* state = work.state + column * work.key_dim;
  Floats with_key[VECTORS], with_query[VECTORS], change[VECTORS];
  if (work.tokens > 0) {
    pass_over<VECTORS, false, true>(state, work.key_dim, 0, nullptr, nullptr, work.keys, work.queries, with_key,
                                    with_query);
  }
  for (std::int64_t token = 0; token < work.tokens; ++token) {
    const float* key = work.keys + token * work.stride;
    const float* query = work.queries + token * work.stride;
    const float decay = work.decays[token * work.gate_stride], step = work.steps[token * work.gate_stride];
    const float both = dot(key, query, work.key_dim);
    UNROLL for (int v = 0; v < VECTORS; ++v) {
      const Floats value = load_floats(work.values + token * work.stride + column + v * width);
      change[v] = step * (value - decay * with_key[v]);
      store(work.out + token * work.out_stride + column + v * width,
            decay * with_query[v] + both * change[v]);
    }
    const auto pass = token + 1 < work.tokens ? pass_over<VECTORS, true, true> : pass_over<VECTORS, true, false>;
    pass(state, work.key_dim, decay, key, change, key + work.stride, query + work.stride, with_key, with_query);
  }
}

TARGET static void delta_rule(const DeltaRule& work) {
  std::int64_t column = 0;
  for (; column + 4 * width <= work.columns; column += 4 * width) delta_columns<4>(work, column);
  for (; column < work.columns; column += slab_columns) {
    delta_columns<int(slab_columns) / width>(work, column);
  }
}
