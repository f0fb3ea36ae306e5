// SPDX-License-Identifier: Apache-2.0
// What the products of every instruction set share: their vectors, and what the compilers' vector extensions
// say as well as intrinsics do. Included once per instruction set, inside its namespace, with VECTOR_BYTES,
// TARGET and, where dot products add pairs in 16 bits, NARROW_SUMS defined.

#include "vector-inl.h"

using Bytes = Vector<std::uint8_t>;
using Sums = Vector<std::int32_t>;
using Words = Vector<std::uint32_t>;  // sums that are too high, and may wrap around
using Floats = Vector<float>;

INLINE Bytes load_bytes(const void* from) { return load<Bytes>(from); }

// Sums in lanes that may be narrower, and how many dot_codes they can hold.
#if defined(NARROW_SUMS)
using Small = Vector<std::int16_t>;
constexpr std::int64_t small_dots = 64;
constexpr int nibble_dots = 8;
#else
using Small = Sums;
constexpr std::int64_t small_dots = std::int64_t(1) << 32;
constexpr int nibble_dots = 1 << 30;
INLINE Sums widen(const Sums& sums, const Sums& more) {
  return bit_cast<Sums>(bit_cast<Words>(sums) + bit_cast<Words>(more));
}
#endif

// Shifts of 16 bits are those that x86 has; what comes from the byte above is masked.
INLINE Bytes shifted_down(const Bytes& v, int count) {
  return bit_cast<Bytes>(bit_cast<Vector<std::uint16_t>>(v) >> count);
}
INLINE Bytes shifted_up(const Bytes& v, int count) { return bit_cast<Bytes>(bit_cast<Vector<std::uint16_t>>(v) << count); }
// Bits 2 p and 2 p + 1 of every byte.
INLINE Bytes plane(const Bytes& v, int p) { return shifted_down(v, 2 * p) & 3; }
INLINE Bytes low_nibbles(const Bytes& v) { return v & 15; }
INLINE Bytes high_nibbles(const Bytes& v) { return shifted_down(v, 4) & 15; }
INLINE Bytes to_unsigned(const Bytes& weights) { return weights ^ 0x80; }

// Four activations of one token in every 32-bit lane.
INLINE Bytes repeat4(const void* x) { return bit_cast<Bytes>(splat(load<std::int32_t>(x))); }

// The same of sixteen, the fours of which are numbered: where an instruction picks them, they are loaded once.
#if defined(__aarch64__)
struct Fours {
  Bytes sixteen;
  int number;
};
INLINE Fours fours(const std::int8_t* x, int number) { return {load_bytes(x), number}; }
#else
using Fours = Bytes;
INLINE Fours fours(const std::int8_t* x, int number) { return repeat4(x + 4 * number); }
#endif

// The lower and upper halves of each 128 bits of a and b, element by element in turn.
template <class T, T... I>
INLINE void interleave_halves(const Bytes& a, const Bytes& b, Bytes& low, Bytes& high,
                              std::integer_sequence<T, I...>) {
  constexpr int count = sizeof...(I), in_lane = 16 / int(sizeof(T));
  const auto x = bit_cast<Vector<T>>(a), y = bit_cast<Vector<T>>(b);
  low = bit_cast<Bytes>(PICK(T, x, y, T(I % 2 * count + I / in_lane * in_lane + I % in_lane / 2)...));
  high = bit_cast<Bytes>(
      PICK(T, x, y, T(I % 2 * count + I / in_lane * in_lane + in_lane / 2 + I % in_lane / 2)...));
}
template <class T>
INLINE void interleave_halves(const Bytes& a, const Bytes& b, Bytes& low, Bytes& high) {
  interleave_halves(a, b, low, high, std::make_integer_sequence<T, lanes<T>>());
}

constexpr int row_lanes = VECTOR_BYTES / 4;
constexpr int quads = VECTOR_BYTES / 16;  // of 128 bits

// 128 bits from a, then from b, then those behind in turn. A vector of 128 bits holds those of a.
INLINE Bytes load_quads(const std::uint8_t* a, [[maybe_unused]] const std::uint8_t* b) {
#if VECTOR_BYTES == 16
  return load_bytes(a);
#elif VECTOR_BYTES == 32
  return bit_cast<Bytes>(_mm256_set_m128i(load<__m128i>(b), load<__m128i>(a)));
#else
  const __m256i first = _mm256_set_m128i(load<__m128i>(b), load<__m128i>(a));
  const __m256i next = _mm256_set_m128i(load<__m128i>(b + 16), load<__m128i>(a + 16));
  return bit_cast<Bytes>(_mm512_inserti64x4(_mm512_castsi256_si512(first), next, 1));
#endif
}

