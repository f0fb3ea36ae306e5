// aarch64 with the dot product instructions: sdot multiplies signed bytes, four a lane. Codes up to 2
// and nibbles up to 15 are as good signed as unsigned.

#if defined(__aarch64__)

#include <cstdint>
#include <utility>

#include <arm_neon.h>

#include "matmul_kernels.h"

namespace sparse_bitnet {
namespace neon_matmul {

#if defined(__clang__)
#define TARGET __attribute__((target("dotprod")))
#else
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#define VECTOR_BYTES 16
#include "vector-inl.h"

using Bytes = Vector<std::uint8_t>;
using Sums = Vector<std::int32_t>;
using Small = Sums;
using Floats = Vector<float>;
constexpr std::int64_t small_dots = std::int64_t(1) << 32;
constexpr int nibble_dots = 1 << 30;
constexpr int int8_offset = 0;
constexpr int rows_together = 4, tokens_together = 4;
constexpr int tile_vectors = 4, tile_tokens = 4;

INLINE uint8x16_t bits(const Bytes& v) { return bit_cast<uint8x16_t>(v); }

INLINE Sums dot_codes(Sums sums, const Bytes& codes, const Bytes& x) {
  // Some compilers declare vdotq_s32 only where the whole file is compiled for it.
  __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(codes), "w"(x));
  return sums;
}
// Unsigned bytes times signed ones would take another extension: never called.
constexpr bool has_dot_bytes = false;
[[maybe_unused]] INLINE Sums dot_bytes(const Sums& sums, const Bytes&, const Bytes&) {
  return sums;
}
INLINE Sums widen(const Sums& sums, const Sums& more) { return sums + more; }

// Only tiles need them, which never hold int8 here.
INLINE Bytes to_unsigned(const Bytes& weights) { return weights ^ 0x80; }
INLINE Sums dot_int8(const Sums& sums, const Bytes& weights, const Bytes& x) {
  return dot_codes(sums, weights, x);
}

INLINE Bytes plane(const Bytes& packed_bytes, int p) { return (packed_bytes >> (2 * p)) & 3; }

// floor(3 v / 256) of a fraction v / 256; what is left of it remains. The average rounds down, and
// floor((v + floor(v / 2)) / 2) is floor(3 v / 4) for odd v too.
INLINE Bytes next_digit(Bytes& fractions) {
  const uint8x16_t v = bits(fractions);
  const uint8x16_t digit = vshrq_n_u8(vhaddq_u8(v, vshrq_n_u8(v, 1)), 6);
  fractions += fractions + fractions;
  return bit_cast<Bytes>(digit);
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

INLINE int32x4_t sum_four(const Sums* a) {
  const int32x4_t low = vpaddq_s32(bit_cast<int32x4_t>(a[0]), bit_cast<int32x4_t>(a[1]));
  const int32x4_t high = vpaddq_s32(bit_cast<int32x4_t>(a[2]), bit_cast<int32x4_t>(a[3]));
  return vpaddq_s32(low, high);
}

template <int R>
INLINE void store_sums(const Sums* by_row, std::int32_t* out) {
  static_assert(R == 4 || R == 1);
  if constexpr (R == 4) {
    vst1q_s32(out, sum_four(by_row));
  } else {
    *out = vaddvq_s32(bit_cast<int32x4_t>(by_row[0]));
  }
}

INLINE Bytes repeat4(const std::int8_t* x) {
  std::int32_t four;
  __builtin_memcpy(&four, x, 4);
  return bit_cast<Bytes>(vdupq_n_s32(four));
}
INLINE Sums tile_dot(const Sums& sums, const Bytes& weights, const Bytes& x) {
  return dot_codes(sums, weights, x);
}

INLINE void transpose_words(Bytes* square) {
  uint32x4_t a[4];
  UNROLL for (int i = 0; i < 4; ++i) a[i] = bit_cast<uint32x4_t>(square[i]);
  UNROLL for (int i = 0; i < 2; ++i) {
    const auto low = vreinterpretq_u64_u32(i == 0 ? vtrn1q_u32(a[0], a[1]) : vtrn2q_u32(a[0], a[1]));
    const auto high = vreinterpretq_u64_u32(i == 0 ? vtrn1q_u32(a[2], a[3]) : vtrn2q_u32(a[2], a[3]));
    square[i] = bit_cast<Bytes>(vtrn1q_u64(low, high));
    square[2 + i] = bit_cast<Bytes>(vtrn2q_u64(low, high));
  }
}

INLINE Bytes low_nibbles(const Bytes& v) { return v & 15; }
INLINE Bytes high_nibbles(const Bytes& v) { return v >> 4; }
INLINE Sums dot_nibbles(const Sums& sums, const Bytes& nibbles, const Bytes& x) {
  return dot_codes(sums, nibbles, x);
}

INLINE void load_halves(const std::int8_t* x, Bytes* low, Bytes* high) {
  UNROLL for (int v = 0; v < 2; ++v) {
    low[v] = load<Bytes>(x + 16 * v);
    high[v] = load<Bytes>(x + 32 + 16 * v);
  }
}

INLINE void reduce_groups(const Sums* by_row, Vector<std::int32_t, 32>* out) {
  const int32x4_t halves[2] = {sum_four(by_row), sum_four(by_row + 4)};
  __builtin_memcpy(out, halves, sizeof halves);
}

INLINE Floats multiply_add(const Floats& a, const Floats& b, const Floats& c) {
  return bit_cast<Floats>(vfmaq_f32(bit_cast<float32x4_t>(c), bit_cast<float32x4_t>(a),
                                    bit_cast<float32x4_t>(b)));
}
INLINE Floats widen_bfloat16(const std::uint8_t* from) {
  return bit_cast<Floats>(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(from)), 16));
}
INLINE float sum_lanes(const Floats& v) { return (v[0] + v[2]) + (v[1] + v[3]); }

#include "matmul_edges-inl.h"
#include "matmul_rows-inl.h"
#include "matmul_tiles-inl.h"
#include "matmul_units-inl.h"
#include "matmul_int4-inl.h"

// Rows are decoded once for tokens_together tokens, so tiles pay off where decoding is dear. Tiles of
// int8 would be unsigned.
INLINE std::int64_t tile_from(WeightFormat format) {
  switch (format) {
    case WeightFormat::i2:
      return 32;
    case WeightFormat::int8:
      return std::int64_t(1) << 62;
    case WeightFormat::nm_bitmap:
      return 8;
    default:
      return 16;
  }
}

constexpr bool has_wide_tiles = false;
[[maybe_unused]] INLINE void wide_piece(const Matrix&, std::int64_t, std::int64_t,
                                        const Activations&, MatmulScratch&) {}

#include "matmul_multiply-inl.h"
#include "matmul_table-inl.h"

}  // namespace neon_matmul

const MatmulKernels matmul_neon = {
    neon_matmul::quantize_token,
    neon_matmul::sum_groups,
    neon_matmul::multiply_on<neon_matmul::NoUnit>,
    0,
    neon_matmul::multiply_table,
};

const MatmulKernels matmul_emulated_unit = {
    neon_matmul::quantize_token,
    neon_matmul::sum_groups,
    neon_matmul::multiply_on<neon_matmul::EmulatedUnit>,
    2,
    neon_matmul::multiply_table,
};

}  // namespace sparse_bitnet

#endif
