// SPDX-License-Identifier: Apache-2.0
// Matrix products of the engine: packed or int8 weights times int8 activations, accumulated exactly in
// 32-bit integers. Every instruction set returns the same bits, for every thread and token count.

#pragma once

#include <cstdint>
#include <vector>

#include "b3_strips.h"
#include "isa.h"
#include "lookup.h"
#include "packed_format.h"
#include "thread_pool.h"

namespace sparse_bitnet {

// i2 is the layout of packed_format.h, except that rows lie `row_stride` bytes
// apart, and that with group scales it lies in strips, so that no sum is taken across the lanes of a vector:
// strips of 16 rows follow each other, 16 row_stride bytes apart, the last one filled up with rows of any
// codes. 64 bytes of a strip hold 16 columns c, c + 1, ...: 32-bit word i is of row i, and its byte j holds
// in bits 2p and 2p + 1 weight c + 4p + j, plus one.
// lookup lies as lookup.h says, its strips one behind another and filled up to 16 rows with any codes. b3_strips lies as
// b3_strips.h says.
// int8 and int4 are for the embedding and the output head.
//   int8: one byte a weight, two's complement, float scale [rows]; at most max_int8_columns.
//   int4: groups of 64 weights of a row in 32 bytes; byte j holds weight j of the group in its low and
//         weight j + 32 in its high four bits, each plus 8; float scale [rows, columns / 64].
enum class WeightFormat : int { i2 = 0, b3_strips = 1, int8 = 2, int4 = 3, lookup = 4 };
constexpr int weight_formats = 5;
constexpr bool is_ternary(WeightFormat format) { return format != WeightFormat::int8 && format != WeightFormat::int4; }

// Limit of int8 rows: 32 bits hold the sum of at most 2^17 products of 128 and 127.
constexpr std::int64_t max_int8_columns = std::int64_t(1) << 17;

constexpr int int4_group = 64;
constexpr int strip_rows = 16, strip_columns = 16;  // of 64 bytes

enum class ScaleType : int { float32 = 0, float16 = 1, bfloat16 = 2 };

// The kernels rely on these bytes between rows, data alignment and readable bytes after the last row.
constexpr int matrix_alignment = 64;

// A matrix [rows, columns], ready to be multiplied. `data` is 64-byte aligned, row_stride is a multiple
// of 64 and at least bytes_per_row(), of lookup and of b3_strips those exactly, and at least 64 bytes behind the
// last row are readable; the bytes of a row beyond bytes_per_row() are arbitrary.
struct Matrix {
  WeightFormat format;
  packed::Pattern pattern;  // of lookup
  std::int64_t rows, columns, row_stride;
  const std::uint8_t* data;
  float scale;          // i2, b3_strips: the weight scale, a multiplier
  const float* scales;  // int8 [rows], int4 [rows, columns / 64]; i2, b3_strips [rows], or null: `scale`
  // i2, b3_strips, lookup with a scale for every `group` columns (packed_format.h) in place of both: those of the
  // rows of a strip together, [ceil(rows / rows_of_strip), columns / group, rows_of_strip].
  std::int64_t group = 0;
  ScaleType scale_type = ScaleType::float32;
  const void* group_scales = nullptr;

  // Number of columns whose sum has a scale of its own; 0 if all columns share one.
  std::int64_t summed_group() const { return format == WeightFormat::int4 ? int4_group : group; }
  bool in_strips() const { return group != 0 || format == WeightFormat::b3_strips; }
  std::int64_t rows_of_strip() const { return format == WeightFormat::b3_strips ? b3_strips::rows : strip_rows; }
  // The weight at a place, unscaled; and, where `group` is not 0, the scale of a row's group `index`.
  int code(std::int64_t row, std::int64_t column) const;
  float group_scale(std::int64_t row, std::int64_t index) const;

