// SPDX-License-Identifier: Apache-2.0
// The run-time layout `lookup` of ternary weights: a code is the index of some weights in a table of 64
// bytes, which one instruction looks up for a whole vector (vpermb, tbl). Fewer bits a weight than i2, for
// no more work; never in a file.
//
// Rows lie in strips, so that vectors of 64 bytes hold the low bits of some rows and, above them, the codes
// of the others. A block of a strip is 64 codes of each row:
//
//   quads, of patterns that leave at most two of four weights (2:4, 1:4, 2:8): a code of 6 bits is columns
//     4j to 4j + 3 of a block of 256, as a state: 1.5 bits a weight. Four rows in three vectors; byte j of
//     vector i holds code j of row i, and above it two bits of row 3: bits 4 and 5, 2 and 3, 0 and 1.
//   triples, of all others: a code of 5 bits is columns j, j + 64 and j + 128 of a block of 192 in base 3,
//     1.67 bits a weight. Eight rows in five vectors; byte j of vector i holds code j of row i, and above
//     it the low three bits of rows 5, 6 and 7 (vectors 0, 1, 2), bits 3 and 4 of rows 5 and 6 (the two
//     highest of vectors 3 and 4), and bit 3 and 4 of row 7 (bit 5 of vectors 3 and 4).
//
// Columns that are not there stand for -1, 0 when 1 is added, so that they meet any activations.

#pragma once

#include <cstdint>

#include "packed_format.h"

namespace sparse_bitnet::lookup {

constexpr int block_codes = 64;
constexpr int table_size = 64;

struct Shape {
  int weights;  // of a code
  int bits;
  int rows;  // of a strip
  constexpr int vectors() const { return rows * bits / 8; }
  constexpr int block_columns() const { return block_codes * weights; }
  constexpr std::int64_t blocks(std::int64_t columns) const {
    return packed::divide_up(columns, block_columns());
  }
  constexpr std::int64_t row_bytes(std::int64_t columns) const { return blocks(columns) * block_codes * bits / 8; }
};

constexpr Shape quads = {4, 6, 4}, triples = {3, 5, 8};

constexpr bool is_quads(packed::Pattern pattern) { return pattern.n <= 2 && pattern.m % 4 == 0; }
constexpr const Shape& shape_of(packed::Pattern pattern) { return is_quads(pattern) ? quads : triples; }

// For each place of a code and each code the weight plus one, and of quads the code for each number that
// the weights are in base 3, the first one lowest. Codes that are no state are the columns that are not
// there. Higher bits of a code of triples do not matter.
struct Tables {
  std::uint8_t quads[4][table_size];
  std::uint8_t triples[3][table_size];
  std::uint8_t quad_of[81];
};
constexpr std::uint8_t absent_quad = table_size - 1;

constexpr Tables make_tables() {
  Tables tables = {};
  int state = 0;
  for (int number = 0; number < 81; ++number) {
    const int digits[] = {number % 3, number / 3 % 3, number / 9 % 3, number / 27};
    int nonzeros = 0;
    for (int digit : digits) nonzeros += digit != 1;
    tables.quad_of[number] = absent_quad;
    if (nonzeros > 2) continue;
    for (int i = 0; i < 4; ++i) tables.quads[i][state] = std::uint8_t(digits[i]);
    tables.quad_of[number] = std::uint8_t(state++);
  }
  for (int code = 0; code < table_size; ++code) {
    const int number = code % 32;
    for (int i = 0, power = 1; i < 3 && number < 27; ++i, power *= 3) {
      tables.triples[i][code] = std::uint8_t(number / power % 3);
    }
  }
  return tables;
}
alignas(64) inline constexpr Tables tables = make_tables();

// The code of a row of a strip at byte j of a block of it; then what writes them, leaving other rows alone.
constexpr int code_at(const Shape& shape, const std::uint8_t* block, int row, int j) {
  const auto byte = [&](int vector) { return int(block[vector * block_codes + j]); };
  if (shape.bits == 6) {
    return row < 3 ? byte(row) & 63 : byte(0) >> 6 << 4 | byte(1) >> 6 << 2 | byte(2) >> 6;
  }
  if (row < 5) return byte(row) & 31;
  const int high = row < 7 ? byte(row - 2) >> 6 : (byte(3) >> 5 & 1) | (byte(4) >> 5 & 1) << 1;
  return byte(row - 5) >> 5 | high << 3;
}

// Of a whole block.
inline void set_codes(const Shape& shape, std::uint8_t* block, int row, const std::uint8_t* codes) {
  const auto put = [&](int vector, int mask, auto bits) {
    std::uint8_t* bytes = block + vector * block_codes;
    for (int j = 0; j < block_codes; ++j) bytes[j] = std::uint8_t((bytes[j] & ~mask) | bits(codes[j]));
  };
  const auto all = [](int code) { return code; };
  if (shape.bits == 6) {
    if (row < 3) return put(row, 63, all);
    put(0, 0xc0, [](int code) { return code >> 4 << 6; });
    put(1, 0xc0, [](int code) { return (code >> 2 & 3) << 6; });
    return put(2, 0xc0, [](int code) { return (code & 3) << 6; });
  }
  if (row < 5) return put(row, 31, all);
  put(row - 5, 0xe0, [](int code) { return (code & 7) << 5; });
  if (row < 7) return put(row - 2, 0xc0, [](int code) { return code >> 3 << 6; });
  put(3, 0x20, [](int code) { return (code >> 3 & 1) << 5; });
  put(4, 0x20, [](int code) { return code >> 4 << 5; });
}

// The weight plus one at a column of a row of a strip.
constexpr int digit_at(packed::Pattern pattern, const std::uint8_t* strip, int row, std::int64_t column) {
  const Shape& shape = shape_of(pattern);
  const int at = int(column % shape.block_columns());
  const std::uint8_t* block = strip + column / shape.block_columns() * shape.vectors() * block_codes;
  if (is_quads(pattern)) return tables.quads[at % 4][code_at(shape, block, row, at / 4)];
  return tables.triples[at / block_codes][code_at(shape, block, row, at % block_codes)];
}

// Writes a row of a strip from its weights plus one.
inline void encode_row(packed::Pattern pattern, const std::uint8_t* digits, std::int64_t columns, int row,
                       std::uint8_t* strip) {
  const Shape& shape = shape_of(pattern);
  std::uint8_t last[quads.block_columns()] = {};
  for (std::int64_t first = 0; first < columns; first += shape.block_columns()) {
    const std::uint8_t* from = digits + first;
    const std::int64_t count = columns - first;
    if (count < shape.block_columns()) {
      for (std::int64_t i = 0; i < count; ++i) last[i] = from[i];
      from = last;
    }
    std::uint8_t codes[block_codes];
    for (int j = 0; j < block_codes; ++j) {
      if (is_quads(pattern)) {
        const std::uint8_t* four = from + 4 * j;
        codes[j] = 4 * j < count ? tables.quad_of[four[0] + 3 * four[1] + 9 * four[2] + 27 * four[3]] : absent_quad;
      } else {
        codes[j] = std::uint8_t(from[j] + 3 * from[j + block_codes] + 9 * from[j + 2 * block_codes]);
      }
    }
    set_codes(shape, strip, row, codes);
    strip += shape.vectors() * block_codes;
  }
}

}  // namespace sparse_bitnet::lookup
