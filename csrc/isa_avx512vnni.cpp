// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)

#define ISA avx512vnni
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")))
#define DOT_OFFSET 128
#define DOT_SIGNED(sum, a, b) DOT_UNSIGNED(sum, (b) ^ std::int32_t(0x80808080u), a)
#define DOT_UNSIGNED(sum, a, b) Ints(_mm512_dpbusd_epi32(__m512i(sum), __m512i(a), __m512i(b)))

#include "isa_avx512-inl.h"

#if defined(SPARSE_BITNET_AMX)
namespace sparse_bitnet {
const VectorKernels vector_amx_int8 = kernels_avx512vnni::kernels_on<AmxUnit>();
}
#endif

#endif
