// SPDX-License-Identifier: Apache-2.0
#include "packed_rows.h"

#include <cstdint>
#include <cstring>

#include "checksum.h"
#include "isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sparse_bitnet {
namespace {

using packed::divide_up;
using packed::Pattern;

constexpr char bad_i2[] = "a two-bit field holds 3, which stands for no code";
constexpr char bad_b3[] = "a byte stands for no five codes";
constexpr char bad_signs[] = "there are sign bits without a non-zero";
constexpr char bad_padding[] = "the padding of a row is not zero codes";
constexpr char bad_codes[] = "there are codes other than -1, 0 and 1";
constexpr char bad_group[] = "a group has more non-zeros than the pattern allows";

constexpr std::uint64_t ones = 0x0101010101010101u;

std::uint64_t load_word(const std::uint8_t* from) {
  std::uint64_t word;
  std::memcpy(&word, from, 8);
  return word;
}

int count_bits(std::uint64_t word) {
  word -= word >> 1 & 0x5555555555555555u;
  word = (word & 0x3333333333333333u) + (word >> 2 & 0x3333333333333333u);
  word = (word + (word >> 4)) & 0x0f0f0f0f0f0f0f0fu;
  return int(word * ones >> 56);
}

struct ByteTables {
  std::uint64_t spread[256];  // bit i of the index in byte i
  std::uint8_t is_b3[256];    // whether the byte stands for five codes

  constexpr ByteTables() : spread(), is_b3() {
    for (int b = 0; b < 256; ++b) {
      for (int i = 0; i < 8; ++i) spread[b] |= std::uint64_t(b >> i & 1) << (8 * i);
    }
    for (int value = 0; value < 243; ++value) is_b3[(256 * value + 242) / 243] = 1;
  }
};

constexpr ByteTables tables;

// Eight digits from the bits of eight weights.
std::uint64_t digits_of(std::uint64_t nonzero, std::uint64_t negative) {
  return ones + tables.spread[nonzero] - 2 * tables.spread[negative];
}

// 64 digits as bitmaps of the non-zeros and of the negatives.
struct Bitmaps {
  std::uint64_t nonzero, negative;
};

#if defined(__x86_64__)

Bitmaps bitmaps_of(const std::uint8_t* digits) {
  Bitmaps bits = {0, 0};
  const __m128i one = _mm_set1_epi8(1), zero = _mm_setzero_si128();
  for (int i = 0; i < 4; ++i) {
    const __m128i d = _mm_loadu_si128(reinterpret_cast<const __m128i*>(digits + 16 * i));
    const unsigned zeros = unsigned(_mm_movemask_epi8(_mm_cmpeq_epi8(d, one)));
    const unsigned negatives = unsigned(_mm_movemask_epi8(_mm_cmpeq_epi8(d, zero)));
    bits.nonzero |= std::uint64_t(zeros ^ 0xffffu) << (16 * i);
    bits.negative |= std::uint64_t(negatives) << (16 * i);
  }
  return bits;
}

#else

// The low bit of each of eight bytes as eight bits.
std::uint64_t low_bits(std::uint64_t bytes) {
  return (bytes & ones) * 0x0102040810204080u >> 56;
}

Bitmaps bitmaps_of(const std::uint8_t* digits) {
  Bitmaps bits = {0, 0};
  for (int i = 0; i < 8; ++i) {
    const std::uint64_t word = load_word(digits + 8 * i);
    bits.nonzero |= low_bits(~word) << (8 * i);
    bits.negative |= low_bits(~word & ~(word >> 1)) << (8 * i);
  }
  return bits;
}

#endif

// Bits of `value`, from bit 0 on, to the set bits of `mask`, and back.
std::uint64_t spread_by_bit(std::uint64_t value, std::uint64_t mask) {
  std::uint64_t result = 0;
  for (; mask != 0; mask &= mask - 1, value >>= 1) {
    if (value & 1) result |= mask & (0 - mask);
  }
  return result;
}

std::uint64_t gather_by_bit(std::uint64_t value, std::uint64_t mask) {
  std::uint64_t result = 0;
  for (int i = 0; mask != 0; mask &= mask - 1, ++i) {
    if (value & mask & (0 - mask)) result |= std::uint64_t(1) << i;
  }
  return result;
}

#if defined(__x86_64__)

__attribute__((target("bmi2"))) std::uint64_t spread_bmi2(std::uint64_t value, std::uint64_t mask) {
  return _pdep_u64(value, mask);
}

__attribute__((target("bmi2"))) std::uint64_t gather_bmi2(std::uint64_t value, std::uint64_t mask) {
  return _pext_u64(value, mask);
}

#endif

using BitFunction = std::uint64_t (*)(std::uint64_t, std::uint64_t);

// Bits of the weights of a chunk of which a row has `left`, counted from the chunk's start.
std::uint64_t existing(std::int64_t left) {
  return left >= 64 ? ~std::uint64_t(0) : (std::uint64_t(1) << left) - 1;
}

// The formats in blocks, byte j of which holds digits a plane apart.
struct I2 {
  static constexpr int planes = 4, block_bytes = packed::i2_block_bytes;
  static constexpr auto plane_bytes = packed::i2_plane_bytes;
  static constexpr const char* bad = bad_i2;

