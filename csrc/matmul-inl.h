// SPDX-License-Identifier: Apache-2.0
// The body of matmul_avx2.cpp, matmul_avxvnni.cpp, matmul_avx512vnni.cpp, matmul_neon.cpp and the like:
// MatmulKernels for one instruction set. Included inside its namespace after matmul_vectors-inl.h and these primitives, all
// of them INLINE:
//   constexpr int tokens_together                    tokens of four rows whose sums stay in registers
//   constexpr int tile_vectors, tile_tokens          and where tiles are multiplied, see matmul_tiles-inl.h
//   constexpr std::int64_t tile_from[]               by format, from how many tokens tiles are faster; AMD: multiply_on
//   constexpr int strip_tile_from                    the same of i2 with group scales; lookup: two thirds
//   constexpr int strips_together                    strips of i2 that are multiplied at once
//   Small dot_codes(Small, Bytes codes, Bytes x)     each 32-bit lane: plus four products, of codes 0, 1, 2; and for Fours x
//   constexpr bool takes_any_bytes                   without NARROW_SUMS: dot_codes takes any unsigned bytes, else signed
//   FUSED(a, b, c)                                   a * b + c, rounded once
//   LookupTable, lookup_table, look_up               see matmul_lookup-inl.h
// with PAIRED_TILES dot_pairs, for tiles in pairs of rows, with NARROW_SUMS widen, dot_int8, int8_offset and what
// matmul_wide-inl.h asks for, and with HAS_SUMS (one file for each width of vectors) SumKernels.

#if defined(NARROW_SUMS)
INLINE Sums dot_nibbles(const Sums& sums, const Bytes& nibbles, const Bytes& x) {
  return widen(sums, dot_codes(Small{}, nibbles, x));
}
#else
INLINE Sums dot_nibbles(const Sums& sums, const Bytes& nibbles, const Bytes& x) {
  return dot_codes(sums, nibbles, x);
}
// dot_int8 exceeds the signed product by this times the sum of x.
constexpr int int8_offset = takes_any_bytes ? 128 : 0;
INLINE Sums dot_int8(const Sums& sums, const Bytes& weights, const Bytes& x) {
  return dot_codes(sums, takes_any_bytes ? to_unsigned(weights) : weights, x);
}
#endif

#if defined(__x86_64__)
constexpr const SumKernels* sum_kernels = VECTOR_BYTES == 64 ? &matmul_sums_avx512 : &matmul_sums_avx2;
#else
constexpr const SumKernels* sum_kernels = nullptr;
#endif

#include "matmul_edges-inl.h"
#include "matmul_rows-inl.h"
#include "matmul_lookup-inl.h"
#include "matmul_tiles-inl.h"
#include "matmul_groups-inl.h"
#if defined(HAS_SUMS)
#include "matmul_sums-inl.h"
#endif
#include "matmul_int4-inl.h"
#if defined(NARROW_SUMS)
#include "matmul_wide-inl.h"
#endif
#include "unit_sums-inl.h"
#include "matmul_multiply-inl.h"
#include "matmul_gated-inl.h"

template <class Unit>
constexpr MatmulKernels kernels_on(std::int64_t tiles_from) {
  decltype(MatmulKernels::multiply_gated) gated = nullptr;
  if constexpr (Unit::is_there) gated = unit_gated<Unit>;
  return {quantize_token, sum_groups, multiply_on<Unit>, finish_by_vectors, gated, tiles_from, sum_kernels};
}
