// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)

#define ISA avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define DOT_SIGNED(sum, a, b)                                                                     \
  DOT_UNSIGNED(sum, _mm512_abs_epi8(__m512i(b)),                                                  \
               _mm512_mask_sub_epi8(__m512i(a), _mm512_movepi8_mask(__m512i(b)), __m512i{}, __m512i(a)))
#define DOT_UNSIGNED(sum, a, b)                                                      \
  (sum + Ints(_mm512_madd_epi16(_mm512_maddubs_epi16(__m512i(a), __m512i(b)), _mm512_set1_epi16(1))))

#include "isa_avx512-inl.h"

#endif
