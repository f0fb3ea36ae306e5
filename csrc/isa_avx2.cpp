// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)

#define ISA avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define DOT_SIGNED(sum, a, b) \
  DOT_UNSIGNED(sum, _mm256_abs_epi8(__m256i(b)), _mm256_sign_epi8(__m256i(a), __m256i(b)))
#define DOT_UNSIGNED(sum, a, b)                                                      \
  (sum + Ints(_mm256_madd_epi16(_mm256_maddubs_epi16(__m256i(a), __m256i(b)), _mm256_set1_epi16(1))))

#include "isa_avx2-inl.h"

namespace sparse_bitnet {
const VectorKernels vector_emulated_unit = kernels_avx2::kernels_on<EmulatedUnit>();
}

#endif
