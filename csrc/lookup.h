// SPDX-License-Identifier: Apache-2.0
// The run-time layout `lookup` of ternary weights: a code is the index of some weights in a table of 64
// bytes, which one instruction looks up for a whole vector (vpermb, tbl). Fewer bits a weight than i2, for
// no more work; never in a file.
//
// Rows lie in strips, so that vectors of 64 bytes hold the low bits of some rows and, above them, the codes
// of the others (`places` below). A block of a strip is 64 codes of each row. By the pattern of the weights:
//
//   one zero in four, and other patterns n:4 of which every group has exactly n non-zeros: a code of 5 bits
//     is columns 4j to 4j + 3 of a block of 256, as a state: 1.25 bits a weight, eight rows in five vectors.
//   at most two of four weights left (2:4, 1:4, 2:8): the same with 33 states in 6 bits: 1.5 bits a weight,
//     four rows in three vectors.
//   all others: a code of 5 bits is columns j, j + 64 and j + 128 of a block of 192 in base 3: 1.67 bits.
//
// With group scales, of 64 weights or more, all are the last one, in strips of sixteen rows as i2 (matmul.h): byte
// 4 i + j of a vector is row i and a column c + j, c a multiple of 4. The eight rows above become eight vectors
// of codes, numbered along the blocks. Of three groups each vector v holds the columns 4v to 4v + 3, the first
// group's lowest. Each of up to two last groups has blocks of its own, where v holds the columns 12v to 12v + 11.
//
// Padding columns hold -1, which is 0 after adding 1, so that any activation is allowed there; if every
// code is a state, they hold any weights and the activations there are zero.

#pragma once

#include <cstdint>

#include "packed_format.h"

