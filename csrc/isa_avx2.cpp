// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)

#define ISA avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define VECTOR_BYTES 32
#define FLOAT_REGISTERS 16
#define FUSED(a, b, c) Vector<float>(_mm256_fmadd_ps(a, b, c))
#define WIDEN_HALF(from) \
  Vector<float>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))))
#define NARROW_HALF(to, v)                         \
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), \
                   _mm256_cvtps_ph(clamp_to_half(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#define DOT_SIGNED(sum, a, b) \
  DOT_UNSIGNED(sum, _mm256_abs_epi8(__m256i(b)), _mm256_sign_epi8(__m256i(a), __m256i(b)))
#define DOT_UNSIGNED(sum, a, b)                                                      \
  (sum + Ints(_mm256_madd_epi16(_mm256_maddubs_epi16(__m256i(a), __m256i(b)), _mm256_set1_epi16(1))))

#include "isa-inl.h"

#endif