  static std::int64_t bytes_per_row(WeightFormat format, packed::Pattern pattern,
                                    std::int64_t columns, std::int64_t group = 0);
};

// Activations of `tokens` tokens, quantised per token (method: scale = max(|x|) / 127, round half to
// even). Rows of codes lie `stride` bytes apart, an odd multiple of 64, so that they fall into different sets of a
// cache. Behind `columns` lie zeros, behind the last row 512 readable bytes. `fine` adds the next 7 bits, for the output
// head: x is close to scale * (codes + fine / 128).
struct Activations {
  std::int64_t tokens, columns, stride;
  std::int8_t* codes;   // [tokens, stride]
  std::int8_t* fine;    // [tokens, stride], or null
  float* scales;        // [tokens]
  std::int32_t* sums;   // [tokens], the sum of a token's codes
  std::int32_t* fine_sums;  // [tokens], or null
  // Set by `matmul`: whether a matrix unit multiplies, and for it codes and fine of the last tokens % 16 tokens, with
  // zeros up to sixteen; null if there are none.
  bool on_unit = false;
  const std::int8_t *last_codes = nullptr, *last_fine = nullptr;
  // Columns that share a scale: scales and sums then are [tokens, columns / group], and all products have
  // matrices of that group. 0: all of a token, and `sums` its sum.
  std::int64_t group = 0;
  // For lookup's codes of neighbours, made by `matmul` too: of every 256 codes each fourth one, from the first, second,
  // third and last on, [tokens, quad_stride(columns)], zeros behind `columns`.
  const std::int8_t* quads = nullptr;
  // For b3_strips, made by `matmul` too: [tokens, parts, codes of a part, bytes of a table].
  const std::uint8_t* sum_tables = nullptr;

  std::int64_t scales_a_token() const { return group ? columns / group : 1; }
  Activations range(std::int64_t begin, std::int64_t end) const;  // tokens [begin, end)
};

constexpr std::int64_t activation_stride(std::int64_t columns) { return (packed::divide_up(columns, 64) | 1) * 64; }
constexpr std::int64_t activation_slack = 512;
constexpr std::int64_t quad_stride(std::int64_t columns) {
  return lookup::quads.blocks(columns) * lookup::quads.block_columns();
}

// x [tokens, columns] -> activations (its arrays are the caller's, sizes and strides set), on the calling thread. The
// same bits as ops quantize_int8.
void quantize(const Kernels& kernels, const float* x, const Activations& activations);

// One product of a group that shares its input; the group's rows are shared out over the threads
// together (q, k and v; gate and up).
struct Product {
  const Matrix* matrix;
  const float* bias;           // [rows] or null
  float* y;                    // [tokens, y_stride]
  std::int64_t y_stride;
  // Of the last of a group, whose y is that of the product before: y = activation(y) times this product.
  const Activation* gated_by = nullptr;
};

// What the threads of a pool read in each product of a step: in the next step they fetch the first lines of a product
// while they wait for the one before. If its products are others, only the fetch is wasted.
struct ReadOrder {
  std::vector<ThreadPool::Stretch> stretches;  // [products, threads]
  std::size_t next = 0;                        // the place of the next product
};

// y[t, r] = float(sum over c of code[r, c] * x_code[t, c]) * (activation_scale[t] * scale) + bias[r], each
// operation rounded to float32 in that order (so PyTorch's reference has the same bits).
// int8: the same with scale = scales[r], and if there is `fine` with
//   float(128 * dot(w, codes) + dot(w, fine)) / 128, rounded once, in place of float(dot).
// int4: sum over groups, in ascending order in float32, of float(dot in the group, as for int8) *
//   scales[r, g], then * activation_scale[t], + bias.
// Scales of rows and groups: as packed_format.h says. All matrices of a call have the same group.
void matmul(const Kernels& kernels, ThreadPool& pool, const Activations& x,
            const Product* products, int count, ReadOrder* order = nullptr);

// How an embedding or head is stored: int8 and int4 as above, floats in rows of `columns`, or ternary as i2
// with group scales, in strips.
enum class TableType : int { int8 = 0, int4 = 1, bfloat16 = 2, float32 = 3, i2 = 4 };

struct Table {
  TableType type;
  std::int64_t rows, columns, row_stride;  // bytes between rows
  const std::uint8_t* data;  // floats may have any alignment
  const float* scales;       // of int8 and int4
  std::int64_t group = 0;    // of i2, as in Matrix
  ScaleType scale_type = ScaleType::float32;
  const void* group_scales = nullptr;

  // The format in which it is multiplied; not for floats.
  Matrix matrix() const;

  static std::int64_t bytes_per_row(TableType type, std::int64_t columns);
};

// out [columns] = a row of a table, dequantised.
void table_row(const Table& table, std::int64_t row, float* out);

// y[t, r] = sum over c of a float table[r, c] * x[t, c] in float32, x [tokens, columns], y [tokens, rows].
// The same bits on every instruction set, for any number of threads.
void matmul_table(const Kernels& kernels, ThreadPool& pool, const float* x, std::int64_t tokens,
                  const Table& table, float* y);

}  // namespace sparse_bitnet
