// SPDX-License-Identifier: Apache-2.0
// add_and_norm, gated, rotate and hadamard of isa.h, on top of float_vector-inl.h.

// Squares of floats are exact in double, and the lanes of the sum are the same number everywhere, so
// that every instruction set returns the same bits.
constexpr int square_lanes = 16;

TARGET static double sum_of_squares(const float* x, std::int64_t n) {
  constexpr int doubles = VECTOR_BYTES / 8, vectors = square_lanes / doubles;
  Vector<double> sums[vectors] = {};
  std::int64_t i = 0;
  for (; i + square_lanes <= n; i += square_lanes) {
    UNROLL for (int k = 0; k < vectors; ++k) {
      const auto part = load<Vector<float, VECTOR_BYTES / 2>>(x + i + k * doubles);
      const auto wide = __builtin_convertvector(part, Vector<double>);
      sums[k] += wide * wide;
    }
  }
  double lane[square_lanes];
  __builtin_memcpy(lane, sums, sizeof lane);
  for (; i < n; ++i) lane[i % square_lanes] += double(x[i]) * double(x[i]);
  for (int half = square_lanes / 2; half >= 1; half /= 2) {
    for (int k = 0; k < half; ++k) lane[k] += lane[k + half];
  }
  return lane[0];
}

TARGET static void add_and_norm(float* residual, const float* delta, const float* weight,
                                float epsilon, std::int64_t n, float* out) {
  const std::int64_t whole = n / width * width;
  if (delta) {
    for (std::int64_t i = 0; i < whole; i += width) {
      store(residual + i, load_floats(residual + i) + load_floats(delta + i));
    }
    for (std::int64_t i = whole; i < n; ++i) residual[i] += delta[i];
  }
  const float variance = float(sum_of_squares(residual, n) / double(n));
  const float inverse = 1.0f / __builtin_sqrtf(variance + epsilon);
  for (std::int64_t i = 0; i < whole; i += width) {
    store(out + i, load_floats(weight + i) * (load_floats(residual + i) * inverse));
  }
  for (std::int64_t i = whole; i < n; ++i) out[i] = weight[i] * (residual[i] * inverse);
}

TARGET static void gated(Activation activation, const float* gate, const float* up, std::int64_t n, float* out,
                         bool streams) {
  std::int64_t i = 0;
  for (; i + width <= n; i += width) {
    const Floats v = gated_vector(activation, load_floats(gate + i), load_floats(up + i));
    streams ? stream(out + i, v) : store(out + i, v);
  }
  if (i < n) {
    float rest[2][width] = {};
    for (std::int64_t k = i; k < n; ++k) rest[0][k - i] = gate[k], rest[1][k - i] = up[k];
    store(rest[0], gated_vector(activation, load_floats(rest[0]), load_floats(rest[1])));
    for (std::int64_t k = i; k < n; ++k) out[k] = rest[0][k - i];
  }
}

TARGET static void rotate(float* x, const float* cosine, const float* sine, std::int64_t half,
                          float scale) {
  std::int64_t i = 0;
  for (; i + width <= half; i += width) {
    const Floats low = load_floats(x + i), high = load_floats(x + half + i);
    const Floats c = load_floats(cosine + i), s = load_floats(sine + i);
    store(x + i, (low * c - high * s) * scale);
    store(x + half + i, (high * c + low * s) * scale);
  }
  for (; i < half; ++i) {
    const float low = x[i], high = x[half + i];
    x[i] = (low * cosine[i] - high * sine[i]) * scale;
    x[half + i] = (high * cosine[i] + low * sine[i]) * scale;
  }
}

// Values (a, b) of lanes STEP apart -> (a + b, a - b).
template <int STEP, std::int32_t... I>
INLINE Floats butterfly(const Floats& v, std::integer_sequence<std::int32_t, I...> lanes) {
  const Ints minus = {((I & STEP) ? std::numeric_limits<std::int32_t>::min() : 0)...};
  return exchanged<STEP>(v, lanes) + bit_cast<Floats>(bit_cast<Ints>(v) ^ minus);
}

// The levels of a block that lie within a vector.
template <int STEP = 1>
INLINE Floats butterflies(const Floats& v, std::int64_t block) {
  if constexpr (STEP < width) {
    if (STEP < block) return butterflies<2 * STEP>(butterfly<STEP>(v, LaneNumbers()), block);
  }
  return v;
}

TARGET static void hadamard(float* x, const float* before, const float* after, std::int64_t n,
                            std::int64_t block) {
  const float scale = float(1.0 / __builtin_sqrt(double(block)));
  const std::int64_t whole = n / width * width, run = block < width ? std::int64_t(width) : block;
  for (std::int64_t first = 0; first < whole; first += run) {
    const std::int64_t end = first + run;
    for (std::int64_t i = first; i < end; i += width) {
      const Floats v = load_floats(x + i);
      store(x + i, butterflies(before ? v * load_floats(before + i) : v, block));
    }
    for (std::int64_t half = width; half < block; half *= 2) {
      for (std::int64_t i = first; i < end; i += 2 * half) {
        for (std::int64_t k = i; k < i + half; k += width) {
          const Floats a = load_floats(x + k), b = load_floats(x + k + half);
          store(x + k, a + b);
          store(x + k + half, a - b);
        }
      }
    }
    for (std::int64_t i = first; i < end; i += width) {
      const Floats v = load_floats(x + i) * scale;
      store(x + i, after ? v * load_floats(after + i) : v);
    }
  }
  if (whole == n) return;
  // Whole blocks, which are shorter than a vector.
  float rest[width] = {};
  for (std::int64_t i = whole; i < n; ++i) rest[i - whole] = before ? x[i] * before[i] : x[i];
  store(rest, butterflies(load_floats(rest), block) * scale);
  for (std::int64_t i = whole; i < n; ++i) x[i] = after ? rest[i - whole] * after[i] : rest[i - whole];
}
