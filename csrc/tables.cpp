// SPDX-License-Identifier: Apache-2.0
#include "tables.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "checksum.h"

namespace sparse_bitnet {
namespace {

constexpr std::int64_t piece_bytes = 1 << 17;

// Runs `work(row, from, thread)`, which says whether a row is finite, over all rows of a table. `from` is
// aligned to the type.
template <class Work>
CopiedTable for_rows(ThreadPool& pool, const TableSource& table, Work&& work) {
  const std::int64_t row_bytes = table.columns * bytes_of(table.type);
  const std::int64_t piece_rows = std::max<std::int64_t>(1, piece_bytes / row_bytes);
  const std::int64_t pieces = packed::divide_up(table.rows, piece_rows);
  std::vector<CopiedTable> results(std::size_t(pieces), CopiedTable{0, true, true});
  std::vector<std::vector<std::uint8_t>> buffers(
      std::size_t(pool.threads()), std::vector<std::uint8_t>(std::size_t(piece_rows * row_bytes)));
  pool.parallel_for(
      table.rows, piece_rows, [&](std::int64_t begin, std::int64_t end, int thread) {
        const std::int64_t bytes = (end - begin) * row_bytes;
        std::uint8_t* buffer = buffers[std::size_t(thread)].data();
        CopiedTable& result = results[std::size_t(begin / piece_rows)];
        result.is_readable = table.bytes.read(begin * row_bytes, bytes, buffer);
        if (!result.is_readable) return;
        result.crc32 = crc32(buffer, bytes);
        for (std::int64_t row = begin; row < end; ++row) {
          result.is_finite &= work(row, buffer + (row - begin) * row_bytes, thread);
        }
      });
  CopiedTable all = results[0];
  for (std::int64_t i = 1; i < pieces; ++i) {
    const std::int64_t count = std::min(piece_rows, table.rows - i * piece_rows);
    const CopiedTable& piece = results[std::size_t(i)];
    all.crc32 = crc32_joined(all.crc32, piece.crc32, count * row_bytes);
    all.is_readable &= piece.is_readable;
    all.is_finite &= piece.is_finite;
  }
  return all;
}

void to_floats(const TableSource& table, std::int64_t row, const std::uint8_t* from, float* out) {
  switch (table.type) {
    case StoredTable::float32:
      std::memcpy(out, from, std::size_t(table.columns) * 4);
      return;
    case StoredTable::bfloat16:
      for (std::int64_t i = 0; i < table.columns; ++i) {
        std::uint16_t high;
        std::memcpy(&high, from + 2 * i, 2);
        const std::uint32_t bits = std::uint32_t(high) << 16;
        std::memcpy(out + i, &bits, 4);
      }
      return;
    case StoredTable::int8:
      for (std::int64_t i = 0; i < table.columns; ++i) {
        out[i] = float(std::int8_t(from[i])) * table.scales[row];
      }
      return;
  }
}

bool all_finite(const float* values, std::int64_t count) {
  std::uint32_t broken = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, values + i, 4);
    broken |= (bits & 0x7f800000u) == 0x7f800000u;
  }
  return broken == 0;
}

}  // namespace

CopiedTable copy_table(ThreadPool& pool, const TableSource& table, std::uint8_t* out,
                       std::int64_t row_stride) {
  const std::size_t row_bytes = std::size_t(table.columns * bytes_of(table.type));
  return for_rows(pool, table, [&](std::int64_t row, const std::uint8_t* from, int) {
    std::memcpy(out + row * row_stride, from, row_bytes);
    return true;
  });
}

CopiedTable quantize_table(const VectorKernels& kernels, ThreadPool& pool, const TableSource& table,
                           WeightFormat format, std::uint8_t* out, std::int64_t row_stride,
                           float* scales) {
  const std::int64_t columns = table.columns;
  std::vector<std::vector<float>> floats(std::size_t(pool.threads()),
                                         std::vector<float>(std::size_t(columns)));
  const std::int64_t groups = columns / int4_group;
  return for_rows(pool, table, [&](std::int64_t row, const std::uint8_t* from, int thread) {
    std::uint8_t* to = out + row * row_stride;
    float* values = floats[std::size_t(thread)].data();
    if (format == WeightFormat::int8) {
      const bool is_half = table.type == StoredTable::bfloat16;
      if (!is_half) to_floats(table, row, from, values);
      kernels.quantize_int8(is_half ? static_cast<const void*>(from) : values,
                            is_half ? Dtype::bfloat16 : Dtype::float32, 1, columns,
                            reinterpret_cast<std::int8_t*>(to), scales + row);
      return std::isfinite(scales[row]);
    }
    to_floats(table, row, from, values);
    if (!all_finite(values, columns)) return false;
    kernels.quantize_int4(values, groups, to, scales + row * groups);
    return true;
  });
}

}  // namespace sparse_bitnet
