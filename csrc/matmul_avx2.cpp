// AVX2, and included by matmul_avxvnni.cpp, which defines AVX_VNNI, with vpdpbusd of 256 bits. Without it,
// vpmaddubsw multiplies unsigned codes with signed activations and adds pairs in 16 bits. A pair of codes
// up to 2 gives at most 508, so 64 of them fit; vpmaddwd then widens the sum.

#if defined(__x86_64__)

#include <cstdint>
#include <utility>

#include <immintrin.h>

#include "matmul_kernels.h"
#include "platform.h"

#if !defined(AVX_VNNI) || defined(SPARSE_BITNET_AVX_VNNI)

namespace sparse_bitnet {
#if defined(AVX_VNNI)
#define TARGET __attribute__((target("avx2,avxvnni,bmi,bmi2,fma")))
namespace avxvnni_matmul {
#else
#define TARGET __attribute__((target("avx2,bmi,bmi2,fma")))
namespace avx2_matmul {
#endif

#define VECTOR_BYTES 32
#include "vector-inl.h"

using Bytes = Vector<std::uint8_t>;
using Sums = Vector<std::int32_t>;
using Floats = Vector<float>;
constexpr int rows_together = 4, tokens_together = 2;
constexpr int tile_vectors = 2, tile_tokens = 4;

INLINE __m256i bits(const Bytes& v) { return bit_cast<__m256i>(v); }

INLINE Bytes to_unsigned(const Bytes& weights) { return weights ^ 0x80; }

#if defined(AVX_VNNI)

using Small = Sums;
constexpr std::int64_t small_dots = std::int64_t(1) << 32;
constexpr int nibble_dots = 1 << 30;
constexpr int int8_offset = 128;

INLINE Sums dot_codes(const Sums& sums, const Bytes& codes, const Bytes& x) {
  return bit_cast<Sums>(_mm256_dpbusd_avx_epi32(bit_cast<__m256i>(sums), bits(codes), bits(x)));
}
constexpr bool has_dot_bytes = true;
INLINE Sums dot_bytes(const Sums& sums, const Bytes& bytes, const Bytes& x) {
  return dot_codes(sums, bytes, x);
}
INLINE Sums widen(const Sums& sums, const Sums& more) { return sums + more; }
INLINE Sums dot_int8(const Sums& sums, const Bytes& weights, const Bytes& x) {
  return dot_codes(sums, to_unsigned(weights), x);
}
INLINE Sums dot_nibbles(const Sums& sums, const Bytes& nibbles, const Bytes& x) {
  return dot_codes(sums, nibbles, x);
}

#else

using Small = Vector<std::int16_t>;
constexpr std::int64_t small_dots = 64;
constexpr int nibble_dots = 8;
constexpr int int8_offset = 0;

// Rows that a tile does not have are sums of anything: these may wrap around.
INLINE Small dot_codes(const Small& small, const Bytes& codes, const Bytes& x) {
  return bit_cast<Small>(_mm256_add_epi16(bit_cast<__m256i>(small),
                                          _mm256_maddubs_epi16(bits(codes), bits(x))));
}
// Any bytes would overflow: never called.
constexpr bool has_dot_bytes = false;
[[maybe_unused]] INLINE Sums dot_bytes(const Sums& sums, const Bytes&, const Bytes&) {
  return sums;
}
INLINE Sums widen(const Sums& sums, const Small& small) {
  const __m256i pairs = _mm256_madd_epi16(bit_cast<__m256i>(small), _mm256_set1_epi16(1));
  return sums + bit_cast<Sums>(pairs);
}

// |w| <= 128 times x with the sign of w: a pair is at most 2 * 128 * 127.
INLINE Sums dot_int8(const Sums& sums, const Bytes& weights, const Bytes& x) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(bits(weights)),
                                             _mm256_sign_epi8(bits(x), bits(weights)));
  return widen(sums, bit_cast<Small>(pairs));
}
INLINE Sums dot_nibbles(const Sums& sums, const Bytes& nibbles, const Bytes& x) {
  return widen(sums, dot_codes(Small{}, nibbles, x));
}

#endif

INLINE Bytes plane(const Bytes& packed_bytes, int p) {
  return bit_cast<Bytes>(_mm256_srli_epi16(bits(packed_bytes), 2 * p)) & 3;
}

// floor(3 v / 256) of a fraction v / 256; what is left of it remains. Two averages, which round up,
// of u = v - 1 (0 for 0) and 0 give 3 u / 4 with that number in bits 6 and 7: checked for every byte.
INLINE Bytes next_digit(Bytes& fractions) {
  const __m256i u = _mm256_subs_epu8(bits(fractions), _mm256_set1_epi8(1));
  const __m256i digit = _mm256_avg_epu8(u, _mm256_avg_epu8(u, _mm256_setzero_si256()));
  fractions += fractions + fractions;
  return bit_cast<Bytes>(_mm256_srli_epi16(digit, 6)) & 3;
}

struct Bitmap {
  std::uint64_t nonzero, negative;
};

INLINE Bitmap load_bitmap(const std::uint8_t* signs, const std::uint8_t* nonzero) {
  std::uint64_t sign_bits;
  Bitmap bitmap;
  __builtin_memcpy(&sign_bits, signs, 8);
  __builtin_memcpy(&bitmap.nonzero, nonzero, 8);
  bitmap.negative = _pdep_u64(sign_bits, bitmap.nonzero);
  return bitmap;
}

// -1 in the bytes whose bit is set.
INLINE __m256i byte_mask(std::uint32_t mask) {
  const __m256i byte_of_lane = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                                  0x0303030303030303);
  const __m256i bit_of_lane = _mm256_set1_epi64x(std::int64_t(0x8040201008040201));
  const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(int(mask)), byte_of_lane);
  return _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit_of_lane), bit_of_lane);
}

