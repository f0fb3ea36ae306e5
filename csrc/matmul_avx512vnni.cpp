// SPDX-License-Identifier: Apache-2.0
// AVX-512 with VNNI: vpdpbusd multiplies unsigned codes with signed activations, four a lane.

#if defined(__x86_64__)

#include "avx512.h"
#include "matmul_kernels.h"
#include "platform.h"

namespace sparse_bitnet {
namespace avx512vnni_matmul {

#define TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,bmi,bmi2,fma")))
#define HAS_SUMS
#define VECTOR_BYTES 64
#include "matmul_vectors-inl.h"
constexpr int lookup_tile_from = 8;
#include "matmul_avx512-inl.h"

// Sixteen entries at a time.
struct LookupTable {
  __m512i of[4];
};
INLINE LookupTable lookup_table(const std::uint8_t* entries) {
  LookupTable table;
  UNROLL for (int i = 0; i < 4; ++i) table.of[i] = _mm512_maskz_broadcast_i32x4(__mmask16(-1), load<__m128i>(entries + 16 * i));
  return table;
}
template <int BITS>
INLINE Bytes look_up(const LookupTable& table, const Bytes& codes) {
  constexpr int parts = 1 << (BITS - 4);
  if (parts == 1) return bit_cast<Bytes>(_mm512_maskz_shuffle_epi8(__mmask64(-1), table.of[0], bits(codes)));
  __m512i entries = _mm512_maskz_shuffle_epi8(__mmask64(-1), table.of[0], bits(codes & 15));
  UNROLL for (int i = 1; i < parts; ++i) {
    const __m512i all = bits(codes), part = bits(codes & 48), value = _mm512_set1_epi8(char(16 * i));
    const __mmask64 here = parts == 2 ? _mm512_test_epi8_mask(all, value) : _mm512_cmpeq_epi8_mask(part, value);
    entries = _mm512_mask_shuffle_epi8(entries, here, table.of[i], bits(codes & 15));
  }
  return bit_cast<Bytes>(entries);
}

#include "matmul-inl.h"

}  // namespace avx512vnni_matmul

const SumKernels matmul_sums_avx512 = {avx512vnni_matmul::sum_table_bytes, avx512vnni_matmul::sum_tables,
                                       avx512vnni_matmul::sum_strips};
const MatmulKernels matmul_avx512vnni = avx512vnni_matmul::kernels_on<NoUnit>(0);

}  // namespace sparse_bitnet

#endif
