// SPDX-License-Identifier: Apache-2.0
// Packed ternary weights, version 1: this comment is the specification, the functions below are the
// same in code. packing/formats.py mirrors the constants; a test compares both.
//
// A layer's codes are a matrix [rows, in_features] of -1, 0 and 1 in which every group of m
// consecutive codes of a row holds at most n non-zeros (n:m; a dense matrix is 1:1 whatever its
// pattern is called). 1 <= n <= m <= 32, in_features is a multiple of m and at most 2^23, so that a
// sum of codes times int8 activations fits 32 bits. Every format is exact. Bytes are the same on every
// machine: little endian, bit 0 is the least significant one.
//
// A row takes row_bytes bytes whatever its codes. Rows follow each other without a gap, and each can be
// decoded without the others. Padding has the bits that zero codes encode to. A matrix has one encoding;
// a reader refuses anything else. The first row has no guaranteed alignment: safetensors files give none.
//
// i2: two bits a weight, for speed; knows no pattern.
//   A row is cut into blocks of 256 weights in 64 bytes; the last block may be shorter. Byte j of a
//   block holds, in bits 2p and 2p + 1, weight j + s p of the block, p = 0..3, plus one: 0, 1, 2 for
//   -1, 0, 1 (3 is invalid). s is the number of bytes of the block: 64, and in a last block of r
//   weights ceil(r / 4) rounded up to 16.
//   So one vector load, shifted and masked, gives four vectors of unsigned codes for four contiguous
//   pieces of the activations in their natural order, with vectors of 64, 32 and 16 bytes alike
//   (vpdpbusd, vpmaddubsw, udot), without a shuffle. The product of codes plus one with the
//   activations exceeds the wanted one by the sum of the activations.
//
// b3: base 3, five weights a byte, for dense matrices; knows no pattern.
//   Blocks of 320 weights in 64 bytes; byte j of a block holds weights j + s p, p = 0..4, s = 64 and
//   in a last block of r weights ceil(r / 5). With digits d_p = code + 1 and
//   V = 81 d_0 + 27 d_1 + 9 d_2 + 3 d_3 + d_4 the byte is ceil(256 V / 243): V / 243 as a fraction, so
//   that multiplying by 3 moves the next digit into bits 8 and 9. 13 of the 256 values are invalid.
//
// nm-enum: the fewest bits whatever the weights, for archives and downloads.
//   A group has S = sum over k <= n of C(m, k) 2^k states. Its number counts the admissible groups
//   before it in lexicographic order with 0 < 1 < -1, the first weight being the most significant:
//   with A(j, b) the number of states of j weights of which at most b are not zero, it is the sum over
//   the non-zero weights of A(j, b), plus A(j, b - 1) where the weight is -1; j counts the weights
//   after this one, and b is n minus the non-zeros before it.
//   g groups make a word: the sum of number_i S^i, i = 0 for the first group, in the least w bits with
//   S^g <= 2^w. g is the count with the smallest w / g among those with S^g <= 2^64, the smallest such
//   count. Words of a row follow each other bit by bit, each from its least significant bit on; a last
//   word of fewer groups takes its own, smaller w. Zero bits fill the row's last byte.
//   6:8 has 5281 states, 5 groups in 62 bits: 1.55 bits a weight. 2:4: 33, 12 in 61, 1.271. 2:8: 129,
//   9 in 64, 0.889. Dense: 3, 29 in 46, 1.586.
//
// nm-sign: the fewest bits where every group has exactly n non-zeros (n of m binary weights); no others.
//   A group takes p + n bits, p = ceil(log2(C(m, n))): from the least significant on p bits of the number
//   of its places, then a bit for each non-zero, the first one's first, set where it is negative. With the
//   non-zeros at places a_1 < ... < a_n, from 0 on, the number is the sum of C(a_i, i): it counts the sets
//   of places before it in the order of the binary numbers with those bits. Numbers of C(m, n) and more
//   are invalid. Groups of a row follow each other bit by bit, and zero bits fill the row's last byte.
//   3:4 takes 5 bits for four weights, 1.25 a weight; 2:4 the same, 6:8 1.375, dense weights (1:1) 1.
//
// Scales: value = code times scale. They are a tensor of their own beside the codes, in float32, float16
// or bfloat16 as the model came with them, and its shape says how many there are:
//   [1]                      one for the matrix (float32 only),
//   [rows, 1]                one for each row,
//   [rows, in_features / g]  one for every g consecutive weights of a row, row after row;
//                            g = 32, 64, 128 or 256 divides in_features.
// All are positive and finite, or zero where all codes of their group are. With int8 activations of scale
// x, a row of the product is
//   y = (sum over groups, ascending, in float32, of float(dot of the group) * float(scale)) * x + bias,
// each operation rounded to float32 in that order, and with one scale a matrix or a row
//   y = float(dot) * (x * scale) + bias.
// Activations that have a scale for every g columns too, x[group], give
//   y = sum over groups, ascending, in float32, of (float(dot of the group) * float(scale)) * x[group], + bias.
// Sums start from 0; dot is exact.

#pragma once

#include <cstdint>

