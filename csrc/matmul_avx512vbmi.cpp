// SPDX-License-Identifier: Apache-2.0
// AVX-512 with VNNI and VBMI: vpermb looks 64 bytes up at once. What has AMX has it too.

#if defined(__x86_64__)

#include "avx512.h"
#include "matmul_kernels.h"
#include "platform.h"

namespace sparse_bitnet {
namespace avx512vbmi_matmul {

#define TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,bmi,bmi2,fma")))
#define VECTOR_BYTES 64
#include "matmul_vectors-inl.h"
constexpr int lookup_tile_from = 48;
#include "matmul_avx512-inl.h"

using LookupTable = __m512i;
INLINE LookupTable lookup_table(const std::uint8_t* entries) { return load<__m512i>(entries); }
template <int>
INLINE Bytes look_up(const LookupTable& table, const Bytes& codes) {
  return bit_cast<Bytes>(_mm512_permutexvar_epi8(bits(codes), table));
}

#include "matmul-inl.h"

}  // namespace avx512vbmi_matmul

const MatmulKernels matmul_avx512vbmi = avx512vbmi_matmul::kernels_on<NoUnit>(0);
#if defined(SPARSE_BITNET_AMX)
const MatmulKernels matmul_amx_int8 = avx512vbmi_matmul::kernels_on<AmxUnit>(12);
#endif

}  // namespace sparse_bitnet

#endif
