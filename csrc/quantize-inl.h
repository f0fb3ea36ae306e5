// SPDX-License-Identifier: Apache-2.0
// sum_magnitudes (for absmean) and quantize_int8. The element types are those of the keys in select-inl.h:
// int32_t stands for the bits of a float32, int16_t for those of a bfloat16.

INLINE float to_float(std::int32_t bits) { return bit_cast<float>(bits); }
INLINE float to_float(std::int16_t bits) {
  return bit_cast<float>(std::uint32_t(std::uint16_t(bits)) << 16);
}

template <class V>
INLINE V magnitude(const V& v) {
  return v < 0 ? -v : v;
}

// The two bfloat16 of each 32-bit lane, as floats.
INLINE void split_pairs(const Vector<std::int32_t>& pairs, Vector<float>& first,
                        Vector<float>& second) {
  first = bit_cast<Vector<float>>(pairs << 16);
  second = bit_cast<Vector<float>>(pairs & std::int32_t(0xffff0000));
}

INLINE void add_magnitudes(const Vector<float, VECTOR_BYTES / 2>& floats, Vector<double>& sum) {
  sum += magnitude(__builtin_convertvector(floats, Vector<double>));
}

// Element i is added to partial sum i % partials whatever the vector width, so the order of the
// additions is the same on every instruction set; enough of them hide the latency of an addition.
constexpr int partials = 32;

// 32 elements from `weight` onto their partial sums, in an order of its own.
INLINE void add_all(const std::int32_t* weight, Vector<double>* sum) {
  UNROLL for (int k = 0; k < partials / lanes<double>; ++k) {
    add_magnitudes(load<Vector<float, VECTOR_BYTES / 2>>(weight + k * lanes<double>), sum[k]);
  }
}

INLINE void add_all(const std::int16_t* weight, Vector<double>* sum) {
  constexpr int loads = partials / lanes<std::int16_t>;
  UNROLL for (int k = 0; k < loads; ++k) {
    Vector<float> even, odd;
    split_pairs(load<Vector<std::int32_t>>(weight + k * lanes<std::int16_t>), even, odd);
    const Halves evens = bit_cast<Halves>(even), odds = bit_cast<Halves>(odd);
    add_magnitudes(evens.low, sum[2 * k]);
    add_magnitudes(evens.high, sum[2 * k + 1]);
    add_magnitudes(odds.low, sum[2 * loads + 2 * k]);
    add_magnitudes(odds.high, sum[2 * loads + 2 * k + 1]);
  }
}

// The partial sum of element i among those that add_all leaves.
INLINE int place(int i, std::int32_t) { return i; }
INLINE int place(int i, std::int16_t) { return i / 2 + i % 2 * (partials / 2); }

template <class T>
TARGET static double sum_of(const void* weight, std::int64_t count) {
  const T* w = static_cast<const T*>(weight);
  Vector<double> sum[partials / lanes<double>] = {};
  std::int64_t i = 0;
  for (; i + partials <= count; i += partials) add_all(w + i, sum);
  double partial[partials];
  __builtin_memcpy(partial, sum, sizeof partial);
  for (int k = 0; i < count; ++i, ++k) partial[place(k, T())] += magnitude(double(to_float(w[i])));
  double total[partials];
  for (int k = 0; k < partials; ++k) total[k] = partial[place(k, T())];
  for (int half = partials / 2; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) total[k] += total[k + half];
  }
  return total[0];
}

TARGET static double sum_magnitudes(const void* weight, Dtype dtype, std::int64_t count) {
  return dtype == Dtype::float32 ? sum_of<std::int32_t>(weight, count)
                                 : sum_of<std::int16_t>(weight, count);
}

// Four vectors of floats: v[i] holds elements i, i + 4, i + 8, ...
INLINE void load_fours(const std::int32_t* from, Vector<float>* v) {
  Vector<std::int32_t> bits[4];
  UNROLL for (int i = 0; i < 4; ++i) {
    bits[i] = load<Vector<std::int32_t>>(from + i * lanes<std::int32_t>);
  }
  deinterleave<4, std::int32_t>(bits);
  UNROLL for (int i = 0; i < 4; ++i) v[i] = bit_cast<Vector<float>>(bits[i]);
}

