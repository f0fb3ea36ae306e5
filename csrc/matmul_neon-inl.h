// SPDX-License-Identifier: Apache-2.0
// 128 bits of aarch64 with dot products, for matmul_neon.cpp and matmul_i8mm.cpp. Included like
// matmul_vectors-inl.h, which comes first.

constexpr int tokens_together = 4;
constexpr int strip_tile_from = 24, strips_together = 1;

#define FUSED(a, b, c) Vector<float>(vfmaq_f32(c, a, b))
INLINE uint8x16_t bits(const Bytes& v) { return bit_cast<uint8x16_t>(v); }

// As many float16 as a vector has lanes.
INLINE Floats widen_halves(const std::uint16_t* from) {
  return bit_cast<Floats>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))));
}

constexpr bool takes_any_bytes = false;
INLINE Sums dot_codes(Sums sums, const Bytes& codes, const Bytes& x) {
  // Some compilers declare vdotq_s32 only where the whole file is compiled for it.
  __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(codes), "w"(x));
  return sums;
}

// `number` is a constant where this is inlined.
INLINE Sums dot_codes(Sums sums, const Bytes& codes, const Fours& x) {
  switch (x.number) {
    case 0: __asm__("sdot %0.4s, %1.16b, %2.4b[0]" : "+w"(sums) : "w"(codes), "w"(x.sixteen)); break;
    case 1: __asm__("sdot %0.4s, %1.16b, %2.4b[1]" : "+w"(sums) : "w"(codes), "w"(x.sixteen)); break;
    case 2: __asm__("sdot %0.4s, %1.16b, %2.4b[2]" : "+w"(sums) : "w"(codes), "w"(x.sixteen)); break;
    default: __asm__("sdot %0.4s, %1.16b, %2.4b[3]" : "+w"(sums) : "w"(codes), "w"(x.sixteen));
  }
  return sums;
}

using LookupTable = uint8x16x4_t;
INLINE LookupTable lookup_table(const std::uint8_t* entries) { return vld1q_u8_x4(entries); }
template <int BITS>
INLINE Bytes look_up(const LookupTable& table, const Bytes& codes) {
  if (BITS == 4) return bit_cast<Bytes>(vqtbl1q_u8(table.val[0], bits(codes)));
  if (BITS == 5) return bit_cast<Bytes>(vqtbl2q_u8({{table.val[0], table.val[1]}}, bits(codes & 31)));
  return bit_cast<Bytes>(vqtbl4q_u8(table, bits(codes & 63)));
}