namespace sparse_bitnet::lookup {

constexpr int block_codes = 64;
constexpr int table_size = 64;

// Bits [from, from + width) of a byte of a vector, which are bits `to` and up of a code; from >= to. The next field of a
// code is of the bits above.
struct Field {
  int vector, from, width, to;
};
struct Places {
  int count;
  Field fields[3];
};

// Where the code of each row of a strip lies, for codes of 6 and of 5 bits.
inline constexpr Places places_of_six[] = {
    {1, {{0, 0, 6, 0}}}, {1, {{1, 0, 6, 0}}}, {1, {{2, 0, 6, 0}}}, {3, {{2, 6, 2, 0}, {1, 6, 2, 2}, {0, 6, 2, 4}}},
};
inline constexpr Places places_of_five[] = {
    {1, {{0, 0, 5, 0}}},
    {1, {{1, 0, 5, 0}}},
    {1, {{2, 0, 5, 0}}},
    {1, {{3, 0, 5, 0}}},
    {1, {{4, 0, 5, 0}}},
    {2, {{0, 5, 3, 0}, {3, 6, 2, 3}}},
    {2, {{1, 5, 3, 0}, {4, 6, 2, 3}}},
    {3, {{2, 5, 3, 0}, {3, 5, 1, 3}, {4, 5, 1, 4}}},
};

struct Shape {
  int weights;  // of a code
  int bits;
  constexpr int rows() const { return bits == 6 ? 4 : 8; }  // of a strip
  constexpr const Places& places(int row) const { return bits == 6 ? places_of_six[row] : places_of_five[row]; }
  constexpr int vectors() const { return rows() * bits / 8; }
  constexpr int block_columns() const { return block_codes * weights; }
  // Weights of a code are neighbours, and meet activations in the order of Activations::quads.
  constexpr bool neighbours() const { return weights == 4; }
  constexpr std::int64_t blocks(std::int64_t columns) const {
    return packed::divide_up(columns, block_columns());
  }
  constexpr std::int64_t row_bytes(std::int64_t columns) const { return blocks(columns) * block_codes * bits / 8; }
};

constexpr Shape exact_quads = {4, 5}, quads = {4, 6}, triples = {3, 5};

// States are the values that a code's weights can have (their non-zeros within bounds), counted in the order
// of the numbers that the weights plus one are in base 3, the first one lowest. Higher bits of a code do not
// matter.
struct Layout {
  Shape shape;
  std::uint8_t digits[4][table_size];  // by place and code: the weight plus one; 0 where the code is no state
  std::uint8_t code_of[81];            // by number; of one that is no state, a code that is none where there is
};

constexpr Layout make_layout(const Shape& shape, int least, int most) {
  Layout layout = {shape, {}, {}};
  const int codes = 1 << shape.bits, numbers = shape.weights == 4 ? 81 : 27;
  int state = 0;
  for (int number = 0; number < numbers; ++number) {
    int digits[4] = {}, nonzeros = 0;
    for (int i = 0, left = number; i < shape.weights; ++i, left /= 3) nonzeros += (digits[i] = left % 3) != 1;
    layout.code_of[number] = std::uint8_t(codes - 1);
    if (nonzeros < least || nonzeros > most) continue;
    for (int code = state; code < table_size; code += codes) {
      for (int i = 0; i < shape.weights; ++i) layout.digits[i][code] = std::uint8_t(digits[i]);
    }
    layout.code_of[number] = std::uint8_t(state++);
  }
  return layout;
}

// The first three by n.
alignas(64) inline constexpr Layout layouts[] = {
    make_layout(exact_quads, 1, 1), make_layout(exact_quads, 2, 2), make_layout(exact_quads, 3, 3),
    make_layout(quads, 0, 2),       make_layout(triples, 0, 3),
};

constexpr const Layout& layout_of(packed::Pattern pattern) {
  if (pattern.exact && pattern.m == 4 && pattern.n < 4) return layouts[pattern.n - 1];
  return layouts[pattern.n <= 2 && pattern.m % 4 == 0 ? 3 : 4];
}
constexpr const Shape& shape_of(packed::Pattern pattern) { return layout_of(pattern).shape; }

// Blocks of three groups of a strip with group scales, or of one that has its own.
constexpr std::int64_t strip_blocks(std::int64_t group, bool is_shared) {
  return is_shared ? group / 32 : packed::divide_up(group, 96);
}

// Where a column of a strip with group scales lies.
struct StripPlace {
  std::int64_t block;
  int vector, digit;
};
constexpr StripPlace strip_place(std::int64_t columns, std::int64_t group, std::int64_t column) {
  const std::int64_t g = column / group, words = column % group / 4;
  const bool is_shared = g / 3 * 3 + 3 <= columns / group;
  const std::int64_t vector = is_shared ? words : words / 3;
  const std::int64_t before = g / 3 * strip_blocks(group, true) + (is_shared ? 0 : g % 3 * strip_blocks(group, false));
  return {before + vector / 8, int(vector % 8), int(is_shared ? g % 3 : words % 3)};
}

// Reads, then writes, the code of a row of a strip at byte j of a block; other rows are unchanged.
constexpr int code_at(const Shape& shape, const std::uint8_t* block, int row, int j) {
  const Places& places = shape.places(row);
  int code = 0;
  for (int i = 0; i < places.count; ++i) {
    const Field& field = places.fields[i];
    code |= (block[field.vector * block_codes + j] >> field.from & ((1 << field.width) - 1)) << field.to;
  }
  return code;
}

// Of COUNT bytes from `block` on.
template <int COUNT = block_codes>
inline void set_codes(const Shape& shape, std::uint8_t* block, int row, const std::uint8_t* codes) {
  const Places& places = shape.places(row);
  for (int i = 0; i < places.count; ++i) {
    const Field field = places.fields[i];
    const int mask = ((1 << field.width) - 1) << field.from, up = field.from - field.to;
    std::uint8_t* bytes = block + field.vector * block_codes;
    for (int j = 0; j < COUNT; ++j) bytes[j] = std::uint8_t((bytes[j] & ~mask) | (codes[j] << up & mask));
  }
}

// The weight plus one at a column of a row of a strip.
constexpr int digit_at(packed::Pattern pattern, const std::uint8_t* strip, int row, std::int64_t column) {
  const Layout& layout = layout_of(pattern);
  const Shape& shape = layout.shape;
  const int at = int(column % shape.block_columns());
  const std::uint8_t* block = strip + column / shape.block_columns() * shape.vectors() * block_codes;
  const int code = shape.neighbours() ? at / shape.weights : at % block_codes;
  const int weight = shape.neighbours() ? at % shape.weights : at / block_codes;
  return layout.digits[weight][code_at(shape, block, row, code)];
}

// Writes a row of a strip from its weights plus one.
inline void encode_row(packed::Pattern pattern, const std::uint8_t* digits, std::int64_t columns, int row,
                       std::uint8_t* strip) {
  const Layout& layout = layout_of(pattern);
  const Shape& shape = layout.shape;
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
      const std::uint8_t* w = shape.neighbours() ? from + 4 * j : from + j;
      codes[j] = shape.neighbours() ? layout.code_of[w[0] + 3 * w[1] + 9 * w[2] + 27 * w[3]]
                                    : std::uint8_t(w[0] + 3 * w[block_codes] + 9 * w[2 * block_codes]);
    }
    set_codes(shape, strip, row, codes);
    strip += shape.vectors() * block_codes;
  }
}

// Writes a row of a strip with group scales, whose first bytes are at `to`, from its weights plus one.
inline void encode_strip_row(const std::uint8_t* digits, std::int64_t columns, std::int64_t group, std::uint8_t* to) {
  for (const std::uint8_t* end = digits + columns; digits < end;) {
    const bool is_shared = digits + 3 * group <= end;
    const std::int64_t step = is_shared ? 4 : 12, apart = is_shared ? group : 4, count = is_shared ? 3 * group : group;
    for (std::int64_t v = 0; v < 8 * strip_blocks(group, is_shared); ++v) {
      std::uint8_t codes[4] = {};
      for (int p = 0, factor = 1; p < 3; ++p, factor *= 3) {
        const std::int64_t first = v * step + p * apart;
        for (int j = 0; j < 4 && first < count; ++j) codes[j] += std::uint8_t(digits[first + j] * factor);
      }
      set_codes<4>(triples, to + v / 8 * triples.vectors() * block_codes, int(v % 8), codes);
    }
    to += strip_blocks(group, is_shared) * triples.vectors() * block_codes;
    digits += count;
  }
}

}  // namespace sparse_bitnet::lookup
