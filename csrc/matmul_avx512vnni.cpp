// AVX-512 with VNNI: vpdpbusd multiplies unsigned codes with signed activations, four a lane.

#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
// GCC's own headers start from vectors that they leave undefined on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <cstdint>
#include <utility>

#include <immintrin.h>

#include "matmul_kernels.h"
#include "platform.h"

namespace sparse_bitnet {
namespace avx512vnni_matmul {

#define TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,bmi,bmi2,fma")))
#define VECTOR_BYTES 64
#include "vector-inl.h"

using Bytes = Vector<std::uint8_t>;
using Sums = Vector<std::int32_t>;
using Small = Sums;
constexpr std::int64_t small_dots = std::int64_t(1) << 32;
constexpr int nibble_dots = 1 << 30;
constexpr int int8_offset = 128;
constexpr int rows_together = 4, tokens_together = 4;
constexpr int tile_vectors = 2, tile_tokens = 12;

INLINE __m512i bits(const Bytes& v) { return bit_cast<__m512i>(v); }

INLINE Sums dot_codes(const Sums& sums, const Bytes& codes, const Bytes& x) {
  return bit_cast<Sums>(_mm512_dpbusd_epi32(bit_cast<__m512i>(sums), bits(codes), bits(x)));
}
constexpr bool has_dot_bytes = true;
INLINE Sums dot_bytes(const Sums& sums, const Bytes& bytes, const Bytes& x) {
  return dot_codes(sums, bytes, x);
}
INLINE Sums widen(const Sums& sums, const Sums& more) { return sums + more; }

INLINE Bytes to_unsigned(const Bytes& weights) { return weights ^ 0x80; }
INLINE Sums dot_int8(const Sums& sums, const Bytes& weights, const Bytes& x) {
  return dot_codes(sums, to_unsigned(weights), x);
}

INLINE Bytes plane(const Bytes& packed_bytes, int p) {
  return bit_cast<Bytes>(_mm512_srli_epi16(bits(packed_bytes), 2 * p)) & 3;
}

// floor(3 v / 256) of a fraction v / 256; what is left of it remains. Two averages, which round up,
// of u = v - 1 (0 for 0) and 0 give 3 u / 4 with that number in bits 6 and 7: checked for every byte.
INLINE Bytes next_digit(Bytes& fractions) {
  const __m512i u = _mm512_subs_epu8(bits(fractions), _mm512_set1_epi8(1));
  const __m512i digit = _mm512_avg_epu8(u, _mm512_avg_epu8(u, _mm512_setzero_si512()));
  fractions += fractions + fractions;
  return bit_cast<Bytes>(_mm512_srli_epi16(digit, 6)) & 3;
}

struct Bitmap {
  __mmask64 nonzero, negative;
};

INLINE Bitmap load_bitmap(const std::uint8_t* signs, const std::uint8_t* nonzero) {
  std::uint64_t sign_bits, nonzero_bits;
  __builtin_memcpy(&sign_bits, signs, 8);
  __builtin_memcpy(&nonzero_bits, nonzero, 8);
  Bitmap bitmap;
  // From memory: a compiler would take it from the general register, whose way to a mask is slow.
  __asm__("kmovq %1, %0" : "=k"(bitmap.nonzero) : "m"(*reinterpret_cast<const char(*)[8]>(nonzero)));
  bitmap.negative = _pdep_u64(sign_bits, nonzero_bits);
  return bitmap;
}

INLINE Bytes bitmap_codes(const Bitmap& bitmap, int) {
  const __m512i one = _mm512_set1_epi8(1);
  const __m512i magnitudes = _mm512_mask_blend_epi8(bitmap.nonzero, one, _mm512_set1_epi8(2));
  return bit_cast<Bytes>(
      _mm512_mask_blend_epi8(bitmap.negative, magnitudes, _mm512_setzero_si512()));
}

template <int R>
INLINE void store_sums(const Sums* by_row, std::int32_t* out) {
  if constexpr (R == 4) {
    __m512i a[4];
    UNROLL for (int i = 0; i < 4; ++i) a[i] = bit_cast<__m512i>(by_row[i]);
    const __m512i low = _mm512_add_epi32(_mm512_unpacklo_epi32(a[0], a[1]),
                                         _mm512_unpackhi_epi32(a[0], a[1]));
    const __m512i high = _mm512_add_epi32(_mm512_unpacklo_epi32(a[2], a[3]),
                                          _mm512_unpackhi_epi32(a[2], a[3]));
    const __m512i four =
        _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
    const __m256i half =
        _mm256_add_epi32(_mm512_castsi512_si256(four), _mm512_extracti64x4_epi64(four, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
  } else {
    static_assert(R == 1);
    *out = _mm512_reduce_add_epi32(bit_cast<__m512i>(by_row[0]));
  }
}

INLINE Bytes repeat4(const std::int8_t* x) {
  std::int32_t four;
  __builtin_memcpy(&four, x, 4);
  return bit_cast<Bytes>(_mm512_set1_epi32(four));
}
INLINE Sums tile_dot(const Sums& sums, const Bytes& weights, const Bytes& x) {
  return dot_codes(sums, weights, x);
}

// Four stages exchange words at distance 1, 2, 4 and 8 between rows at the same distance.
INLINE void transpose_words(Bytes* square) {
  __m512i a[16], b[16];
  UNROLL for (int i = 0; i < 16; ++i) a[i] = bits(square[i]);
  UNROLL for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  UNROLL for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // a[4 q + i], 128-bit lane l: word 4 l + i of rows 4 q .. 4 q + 3.
  UNROLL for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
    b[4 + i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
    b[8 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
    b[12 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
  }
  UNROLL for (int i = 0; i < 4; ++i) {
    square[i] = bit_cast<Bytes>(_mm512_shuffle_i32x4(b[i], b[8 + i], 0x88));
    square[8 + i] = bit_cast<Bytes>(_mm512_shuffle_i32x4(b[i], b[8 + i], 0xdd));
    square[4 + i] = bit_cast<Bytes>(_mm512_shuffle_i32x4(b[4 + i], b[12 + i], 0x88));
    square[12 + i] = bit_cast<Bytes>(_mm512_shuffle_i32x4(b[4 + i], b[12 + i], 0xdd));
  }
}

INLINE Bytes low_nibbles(const Bytes& v) { return v & 15; }
INLINE Bytes high_nibbles(const Bytes& v) {
  return bit_cast<Bytes>(_mm512_srli_epi16(bits(v), 4)) & 15;
}
INLINE Sums dot_nibbles(const Sums& sums, const Bytes& nibbles, const Bytes& x) {
  return dot_codes(sums, nibbles, x);
}

INLINE void load_halves(const std::int8_t* x, Bytes* low, Bytes* high) {
  const __m512i first = bits(load<Bytes>(x)), second = bits(load<Bytes>(x + 64));
  *low = bit_cast<Bytes>(_mm512_shuffle_i64x2(first, second, 0x44));
  *high = bit_cast<Bytes>(_mm512_shuffle_i64x2(first, second, 0xee));
}

INLINE void reduce_groups(const Sums* by_row, Vector<std::int32_t, 32>* out) {
  __m512i a[8], b[4];
  UNROLL for (int i = 0; i < 8; ++i) a[i] = bit_cast<__m512i>(by_row[i]);
  UNROLL for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]),
                            _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]));
  }
  UNROLL for (int i = 0; i < 2; ++i) {
    a[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(b[2 * i], b[2 * i + 1]),
                            _mm512_unpackhi_epi64(b[2 * i], b[2 * i + 1]));
  }
  // a[0], a[1]: in each 128 bits the sums of rows 0..3 and 4..7; lanes 0 and 1 are group 0.
  const __m512i even = _mm512_shuffle_i64x2(a[0], a[1], 0x88);
  const __m512i odd = _mm512_shuffle_i64x2(a[0], a[1], 0xdd);
  const __m512i sums = _mm512_add_epi32(even, odd);
  // Rows 0..3 of group 0, of group 1, rows 4..7 of group 0, of group 1.
  const __m512i ordered = _mm512_shuffle_i64x2(sums, sums, 0xd8);
  out[0] = bit_cast<Vector<std::int32_t, 32>>(_mm512_castsi512_si256(ordered));
  out[1] = bit_cast<Vector<std::int32_t, 32>>(_mm512_extracti64x4_epi64(ordered, 1));
}

