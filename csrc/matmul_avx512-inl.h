// SPDX-License-Identifier: Apache-2.0
// 512 bits of x86, for matmul_avx512vnni.cpp and matmul_avx512vbmi.cpp. Included like matmul_vectors-inl.h,
// which comes first, with lookup_tile_from, the part of tile_from that differs between them.

constexpr int tokens_together = 4;
constexpr int tile_vectors = 2, tile_tokens = 12;
// Where decoding along the rows costs little, a tile pays off late.
constexpr std::int64_t tile_from[weight_formats] = {24, 8, 64, 6, lookup_tile_from};
constexpr int strip_tile_from = 24, strips_together = 2;

#define FUSED(a, b, c) Vector<float>(_mm512_fmadd_ps(a, b, c))
INLINE __m512i bits(const Bytes& v) { return bit_cast<__m512i>(v); }

constexpr bool takes_any_bytes = true;
INLINE Sums dot_codes(const Sums& sums, const Bytes& codes, const Bytes& x) {
  return bit_cast<Sums>(_mm512_dpbusd_epi32(bit_cast<__m512i>(sums), bits(codes), bits(x)));
}

// As many float16 as a vector has lanes.
INLINE Floats widen_halves(const std::uint16_t* from) {
  return bit_cast<Floats>(_mm512_maskz_cvtph_ps(__mmask16(-1), load<__m256i>(from)));
}