  static void split(const std::uint8_t* block, std::int64_t plane, std::uint8_t* digits) {
    for (int p = 0; p < 4; ++p) {
      for (std::int64_t j = 0; j < plane; ++j) digits[p * plane + j] = block[j] >> (2 * p) & 3;
    }
  }
  static void join(const std::uint8_t* digits, std::int64_t plane, std::uint8_t* block) {
    for (std::int64_t j = 0; j < plane; ++j) {
      block[j] = std::uint8_t(digits[j] | digits[plane + j] << 2 | digits[2 * plane + j] << 4 |
                              digits[3 * plane + j] << 6);
    }
  }
  static bool is_valid(const std::uint8_t* bytes, std::int64_t count) {
    std::uint8_t threes = 0;
    for (std::int64_t i = 0; i < count; ++i) threes |= bytes[i] & bytes[i] >> 1 & 0x55;
    return threes == 0;
  }
};

struct B3 {
  static constexpr int planes = 5, block_bytes = packed::b3_block_bytes;
  static constexpr auto plane_bytes = packed::b3_plane_bytes;
  static constexpr const char* bad = bad_b3;

  static void split(const std::uint8_t* block, std::int64_t plane, std::uint8_t* digits) {
    std::uint8_t fraction[block_bytes];
    std::memcpy(fraction, block, std::size_t(plane));
    for (int p = 0; p < 5; ++p) {
      for (std::int64_t j = 0; j < plane; ++j) {
        const std::uint16_t tripled = std::uint16_t(3 * fraction[j]);
        digits[p * plane + j] = std::uint8_t(tripled >> 8);
        fraction[j] = std::uint8_t(tripled);
      }
    }
  }
  static void join(const std::uint8_t* digits, std::int64_t plane, std::uint8_t* block) {
    for (std::int64_t j = 0; j < plane; ++j) {
      const std::uint16_t value =
          std::uint16_t(81 * digits[j] + 27 * digits[plane + j] + 9 * digits[2 * plane + j] +
                        3 * digits[3 * plane + j] + digits[4 * plane + j]);
      // ceil(256 v / 243), without leaving 16 bits.
      block[j] = std::uint8_t(value + std::uint16_t(13 * value + 242) / 243);
    }
  }
  static bool is_valid(const std::uint8_t* bytes, std::int64_t count) {
    std::uint8_t valid = 1;
    for (std::int64_t i = 0; i < count; ++i) valid &= tables.is_b3[bytes[i]];
    return valid != 0;
  }
};

bool are_zero_codes(const std::uint8_t* digits, std::int64_t begin, std::int64_t end) {
  std::uint8_t difference = 0;
  for (std::int64_t i = begin; i < end; ++i) difference |= digits[i] ^ 1;
  return difference == 0;
}

// All whole blocks, then a shorter one, which may be empty.
template <class Format>
const char* decode_blocks(const std::uint8_t* row, std::int64_t columns, std::uint8_t* digits) {
  constexpr int weights = Format::planes * Format::block_bytes;
  const std::int64_t blocks = columns / weights, tail = columns % weights;
  const std::int64_t plane = Format::plane_bytes(tail);
  std::uint8_t last[weights];
  Format::split(row + blocks * Format::block_bytes, plane, last);
  if (digits != nullptr) {
    for (std::int64_t i = 0; i < blocks; ++i) {
      Format::split(row + i * Format::block_bytes, Format::block_bytes, digits + i * weights);
    }
    std::memcpy(digits + blocks * weights, last, std::size_t(Format::planes * plane));
  }
  if (!Format::is_valid(row, blocks * Format::block_bytes + plane)) return Format::bad;
  return are_zero_codes(last, tail, Format::planes * plane) ? nullptr : bad_padding;
}

template <class Format>
void encode_blocks(const std::uint8_t* digits, std::int64_t columns, std::uint8_t* row) {
  constexpr int weights = Format::planes * Format::block_bytes;
  for (; columns >= weights; columns -= weights, digits += weights, row += Format::block_bytes) {
    Format::join(digits, Format::block_bytes, row);
  }
  Format::join(digits, Format::plane_bytes(columns), row);
}

template <BitFunction spread_bits>
void decode_nm_bitmap(Pattern pattern, const std::uint8_t* row, std::int64_t columns,
                      std::uint8_t* digits) {
  const std::int64_t sign_bytes = packed::nm_bitmap_sign_bytes(pattern);
  for (std::int64_t first = 0; first < columns; first += 64, row += sign_bytes + 8) {
    std::uint64_t signs = 0;
    std::memcpy(&signs, row, std::size_t(sign_bytes));
    const std::uint64_t nonzero = load_word(row + sign_bytes);
    const std::uint64_t negative = spread_bits(signs, nonzero);
    for (int i = 0; i < 64; i += 8) {
      const std::uint64_t eight = digits_of(nonzero >> i & 255, negative >> i & 255);
      std::memcpy(digits + first + i, &eight, 8);
    }
  }
}

template <BitFunction gather_bits>
void encode_nm_bitmap(Pattern pattern, const std::uint8_t* digits, std::int64_t columns,
                      std::uint8_t* row) {
  const std::int64_t sign_bytes = packed::nm_bitmap_sign_bytes(pattern);
  for (std::int64_t first = 0; first < columns; first += 64, row += sign_bytes + 8) {
    const Bitmaps bits = bitmaps_of(digits + first);
    const std::uint64_t signs = gather_bits(bits.negative, bits.nonzero);
    std::memcpy(row, &signs, std::size_t(sign_bytes));
    std::memcpy(row + sign_bytes, &bits.nonzero, 8);
  }
}

#if defined(__x86_64__)

__attribute__((target("avx512bw,bmi2"))) void decode_nm_bitmap_avx512(Pattern pattern,
                                                                      const std::uint8_t* row,
                                                                      std::int64_t columns,
                                                                      std::uint8_t* digits) {
  const std::int64_t sign_bytes = packed::nm_bitmap_sign_bytes(pattern);
  const __m512i one = _mm512_set1_epi8(1), two = _mm512_set1_epi8(2);
  for (std::int64_t first = 0; first < columns; first += 64, row += sign_bytes + 8) {
    // Sign bytes come first, so eight bytes of them are there; pdep takes the lowest bits it needs.
    std::uint64_t signs, nonzero;
    __builtin_memcpy(&signs, row, 8);
    __builtin_memcpy(&nonzero, row + sign_bytes, 8);
    const __m512i absolute = _mm512_mask_mov_epi8(one, nonzero, two);
    const __m512i negative = _mm512_setzero_si512();
    _mm512_storeu_si512(digits + first, _mm512_mask_mov_epi8(absolute, _pdep_u64(signs, nonzero),
                                                             negative));
  }
}

#endif

}  // namespace

