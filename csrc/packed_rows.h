// SPDX-License-Identifier: Apache-2.0
// Rows of packed weights to digits (codes plus one, a byte each) and back: the work of loading.cpp.

#pragma once

#include <cstdint>
#include <vector>

#include "packed_format.h"

namespace sparse_bitnet {

// Digits lie in rows padded with digit 1 to the longest block, so that no encoder looks past their end.
constexpr std::int64_t digits_size(std::int64_t columns) {
  return columns + packed::b3_block_weights + packed::i2_block_weights;
}

// The decoders fill `digits` [columns] and its padding, and say why a row is damaged or return null. i2
// without digits is only checked; nobody looks at groups.
const char* decode_i2(const std::uint8_t* row, std::int64_t columns, std::uint8_t* digits);
const char* decode_b3(const std::uint8_t* row, std::int64_t columns, std::uint8_t* digits);

void encode_i2(const std::uint8_t* digits, std::int64_t columns, std::uint8_t* row);

// Why a row has groups of more than n non-zeros, or null. The pattern is coded; 7 digits behind the row must be 1.
const char* check_groups(packed::Pattern pattern, const std::uint8_t* digits, std::int64_t columns);

// nm-enum and nm-sign (packed_format.h) to digits: words to group numbers to the digits of several groups at
// once. A group of nm-sign is a number below 2^b, and words of as many as 64 bits hold are no words of their own.
class GroupDecoder {
 public:
  // Of nm-sign where pattern.exact.
  GroupDecoder(packed::Pattern pattern, std::int64_t columns);

  // Bytes that a row must have readable behind its end.
  static constexpr std::int64_t slack = 16;

  // Fills `digits` and says why the row is damaged, or returns null.
  const char* decode(const std::uint8_t* row, std::uint8_t* digits) const;

 private:
  const char* decode_word(std::uint64_t word, int groups, std::uint8_t* digits) const;
  // Whether there is a group of that number.
  bool decode_group(std::uint64_t number, std::uint8_t* digits) const;

  packed::Pattern pattern_;
  std::int64_t columns_;
  int groups_per_word_;
  std::uint64_t states_;
  // Groups that a table entry stands for, 0 where a group is too long for a table; S to that power,
  // and 2^64 divided by it.
  int step_groups_;
  std::uint64_t step_states_ = 1, step_reciprocal_ = 0;
  std::vector<std::uint64_t> step_digits_;  // [step_states], digit i in byte i, the rest ones; or no_groups
};

}  // namespace sparse_bitnet
