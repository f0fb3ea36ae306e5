// SPDX-License-Identifier: Apache-2.0
// 256 bits of x86, for matmul_avx2.cpp and matmul_avxvnni.cpp. Included like matmul_vectors-inl.h, which
// comes first.

#define FUSED(a, b, c) Vector<float>(_mm256_fmadd_ps(a, b, c))
INLINE __m256i bits(const Bytes& v) { return bit_cast<__m256i>(v); }

// As many float16 as a vector has lanes.
INLINE Floats widen_halves(const std::uint16_t* from) { return bit_cast<Floats>(_mm256_cvtph_ps(load<__m128i>(from))); }

// Sixteen entries at a time.
struct LookupTable {
  __m256i of[4];
};
INLINE LookupTable lookup_table(const std::uint8_t* entries) {
  LookupTable table;
  UNROLL for (int i = 0; i < 4; ++i) {
    table.of[i] = _mm256_broadcastsi128_si256(load<__m128i>(entries + 16 * i));
  }
  return table;
}
template <int BITS>
INLINE Bytes look_up(const LookupTable& table, const Bytes& codes) {
  constexpr int parts = 1 << (BITS - 4);
  if (parts == 1) return bit_cast<Bytes>(_mm256_shuffle_epi8(table.of[0], bits(codes)));
  __m256i entries = _mm256_shuffle_epi8(table.of[0], bits(codes & 15));
  UNROLL for (int i = 1; i < parts; ++i) {
    const auto here = (codes & std::uint8_t(16 * parts - 16)) == std::uint8_t(16 * i);
    entries = _mm256_blendv_epi8(entries, _mm256_shuffle_epi8(table.of[i], bits(codes & 15)), bit_cast<__m256i>(here));
  }
  return bit_cast<Bytes>(entries);
}

constexpr int tokens_together = 2;
// vpdpbusd takes as long as ten of it keep busy; sums in 16 bits are ready at once.
constexpr bool is_narrow = !std::is_same_v<Small, Sums>;
constexpr int tile_vectors = 2, tile_tokens = is_narrow ? 4 : 6;
constexpr std::int64_t tile_from[weight_formats] = {is_narrow ? 8 : 4, 4, 6, 4, 4};
constexpr int strip_tile_from = 12, strips_together = 1;
