// SPDX-License-Identifier: Apache-2.0
#include "repack.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "nm_enum.h"
#include "packed_rows.h"

namespace sparse_bitnet {
namespace {

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
        is_same_(int(stored.format) == int(out.format) && !out.in_strips()),
        is_there_(is_same_ && out.data == stored.bytes.data),
        strip_rows_(lookup::shape_of(out.pattern).rows()),
        row_bytes_(Matrix::bytes_per_row(out.format, stored.pattern, stored.columns)),
        limit_(stored.pattern) {
    if (stored.format == StoredFormat::nm_enum || stored.format == StoredFormat::nm_sign) {
      group_decoder_ = std::make_unique<GroupDecoder>(stored.pattern, stored.columns);
    }
  }

  const char* row(std::int64_t index, const std::uint8_t* from, std::uint8_t* digits) const {
    auto* to = const_cast<std::uint8_t*>(out_.data) + index * out_.row_stride;
    if (is_same_ && !is_there_) std::memcpy(to, from, std::size_t(row_bytes_));
    if (is_same_ && limit_.pattern().m == 1) {
      return decode(from, nullptr);
    }
    const char* damage = decode(from, digits);
    if (damage != nullptr) return damage;
    if (out_.pattern.exact && !stored_.pattern.exact && !has_full_groups(digits)) return bad_count;
    if (out_.in_strips()) {
      encode_strip_row(digits, stored_.columns, to - index % strip_rows * (out_.row_stride - 4));
    } else if (out_.format == WeightFormat::lookup) {
      const int in_strip = int(index % strip_rows_);
      lookup::encode_row(out_.pattern, digits, stored_.columns, in_strip, to - in_strip * out_.row_stride);
    } else if (!is_same_) {
      encode(digits, to);
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
    return damage || limit_.pattern().m == 1 ? damage : check_groups(limit_, digits, columns);
  }

  // Of groups with no more than n.
  bool has_full_groups(const std::uint8_t* digits) const {
    std::int64_t nonzeros = 0;
    for (std::int64_t i = 0; i < stored_.columns; ++i) nonzeros += digits[i] != 1;
    return nonzeros == stored_.columns / limit_.pattern().m * limit_.pattern().n;
  }

  void encode(const std::uint8_t* digits, std::uint8_t* to) const {
    if (out_.format == WeightFormat::i2) encode_i2(digits, stored_.columns, to);
    if (out_.format == WeightFormat::b3) encode_b3(digits, stored_.columns, to);
  }

  const StoredMatrix stored_;
  const Matrix out_;
  const bool is_same_;   // rows lie as they are stored
  const bool is_there_;  // and where they are
  const int strip_rows_;  // of lookup
  const std::int64_t row_bytes_;
  const GroupLimit limit_;
  std::unique_ptr<GroupDecoder> group_decoder_;
};

}  // namespace

std::int64_t StoredMatrix::bytes_per_row(StoredFormat format, packed::Pattern pattern,
                                         std::int64_t columns) {
  if (format == StoredFormat::nm_enum) return packed::nm_enum_row_bytes(pattern, columns);
  if (format == StoredFormat::nm_sign) return packed::nm_sign_row_bytes(pattern, columns);
  return Matrix::bytes_per_row(WeightFormat(int(format)), pattern, columns);
}

Loaded repack(const Kernels& kernels, ThreadPool& pool, const StoredMatrix& stored, const Matrix& out) {
  const Repacking repacking(stored, out);
  // Encoders read padding, and decoders of whole blocks may leave some of it as it is.
  std::vector<std::vector<std::uint8_t>> digits(
      std::size_t(pool.threads()),
      std::vector<std::uint8_t>(std::size_t(digits_size(stored.columns)), 1));
  return load_rows(kernels, pool, stored.bytes, stored.rows,
                   StoredMatrix::bytes_per_row(stored.format, stored.pattern, stored.columns),
                   GroupDecoder::slack, [&](std::int64_t row, const std::uint8_t* from, int thread) {
                     return repacking.row(row, from, digits[std::size_t(thread)].data());
                   });
}

}  // namespace sparse_bitnet
