// SPDX-License-Identifier: Apache-2.0
#include "packed_rows.h"

#include <algorithm>
#include <cstring>

namespace sparse_bitnet {
namespace {

using packed::Pattern;

constexpr char bad_padding[] = "the padding of a row is not zero codes";
constexpr char bad_group[] = "a group has more non-zeros than the pattern allows";

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
  // 243 times a byte is 256 V + r. It stands for the five codes of V if r < 243.
  static bool is_valid(const std::uint8_t* bytes, std::int64_t count) {
    std::uint8_t most = 0;
    for (std::int64_t i = 0; i < count; ++i) most = std::max(most, std::uint8_t(243 * bytes[i]));
    return most < 243;
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

// check_groups for a power of two.
template <int M>
const char* check_groups_of(int n, const std::uint8_t* digits, std::int64_t columns) {
  constexpr std::uint64_t ones = 0x0101010101010101u;
  constexpr std::uint64_t firsts = M == 2 ? 0x0001000100010001u : M == 4 ? 0x0000000100000001u : 1;  // bytes of groups
  std::uint64_t overfull = 0;
  for (std::int64_t first = 0; first < columns; first += M < 8 ? 8 : M) {
    // Digits are odd where the weight is zero. The first byte of a group adds up all.
    std::uint64_t counts = 0, word;
    for (int i = 0; i < M; i += 8) {
      std::memcpy(&word, digits + first + i, sizeof word);
      counts += ~word & ones;
    }
    if (M > 4) counts += counts >> 32;
    if (M > 2) counts += counts >> 16;
    counts += counts >> 8;
    overfull |= (counts & 63 * firsts) + (127 - n) * firsts;
  }
  return overfull & 128 * firsts ? bad_group : nullptr;
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

const char* check_groups(Pattern pattern, const std::uint8_t* digits, std::int64_t columns) {
  const int n = pattern.n, m = pattern.m;
  switch (m) {
    case 1: return nullptr;
    case 2: return check_groups_of<2>(n, digits, columns);
    case 4: return check_groups_of<4>(n, digits, columns);
    case 8: return check_groups_of<8>(n, digits, columns);
    case 16: return check_groups_of<16>(n, digits, columns);
    case 32: return check_groups_of<32>(n, digits, columns);
  }
  for (std::int64_t first = 0; first < columns; first += m) {
    int nonzeros = 0;
    for (int i = 0; i < m; ++i) nonzeros += digits[first + i] != 1;
    if (nonzeros > n) return bad_group;
  }
  return nullptr;
}

}  // namespace sparse_bitnet