INLINE Bytes bitmap_codes(const Bitmap& bitmap, int vector) {
  const __m256i minus = byte_mask(std::uint32_t(bitmap.negative >> (32 * vector)));
  const __m256i any = byte_mask(std::uint32_t(bitmap.nonzero >> (32 * vector)));
  const __m256i codes = _mm256_sub_epi8(_mm256_set1_epi8(1), any);
  return bit_cast<Bytes>(_mm256_add_epi8(codes, _mm256_add_epi8(minus, minus)));
}

INLINE __m128i sum_four(const __m256i* a) {
  const __m256i low =
      _mm256_add_epi32(_mm256_unpacklo_epi32(a[0], a[1]), _mm256_unpackhi_epi32(a[0], a[1]));
  const __m256i high =
      _mm256_add_epi32(_mm256_unpacklo_epi32(a[2], a[3]), _mm256_unpackhi_epi32(a[2], a[3]));
  const __m256i four =
      _mm256_add_epi32(_mm256_unpacklo_epi64(low, high), _mm256_unpackhi_epi64(low, high));
  return _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
}

template <int R>
INLINE void store_sums(const Sums* by_row, std::int32_t* out) {
  static_assert(R == 4 || R == 1);
  __m256i a[4];
  UNROLL for (int i = 0; i < 4; ++i) a[i] = bit_cast<__m256i>(by_row[i % R]);
  const __m128i four = sum_four(a);
  if (R == 4) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), four);
  } else {
    *out = _mm_cvtsi128_si32(four);
  }
}

INLINE Bytes repeat4(const std::int8_t* x) {
  std::int32_t four;
  __builtin_memcpy(&four, x, 4);
  return bit_cast<Bytes>(_mm256_set1_epi32(four));
}
INLINE Small tile_dot(const Small& small, const Bytes& weights, const Bytes& x) {
  return dot_codes(small, weights, x);
}

INLINE void transpose_words(Bytes* square) {
  __m256i a[8], b[8];
  UNROLL for (int i = 0; i < 8; ++i) a[i] = bits(square[i]);
  UNROLL for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
  UNROLL for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  UNROLL for (int i = 0; i < 4; ++i) {
    square[i] = bit_cast<Bytes>(_mm256_permute2x128_si256(a[i], a[4 + i], 0x20));
    square[4 + i] = bit_cast<Bytes>(_mm256_permute2x128_si256(a[i], a[4 + i], 0x31));
  }
}

