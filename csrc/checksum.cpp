// SPDX-License-Identifier: Apache-2.0
#include "checksum.h"

#include <cstring>

namespace sparse_bitnet {
namespace {

// A polynomial of degree below 32, bit i standing for x^(31 - i).
using Polynomial = std::uint32_t;

constexpr Polynomial one = 0x80000000u;

constexpr Polynomial times_x(Polynomial a) { return (a >> 1) ^ (a & 1 ? 0xedb88320u : 0u); }

constexpr Polynomial times(Polynomial a, Polynomial b) {
  Polynomial product = 0;
  for (; b != 0; b <<= 1, a = times_x(a)) {
    if (b & one) product ^= a;
  }
  return product;
}

// x^exponent modulo the polynomial.
constexpr Polynomial power_of_x(std::uint64_t exponent) {
  Polynomial result = one, square = times_x(one);
  for (; exponent != 0; exponent >>= 1, square = times(square, square)) {
    if (exponent & 1) result = times(result, square);
  }
  return result;
}

constexpr int slices = 8;

// slice[k][b]: byte b followed by k zero bytes.
struct Tables {
  Polynomial slice[slices][256];

  constexpr Tables() : slice() {
    for (int b = 0; b < 256; ++b) {
      Polynomial rest = Polynomial(b);
      for (int k = 0; k < slices; ++k) {
        for (int bit = 0; bit < 8; ++bit) rest = times_x(rest);
        slice[k][b] = rest;
      }
    }
  }
};

constexpr Tables tables;

// The remainder of the message so far, `rest`, after eight more bytes.
inline Polynomial after_eight(Polynomial rest, const std::uint8_t* data) {
  std::uint64_t word;
  std::memcpy(&word, data, 8);
  word ^= rest;
  rest = 0;
  for (int k = 0; k < slices; ++k) rest ^= tables.slice[7 - k][word >> (8 * k) & 255];
  return rest;
}

}  // namespace

std::uint32_t crc32(const std::uint8_t* data, std::int64_t size) {
  // Two halves at once: each waits for its own last lookups.
  const std::int64_t half = size / 16 * 8;
  Polynomial rest = ~0u, second = 0;
  for (std::int64_t i = 0; i < half; i += 8) rest = after_eight(rest, data + i), second = after_eight(second, data + half + i);
  rest = crc32_joined(rest, second, half);
  for (std::int64_t i = 2 * half; i < size; ++i) rest = (rest >> 8) ^ tables.slice[0][(rest ^ data[i]) & 255];
  return ~rest;
}

std::uint32_t crc32_joined(std::uint32_t first, std::uint32_t second, std::int64_t second_size) {
  return times(power_of_x(8 * std::uint64_t(second_size)), first) ^ second;
}

}  // namespace sparse_bitnet
