// SPDX-License-Identifier: Apache-2.0
// 128 bits of aarch64 with dot products, for matmul_neon.cpp and matmul_i8mm.cpp. Included like
// matmul_vectors-inl.h, which comes first.

constexpr int rows_together = 4, tokens_together = 4;
constexpr int group_tile_from = 8, strip_tile_from = 24, strips_together = 1;

INLINE uint8x16_t bits(const Bytes& v) { return bit_cast<uint8x16_t>(v); }

constexpr bool takes_any_bytes = false;
INLINE Sums dot_codes(Sums sums, const Bytes& codes, const Bytes& x) {
  // Some compilers declare vdotq_s32 only where the whole file is compiled for it.
  __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(codes), "w"(x));
  return sums;
}

// The average rounds down, and floor((v + floor(v / 2)) / 2) is floor(3 v / 4) for odd v too.
INLINE Bytes three_quarters(const Bytes& v) {
  return bit_cast<Bytes>(vhaddq_u8(bits(v), vshrq_n_u8(bits(v), 1)));
}

using LookupTable = uint8x16x4_t;
INLINE LookupTable lookup_table(const std::uint8_t* entries) { return vld1q_u8_x4(entries); }
INLINE Bytes look_up(const LookupTable& table, const Bytes& codes) {
  return bit_cast<Bytes>(vqtbl4q_u8(table, bits(codes & 63)));
}

// For each byte of a bitmap and each of its bits: 1 << (ones below it), or 0 where it is not set.
struct SignBits {
  std::uint8_t of[256][8];
};
constexpr SignBits make_sign_bits() {
  SignBits table = {};
  for (int byte = 0; byte < 256; ++byte) {
    for (int bit = 0, rank = 0; bit < 8; ++bit) {
      if (byte >> bit & 1) table.of[byte][bit] = std::uint8_t(1 << rank++);
    }
  }
  return table;
}
alignas(64) static constexpr SignBits sign_bits = make_sign_bits();

// signs: byte b starts with the sign of the first non-zero of byte b of the bitmap.
struct Bitmap {
  std::uint64_t nonzero;
  uint8x16_t signs;
};

// The same in all 64 bits, moved up by so many bytes.
template <int BYTES>
INLINE uint8x8_t up(uint8x8_t v) {
  return vreinterpret_u8_u64(vshl_n_u64(vreinterpret_u64_u8(v), 8 * BYTES));
}

INLINE Bitmap load_bitmap(const std::uint8_t* signs, const std::uint8_t* nonzero) {
  Bitmap bitmap;
  __builtin_memcpy(&bitmap.nonzero, nonzero, 8);
  uint8x8_t count = vcnt_u8(vcreate_u8(bitmap.nonzero));
  count = vadd_u8(count, up<1>(count));
  count = vadd_u8(count, up<2>(count));
  count = vadd_u8(count, up<4>(count));
  const uint8x8_t before = up<1>(count);
  // Two bytes from before / 8 on hold the eight signs; behind the last byte there are none.
  const uint8x8_t first = vshr_n_u8(before, 3), second = vadd_u8(first, vdup_n_u8(1));
  const uint8x16_t places = vcombine_u8(vzip1_u8(first, second), vzip2_u8(first, second));
  const uint8x16_t all_signs = vcombine_u8(vld1_u8(signs), vdup_n_u8(0));
  const uint16x8_t pairs = vreinterpretq_u16_u8(vqtbl1q_u8(all_signs, places));
  const int8x8_t down = vneg_s8(vreinterpret_s8_u8(vand_u8(before, vdup_n_u8(7))));
  const uint8x8_t of_bytes = vmovn_u16(vshlq_u16(pairs, vmovl_s8(down)));
  bitmap.signs = vcombine_u8(of_bytes, of_bytes);
  return bitmap;
}

INLINE Bytes bitmap_codes(const Bitmap& bitmap, int vector) {
  const uint8x8_t low = vld1_u8(sign_bits.of[bitmap.nonzero >> (16 * vector) & 255]);
  const uint8x8_t high = vld1_u8(sign_bits.of[bitmap.nonzero >> (16 * vector + 8) & 255]);
  const uint8x16_t places = vcombine_u8(low, high);
  const uint8x16_t sources = vcombine_u8(vdup_n_u8(std::uint8_t(2 * vector)),
                                         vdup_n_u8(std::uint8_t(2 * vector + 1)));
  const uint8x16_t minus = vtstq_u8(vqtbl1q_u8(bitmap.signs, sources), places);
  const uint8x16_t any = vtstq_u8(places, places);
  const uint8x16_t codes = vsubq_u8(vdupq_n_u8(1), any);
  return bit_cast<Bytes>(vaddq_u8(codes, vaddq_u8(minus, minus)));
}

INLINE Floats multiply_add(const Floats& a, const Floats& b, const Floats& c) {
  return bit_cast<Floats>(vfmaq_f32(bit_cast<float32x4_t>(c), bit_cast<float32x4_t>(a),
                                    bit_cast<float32x4_t>(b)));
}