const LoadingKernels loading_generic = {crc32_by_table, decode_nm_bitmap<spread_by_bit>,
                                        encode_nm_bitmap<gather_by_bit>};
#if defined(__x86_64__)
const LoadingKernels loading_avx2 = {crc32_by_folding, decode_nm_bitmap<spread_bmi2>,
                                     encode_nm_bitmap<gather_bmi2>};
const LoadingKernels loading_avx512 = {crc32_by_folding, decode_nm_bitmap_avx512,
                                       encode_nm_bitmap<gather_bmi2>};
#endif

const char* decode_i2(const std::uint8_t* row, std::int64_t columns, std::uint8_t* digits) {
  return decode_blocks<I2>(row, columns, digits);
}

const char* decode_b3(const std::uint8_t* row, std::int64_t columns, std::uint8_t* digits) {
  return decode_blocks<B3>(row, columns, digits);
}

void encode_i2(const std::uint8_t* digits, std::int64_t columns, std::uint8_t* row) {
  encode_blocks<I2>(digits, columns, row);
}

void encode_b3(const std::uint8_t* digits, std::int64_t columns, std::uint8_t* row) {
  encode_blocks<B3>(digits, columns, row);
}

const char* decode_codes(const std::uint8_t* row, std::int64_t columns, std::uint8_t* digits) {
  std::uint8_t largest = 0;
  for (std::int64_t i = 0; i < columns; ++i) {
    digits[i] = std::uint8_t(row[i] + 1);
    largest = digits[i] > largest ? digits[i] : largest;
  }
  return largest > 2 ? bad_codes : nullptr;
}

