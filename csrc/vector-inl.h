// SPDX-License-Identifier: Apache-2.0
// Vectors of VECTOR_BYTES in terms of the compilers' vector extensions. Included once per instruction
// set, inside its namespace, with VECTOR_BYTES and TARGET (a function attribute) defined. Everything is
// static and inlined into functions of that target, so no two instruction sets share a symbol.

#define INLINE TARGET __attribute__((always_inline)) static inline

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("nounroll")
#else
#define UNROLL _Pragma("GCC unroll 32")
#define NO_UNROLL _Pragma("GCC unroll 1")
#endif

template <class T, int BYTES = VECTOR_BYTES>
struct VectorOf {
  typedef T type __attribute__((vector_size(BYTES)));
};
template <class T, int BYTES = VECTOR_BYTES>
using Vector = typename VectorOf<T, BYTES>::type;

template <class T>
constexpr int lanes = VECTOR_BYTES / int(sizeof(T));

template <class V>
INLINE V load(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
INLINE void store(void* to, const V& v) {
  __builtin_memcpy(to, &v, sizeof v);
}

template <class To, class From>
INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// As store; of a whole cache line, past the caches where the instruction set can.
template <class V>
INLINE void stream(void* to, const V& v) {
#if VECTOR_BYTES == 64
  if (reinterpret_cast<std::uintptr_t>(to) % 64 == 0) return _mm512_stream_si512(static_cast<__m512i*>(to), bit_cast<__m512i>(v));
#endif
  store(to, v);
}

template <class T>
INLINE Vector<T> splat(T value) {
  return value - Vector<T>{};  // value + 0 is not what -0.0 is: compilers would add
}

// Both return b if either is NaN.
template <class V>
INLINE V larger(const V& a, const V& b) {
  return a > b ? a : b;
}
template <class V>
INLINE V smaller(const V& a, const V& b) {
  return a < b ? a : b;
}

// Lanes of the concatenation (a, b) picked by a constant list of indices.
#if defined(__clang__)
#define PICK(T, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(T, a, b, ...) __builtin_shuffle(a, b, Vector<T>{__VA_ARGS__})
#endif

template <int UNIT, class T, T... I>
INLINE void unzip_lanes(const Vector<T>& a, const Vector<T>& b, Vector<T>& even, Vector<T>& odd,
                        std::integer_sequence<T, I...>) {
  even = PICK(T, a, b, T(I / UNIT * 2 * UNIT + I % UNIT)...);
  odd = PICK(T, a, b, T((I / UNIT * 2 + 1) * UNIT + I % UNIT)...);
}

template <class T, T... I>
INLINE void zip_lanes(const Vector<T>& a, const Vector<T>& b, Vector<T>& low, Vector<T>& high,
                      std::integer_sequence<T, I...>) {
  constexpr int count = sizeof...(I);
  low = PICK(T, a, b, T(I / 2 + (I & 1) * count)...);
  high = PICK(T, a, b, T(count / 2 + I / 2 + (I & 1) * count)...);
}

// (a, b) -> its lanes, or runs of UNIT lanes, at even and at odd places, in order.
template <class T, int UNIT = 1>
INLINE void unzip(const Vector<T>& a, const Vector<T>& b, Vector<T>& even, Vector<T>& odd) {
  unzip_lanes<UNIT, T>(a, b, even, odd, std::make_integer_sequence<T, lanes<T>>());
}

// The inverse of unzip.
template <class T>
INLINE void zip(const Vector<T>& a, const Vector<T>& b, Vector<T>& low, Vector<T>& high) {
  zip_lanes<T>(a, b, low, high, std::make_integer_sequence<T, lanes<T>>());
}

// v[0..COUNT) hold one sequence; afterwards v[i] holds its elements i, i + COUNT, i + 2 COUNT, ...
// Each of the log2(COUNT) stages sends the even elements to the first half and the odd ones to the
// second, which leaves the residues in order without a final permutation.
template <int COUNT, class T, int UNIT = 1>
INLINE void deinterleave(Vector<T>* v) {
  UNROLL for (int stage = 1; stage < COUNT; stage *= 2) {
    Vector<T> out[COUNT];
    UNROLL for (int k = 0; k < COUNT / 2; ++k) {
      unzip<T, UNIT>(v[2 * k], v[2 * k + 1], out[k], out[k + COUNT / 2]);
    }
    UNROLL for (int k = 0; k < COUNT; ++k) v[k] = out[k];
  }
}

// The inverse of deinterleave.
template <int COUNT, class T>
INLINE void interleave(Vector<T>* v) {
  UNROLL for (int stage = 1; stage < COUNT; stage *= 2) {
    Vector<T> out[COUNT];
    UNROLL for (int k = 0; k < COUNT / 2; ++k) {
      zip<T>(v[k], v[k + COUNT / 2], out[2 * k], out[2 * k + 1]);
    }
    UNROLL for (int k = 0; k < COUNT; ++k) v[k] = out[k];
  }
}
