// SPDX-License-Identifier: Apache-2.0
// Repacks a file into the layouts of the kernels (matmul.h), reading it once: packed matrices, checked
// in the same pass (checksum of the stored bytes, and whether they are the encoding of a matrix of the
// pattern), and embedding and output head.

#pragma once

#include <cstdint>

#include "matmul.h"
#include "packed_format.h"
#include "platform.h"

namespace sparse_bitnet {

struct Loaded {
  std::uint32_t crc32;  // of all stored bytes
  bool is_readable;     // whether they could be read
  const char* damage;   // error in the rows, or null
};

// What a file holds: a format of packed_format.h. Of these, only i2 without group scales is also multiplied as it lies.
enum class StoredFormat : int { i2 = 0, b3 = 1, nm_enum = 2, nm_sign = 3 };

struct StoredMatrix {
  StoredFormat format;
  packed::Pattern pattern;     // exact where the format is nm_sign
  std::int64_t rows, columns;  // within the limits of packed_format.h
  ByteSource bytes;            // rows follow each other, bytes_per_row() each, aligned to nothing

  static std::int64_t bytes_per_row(StoredFormat format, packed::Pattern pattern, std::int64_t columns);
};

// Writes the rows of `out`, a matrix of ternary weights; bytes between rows are unchanged. If its pattern is exact, the
// stored groups must have n non-zeros. A damaged matrix gives arbitrary weights, within its bounds. If `out` is the
// stored bytes themselves, in a mapped file, they are only checked.
Loaded repack(ThreadPool& pool, const StoredMatrix& stored, const Matrix& out);

struct StoredTable {
  TableType type;  // not int4
  std::int64_t rows, columns;
  ByteSource bytes;     // rows follow each other; aligned to nothing
  const float* scales;  // [rows] of int8
};

// Writes the rows of `out`: copied where the types are the same, or to int8 (scales [rows], as the op quantize_int8) or
// int4 (scales [rows, columns / 64], columns a multiple of 64; of several scales for a group the one with the least
// squared error). The same bits for every thread count and instruction set.
Loaded load_table(const Kernels& kernels, ThreadPool& pool, const StoredTable& stored, const Table& out);

}  // namespace sparse_bitnet