const char* check_nm_bitmap(const GroupLimit& limit, const std::uint8_t* row,
                            std::int64_t columns) {
  const std::int64_t sign_bytes = packed::nm_bitmap_sign_bytes(limit.pattern());
  for (std::int64_t first = 0; first < columns; first += 64, row += sign_bytes + 8) {
    std::uint64_t signs = 0;
    std::memcpy(&signs, row, std::size_t(sign_bytes));
    const std::uint64_t nonzero = load_word(row + sign_bytes);
    if (limit.is_broken(nonzero)) return bad_group;
    if (nonzero & ~existing(columns - first)) return bad_padding;
    const int count = count_bits(nonzero);
    if (count < 64 && signs >> count != 0) return bad_signs;
  }
  return nullptr;
}

GroupLimit::GroupLimit(Pattern pattern) : pattern_(packed::coded(pattern)), overfull_() {
  if (8 % pattern_.m != 0) return;
  for (int b = 0; b < 256; ++b) {
    for (int i = 0; i < 8; i += pattern_.m) {
      overfull_[b] |= count_bits(std::uint64_t(b) >> i & ((1u << pattern_.m) - 1)) > pattern_.n;
    }
  }
}

bool GroupLimit::is_broken(std::uint64_t bitmap) const {
  if (pattern_.m == 1) return false;
  std::uint8_t broken = 0;
  if (8 % pattern_.m == 0) {
    for (int i = 0; i < 64; i += 8) broken |= overfull_[bitmap >> i & 255];
  } else {
    const std::uint64_t group = (std::uint64_t(1) << pattern_.m) - 1;
    for (int i = 0; i < 64; i += pattern_.m) {
      broken |= count_bits(bitmap >> i & group) > pattern_.n;
    }
  }
  return broken != 0;
}

const char* check_groups(const GroupLimit& limit, const std::uint8_t* digits,
                         std::int64_t columns) {
  const Pattern pattern = limit.pattern();
  if (pattern.m == 1) return nullptr;
  if (64 % pattern.m == 0) {
    for (std::int64_t first = 0; first < columns; first += 64) {
      const std::uint64_t nonzero = bitmaps_of(digits + first).nonzero;
      if (limit.is_broken(nonzero & existing(columns - first))) return bad_group;
    }
    return nullptr;
  }
  for (std::int64_t first = 0; first < columns; first += pattern.m) {
    int nonzeros = 0;
    for (int i = 0; i < pattern.m; ++i) nonzeros += digits[first + i] != 1;
    if (nonzeros > pattern.n) return bad_group;
  }
  return nullptr;
}

}  // namespace sparse_bitnet
