// SPDX-License-Identifier: Apache-2.0
// Reads packed bytes with nothing but packed_format.h: what Python packs is what the header says.
//   packed_reader size FORMAT N M IN_FEATURES           prints the bytes of a row
//   packed_reader read FORMAT N M IN_FEATURES ROWS      rows on standard input -> int8 codes
#include "packed_format.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using namespace sparse_bitnet::packed;

int main(int count, char** arguments) {
  if (count < 6) return 2;
  const char* format = arguments[2];
  const Pattern pattern{std::atoi(arguments[3]), std::atoi(arguments[4])};
  const std::int64_t in_features = std::atoll(arguments[5]);
  const bool is_i2 = std::strcmp(format, "i2") == 0, is_b3 = std::strcmp(format, "b3") == 0;
  const bool is_sign = std::strcmp(format, "nm-sign") == 0;
  if (!is_valid(pattern)) return 3;
  const std::int64_t row_bytes = is_i2       ? i2_row_bytes(in_features)
                                 : is_b3     ? b3_row_bytes(in_features)
                                 : is_sign   ? nm_sign_row_bytes(pattern, in_features)
                                             : nm_enum_row_bytes(pattern, in_features);
  if (std::strcmp(arguments[1], "size") == 0) {
    std::printf("%lld\n", static_cast<long long>(row_bytes));
    return 0;
  }
  std::vector<std::uint8_t> row(row_bytes);
  for (int r = 0; r < std::atoi(arguments[6]); ++r) {
    if (std::fread(row.data(), 1, row.size(), stdin) != row.size()) return 4;
    for (std::int64_t i = 0; i < in_features; ++i) {
      const int code = is_i2       ? i2_code(row.data(), in_features, i)
                       : is_b3     ? b3_code(row.data(), in_features, i)
                       : is_sign   ? nm_sign_code(pattern, row.data(), i)
                                   : nm_enum_code(pattern, row.data(), in_features, i);
      std::putchar(code & 0xff);
    }
  }
  return 0;
}
