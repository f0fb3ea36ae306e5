// SPDX-License-Identifier: Apache-2.0
#include "repack.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "checksum.h"
#include "nm_enum.h"
#include "packed_rows.h"

namespace sparse_bitnet {
namespace {

// Stored bytes that one thread takes at a time: they stay in its cache between checksum and decoding.
constexpr std::int64_t piece_bytes = 1 << 17;

// What a thread writes to: the bytes of a piece, with the slack that nm-enum wants, and the digits of a
// row.
struct Scratch {
  std::vector<std::uint8_t> piece, digits;
};

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
        stored_bytes_(stored_row_bytes(stored.format, stored.pattern, stored.columns)),
        row_bytes_(Matrix::bytes_per_row(out.format, stored.pattern, stored.columns)),
        limit_(stored.pattern) {
    if (stored.format == StoredFormat::nm_enum) {
      enum_decoder_ = std::make_unique<EnumDecoder>(stored.pattern, stored.columns);
    }
  }

  Repacked run(ThreadPool& pool) {
    const std::int64_t piece_rows = std::max<std::int64_t>(1, piece_bytes / stored_bytes_);
    const std::int64_t pieces = packed::divide_up(stored_.rows, piece_rows);
    std::vector<Repacked> results(std::size_t(pieces), Repacked{0, true, nullptr});
    std::vector<Scratch> scratch(std::size_t(pool.threads()));
    for (Scratch& one : scratch) {
      // Encoders read padding, and decoders of whole blocks may leave some of it as it is.
      one.digits.assign(std::size_t(digits_size(stored_.columns)), 1);
      one.piece.resize(std::size_t(piece_rows * stored_bytes_ + EnumDecoder::slack));
    }
    pool.parallel_for(stored_.rows, piece_rows,
                      [&](std::int64_t begin, std::int64_t end, int thread) {
                        results[std::size_t(begin / piece_rows)] =
                            rows(begin, end, scratch[std::size_t(thread)]);
                      });
    Repacked all = results[0];
    for (std::int64_t i = 1; i < pieces; ++i) {
      const std::int64_t count = std::min(piece_rows, stored_.rows - i * piece_rows);
      const Repacked& piece = results[std::size_t(i)];
      all.crc32 = crc32_joined(all.crc32, piece.crc32, count * stored_bytes_);
      all.is_readable &= piece.is_readable;
      if (all.damage == nullptr) all.damage = piece.damage;
    }
    return all;
  }

 private:
  Repacked rows(std::int64_t begin, std::int64_t end, Scratch& scratch) const {
    const std::int64_t bytes = (end - begin) * stored_bytes_;
    const std::uint8_t* first = scratch.piece.data();
    if (!stored_.bytes.read(begin * stored_bytes_, bytes, scratch.piece.data())) {
      return {0, false, nullptr};
    }
    Repacked result = {crc32(first, bytes), true, nullptr};
    for (std::int64_t i = begin; i < end; ++i) {
      const char* damage = row(first + (i - begin) * stored_bytes_, i, scratch.digits.data());
      if (result.damage == nullptr) result.damage = damage;
    }
    return result;
  }

  const char* row(const std::uint8_t* from, std::int64_t index, std::uint8_t* digits) const {
    auto* to = const_cast<std::uint8_t*>(out_.data) + index * out_.row_stride;
    if (is_same_) std::memcpy(to, from, std::size_t(row_bytes_));
    if (is_same_ && out_.format == WeightFormat::nm_bitmap) {
      return check_nm_bitmap(limit_, from, stored_.columns);
    }
    if (is_same_ && limit_.pattern().m == 1) {
      return decode(from, nullptr);
    }
    const char* damage = decode(from, digits);
    if (damage != nullptr) return damage;
    if (out_.in_strips()) {
      encode_strip_row(digits, stored_.columns, to - index % strip_rows * (out_.row_stride - 4));
    } else if (!is_same_) {
      encode(digits, to);
    }
    return nullptr;
  }

  const char* decode(const std::uint8_t* from, std::uint8_t* digits) const {
    const std::int64_t columns = stored_.columns;
    const char* damage = nullptr;
    switch (stored_.format) {
      case StoredFormat::nm_enum:
        return enum_decoder_->decode(from, digits);
      case StoredFormat::nm_bitmap:
        damage = check_nm_bitmap(limit_, from, columns);
        decode_nm_bitmap(stored_.pattern, from, columns, digits);
        return damage;
      case StoredFormat::i2:
        damage = decode_i2(from, columns, digits);
        break;
      case StoredFormat::b3:
        damage = decode_b3(from, columns, digits);
        break;
      case StoredFormat::codes:
        damage = decode_codes(from, columns, digits);
        break;
    }
    return damage || limit_.pattern().m == 1 ? damage : check_groups(limit_, digits, columns);
  }

  void encode(const std::uint8_t* digits, std::uint8_t* to) const {
    if (out_.format == WeightFormat::i2) encode_i2(digits, stored_.columns, to);
    if (out_.format == WeightFormat::b3) encode_b3(digits, stored_.columns, to);
    if (out_.format == WeightFormat::nm_bitmap) {
      encode_nm_bitmap(stored_.pattern, digits, stored_.columns, to);
    }
  }

  const StoredMatrix stored_;
  const Matrix out_;
  const bool is_same_;  // rows lie as they are stored
  const std::int64_t stored_bytes_, row_bytes_;
  const GroupLimit limit_;
  std::unique_ptr<EnumDecoder> enum_decoder_;
};

}  // namespace

std::int64_t stored_row_bytes(StoredFormat format, packed::Pattern pattern, std::int64_t columns) {
  switch (format) {
    case StoredFormat::i2:
      return packed::i2_row_bytes(columns);
    case StoredFormat::b3:
      return packed::b3_row_bytes(columns);
    case StoredFormat::nm_bitmap:
      return packed::nm_bitmap_row_bytes(pattern, columns);
    case StoredFormat::nm_enum:
      return packed::nm_enum_row_bytes(pattern, columns);
    case StoredFormat::codes:
      return columns;
  }
  return 0;
}

Repacked repack(ThreadPool& pool, const StoredMatrix& stored, const Matrix& out) {
  return Repacking(stored, out).run(pool);
}

}  // namespace sparse_bitnet