// A square of 32-bit words, one row a vector.
INLINE void transpose_words(Bytes* square) {
  Bytes a[row_lanes];
  UNROLL for (int i = 0; i < row_lanes; i += 2) {
    interleave_halves<std::uint32_t>(square[i], square[i + 1], a[i], a[i + 1]);
  }
  // by_word[w][q], 128-bit lane l: word 4 l + w of rows 4 q to 4 q + 3.
  Vector<std::uint64_t> by_word[4][quads];
  UNROLL for (int i = 0; i < row_lanes; i += 4) {
    UNROLL for (int half = 0; half < 2; ++half) {
      Bytes first, second;
      interleave_halves<std::uint64_t>(a[i + half], a[i + 2 + half], first, second);
      by_word[2 * half][i / 4] = bit_cast<Vector<std::uint64_t>>(first);
      by_word[2 * half + 1][i / 4] = bit_cast<Vector<std::uint64_t>>(second);
    }
  }
  UNROLL for (int w = 0; w < 4; ++w) {
    deinterleave<quads, std::uint64_t, 2>(by_word[w]);
    UNROLL for (int q = 0; q < quads; ++q) square[4 * q + w] = bit_cast<Bytes>(by_word[w][q]);
  }
}

// In each 128 bits the sums over that lane of a[0] to a[3].
INLINE Sums sum_four(const Sums* a) {
#if defined(__aarch64__)
  const int32x4_t low = vpaddq_s32(bit_cast<int32x4_t>(a[0]), bit_cast<int32x4_t>(a[1]));
  const int32x4_t high = vpaddq_s32(bit_cast<int32x4_t>(a[2]), bit_cast<int32x4_t>(a[3]));
  return bit_cast<Sums>(vpaddq_s32(low, high));
#else
  Bytes low, high, pairs[2];
  UNROLL for (int i = 0; i < 2; ++i) {
    interleave_halves<std::uint32_t>(bit_cast<Bytes>(a[2 * i]), bit_cast<Bytes>(a[2 * i + 1]), low, high);
    pairs[i] = bit_cast<Bytes>(bit_cast<Words>(low) + bit_cast<Words>(high));
  }
  interleave_halves<std::uint64_t>(pairs[0], pairs[1], low, high);
  return bit_cast<Sums>(bit_cast<Words>(low) + bit_cast<Words>(high));
#endif
}

// v plus its halves exchanged, down to STEP lanes: lanes below STEP hold the sum of all that are as far apart.
template <int STEP, class T, std::int32_t... I>
INLINE Vector<T> folded_once(const Vector<T>& v, std::integer_sequence<std::int32_t, I...>) {
  return v + PICK(std::int32_t, v, v, (I ^ STEP)...);
}
template <int LEFT, class T>
INLINE Vector<T> folded(Vector<T> v) {
  using LaneNumbers = std::make_integer_sequence<std::int32_t, row_lanes>;
  if constexpr (LEFT <= 8 && row_lanes > 8) v = folded_once<8, T>(v, LaneNumbers());
  if constexpr (LEFT <= 4 && row_lanes > 4) v = folded_once<4, T>(v, LaneNumbers());
  if constexpr (LEFT <= 2) v = folded_once<2, T>(v, LaneNumbers());
  if constexpr (LEFT <= 1) v = folded_once<1, T>(v, LaneNumbers());
  return v;
}

// The sums over all lanes of R vectors, 1 or 4.
template <int R>
INLINE void store_sums(const Sums* by_row, std::int32_t* out) {
  if constexpr (R == 4) {
    const Words four = folded<4, std::uint32_t>(bit_cast<Words>(sum_four(by_row)));
    __builtin_memcpy(out, &four, 16);
  } else {
    static_assert(R == 1);
    *out = std::int32_t(folded<1, std::uint32_t>(bit_cast<Words>(by_row[0]))[0]);
  }
}

// 128-bit lanes 0 (or 1) of a and of b, then 2 (or 3) of each.
template <int FIRST, std::uint64_t... I>
INLINE Sums every_other_quad(const Sums& a, const Sums& b, std::integer_sequence<std::uint64_t, I...>) {
  using T = std::uint64_t;
  const auto x = bit_cast<Vector<T>>(a), y = bit_cast<Vector<T>>(b);
  return bit_cast<Sums>(PICK(T, x, y, (I / 2 % 2 * sizeof...(I) + (I / 4 * 2 + FIRST) * 2 + I % 2)...));
}

// out[group][row] of eight rows, where 32 bytes of a vector, or all of a shorter one, belong to a group.
INLINE void reduce_groups(const Sums* by_row, Vector<std::int32_t, 32>* out) {
  Sums sums[2] = {sum_four(by_row), sum_four(by_row + 4)};
  if constexpr (quads > 1) {
    using Lanes = std::make_integer_sequence<std::uint64_t, lanes<std::uint64_t>>;
    sums[0] = every_other_quad<0>(sums[0], sums[1], Lanes()) + every_other_quad<1>(sums[0], sums[1], Lanes());
    __builtin_memcpy(out, sums, VECTOR_BYTES);
  } else {
    __builtin_memcpy(out, sums, sizeof sums);
  }
}
