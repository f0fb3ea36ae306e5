// SPDX-License-Identifier: Apache-2.0
// Rows of packed weights to digits (codes plus one, a byte each) and back: the work of repack.cpp.

#pragma once

#include <cstdint>

#include "packed_format.h"

namespace sparse_bitnet {

// Digits lie in rows padded with digit 1 to the longest block, so that no encoder looks past their end.
constexpr std::int64_t digits_size(std::int64_t columns) {
  return columns + packed::b3_block_weights + packed::i2_block_weights;
}

// The decoders fill `digits` [columns] and its padding, and say why a row is damaged or return null. i2 and
// b3 without digits are only checked; nobody looks at groups.
const char* decode_i2(const std::uint8_t* row, std::int64_t columns, std::uint8_t* digits);
const char* decode_b3(const std::uint8_t* row, std::int64_t columns, std::uint8_t* digits);

void encode_i2(const std::uint8_t* digits, std::int64_t columns, std::uint8_t* row);
void encode_b3(const std::uint8_t* digits, std::int64_t columns, std::uint8_t* row);

// Whether groups of m have at most n non-zeros.
class GroupLimit {
 public:
  explicit GroupLimit(packed::Pattern pattern);
  packed::Pattern pattern() const { return pattern_; }
  // Of 64 weights as a bitmap; m divides 64.
  bool is_broken(std::uint64_t nonzero) const;

 private:
  packed::Pattern pattern_;
  std::uint8_t overfull_[256];
};

// Why a row is no encoding of a matrix, or null.
const char* check_groups(const GroupLimit& limit, const std::uint8_t* digits,
                         std::int64_t columns);

}  // namespace sparse_bitnet
