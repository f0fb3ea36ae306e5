// SPDX-License-Identifier: Apache-2.0
// b3 with group scales, of 64 weights or more: a run-time layout of 5 bits for three weights, never in a file. The
// products look up sums of three activations, for all rows of a vector at once (matmul_sums-inl.h).
//
// Rows lie in strips of 64, whose bytes j are 64 neighbours, the last strip filled up with rows of any codes. Groups of
// columns follow each other. Three neighbouring columns of a group, past whose end weights are 0, are a code: w0 + 3 w1 +
// 9 w2, as an index of 4 bits, its magnitude, and a sign. Segments of eight codes take four bytes of two indices, the
// first one's low, and a byte of signs. A group's last segment has six codes in four bytes, or for groups of 128 three in
// two, of which the last one's high bits are the signs, over a set bit that keeps it from being zero.

#pragma once

#include <cstdint>

namespace sparse_bitnet::b3_strips {

constexpr int rows = 64, segment_columns = 24;

constexpr int segment_bytes(int codes) { return codes == 3 ? 2 : codes / 2 + 1; }
constexpr int last_codes(std::int64_t group) { return int(group % segment_columns + 2) / 3; }
constexpr std::int64_t group_bytes(std::int64_t group) {
  return group / segment_columns * segment_bytes(8) + segment_bytes(last_codes(group));
}
constexpr int sign_bit(int codes, int code) {
  return codes == 3 ? (code == 0 ? 5 : code == 1 ? 7 : 6) : code % 2 * 4 + code / 2;
}

// The weight at a column of a row.
constexpr int weight_at(const std::uint8_t* row, std::int64_t group, std::int64_t column) {
  const std::int64_t in_group = column % group, segment = in_group / segment_columns;
  const int code = int(in_group % segment_columns / 3), codes = segment < group / segment_columns ? 8 : last_codes(group);
  row += (column / group * group_bytes(group) + segment * segment_bytes(8)) * rows;
  const int index = row[code / 2 * rows] >> code % 2 * 4 & 15;
  const bool is_negative = row[(segment_bytes(codes) - 1) * rows] >> sign_bit(codes, code) & 1;
  constexpr int factors[] = {1, 3, 9};
  return (13 + (is_negative ? -index : index)) / factors[in_group % 3] % 3 - 1;
}

template <int CODES>
inline void encode_segment(const std::uint8_t* digits, std::uint8_t* row) {
  constexpr int count = segment_bytes(CODES);
  std::uint8_t bytes[count] = {};
  bytes[count - 1] = CODES == 3 ? 16 : 0;
  for (int i = 0; i < CODES; ++i) {
    const int code = digits[3 * i] + 3 * digits[3 * i + 1] + 9 * digits[3 * i + 2] - 13;
    bytes[i / 2] |= std::uint8_t((code < 0 ? -code : code) << i % 2 * 4);
    bytes[count - 1] |= std::uint8_t((code < 0) << sign_bit(CODES, i));
  }
  for (int j = 0; j < count; ++j) row[j * rows] = bytes[j];
}

// Writes a row from its weights plus one.
inline void encode_row(const std::uint8_t* digits, std::int64_t columns, std::int64_t group, std::uint8_t* row) {
  for (std::int64_t c = 0; c < columns; row += segment_bytes(last_codes(group)) * rows) {
    for (std::int64_t s = group / segment_columns; s > 0; --s, c += segment_columns, row += segment_bytes(8) * rows) {
      encode_segment<8>(digits + c, row);
    }
    std::uint8_t last[segment_columns];
    const std::int64_t left = group % segment_columns;
    for (int i = 0; i < segment_columns; ++i) last[i] = i < left ? digits[c + i] : 1;
    last_codes(group) == 3 ? encode_segment<3>(last, row) : encode_segment<6>(last, row);
    c += left;
  }
}

}  // namespace sparse_bitnet::b3_strips
