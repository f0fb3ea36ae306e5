// SPDX-License-Identifier: Apache-2.0
// select_ternary: n of every m weights without sorting.
//
// A weight is kept when fewer than n weights of its group come before it in the order "larger
// magnitude first, lower index first". One vector holds the i-th weight of as many groups as it has
// lanes, so counting the weights that come before needs one comparison for each of the m (m - 1) / 2
// pairs, for all those groups at once. Magnitudes are compared as integers (the bits without the
// sign), which is a total order, NaN included, and the same on every machine.
//
// Groups of m are read as groups of the next power of two M; surplus keys are -1, below every other.

template <class T>
constexpr T magnitude_bits = std::numeric_limits<T>::max();

// +infinity as a key; NaNs lie above. A bfloat16 is the upper half of a float32.
template <class T>
constexpr T infinity_key = T(0x7f800000 >> (8 * (4 - sizeof(T))));

// Magnitudes above this key have the code 1 or -1.
//
// round_half_even(fl(w / s)) is 0 exactly when fl(w / s) <= 1/2, and that is when |w| <= s / 2, which
// is a float32 (s >= 2^-125). If |w| <= s/2, the quotient is at most 1/2 and rounding is monotone. If
// |w| > s/2, then |w| >= s/2 + u with u the spacing of float32 at s/2, and s/2 < 2^24 u, so the
// quotient is at least 1/2 + u/s > 1/2 + 2^-25: beyond the midpoint between 1/2 and the next float32,
// 1/2 + 2^-24, it cannot be rounded down to 1/2. A bfloat16 w is above s/2 when its bits, which are
// the upper half of those of a float32 with zeros below, are above the upper half of those of s/2.
template <class T>
INLINE T threshold_key(float weight_scale) {
  return T(bit_cast<std::int32_t>(0.5f * weight_scale) >> (8 * (4 - sizeof(T))));
}

// Lanes of ones where the key (a finite one) is above the threshold.
template <class T>
INLINE Vector<T> is_nonzero(const Vector<T>& key, T threshold) {
  return (key > threshold) & (key <= infinity_key<T>);
}

// The code 1 or -1 of each lane's sign, in every byte of the lane.
template <class T>
INLINE Vector<T> sign_bytes(const Vector<T>& bits) {
  constexpr T ones = T(0x01010101);
  return (bits >> (8 * int(sizeof(T)) - 1)) | ones;
}

// kept[i] = lanes of ones where fewer than n of the m keys of the group come before key[i].
template <int M, class T>
INLINE void keep_largest(const Vector<T>* key, int n, int m, Vector<T>* kept) {
  // Keys and counts of one block stay in registers while the later keys stream past.
  constexpr int block = M <= 8 ? M : VECTOR_BYTES == 64 ? 8 : 4;
  const int used = M == block ? M : int(packed::divide_up(m, block)) * block;
  Vector<T> before[M];
  UNROLL for (int i = 0; i < M; ++i) before[i] = splat<T>(T(i));
  for (int first = 0; first < used; first += block) {
    Vector<T> k[block], count[block];
    UNROLL for (int i = 0; i < block; ++i) {
      k[i] = key[first + i];
      count[i] = before[first + i];
    }
    // Every lower index is counted as coming before; a comparison (-1 where true) corrects both.
    UNROLL for (int i = 0; i < block; ++i) {
      UNROLL for (int j = i + 1; j < block; ++j) {
        const Vector<T> larger = k[j] > k[i];
        count[i] -= larger;
        count[j] += larger;
      }
    }
    NO_UNROLL for (int j = first + block; j < used; ++j) {
      const Vector<T> later = key[j];
      Vector<T> later_count = before[j];
      UNROLL for (int i = 0; i < block; ++i) {
        const Vector<T> larger = later > k[i];
        count[i] -= larger;
        later_count += larger;
      }
      before[j] = later_count;
    }
    UNROLL for (int i = 0; i < block; ++i) kept[first + i] = count[i] < splat<T>(T(n));
  }
}

// One byte of every lane of value[0..M), in memory order: the groups' bytes one group after another.
// All bytes of a lane are equal, so byte k of a lane can come from value k of a run without a shift.
template <int M, class T>
INLINE void store_bytes(const Vector<T>* value, void* to) {
  constexpr int run = sizeof(T);
  Vector<T> bytes[M / run];
  UNROLL for (int i = 0; i < M / run; ++i) {
    bytes[i] = Vector<T>{};
    UNROLL for (int k = 0; k < run; ++k) {
      bytes[i] |= value[run * i + k] & splat<T>(T(0xffu << (8 * k)));
    }
  }
  interleave<M / run, T>(bytes);
  UNROLL for (int i = 0; i < M / run; ++i) store((char*)to + i * VECTOR_BYTES, bytes[i]);
}

// One tile: as many groups of M as a vector has lanes. Writes codes only where CODES.
template <int M, bool CODES, class T>
INLINE void select_tile(const T* weight, T threshold, int n, int m, std::int8_t* codes,
                        std::uint8_t* mask) {
  Vector<T> bits[M], key[M], kept[M];
  UNROLL for (int i = 0; i < M; ++i) bits[i] = load<Vector<T>>(weight + i * lanes<T>);
  deinterleave<M, T>(bits);
  UNROLL for (int i = 0; i < M; ++i) key[i] = bits[i] & magnitude_bits<T>;
  for (int i = m; i < M; ++i) key[i] = splat<T>(T(-1));
  keep_largest<M, T>(key, n, m, kept);
  if constexpr (CODES) {
    Vector<T> code[M];
    UNROLL for (int i = 0; i < M; ++i) {
      code[i] = sign_bytes<T>(bits[i]) & is_nonzero<T>(key[i], threshold) & kept[i];
    }
    store_bytes<M, T>(code, codes);
  }
  UNROLL for (int i = 0; i < M; ++i) kept[i] &= T(0x01010101);
  store_bytes<M, T>(kept, mask);
}

