// SPDX-License-Identifier: Apache-2.0
#include "tables.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace sparse_bitnet {
namespace {

constexpr char not_finite[] = "has values that are not finite";

// Of float32, or of bfloat16, which is its upper half.
template <class Bits>
bool all_finite(const void* values, std::int64_t count) {
  constexpr Bits exponent = Bits(0x7f800000u >> (32 - 8 * sizeof(Bits)));
  Bits broken = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, static_cast<const char*>(values) + i * std::int64_t(sizeof bits), sizeof bits);
    broken |= (bits & exponent) == exponent;
  }
  return broken == 0;
}

bool all_finite(TableType type, const void* row, std::int64_t columns) {
  if (type == TableType::float32) return all_finite<std::uint32_t>(row, columns);
  return type != TableType::bfloat16 || all_finite<std::uint16_t>(row, columns);
}

}  // namespace

Loaded copy_table(const Kernels& kernels, ThreadPool& pool, const StoredTable& table, std::uint8_t* out,
                  std::int64_t row_stride) {
  const std::int64_t row_bytes = Table::bytes_per_row(table.type, table.columns);
  return load_rows(kernels, pool, table.bytes, table.rows, row_bytes, 0,
                   [&](std::int64_t row, const std::uint8_t* from, int) -> const char* {
                     if (out != table.bytes.data) std::memcpy(out + row * row_stride, from, std::size_t(row_bytes));
                     return all_finite(table.type, from, table.columns) ? nullptr : not_finite;
                   });
}

Loaded quantize_table(const Kernels& kernels, ThreadPool& pool, const StoredTable& table, TableType type,
                      std::uint8_t* out, std::int64_t row_stride, float* scales) {
  const std::int64_t columns = table.columns, groups = columns / int4_group;
  const bool is_half = table.type == TableType::bfloat16;
  std::vector<std::vector<float>> floats(std::size_t(pool.threads()),
                                         std::vector<float>(std::size_t(columns)));
  auto work = [&](std::int64_t row, const std::uint8_t* from, int thread) -> const char* {
    std::uint8_t* to = out + row * row_stride;
    float* values = floats[std::size_t(thread)].data();
    const float* scale = table.scales ? table.scales + row : nullptr;
    if (type == TableType::int4 || !is_half) table_row({table.type, 1, columns, 0, from, scale}, 0, values);
    if (type == TableType::int8) {
      kernels.vector.quantize_int8(is_half ? static_cast<const void*>(from) : values,
                                   is_half ? Dtype::bfloat16 : Dtype::float32, 1, columns,
                                   reinterpret_cast<std::int8_t*>(to), scales + row);
      return std::isfinite(scales[row]) ? nullptr : not_finite;
    }
    if (!all_finite(TableType::float32, values, columns)) return not_finite;
    kernels.vector.quantize_int4(values, groups, to, scales + row * groups);
    return all_finite(TableType::float32, scales + row * groups, groups) ? nullptr : not_finite;
  };
  return load_rows(kernels, pool, table.bytes, table.rows, Table::bytes_per_row(table.type, columns), 0, work);
}

}  // namespace sparse_bitnet
