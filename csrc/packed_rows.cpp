// SPDX-License-Identifier: Apache-2.0
#include "packed_rows.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sparse_bitnet {
namespace {

using packed::Pattern;

constexpr char bad_padding[] = "the padding of a row is not zero codes";
constexpr char bad_group[] = "a group has more non-zeros than the pattern allows";

constexpr std::uint64_t ones = 0x0101010101010101u;

int count_bits(std::uint64_t word) {
  word -= word >> 1 & 0x5555555555555555u;
  word = (word & 0x3333333333333333u) + (word >> 2 & 0x3333333333333333u);
  word = (word + (word >> 4)) & 0x0f0f0f0f0f0f0f0fu;
  return int(word * ones >> 56);
}

struct ByteTables {
  std::uint8_t is_b3[256];  // whether the byte stands for five codes

  constexpr ByteTables() : is_b3() {
    for (int value = 0; value < 243; ++value) is_b3[(256 * value + 242) / 243] = 1;
  }
};

constexpr ByteTables tables;

// 64 digits as a bitmap of the non-zeros.
#if defined(__x86_64__)

std::uint64_t nonzeros_of(const std::uint8_t* digits) {
  std::uint64_t bits = 0;
  const __m128i one = _mm_set1_epi8(1);
  for (int i = 0; i < 4; ++i) {
    const __m128i d = _mm_loadu_si128(reinterpret_cast<const __m128i*>(digits + 16 * i));
    const unsigned zeros = unsigned(_mm_movemask_epi8(_mm_cmpeq_epi8(d, one)));
    bits |= std::uint64_t(zeros ^ 0xffffu) << (16 * i);
  }
  return bits;
}

#else

std::uint64_t nonzeros_of(const std::uint8_t* digits) {
  std::uint64_t bits = 0;
  for (int i = 0; i < 8; ++i) {
    std::uint64_t word;
    std::memcpy(&word, digits + 8 * i, 8);
    // The low bit of each of eight bytes as eight bits.
    bits |= ((~word & ones) * 0x0102040810204080u >> 56) << (8 * i);
  }
  return bits;
}

#endif

// Bits of the weights of a chunk of which a row has `left`, counted from the chunk's start.
std::uint64_t existing(std::int64_t left) {
  return left >= 64 ? ~std::uint64_t(0) : (std::uint64_t(1) << left) - 1;
}

// The formats in blocks, byte j of which holds digits a plane apart.
struct I2 {
  static constexpr int planes = 4, block_bytes = packed::i2_block_bytes;
  static constexpr auto plane_bytes = packed::i2_plane_bytes;
  static constexpr const char* bad = "a two-bit field holds 3, which is not a code";

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
  static constexpr const char* bad = "a byte is not a code of 5 weights";

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
  static bool is_valid(const std::uint8_t* bytes, std::int64_t count) {
    std::uint8_t valid = 1;
    for (std::int64_t i = 0; i < count; ++i) valid &= tables.is_b3[bytes[i]];
    return valid != 0;
  }
};

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
  std::uint8_t padding = 0;
  for (std::int64_t i = tail; i < Format::planes * plane; ++i) padding |= last[i] ^ 1;
  return padding == 0 ? nullptr : bad_padding;
}

}  // namespace

const char* decode_i2(const std::uint8_t* row, std::int64_t columns, std::uint8_t* digits) {
  return decode_blocks<I2>(row, columns, digits);
}

const char* decode_b3(const std::uint8_t* row, std::int64_t columns, std::uint8_t* digits) {
  return decode_blocks<B3>(row, columns, digits);
}

void encode_i2(const std::uint8_t* digits, std::int64_t columns, std::uint8_t* row) {
  constexpr int weights = packed::i2_block_weights, bytes = packed::i2_block_bytes;
  for (; columns >= weights; columns -= weights, digits += weights, row += bytes) I2::join(digits, bytes, row);
  I2::join(digits, packed::i2_plane_bytes(columns), row);
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

const char* GroupLimit::check(const std::uint8_t* digits, std::int64_t columns) const {
  if (pattern_.m == 1) return nullptr;
  if (64 % pattern_.m == 0) {
    for (std::int64_t first = 0; first < columns; first += 64) {
      if (is_broken(nonzeros_of(digits + first) & existing(columns - first))) return bad_group;
    }
    return nullptr;
  }
  for (std::int64_t first = 0; first < columns; first += pattern_.m) {
    int nonzeros = 0;
    for (int i = 0; i < pattern_.m; ++i) nonzeros += digits[first + i] != 1;
    if (nonzeros > pattern_.n) return bad_group;
  }
  return nullptr;
}

}  // namespace sparse_bitnet
