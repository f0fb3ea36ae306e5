// SPDX-License-Identifier: Apache-2.0
// nm-enum and nm-sign (packed_format.h) to digits: words to group numbers to the digits of several groups at
// once. A group of nm-sign is a number below 2^b, and words of as many as 64 bits hold are no words of their own.

#pragma once

#include <cstdint>
#include <vector>

#include "packed_format.h"

namespace sparse_bitnet {

class GroupDecoder {
 public:
  // Of nm-sign where pattern.exact.
  GroupDecoder(packed::Pattern pattern, std::int64_t columns);

  // Bytes that a row must have readable behind its end.
  static constexpr std::int64_t slack = 16;

  // Fills `digits` (packed_rows.h) and says why the row is damaged, or returns null.
  const char* decode(const std::uint8_t* row, std::uint8_t* digits) const;

 private:
  const char* decode_word(std::uint64_t word, int groups, std::uint8_t* digits) const;
  // Whether there is a group of that number.
  bool decode_group(std::uint64_t number, std::uint8_t* digits) const;
  bool decode_signs(std::uint64_t group, std::uint8_t* digits) const;
  int bits_of(int groups) const;

  packed::Pattern pattern_;
  std::int64_t columns_;
  int groups_per_word_;
  std::uint64_t states_;
  // Groups that a table entry stands for, 0 where a group is too long for a table; S to that power,
  // and 2^64 divided by it.
  int step_groups_;
  std::uint64_t step_states_, step_reciprocal_;
  std::vector<std::uint64_t> step_digits_;  // [step_states], digit i in byte i, the rest ones; or no_groups
};

}  // namespace sparse_bitnet
