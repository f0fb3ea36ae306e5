// SPDX-License-Identifier: Apache-2.0
// Embedding and output head, from the types in which a file has them to those of matmul.h.

#pragma once

#include <cstdint>

#include "matmul.h"
#include "stored_rows.h"

namespace sparse_bitnet {

struct StoredTable {
  TableType type;  // not int4
  std::int64_t rows, columns;
  ByteSource bytes;     // rows follow each other; aligned to nothing
  const float* scales;  // [rows] of int8
};

// Rows as they are, `row_stride` bytes apart.
Loaded copy_table(const Kernels& kernels, ThreadPool& pool, const StoredTable& table, std::uint8_t* out,
                  std::int64_t row_stride);

// To TableType::int8 (scales [rows], as the op quantize_int8) or int4 (scales
// [rows, columns / 64], columns a multiple of 64; of several scales for a group the one with the
// least squared error). The same bits for every thread count and instruction set.
Loaded quantize_table(const Kernels& kernels, ThreadPool& pool, const StoredTable& table, TableType type,
                      std::uint8_t* out, std::int64_t row_stride, float* scales);

}  // namespace sparse_bitnet
