// SPDX-License-Identifier: Apache-2.0
// Packed matrices of a file to the layout in which they are multiplied (matmul.h), checked on the way:
// the checksum of the bytes as they are, and whether they are the encoding of a matrix of the pattern.

#pragma once

#include <cstdint>

#include "matmul.h"
#include "packed_format.h"
#include "stored_rows.h"

namespace sparse_bitnet {

// What a file holds: a format of packed_format.h. Those that
// are run as they are have the number of their WeightFormat, others that of none of ternary weights.
enum class StoredFormat : int { i2 = 0, b3 = 1, nm_enum = 2, nm_sign = 3 };

struct StoredMatrix {
  StoredFormat format;
  packed::Pattern pattern;     // exact where the format is nm_sign
  std::int64_t rows, columns;  // within the limits of packed_format.h
  ByteSource bytes;            // rows follow each other, bytes_per_row() each, aligned to nothing

  static std::int64_t bytes_per_row(StoredFormat format, packed::Pattern pattern, std::int64_t columns);
};

// Writes the rows of `out`, a matrix of ternary weights; what lies between rows is left alone. A
// damaged matrix is written somehow, within its bounds. Where `out` is the stored bytes themselves, in a mapped
// file, they are checked alone.
Loaded repack(const Kernels& kernels, ThreadPool& pool, const StoredMatrix& stored, const Matrix& out);

}  // namespace sparse_bitnet
