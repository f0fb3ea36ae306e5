// SPDX-License-Identifier: Apache-2.0
// Base-3 weights as they are multiplied: 5 bits for three weights, never in a file. --weight-format calls them b3; the b3
// of files (packed_format.h) is another layout. The products look up sums of three activations, for all rows of a vector at
// once (matmul_sums-inl.h).
//
// Rows lie in strips of 64, whose bytes j are 64 neighbours, the last strip filled up with rows of any codes. Columns are
// cut into segments of 24; a row without group scales is filled up with zeros to whole ones. Each group of 64, 128 or 256
// begins a segment, and its last one has the 16 or 8 columns that are left.
//
// Three weights are a code, w0 + 3 w1 + 9 w2, as an index of 4 bits, its magnitude, and a sign. A segment has eight codes
// in four bytes of two indices, the first one's low, and a byte of signs. Code i of the first four holds the weights i, i + 4
// and i + 8 of the segment, so that four codes side by side are words of four columns; the last four hold those that lie
// 12 columns further. A segment of 16 columns has six codes in four bytes; the last two hold weights 12 and 14, 13 and 15.
// One of 8 columns has three codes in two bytes: code i holds i and i + 4, the first also 3 and the second also 7. The high
// bits of the last byte are their signs, over a set bit that keeps the byte from being zero.

#pragma once

#include <cstdint>
#include <cstring>

namespace sparse_bitnet::b3_strips {

constexpr int rows = 64, segment_columns = 24;

// Columns that are cut by themselves: a group, or without groups a segment.
constexpr std::int64_t part_columns(std::int64_t group) { return group ? group : segment_columns; }
// The codes of a segment with so many columns, and the columns of one with so many codes.
constexpr int codes_of(std::int64_t columns) { return int(columns + 2) / 3; }
constexpr int columns_of(int codes) { return 3 * codes / 8 * 8; }
constexpr int segment_bytes(int codes) { return codes == 3 ? 2 : codes == 0 ? 0 : codes / 2 + 1; }
constexpr std::int64_t part_codes(std::int64_t part) {
  return part / segment_columns * 8 + codes_of(part % segment_columns);
}
constexpr std::int64_t part_bytes(std::int64_t part) {
  return part / segment_columns * segment_bytes(8) + segment_bytes(codes_of(part % segment_columns));
}
constexpr int sign_bit(int codes, int code) {
  return codes == 3 ? (code == 0 ? 5 : code == 1 ? 7 : 6) : code % 2 * 4 + code / 2;
}

// Where a column of a segment lies.
struct Place {
  int code, digit;
};
constexpr Place place_of(int codes, int column) {
  if (codes == 3) return column % 4 == 3 ? Place{column / 4, 2} : Place{column % 4, column / 4};
  if (codes == 6 && column >= 12) return {4 + column % 2, column / 14};
  return {column / 12 * 4 + column % 4, column % 12 / 4};
}

// The weight at a column of a row.
constexpr int weight_at(const std::uint8_t* row, std::int64_t group, std::int64_t column) {
  const std::int64_t part = part_columns(group), in_part = column % part, segment = in_part / segment_columns;
  const int codes = segment < part / segment_columns ? 8 : codes_of(part % segment_columns);
  const Place place = place_of(codes, int(in_part % segment_columns));
  row += (column / part * part_bytes(part) + segment * segment_bytes(8)) * rows;
  const int index = row[place.code / 2 * rows] >> place.code % 2 * 4 & 15;
  const bool is_negative = row[(segment_bytes(codes) - 1) * rows] >> sign_bit(codes, place.code) & 1;
  constexpr int factors[] = {1, 3, 9};
  return (13 + (is_negative ? -index : index)) / factors[place.digit] % 3 - 1;
}

// The codes are bytes of a word: those of a short segment, too, of which the others are zero.
template <int CODES>
inline void encode_segment(const std::uint8_t* digits, std::uint8_t* row) {
  constexpr std::uint64_t ones = 0x0101010101010101u, factors[] = {1, 3, 9};
  std::uint8_t ordered[segment_columns];
  if (CODES < 8) std::memset(ordered, 1, sizeof ordered);
  for (int c = 0; c < columns_of(CODES) && CODES < 8; ++c) {
    const Place place = place_of(CODES, c);
    ordered[place.code / 4 * 12 + place.digit * 4 + place.code % 4] = digits[c];
  }
  if (CODES < 8) digits = ordered;
  std::uint64_t codes = 0;
  for (int p = 0; p < 3; ++p) {
    std::uint32_t first, last;
    std::memcpy(&first, digits + 4 * p, 4);
    std::memcpy(&last, digits + 12 + 4 * p, 4);
    codes += factors[p] * (first | std::uint64_t(last) << 32);
  }
  const std::uint64_t above = (codes | 128 * ones) - 13 * ones, signs = ~above >> 7 & ones;
  const std::uint64_t low = above & 127 * ones, negative = 255 * signs;
  const std::uint64_t index = (low & ~negative) | ((128 * ones - low) & negative), pairs = index | index >> 4;
  for (int j = 0; j < CODES / 2; ++j) row[j * rows] = std::uint8_t(pairs >> 16 * j);
  if (CODES == 3) {
    row[rows] = std::uint8_t(index >> 16 | 16 | (signs & 1) << 5 | (signs >> 8 & 1) << 7 | (signs >> 16) << 6);
  } else {
    row[CODES / 2 * rows] = std::uint8_t(signs * 0x0110022004400880u >> 56);  // to the places of sign_bit
  }
}

// Writes a row from its weights plus one, behind which lie ones.
inline void encode_row(const std::uint8_t* digits, std::int64_t columns, std::int64_t group, std::uint8_t* row) {
  const std::int64_t part = part_columns(group), left = part % segment_columns;
  for (std::int64_t c = 0; c < columns; c += left, row += segment_bytes(codes_of(left)) * rows) {
    for (std::int64_t s = part / segment_columns; s > 0; --s, c += segment_columns, row += segment_bytes(8) * rows) {
      encode_segment<8>(digits + c, row);
    }
    if (left) left == 8 ? encode_segment<3>(digits + c, row) : encode_segment<6>(digits + c, row);
  }
}

struct Tables {
  // By index: the three weights, times 1, 4 and 16. With 21 added they are one too high, in fields of two bits.
  alignas(64) std::uint8_t fields[64];
  // The bit of the sign of a first code, and of the fifth: those of the next three, and of the last three, are above.
  alignas(64) std::uint8_t bits[64];

  constexpr Tables() : fields(), bits() {
    for (int i = 0; i < 14; ++i) fields[i] = std::uint8_t((13 + i) % 3 + (13 + i) / 3 % 3 * 4 + (13 + i) / 9 * 16 - 21);
    for (int i = 0; i < 64; ++i) bits[i] = i / 16 % 2 ? 4 : 1;
  }
};
inline constexpr Tables tables;

}  // namespace sparse_bitnet::b3_strips