// Copies groups of m elements that lie `apart` to places `to_apart` apart, from m to M or back. Each copy but the
// last has M elements: it runs over into the next group, which exists or is written by the next copy.
template <int M, class T>
INLINE void copy_groups(const T* from, int apart, T* to, int to_apart, int groups, int m) {
  for (int g = 0; g < groups - 1; ++g) __builtin_memcpy(to + g * to_apart, from + g * apart, M * sizeof(T));
  for (int i = 0; i < m; ++i) to[(groups - 1) * to_apart + i] = from[(groups - 1) * apart + i];
}

// Asks for the cache lines some way ahead of `from`. Hardware prefetching alone does not keep up with
// wide vectors: 55 MB of float32 on two cores with AVX-512 take 4.9 ms without this and 2.0 ms with it.
INLINE void prefetch_ahead(const void* from, int bytes) {
  constexpr int distance = 8192, line = 64;
  const auto address = reinterpret_cast<std::uintptr_t>(from) + distance;
  for (int i = 0; i < bytes; i += line) __builtin_prefetch(reinterpret_cast<const void*>(address + i));
}

template <int M, bool CODES, class T>
TARGET static void select_groups(const T* weight, T threshold, std::int64_t groups, int n, int m,
                                 std::int8_t* codes, std::uint8_t* mask) {
  constexpr int tile = lanes<T>;
  std::int64_t g = 0;
  if (m == M) {
    for (; g + tile <= groups; g += tile) {
      prefetch_ahead(weight + g * M, M * tile * sizeof(T));
      select_tile<M, CODES, T>(weight + g * M, threshold, n, M, CODES ? codes + g * M : nullptr,
                               mask + g * M);
    }
  }
  // Several tiles are copied before the first is read: a load that spans stores still in flight stalls.
  constexpr int copied = 4 * tile;
  T wide_weight[M * copied] = {};
  std::int8_t wide_codes[M * copied];
  std::uint8_t wide_mask[M * copied];
  for (; g < groups; g += copied) {
    const int count = int(groups - g < copied ? groups - g : copied);
    prefetch_ahead(weight + g * m, count * m * sizeof(T));
    copy_groups<M>(weight + g * m, m, wide_weight, M, count, m);
    for (int first = 0; first < count; first += tile) {
      select_tile<M, CODES, T>(wide_weight + first * M, threshold, n, m, wide_codes + first * M,
                               wide_mask + first * M);
    }
    if (CODES) copy_groups<M>(wide_codes, M, codes + g * m, m, count, m);
    copy_groups<M>(wide_mask, M, mask + g * m, m, count, m);
  }
}

template <bool CODES, class T>
TARGET static void select_any(const void* weight, float weight_scale, std::int64_t groups, int n, int m,
                              std::int8_t* codes, std::uint8_t* mask) {
  const T* w = static_cast<const T*>(weight);
  const T threshold = threshold_key<T>(weight_scale);
  if (m <= 4) return select_groups<4, CODES, T>(w, threshold, groups, n, m, codes, mask);
  if (m <= 8) return select_groups<8, CODES, T>(w, threshold, groups, n, m, codes, mask);
  if (m <= 16) return select_groups<16, CODES, T>(w, threshold, groups, n, m, codes, mask);
  select_groups<32, CODES, T>(w, threshold, groups, n, m, codes, mask);
}

// Codes of VECTOR_BYTES weights, all of them kept.
template <class T>
INLINE void dense_tile(const T* weight, T threshold, std::int8_t* codes) {
  constexpr int run = sizeof(T);
  Vector<T> v[run];
  UNROLL for (int i = 0; i < run; ++i) v[i] = load<Vector<T>>(weight + i * lanes<T>);
  deinterleave<run, T>(v);
  UNROLL for (int i = 0; i < run; ++i) {
    v[i] = sign_bytes<T>(v[i]) & is_nonzero<T>(v[i] & magnitude_bits<T>, threshold);
  }
  store_bytes<run, T>(v, codes);
}

template <class T>
TARGET static void dense_codes(const void* weight, float weight_scale, std::int64_t count, std::int8_t* codes) {
  constexpr int tile = VECTOR_BYTES;
  const T* w = static_cast<const T*>(weight);
  const T threshold = threshold_key<T>(weight_scale);
  std::int64_t i = 0;
  for (; i + tile <= count; i += tile) dense_tile<T>(w + i, threshold, codes + i);
  if (i == count) return;
  T last[tile] = {};
  std::int8_t last_codes[tile];
  for (std::int64_t k = i; k < count; ++k) last[k - i] = w[k];
  dense_tile<T>(last, threshold, last_codes);
  for (std::int64_t k = i; k < count; ++k) codes[k] = last_codes[k - i];
}

TARGET static void select_ternary(const void* weight, Dtype dtype, float weight_scale, std::int64_t groups, int n,
                                  int m, std::int8_t* codes, std::uint8_t* mask) {
  const bool is_float = dtype == Dtype::float32;
  const auto select = codes ? is_float ? select_any<true, std::int32_t> : select_any<true, std::int16_t>
                            : is_float ? select_any<false, std::int32_t> : select_any<false, std::int16_t>;
  select(weight, weight_scale, groups, n, m, codes, mask);
}

TARGET static void dense_ternary(const void* weight, Dtype dtype, float weight_scale, std::int64_t count,
                                 std::int8_t* codes) {
  (dtype == Dtype::float32 ? dense_codes<std::int32_t> : dense_codes<std::int16_t>)(weight, weight_scale, count, codes);
}