using Floats = Vector<float>;

INLINE Floats multiply_add(const Floats& a, const Floats& b, const Floats& c) {
  return bit_cast<Floats>(
      _mm512_fmadd_ps(bit_cast<__m512>(a), bit_cast<__m512>(b), bit_cast<__m512>(c)));
}
INLINE Floats widen_bfloat16(const std::uint8_t* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return bit_cast<Floats>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
INLINE float sum_lanes(const Floats& v) { return _mm512_reduce_add_ps(bit_cast<__m512>(v)); }

#include "matmul_edges-inl.h"
#include "matmul_rows-inl.h"
#include "matmul_tiles-inl.h"
#include "matmul_units-inl.h"

#if defined(SPARSE_BITNET_AMX)
// Assembly, since the compilers' own functions do not say that they touch memory.
struct AmxUnit : AmxTiles {
  static constexpr bool is_there = true;

  template <int C>
  void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(C));
  }
  template <int I>
  void load(const void* from, std::int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(I) : "memory");
  }
  template <int C>
  void store(void* to, std::int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(C) : "memory");
  }
  template <int C, int A, int B>
  void multiply() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};
#endif

#include "matmul_int4-inl.h"

// Where decoding along the rows costs little, a tile pays off late. 16-bit products would take int8 and
// int4 no faster than 8-bit ones do.
INLINE std::int64_t tile_from(WeightFormat format) {
  switch (format) {
    case WeightFormat::i2:
      return 24;
    case WeightFormat::b3:
      return 8;
    case WeightFormat::nm_bitmap:
      return 16;
    case WeightFormat::int8:
      return 64;
    case WeightFormat::int4:
      return 6;
  }
  return 1;
}

constexpr bool has_wide_tiles = false;
[[maybe_unused]] INLINE void wide_piece(const Matrix&, std::int64_t, std::int64_t,
                                        const Activations&, MatmulScratch&) {}

#include "matmul_multiply-inl.h"
#include "matmul_table-inl.h"

}  // namespace avx512vnni_matmul

const MatmulKernels matmul_avx512vnni = {
    avx512vnni_matmul::quantize_token,
    avx512vnni_matmul::sum_groups,
    avx512vnni_matmul::multiply_on<avx512vnni_matmul::NoUnit>,
    0,
    avx512vnni_matmul::multiply_table,
};

#if defined(SPARSE_BITNET_AMX)
const MatmulKernels matmul_amx_int8 = {
    avx512vnni_matmul::quantize_token,
    avx512vnni_matmul::sum_groups,
    avx512vnni_matmul::multiply_on<avx512vnni_matmul::AmxUnit>,
    12,
    avx512vnni_matmul::multiply_table,
};
#endif

}  // namespace sparse_bitnet

#endif
