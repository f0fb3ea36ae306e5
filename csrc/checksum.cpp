// SPDX-License-Identifier: Apache-2.0
#include "checksum.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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
    for (std::uint32_t b = 0; b < 256; ++b) {
      Polynomial rest = b;
      for (int bit = 0; bit < 8; ++bit) rest = times_x(rest);
      slice[0][b] = rest;
    }
    for (int k = 1; k < slices; ++k) {
      for (int b = 0; b < 256; ++b) {
        const Polynomial before = slice[k - 1][b];
        slice[k][b] = (before >> 8) ^ slice[0][before & 255];
      }
    }
  }
};

constexpr Tables tables;

// The remainder of the message so far, `rest`, after `size` more bytes.
Polynomial remainder_by_table(Polynomial rest, const std::uint8_t* data, std::int64_t size) {
  for (; size >= 8; data += 8, size -= 8) {
    std::uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= rest;
    rest = 0;
    for (int k = 0; k < slices; ++k) rest ^= tables.slice[7 - k][word >> (8 * k) & 255];
  }
  for (; size > 0; ++data, --size) rest = (rest >> 8) ^ tables.slice[0][(rest ^ *data) & 255];
  return rest;
}

#if defined(__x86_64__)

constexpr int lane_bytes = 16, lane_count = 4, fold_bytes = lane_bytes * lane_count;

// A carry-less product of two 64-bit reflected polynomials comes out times x, hence the exponents less
// one: the first 64 bits of a lane move by 64 bits more than the second.
constexpr std::uint64_t fold_first = std::uint64_t(power_of_x(8 * fold_bytes + 63)) << 32;
constexpr std::uint64_t fold_second = std::uint64_t(power_of_x(8 * fold_bytes - 1)) << 32;

__attribute__((target("pclmul,sse4.1"))) Polynomial remainder_by_folding(
    Polynomial rest, const std::uint8_t* data, std::int64_t size) {
  const auto load = [](const std::uint8_t* from) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  };
  const __m128i factors =
      _mm_set_epi64x(std::int64_t(fold_second), std::int64_t(fold_first));
  __m128i lanes[lane_count];
  for (int i = 0; i < lane_count; ++i) lanes[i] = load(data + i * lane_bytes);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(int(rest)));
  data += fold_bytes;
  size -= fold_bytes;
  for (; size >= fold_bytes; data += fold_bytes, size -= fold_bytes) {
    for (int i = 0; i < lane_count; ++i) {
      const __m128i first = _mm_clmulepi64_si128(lanes[i], factors, 0x00);
      const __m128i second = _mm_clmulepi64_si128(lanes[i], factors, 0x11);
      lanes[i] = _mm_xor_si128(_mm_xor_si128(first, second), load(data + i * lane_bytes));
    }
  }
  // The lanes are now a message of 64 bytes with the remainder of the whole.
  std::uint8_t folded[fold_bytes];
  for (int i = 0; i < lane_count; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(folded + i * lane_bytes), lanes[i]);
  }
  return remainder_by_table(remainder_by_table(0, folded, fold_bytes), data, size);
}

#endif

}  // namespace

std::uint32_t crc32_by_table(const std::uint8_t* data, std::int64_t size) {
  return ~remainder_by_table(~0u, data, size);
}

#if defined(__x86_64__)
std::uint32_t crc32_by_folding(const std::uint8_t* data, std::int64_t size) {
  return size < fold_bytes ? crc32_by_table(data, size) : ~remainder_by_folding(~0u, data, size);
}
#endif

std::uint32_t crc32_joined(std::uint32_t first, std::uint32_t second, std::int64_t second_size) {
  return times(power_of_x(8 * std::uint64_t(second_size)), first) ^ second;
}

}  // namespace sparse_bitnet
