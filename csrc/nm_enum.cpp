// SPDX-License-Identifier: Apache-2.0
#include "packed_rows.h"

#include <cstring>

namespace sparse_bitnet {
namespace {

constexpr int step_weights = 8;
constexpr std::uint64_t no_groups = ~std::uint64_t(0);

constexpr char bad_word[] = "a word is not a code of groups";
constexpr char bad_places[] = "a group has an invalid set of positions";
constexpr char bad_padding[] = "the padding of a row is not zero bits";

// `count` bits, at most 64, from bit `first` on.
std::uint64_t load_bits(const std::uint8_t* row, std::int64_t first, int count) {
  std::uint64_t low;
  std::memcpy(&low, row + first / 8, 8);
  const int shift = int(first % 8);
  std::uint64_t bits = low >> shift;
  if (shift != 0) bits |= std::uint64_t(row[first / 8 + 8]) << (64 - shift);
  return count == 64 ? bits : bits & ((std::uint64_t(1) << count) - 1);
}

}  // namespace

GroupDecoder::GroupDecoder(packed::Pattern pattern, std::int64_t columns)
    : pattern_(packed::coded(pattern)),
      columns_(columns),
      groups_per_word_(pattern.exact ? packed::nm_enum_word_bits / packed::nm_sign_group_bits(pattern)
                                     : packed::nm_enum_groups_per_word(pattern)),
      states_(pattern.exact ? std::uint64_t(1) << packed::nm_sign_group_bits(pattern)
                            : packed::nm_enum_states(pattern_.m, pattern_.n)),
      step_groups_(step_weights / pattern_.m) {
  if (step_groups_ == 0) return;
  for (int i = 0; i < step_groups_; ++i) step_states_ *= states_;
  step_reciprocal_ = ~std::uint64_t(0) / step_states_;
  step_digits_.resize(step_states_);
  for (std::uint64_t number = 0; number < step_states_; ++number) {
    std::uint8_t digits[step_weights];
    std::memset(digits, 1, sizeof digits);
    std::uint64_t left = number;
    bool is_valid = true;
    for (int i = 0; i < step_groups_; ++i, left /= states_) {
      is_valid &= decode_group(left % states_, digits + i * pattern_.m);
    }
    std::memcpy(&step_digits_[number], digits, sizeof digits);
    if (!is_valid) step_digits_[number] = no_groups;
  }
}

const char* GroupDecoder::decode(const std::uint8_t* row, std::uint8_t* digits) const {
  const std::int64_t groups = columns_ / pattern_.m;
  const int tail = int(groups % groups_per_word_);
  const auto bits_of = [&](int count) {
    return pattern_.exact ? count * packed::nm_sign_group_bits(pattern_) : packed::nm_enum_bits(pattern_, count);
  };
  const int word_bits = bits_of(groups_per_word_), tail_bits = bits_of(tail);
  const char* damage = nullptr;
  std::int64_t bit = 0;
  for (std::int64_t left = groups; left > 0; left -= groups_per_word_) {
    const bool is_whole = left >= groups_per_word_;
    const int count = is_whole ? groups_per_word_ : tail, bits = is_whole ? word_bits : tail_bits;
    const char* error = decode_word(load_bits(row, bit, bits), count, digits);
    if (error != nullptr) damage = error;
    digits += std::int64_t(count) * pattern_.m;
    bit += bits;
  }
  return bit % 8 != 0 && row[bit / 8] >> (bit % 8) != 0 ? bad_padding : damage;
}

const char* GroupDecoder::decode_word(std::uint64_t word, int groups, std::uint8_t* digits) const {
  bool is_valid = true;
  for (; step_groups_ != 0 && groups >= step_groups_; groups -= step_groups_) {
    // One too small at most.
    std::uint64_t quotient = std::uint64_t((unsigned __int128)(word)*step_reciprocal_ >> 64);
    std::uint64_t number = word - quotient * step_states_;
    if (number >= step_states_) {
      ++quotient;
      number -= step_states_;
    }
    is_valid &= step_digits_[number] != no_groups;
    std::memcpy(digits, &step_digits_[number], step_weights);
    digits += step_groups_ * pattern_.m;
    word = quotient;
  }
  for (; groups > 0; --groups, word /= states_, digits += pattern_.m) {
    is_valid &= decode_group(word % states_, digits);
  }
  return word != 0 ? bad_word : is_valid ? nullptr : bad_places;
}

bool GroupDecoder::decode_group(std::uint64_t number, std::uint8_t* digits) const {
  if (pattern_.exact) return packed::nm_sign_digits(pattern_, number, digits);
  packed::nm_enum_digits(pattern_, number, digits);
  return true;
}

}  // namespace sparse_bitnet