namespace sparse_bitnet::packed {

constexpr int version = 1;
constexpr int max_group = 32;
constexpr std::int64_t max_in_features = std::int64_t(1) << 23;

constexpr int i2_block_weights = 256;
constexpr int i2_block_bytes = 64;
constexpr int i2_tail_alignment = 16;

constexpr int b3_block_weights = 320;
constexpr int b3_block_bytes = 64;

constexpr int nm_enum_word_bits = 64;

constexpr bool is_scale_group(std::int64_t group, std::int64_t in_features) {
  return (group == 32 || group == 64 || group == 128 || group == 256) && in_features % group == 0;
}

static_assert(i2_block_weights == 4 * i2_block_bytes);
static_assert(b3_block_weights == 5 * b3_block_bytes);
static_assert(i2_block_bytes % i2_tail_alignment == 0);

struct Pattern {
  int n, m;
  bool exact = false;  // groups have n non-zeros, no fewer
};

constexpr bool is_valid(Pattern pattern) {
  return 1 <= pattern.n && pattern.n <= pattern.m && pattern.m <= max_group;
}

// The pattern whose groups the formats code: 1:1 for every dense one.
constexpr Pattern coded(Pattern pattern) {
  return pattern.n == pattern.m ? Pattern{1, 1, pattern.exact} : pattern;
}

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return divide_up(a, b) * b; }

// i2

constexpr std::int64_t i2_plane_bytes(std::int64_t block_weights) {
  return round_up(divide_up(block_weights, 4), i2_tail_alignment);
}

constexpr std::int64_t i2_row_bytes(std::int64_t in_features) {
  return in_features / i2_block_weights * i2_block_bytes + i2_plane_bytes(in_features % i2_block_weights);
}

constexpr int i2_code(const std::uint8_t* row, std::int64_t in_features, std::int64_t index) {
  const std::int64_t block = index / i2_block_weights, i = index % i2_block_weights;
  const std::int64_t left = in_features - block * i2_block_weights;
  const std::int64_t plane = left < i2_block_weights ? i2_plane_bytes(left) : i2_block_bytes;
  return (row[block * i2_block_bytes + i % plane] >> (2 * (i / plane)) & 3) - 1;
}

// b3

constexpr std::int64_t b3_plane_bytes(std::int64_t block_weights) { return divide_up(block_weights, 5); }

constexpr std::int64_t b3_row_bytes(std::int64_t in_features) {
  return in_features / b3_block_weights * b3_block_bytes + b3_plane_bytes(in_features % b3_block_weights);
}

constexpr int b3_code(const std::uint8_t* row, std::int64_t in_features, std::int64_t index) {
  const std::int64_t block = index / b3_block_weights, i = index % b3_block_weights;
  const std::int64_t left = in_features - block * b3_block_weights;
  const std::int64_t plane = left < b3_block_weights ? b3_plane_bytes(left) : b3_block_bytes;
  std::uint8_t fraction = row[block * b3_block_bytes + i % plane];
  for (std::int64_t p = 0; p < i / plane; ++p) fraction = std::uint8_t(3 * fraction);
  return (3 * fraction >> 8) - 1;
}

// nm-enum

// States of `weights` weights of which at most `nonzeros` are not zero.
constexpr std::uint64_t nm_enum_states(int weights, int nonzeros) {
  std::uint64_t sum = 0, term = 1;
  for (int k = 0; k <= nonzeros && k <= weights; ++k) {
    sum += term;
    term = term * std::uint64_t(weights - k) / std::uint64_t(k + 1) * 2;
  }
  return sum;
}

// The least w with S^groups <= 2^w, or 0 where S^groups passes 2^64. S is odd, so never a power of 2.
constexpr int nm_enum_bits(Pattern pattern, int groups) {
  const Pattern p = coded(pattern);
  const std::uint64_t states = nm_enum_states(p.m, p.n);
  std::uint64_t power = 1;
  for (int i = 0; i < groups; ++i) {
    if (power > ~std::uint64_t(0) / states) return 0;
    power *= states;
  }
  int bits = 0;
  for (; power > 1; power -= power / 2) ++bits;
  return bits;
}

constexpr int nm_enum_groups_per_word(Pattern pattern) {
  int best = 1;
  for (int groups = 2; groups <= nm_enum_word_bits; ++groups) {
    const int bits = nm_enum_bits(pattern, groups);
    if (bits != 0 && bits * best < nm_enum_bits(pattern, best) * groups) best = groups;
  }
  return best;
}

constexpr std::int64_t nm_enum_row_bytes(Pattern pattern, std::int64_t in_features) {
  const std::int64_t groups = in_features / coded(pattern).m;
  const int full = nm_enum_groups_per_word(pattern);
  return divide_up(groups / full * nm_enum_bits(pattern, full) + nm_enum_bits(pattern, int(groups % full)), 8);
}

