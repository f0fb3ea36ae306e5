// SPDX-License-Identifier: Apache-2.0
#include "loading.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "checksum.h"
#include "packed_rows.h"

namespace sparse_bitnet {
namespace {

// Rows are read once, in pieces that stay in a thread's cache between their checksum and what is made of them.
//
// Runs `work(row, from, thread)`, which says what is wrong with a row or returns null, over rows that
// follow each other in `bytes`; `slack` bytes behind each can be read. The result does not depend on the
// number of threads.
template <class Work>
Loaded load_rows(ThreadPool& pool, const ByteSource& bytes, std::int64_t rows, std::int64_t row_bytes,
                 std::int64_t slack, Work&& work) {
  constexpr std::int64_t piece_bytes = 1 << 17;
  // Rows of one strip (matmul.h) share bytes: they are one thread's.
  const std::int64_t strips = std::max<std::int64_t>(1, piece_bytes / row_bytes / strip_rows);
  const std::int64_t piece_rows = std::min(strips * strip_rows, rows);
  std::vector<Loaded> pieces(std::size_t(packed::divide_up(rows, piece_rows)), Loaded{0, true, nullptr});
  std::vector<std::vector<std::uint8_t>> buffers(
      std::size_t(pool.threads()), std::vector<std::uint8_t>(std::size_t(piece_rows * row_bytes + slack)));
  pool.parallel_for(rows, piece_rows, [&](std::int64_t begin, std::int64_t end, int thread) {
    const std::int64_t size = (end - begin) * row_bytes;
    std::uint8_t* buffer = buffers[std::size_t(thread)].data();
    Loaded& piece = pieces[std::size_t(begin / piece_rows)];
    const std::uint8_t* from = buffer;
    if (bytes.data != nullptr && (rows - end) * row_bytes >= slack) {
      from = bytes.data + begin * row_bytes;
    } else {
      piece.is_readable = bytes.read(begin * row_bytes, size, buffer);
    }
    if (!piece.is_readable) return;
    piece.crc32 = crc32(from, size);
    for (std::int64_t row = begin; row < end; ++row) {
      const char* damage = work(row, from + (row - begin) * row_bytes, thread);
      if (piece.damage == nullptr) piece.damage = damage;
    }
  });
  Loaded all = pieces[0];
  for (std::int64_t i = 1; i < std::int64_t(pieces.size()); ++i) {
    const std::int64_t count = std::min(piece_rows, rows - i * piece_rows);
    const Loaded& piece = pieces[std::size_t(i)];
    all.crc32 = crc32_joined(all.crc32, piece.crc32, count * row_bytes);
    all.is_readable &= piece.is_readable;
    if (all.damage == nullptr) all.damage = piece.damage;
  }
  return all;
}

// One row of a strip of i2 (matmul.h), whose first word is at `to`. columns is a multiple of strip_columns.
void encode_strip_row(const std::uint8_t* digits, std::int64_t columns, std::uint8_t* to) {
  for (std::int64_t c = 0; c < columns; c += strip_columns, to += 64) {
    std::uint32_t four[4];
    std::memcpy(four, digits + c, sizeof four);
    const std::uint32_t word = four[0] | four[1] << 2 | four[2] << 4 | four[3] << 6;
    std::memcpy(to, &word, sizeof word);
  }
}

// Writes row `index` of a matrix of ternary weights.
void encode(const Matrix& out, std::int64_t index, const std::uint8_t* digits) {
  auto* to = const_cast<std::uint8_t*>(out.data) + index * out.row_stride;
  if (out.format == WeightFormat::b3_strips) {
    b3_strips::encode_row(digits, out.columns, out.group, to - index % b3_strips::rows * (out.row_stride - 1));
  } else if (out.in_strips()) {
    to -= index % strip_rows * (out.row_stride - 4);
    if (out.format == WeightFormat::i2) {
      encode_strip_row(digits, out.columns, to);
    } else {
      lookup::encode_strip_row(digits, out.columns, out.group, to);
    }
  } else if (out.format == WeightFormat::lookup) {
    const int in_strip = int(index % lookup::shape_of(out.pattern).rows());
    lookup::encode_row(out.pattern, digits, out.columns, in_strip, to - in_strip * out.row_stride);
  } else {
    encode_i2(digits, out.columns, to);
  }
}

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

std::int64_t StoredMatrix::bytes_per_row(StoredFormat format, packed::Pattern pattern,
                                         std::int64_t columns) {
  if (format == StoredFormat::i2) return packed::i2_row_bytes(columns);
  if (format == StoredFormat::b3) return packed::b3_row_bytes(columns);
  if (format == StoredFormat::nm_enum) return packed::nm_enum_row_bytes(pattern, columns);
  return packed::nm_sign_row_bytes(pattern, columns);
}

Loaded repack(ThreadPool& pool, const StoredMatrix& stored, const Matrix& out) {
  const std::int64_t columns = stored.columns;
  const std::int64_t row_bytes = StoredMatrix::bytes_per_row(stored.format, stored.pattern, columns);
  const bool is_i2 = stored.format == StoredFormat::i2, is_b3 = stored.format == StoredFormat::b3;
  const bool is_copy = is_i2 && out.format == WeightFormat::i2 && !out.in_strips();
  const bool is_there = is_copy && out.data == stored.bytes.data;
  const packed::Pattern pattern = packed::coded(stored.pattern);
  const auto groups = is_i2 || is_b3 ? nullptr : std::make_unique<GroupDecoder>(stored.pattern, columns);
  // Encoders read padding, and decoders of whole blocks may leave some of it as it is.
  std::vector<std::vector<std::uint8_t>> memory(std::size_t(pool.threads()),
                                                std::vector<std::uint8_t>(std::size_t(digits_size(columns)), 1));
  const auto write = [&](std::int64_t row, const std::uint8_t* from, int thread) -> const char* {
    if (is_copy && !is_there) {
      std::memcpy(const_cast<std::uint8_t*>(out.data) + row * out.row_stride, from, std::size_t(row_bytes));
    }
    if (is_copy && pattern.m == 1) return decode_i2(from, columns, nullptr);
    std::uint8_t* digits = memory[std::size_t(thread)].data();
    const char* damage = groups  ? groups->decode(from, digits)
                         : is_i2 ? decode_i2(from, columns, digits)
                                 : decode_b3(from, columns, digits);
    if (damage == nullptr && !groups) damage = check_groups(pattern, digits, columns);
    if (damage != nullptr) return damage;
    if (!is_copy) encode(out, row, digits);
    return nullptr;
  };
  return load_rows(pool, stored.bytes, stored.rows, row_bytes, GroupDecoder::slack, write);
}

Loaded load_table(const Kernels& kernels, ThreadPool& pool, const StoredTable& stored, const Table& out) {
  const std::int64_t columns = stored.columns, row_bytes = Table::bytes_per_row(stored.type, columns);
  const bool is_copy = out.type == stored.type, is_half = stored.type == TableType::bfloat16;
  const bool is_int8 = out.type == TableType::int8;
  const std::int64_t groups = is_int8 ? 1 : columns / int4_group;
  std::vector<std::vector<float>> floats(std::size_t(pool.threads()), std::vector<float>(is_copy ? 0 : columns));
  const auto write = [&](std::int64_t row, const std::uint8_t* from, int thread) -> const char* {
    auto* to = const_cast<std::uint8_t*>(out.data) + row * out.row_stride;
    if (is_copy) {
      if (out.data != stored.bytes.data) std::memcpy(to, from, std::size_t(row_bytes));
      return all_finite(stored.type, from, columns) ? nullptr : not_finite;
    }
    float *values = floats[std::size_t(thread)].data(), *scales = const_cast<float*>(out.scales) + row * groups;
    const float* stored_scale = stored.scales ? stored.scales + row : nullptr;
    if (!is_int8 || !is_half) table_row({stored.type, 1, columns, 0, from, stored_scale}, 0, values);
    if (is_int8) {
      kernels.vector.quantize_int8(is_half ? static_cast<const void*>(from) : values,
                                   is_half ? Dtype::bfloat16 : Dtype::float32, 1, columns,
                                   reinterpret_cast<std::int8_t*>(to), scales);
    } else if (all_finite(TableType::float32, values, columns)) {
      kernels.vector.quantize_int4(values, groups, to, scales);
    } else {
      return not_finite;
    }
    return all_finite(TableType::float32, scales, groups) ? nullptr : not_finite;
  };
  return load_rows(pool, stored.bytes, stored.rows, row_bytes, 0, write);
}

}  // namespace sparse_bitnet
