#include "tables.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "checksum.h"
#include "kernels.h"

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

constexpr int group = int4_group;

// The vectors of every instruction set's baseline; wider ones would be taken apart element by element.
constexpr int lanes = 4, vectors = group / lanes;
using Floats = float __attribute__((vector_size(lanes * sizeof(float))));

struct Group {
  Floats v[vectors];
};

float sum_of(const Floats& partial) {
  return (partial[0] + partial[2]) + (partial[1] + partial[3]);
}

// The value of largest magnitude.
float extreme_of(const Group& values) {
  Floats largest = values.v[0], smallest = values.v[0];
  for (int i = 1; i < vectors; ++i) {
    largest = values.v[i] > largest ? values.v[i] : largest;
    smallest = values.v[i] < smallest ? values.v[i] : smallest;
  }
  float high = largest[0], low = smallest[0];
  for (int k = 1; k < lanes; ++k) {
    high = std::max(high, largest[k]);
    low = std::min(low, smallest[k]);
  }
  return high > -low ? high : low;
}

// Code of four values, within -8..7, as floats.
Floats round_values(const Floats& values, float inverse) {
  // Adding 1.5 * 2^23 rounds to an integer, half to even.
  const Floats rounding = Floats{} + 12582912.0f, lowest = Floats{} - 8.0f,
               highest = Floats{} + 7.0f;
  Floats code = (values * inverse + rounding) - rounding;
  code = code > highest ? highest : code;
  return code < lowest ? lowest : code;
}

// The scale with which the codes are closest to the values, and how much less than the values' sum of
// squares the squared error then is.
struct Fit {
  float scale, gain;
};

Fit fit(const Group& values, float inverse) {
  Floats products = {}, squares = {};
  for (int i = 0; i < vectors; ++i) {
    const Floats code = round_values(values.v[i], inverse);
    products += code * values.v[i];
    squares += code * code;
  }
  const float product = sum_of(products), scale = product / sum_of(squares);
  return {scale, product * scale};
}

// How many steps the value of largest magnitude is from zero. With 8 it is represented exactly; fewer
// use less of the range, more clip it for finer steps.
constexpr float candidates[] = {8.0f, 7.25f, 9.0f};

// Writes 32 bytes and returns the scale. The values are finite.
float quantize_group(const float* from, std::uint8_t* out) {
  Group values;
  std::memcpy(&values, from, sizeof values);
  const float extreme = extreme_of(values);
  float best_inverse = 0;
  Fit best = {0, 0};
  for (const float steps : candidates) {
    const float inverse = -steps / extreme;
    // Of groups of zeros, and of numbers too small to be divided by.
    if (!std::isfinite(inverse)) break;
    const Fit found = fit(values, inverse);
    if (found.gain > best.gain) {
      best = found;
      best_inverse = inverse;
    }
  }
  std::uint8_t digits[group];
  for (int i = 0; i < vectors; ++i) {
    const Floats digit = round_values(values.v[i], best_inverse) + 8.0f;
    for (int k = 0; k < lanes; ++k) digits[i * lanes + k] = std::uint8_t(int(digit[k]));
  }
  for (int i = 0; i < group / 2; ++i) {
    out[i] = std::uint8_t(digits[i] | digits[i + group / 2] << 4);
  }
  return best.scale;
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

CopiedTable quantize_table(ThreadPool& pool, const TableSource& table, WeightFormat format,
                           std::uint8_t* out, std::int64_t row_stride, float* scales) {
  const std::int64_t columns = table.columns;
  std::vector<std::vector<float>> floats(std::size_t(pool.threads()),
                                         std::vector<float>(std::size_t(columns)));
  const Kernels& kernels = choose_kernels(supported_isas().front());
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
    for (std::int64_t i = 0; i < columns / group; ++i) {
      scales[row * (columns / group) + i] = quantize_group(values + i * group, to + i * group / 2);
    }
    return true;
  });
}

}  // namespace sparse_bitnet