// The weights plus one of a group, by its number.
constexpr void nm_enum_digits(Pattern pattern, std::uint64_t number, std::uint8_t* digits) {
  int room = pattern.n;
  for (int place = 0; place < pattern.m; ++place) {
    const int after = pattern.m - 1 - place;
    const std::uint64_t zeros = nm_enum_states(after, room);
    digits[place] = 1;
    if (number < zeros) continue;
    number -= zeros;
    --room;
    const std::uint64_t positives = nm_enum_states(after, room);
    digits[place] = number < positives ? 2 : 0;
    if (number >= positives) number -= positives;
  }
}

// `count` bits of a row from bit `first` on.
constexpr std::uint64_t bits_at(const std::uint8_t* row, std::int64_t first, int count) {
  std::uint64_t bits = 0;
  for (int i = 0; i < count; ++i) bits |= std::uint64_t(row[(first + i) / 8] >> ((first + i) % 8) & 1) << i;
  return bits;
}

constexpr int nm_enum_code(Pattern pattern, const std::uint8_t* row, std::int64_t in_features,
                           std::int64_t index) {
  const Pattern p = coded(pattern);
  const int full = nm_enum_groups_per_word(pattern);
  const std::int64_t group = index / p.m, word = group / full;
  const std::int64_t left = in_features / p.m - word * full;
  const int bits = nm_enum_bits(pattern, left < full ? int(left) : full);
  std::uint64_t number = bits_at(row, word * nm_enum_bits(pattern, full), bits);
  const std::uint64_t states = nm_enum_states(p.m, p.n);
  for (std::int64_t i = 0; i < group % full; ++i) number /= states;
  std::uint8_t digits[max_group] = {};
  nm_enum_digits(p, number % states, digits);
  return digits[index % p.m] - 1;
}

// nm-sign

// C(weights, chosen); no more than 32 of them.
constexpr std::uint64_t nm_sign_sets(int weights, int chosen) {
  if (chosen > weights) return 0;
  std::uint64_t sets = 1;
  for (int i = 1; i <= chosen; ++i) sets = sets * std::uint64_t(weights - chosen + i) / std::uint64_t(i);
  return sets;
}

constexpr int nm_sign_place_bits(Pattern pattern) {
  const Pattern p = coded(pattern);
  int bits = 0;
  while (std::uint64_t(1) << bits < nm_sign_sets(p.m, p.n)) ++bits;
  return bits;
}

constexpr int nm_sign_group_bits(Pattern pattern) { return nm_sign_place_bits(pattern) + coded(pattern).n; }

constexpr std::int64_t nm_sign_row_bytes(Pattern pattern, std::int64_t in_features) {
  return divide_up(in_features / coded(pattern).m * nm_sign_group_bits(pattern), 8);
}

// The weights plus one of a group, by its bits. Returns whether there is a group with these.
constexpr bool nm_sign_digits(Pattern pattern, std::uint64_t group, std::uint8_t* digits) {
  const int place_bits = nm_sign_place_bits(pattern);
  std::uint64_t number = group & ((std::uint64_t(1) << place_bits) - 1);
  if (number >= nm_sign_sets(pattern.m, pattern.n)) return false;
  for (int place = pattern.m - 1, left = pattern.n; place >= 0; --place) {
    const std::uint64_t sets = nm_sign_sets(place, left);
    digits[place] = 1;
    if (left == 0 || number < sets) continue;
    number -= sets;
    --left;
    digits[place] = group >> (place_bits + left) & 1 ? 0 : 2;
  }
  return true;
}

constexpr int nm_sign_code(Pattern pattern, const std::uint8_t* row, std::int64_t index) {
  const Pattern p = coded(pattern);
  const int bits = nm_sign_group_bits(pattern);
  std::uint8_t digits[max_group] = {};
  nm_sign_digits(p, bits_at(row, index / p.m * bits, bits), digits);
  return digits[index % p.m] - 1;
}

static_assert(i2_row_bytes(2048) == 512 && i2_row_bytes(896) == 224 && i2_row_bytes(1) == 16);
static_assert(b3_row_bytes(2048) == 410 && b3_row_bytes(896) == 180 && b3_row_bytes(1) == 1);
static_assert(nm_enum_states(8, 6) == 5281 && nm_enum_states(4, 2) == 33 &&
              nm_enum_states(8, 2) == 129 && nm_enum_states(1, 1) == 3);
static_assert(nm_enum_groups_per_word({6, 8}) == 5 && nm_enum_bits({6, 8}, 5) == 62);
static_assert(nm_enum_groups_per_word({2, 4}) == 12 && nm_enum_bits({2, 4}, 12) == 61);
static_assert(nm_enum_groups_per_word({2, 8}) == 9 && nm_enum_bits({2, 8}, 9) == 64);
static_assert(nm_enum_groups_per_word({8, 8}) == 29 && nm_enum_bits({8, 8}, 29) == 46);
static_assert(nm_sign_group_bits({3, 4}) == 5 && nm_sign_group_bits({6, 8}) == 11 && nm_sign_group_bits({8, 8}) == 1);
static_assert(nm_sign_row_bytes({3, 4}, 2048) == 320 && nm_sign_group_bits({20, 32}) == 48);
static_assert(nm_enum_row_bytes({6, 8}, 2048) == 397 && nm_enum_row_bytes({6, 8}, 896) == 174);

}  // namespace sparse_bitnet::packed
