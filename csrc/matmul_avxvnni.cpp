// SPDX-License-Identifier: Apache-2.0
// AVX-VNNI: vpdpbusd of 256 bits multiplies unsigned codes with signed activations, four a lane.

#include "matmul_kernels.h"
#include "platform.h"

#if defined(SPARSE_BITNET_AVX_VNNI)

#include <immintrin.h>

namespace sparse_bitnet {
namespace avxvnni_matmul {

#define TARGET __attribute__((target("avx2,avxvnni,bmi,bmi2,fma,f16c")))
#define VECTOR_BYTES 32
#include "matmul_vectors-inl.h"
#include "matmul_avx2-inl.h"

constexpr bool takes_any_bytes = true;
INLINE Sums dot_codes(const Sums& sums, const Bytes& codes, const Bytes& x) {
  return bit_cast<Sums>(_mm256_dpbusd_avx_epi32(bit_cast<__m256i>(sums), bits(codes), bits(x)));
}

#include "matmul-inl.h"

}  // namespace avxvnni_matmul

const MatmulKernels matmul_avxvnni = avxvnni_matmul::kernels_on<NoUnit>(0);

}  // namespace sparse_bitnet

#endif
