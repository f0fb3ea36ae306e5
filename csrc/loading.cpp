// SPDX-License-Identifier: Apache-2.0
#include "loading.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
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

constexpr char bad_count[] = "a group has fewer non-zeros than the pattern says";

// One row of a strip of i2 (matmul.h), whose first word is at `to`. columns is a multiple of strip_columns.
void encode_strip_row(const std::uint8_t* digits, std::int64_t columns, std::uint8_t* to) {
  for (std::int64_t c = 0; c < columns; c += strip_columns, to += 64) {
    std::uint32_t four[4];
    std::memcpy(four, digits + c, sizeof four);
    const std::uint32_t word = four[0] | four[1] << 2 | four[2] << 4 | four[3] << 6;
    std::memcpy(to, &word, sizeof word);
  }
}

class Repacking {
 public:
  Repacking(const StoredMatrix& stored, const Matrix& out)
      : stored_(stored),
        out_(out),
        is_same_(stored.format == StoredFormat::i2 && out.format == WeightFormat::i2 && !out.in_strips()),
        is_there_(is_same_ && out.data == stored.bytes.data),
        limit_(stored.pattern) {
    if (stored.format == StoredFormat::nm_enum || stored.format == StoredFormat::nm_sign) {
      group_decoder_ = std::make_unique<GroupDecoder>(stored.pattern, stored.columns);
    }
  }

  const char* row(std::int64_t index, const std::uint8_t* from, std::uint8_t* digits) const {
    auto* to = const_cast<std::uint8_t*>(out_.data) + index * out_.row_stride;
    if (is_same_ && !is_there_) std::memcpy(to, from, std::size_t(packed::i2_row_bytes(stored_.columns)));
    if (is_same_ && limit_.pattern().m == 1) return decode(from, nullptr);
    const char* damage = decode(from, digits);
    if (damage != nullptr) return damage;
    if (out_.pattern.exact && !stored_.pattern.exact && !has_full_groups(digits)) return bad_count;
    if (out_.in_strips() && out_.format == WeightFormat::b3_strips) {
      b3_strips::encode_row(digits, stored_.columns, out_.group, to - index % b3_strips::rows * (out_.row_stride - 1));
    } else if (out_.in_strips()) {
      to -= index % strip_rows * (out_.row_stride - 4);
      if (out_.format == WeightFormat::i2) {
        encode_strip_row(digits, stored_.columns, to);
      } else {
        lookup::encode_strip_row(digits, stored_.columns, out_.group, to);
      }
    } else if (out_.format == WeightFormat::lookup) {
      const int in_strip = int(index % lookup::shape_of(out_.pattern).rows());
      lookup::encode_row(out_.pattern, digits, stored_.columns, in_strip, to - in_strip * out_.row_stride);
    } else if (!is_same_) {
      encode_i2(digits, stored_.columns, to);
    }
    return nullptr;
  }

 private:
  const char* decode(const std::uint8_t* from, std::uint8_t* digits) const {
    const std::int64_t columns = stored_.columns;
    const char* damage = nullptr;
    switch (stored_.format) {
      case StoredFormat::nm_enum:
      case StoredFormat::nm_sign:
        return group_decoder_->decode(from, digits);
      case StoredFormat::i2:
        damage = decode_i2(from, columns, digits);
        break;
      case StoredFormat::b3:
        damage = decode_b3(from, columns, digits);
        break;
    }
    return damage ? damage : limit_.check(digits, columns);
  }

  // Of groups with no more than n.
  bool has_full_groups(const std::uint8_t* digits) const {
    std::int64_t nonzeros = 0;
    for (std::int64_t i = 0; i < stored_.columns; ++i) nonzeros += digits[i] != 1;
    return nonzeros == stored_.columns / limit_.pattern().m * limit_.pattern().n;
  }

  const StoredMatrix stored_;
  const Matrix out_;
  const bool is_same_;   // rows lie as they are stored
  const bool is_there_;  // and where they are
  const GroupLimit limit_;
  std::unique_ptr<GroupDecoder> group_decoder_;
};

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
  const Repacking repacking(stored, out);
  // Encoders read padding, and decoders of whole blocks may leave some of it as it is.
  std::vector<std::vector<std::uint8_t>> digits(
      std::size_t(pool.threads()),
      std::vector<std::uint8_t>(std::size_t(digits_size(stored.columns)), 1));
  return load_rows(pool, stored.bytes, stored.rows,
                   StoredMatrix::bytes_per_row(stored.format, stored.pattern, stored.columns),
                   GroupDecoder::slack, [&](std::int64_t row, const std::uint8_t* from, int thread) {
                     return repacking.row(row, from, digits[std::size_t(thread)].data());
                   });
}

Loaded copy_table(ThreadPool& pool, const StoredTable& table, std::uint8_t* out, std::int64_t row_stride) {
  const std::int64_t row_bytes = Table::bytes_per_row(table.type, table.columns);
  return load_rows(pool, table.bytes, table.rows, row_bytes, 0,
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
  return load_rows(pool, table.bytes, table.rows, Table::bytes_per_row(table.type, columns), 0, work);
}

}  // namespace sparse_bitnet