INLINE Bytes low_nibbles(const Bytes& v) { return v & 15; }
INLINE Bytes high_nibbles(const Bytes& v) {
  return bit_cast<Bytes>(_mm256_srli_epi16(bits(v), 4)) & 15;
}
INLINE void load_halves(const std::int8_t* x, Bytes* low, Bytes* high) {
  *low = load<Bytes>(x);
  *high = load<Bytes>(x + 32);
}

INLINE void reduce_groups(const Sums* by_row, Vector<std::int32_t, 32>* out) {
  __m256i a[8];
  UNROLL for (int i = 0; i < 8; ++i) a[i] = bit_cast<__m256i>(by_row[i]);
  *out = bit_cast<Vector<std::int32_t, 32>>(_mm256_set_m128i(sum_four(a + 4), sum_four(a)));
}

INLINE Floats multiply_add(const Floats& a, const Floats& b, const Floats& c) {
  return bit_cast<Floats>(
      _mm256_fmadd_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), bit_cast<__m256>(c)));
}
INLINE Floats widen_bfloat16(const std::uint8_t* from) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return bit_cast<Floats>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
INLINE float sum_lanes(const Floats& v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

INLINE Sums dot_pairs(const Sums& sums, const Bytes& weights, const Bytes& x) {
  return sums + bit_cast<Sums>(_mm256_madd_epi16(bits(weights), bits(x)));
}
INLINE void widen_words(const Bytes& words, Bytes* first, Bytes* second) {
  // Each byte to the high half of 16 bits; what comes into the low half is shifted out.
  const __m256i to_first = _mm256_set_epi8(13, 12, 12, 12, 9, 8, 8, 8, 5, 4, 4, 4, 1, 0, 0, 0, 13, 12,
                                           12, 12, 9, 8, 8, 8, 5, 4, 4, 4, 1, 0, 0, 0);
  const __m256i to_second = _mm256_set_epi8(15, 14, 14, 14, 11, 10, 10, 10, 7, 6, 6, 6, 3, 2, 2, 2, 15,
                                            14, 14, 14, 11, 10, 10, 10, 7, 6, 6, 6, 3, 2, 2, 2);
  const __m256i low = _mm256_shuffle_epi8(bits(words), to_first);
  const __m256i high = _mm256_shuffle_epi8(bits(words), to_second);
  *first = bit_cast<Bytes>(_mm256_srai_epi16(low, 8));
  *second = bit_cast<Bytes>(_mm256_srai_epi16(high, 8));
}

#include "matmul_edges-inl.h"
#include "matmul_rows-inl.h"
#include "matmul_tiles-inl.h"
#include "matmul_units-inl.h"
#include "matmul_int4-inl.h"
#include "matmul_wide-inl.h"

// 16-bit products would take int8 and int4 no faster than vpdpbusd does.
#if defined(AVX_VNNI)
constexpr bool has_wide_tiles = false;
#else
constexpr bool has_wide_tiles = true;
#endif

INLINE std::int64_t tile_from(WeightFormat format) {
  return format == WeightFormat::int8 ? 6 : 4;
}

#include "matmul_multiply-inl.h"
#include "matmul_table-inl.h"

#if defined(AVX_VNNI)
}  // namespace avxvnni_matmul

const MatmulKernels matmul_avxvnni = {
    avxvnni_matmul::quantize_token,
    avxvnni_matmul::sum_groups,
    avxvnni_matmul::multiply_on<avxvnni_matmul::NoUnit>,
    0,
    avxvnni_matmul::multiply_table,
};
#else
}  // namespace avx2_matmul

const MatmulKernels matmul_avx2 = {
    avx2_matmul::quantize_token,
    avx2_matmul::sum_groups,
    avx2_matmul::multiply_on<avx2_matmul::NoUnit>,
    0,
    avx2_matmul::multiply_table,
};

const MatmulKernels matmul_emulated_unit = {
    avx2_matmul::quantize_token,
    avx2_matmul::sum_groups,
    avx2_matmul::multiply_on<avx2_matmul::EmulatedUnit>,
    2,
    avx2_matmul::multiply_table,
};
#endif

}  // namespace sparse_bitnet

#endif
#endif