INLINE void load_fours(const std::int16_t* from, Vector<float>* v) {
  Vector<std::int32_t> pairs[2];
  UNROLL for (int i = 0; i < 2; ++i) {
    pairs[i] = load<Vector<std::int32_t>>(from + i * lanes<std::int16_t>);
  }
  deinterleave<2, std::int32_t>(pairs);
  split_pairs(pairs[0], v[0], v[1]);
  split_pairs(pairs[1], v[2], v[3]);
}

constexpr int code_tile = VECTOR_BYTES;

// VECTOR_BYTES elements of one token.
template <class T>
INLINE void quantize_tile(const T* x, float inverse, std::int8_t* codes) {
  Vector<float> v[4];
  load_fours(x, v);
  Vector<std::int32_t> code = {};
  UNROLL for (int i = 0; i < 4; ++i) {
    const auto sum = bit_cast<Vector<std::int32_t>>(v[i] * inverse + round_to_low_bits);
    code |= (sum & 0xff) << (8 * i);
  }
  store(codes, code);
}

// The largest magnitude of `count` elements, as a key: NaN is the largest of all.
template <class T>
INLINE T largest_key(const T* x, std::int64_t count) {
  constexpr int chains = 4, tile = chains * lanes<T>;
  T largest = 0;
  std::int64_t i = 0;
  if (count >= tile) {
    Vector<T> top[chains] = {};
    for (; i + tile <= count; i += tile) {
      UNROLL for (int k = 0; k < chains; ++k) {
        const Vector<T> key = load<Vector<T>>(x + i + k * lanes<T>) & magnitude_bits<T>;
        top[k] = key > top[k] ? key : top[k];
      }
    }
    UNROLL for (int k = 1; k < chains; ++k) top[0] = top[k] > top[0] ? top[k] : top[0];
    T lane[lanes<T>];
    store(lane, top[0]);
    for (int k = 0; k < lanes<T>; ++k) largest = lane[k] > largest ? lane[k] : largest;
  }
  for (; i < count; ++i) {
    const T key = x[i] & magnitude_bits<T>;
    largest = key > largest ? key : largest;
  }
  return largest;
}

template <class T>
INLINE void quantize_token(const T* x, std::int64_t features, std::int8_t* codes, float* scale) {
  const T largest = largest_key<T>(x, features);
  float absmax = to_float(largest);
  if (absmax < 1e-5f) absmax = 1e-5f;
  *scale = absmax / 127.0f;
  if (largest >= infinity_key<T>) {
    // 127 / infinity is 0 and 0 * infinity is NaN, whose code is 0, like that of every NaN.
    __builtin_memset(codes, 0, features);
    return;
  }
  // Rounded twice, as PyTorch evaluates 127 / tensor.
  const float inverse = 1.0f / absmax * 127.0f;
  if (features < code_tile) {
    T padded[code_tile] = {};
    std::int8_t padded_codes[code_tile];
    for (int i = 0; i < features; ++i) padded[i] = x[i];
    quantize_tile<T>(padded, inverse, padded_codes);
    for (int i = 0; i < features; ++i) codes[i] = padded_codes[i];
    return;
  }
  for (std::int64_t i = 0; i < features; i += code_tile) {
    // The last tile overlaps the one before and computes the same codes again.
    const std::int64_t first = i + code_tile <= features ? i : features - code_tile;
    quantize_tile<T>(x + first, inverse, codes + first);
  }
}

template <class T>
TARGET static void quantize_tokens(const void* x, std::int64_t tokens, std::int64_t features, std::int8_t* codes,
                                   float* activation_scale) {
  for (std::int64_t token = 0; token < tokens; ++token) {
    const std::int64_t first = token * features;
    quantize_token(static_cast<const T*>(x) + first, features, codes + first, activation_scale + token);
  }
}

TARGET static void quantize_int8(const void* x, Dtype dtype, std::int64_t tokens, std::int64_t features,
                                 std::int8_t* codes, float* activation_scale) {
  const auto quantize = dtype == Dtype::float32 ? quantize_tokens<std::int32_t> : quantize_tokens<std::int16_t>;
  quantize(x, tokens, features, codes, activation_scale);
}
