// SPDX-License-Identifier: Apache-2.0
#include "platform.h"

#if defined(SPARSE_BITNET_AVX_VNNI)

#define ISA avxvnni
#define TARGET __attribute__((target("avx2,avxvnni,fma,f16c")))
#define DOT_OFFSET 128
#define DOT_SIGNED(sum, a, b) DOT_UNSIGNED(sum, (b) ^ std::int32_t(0x80808080u), a)
#define DOT_UNSIGNED(sum, a, b) Ints(_mm256_dpbusd_avx_epi32(__m256i(sum), __m256i(a), __m256i(b)))

#include "isa_avx2-inl.h"

#endif
