// SPDX-License-Identifier: Apache-2.0
// AVX2: vpmaddubsw multiplies unsigned codes with signed activations and adds pairs in 16 bits. A pair of
// codes up to 2 gives at most 508, so 64 of them fit; vpmaddwd then widens the sum.

#if defined(__x86_64__)

#include <immintrin.h>

#include "matmul_kernels.h"

namespace sparse_bitnet {
namespace avx2_matmul {

#define TARGET __attribute__((target("avx2,bmi,bmi2,fma,f16c")))
#define HAS_SUMS
#define VECTOR_BYTES 32
#define NARROW_SUMS
#include "matmul_vectors-inl.h"
#include "matmul_avx2-inl.h"

constexpr int int8_offset = 0;

// Rows that a tile does not have are sums of anything: these may wrap around.
INLINE Small dot_codes(const Small& small, const Bytes& codes, const Bytes& x) {
  return bit_cast<Small>(_mm256_add_epi16(bit_cast<__m256i>(small),
                                          _mm256_maddubs_epi16(bits(codes), bits(x))));
}
INLINE Sums dot_pairs(const Sums& sums, const Bytes& weights, const Bytes& x) {
  return sums + bit_cast<Sums>(_mm256_madd_epi16(bits(weights), bits(x)));
}
INLINE Sums widen(const Sums& sums, const Small& small) {
  return dot_pairs(sums, bit_cast<Bytes>(small), bit_cast<Bytes>(splat(std::int16_t(1))));
}

// |w| <= 128 times x with the sign of w: a pair is at most 2 * 128 * 127.
INLINE Sums dot_int8(const Sums& sums, const Bytes& weights, const Bytes& x) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(bits(weights)),
                                             _mm256_sign_epi8(bits(x), bits(weights)));
  return widen(sums, bit_cast<Small>(pairs));
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

#include "matmul-inl.h"

}  // namespace avx2_matmul

const SumKernels matmul_sums_avx2 = {avx2_matmul::sum_table_bytes, avx2_matmul::sum_tables, avx2_matmul::sum_strips};
const MatmulKernels matmul_avx2 = avx2_matmul::kernels_on<NoUnit>(0);
const MatmulKernels matmul_emulated_unit = avx2_matmul::kernels_on<EmulatedUnit>(2);

}  // namespace sparse_bitnet

#endif
