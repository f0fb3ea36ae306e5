// SPDX-License-Identifier: Apache-2.0
// Embedding and output head, from the types in which a file has them to those of matmul.h.

#pragma once

#include <cstdint>

#include "matmul.h"
#include "platform.h"
#include "thread_pool.h"

namespace sparse_bitnet {

enum class StoredTable : int { float32 = 0, bfloat16 = 1, int8 = 2 };

constexpr std::int64_t bytes_of(StoredTable type) {
  return type == StoredTable::float32 ? 4 : type == StoredTable::bfloat16 ? 2 : 1;
}

struct TableSource {
  StoredTable type;
  std::int64_t rows, columns;
  ByteSource bytes;     // rows follow each other; aligned to nothing
  const float* scales;  // [rows] of int8
};

struct CopiedTable {
  std::uint32_t crc32;  // of all stored bytes
  bool is_readable;     // whether the bytes could be read
  bool is_finite;       // whether all values are; known where they are quantised
};

// Rows as they are, `row_stride` bytes apart.
CopiedTable copy_table(ThreadPool& pool, const TableSource& table, std::uint8_t* out,
                       std::int64_t row_stride);

// To WeightFormat::int8 (scales [rows], as the op quantize_int8) or int4 (scales
// [rows, columns / 64], columns a multiple of 64; of several scales for a group the one with the
// least squared error). The same bits for every thread count and instruction set.
CopiedTable quantize_table(const VectorKernels& kernels, ThreadPool& pool, const TableSource& table,
                           WeightFormat format, std::uint8_t* out, std::int64_t row_stride,
                           float* scales);

}  // namespace sparse_bitnet
