// SPDX-License-Identifier: Apache-2.0
// The inner functions behind matmul.h: what one instruction set provides. matmul.cpp adds the threads and
// the memory.

#pragma once

#include <algorithm>
#include <cstdint>

#include "matmul.h"
#include "matrix_unit.h"

namespace sparse_bitnet {

// Tokens that `multiply` takes at a time, and rows of a piece that it is given at most: on a unit, and for many tokens.
constexpr std::int64_t max_tokens_a_call = 512;
constexpr std::int64_t max_rows_a_call = 128, max_rows_without_unit = 64;
// More rows for few tokens, and of ternary weights for some, so that the streams of memory are long (matmul_rows-inl.h).
constexpr std::int64_t max_few_tokens = 3, max_rows_of_few = 1024, max_some_tokens = 23, max_rows_of_some = 256;
// From the sums of a token to those of the next one where rows [begin, end) are a piece and no unit multiplies. Sums of
// the whole last strip or tile are written.
constexpr std::int64_t sums_apart(std::int64_t begin, std::int64_t end) {
  return std::max(packed::round_up(end - begin, b3_strips::rows), max_rows_a_call);
}
constexpr std::int64_t max_summed_tokens = 8;  // whose sums of b3_strips are looked up, not multiplied
// Whether a matrix unit multiplies it: a step is 64 columns.
inline bool is_for_unit(const Matrix& matrix) { return matrix.format != WeightFormat::int4 && matrix.group % 64 == 0; }
// If a call's activations exceed so many bytes of the L2 cache, a unit multiplies up to max_unit_rows rows of a product
// at a time, and half as many tokens of a gate and what it gates.
constexpr std::int64_t max_unit_activations = std::int64_t(1) << 20, max_unit_rows = 4 * max_rows_a_call;
constexpr std::int64_t max_dots = max_tokens_a_call * max_unit_rows;
// Of each of two products, with `fine`.
static_assert(2 * max_rows_a_call * max_tokens_a_call <= max_dots / 2);
static_assert(2 * max_few_tokens * max_rows_of_few <= max_dots / 2 && max_some_tokens * max_rows_of_some <= max_dots / 2);
// An output of more floats than this would take the place of activations in the L2 cache: it is written past it.
constexpr std::int64_t min_streamed = std::int64_t(1) << 18;

// Columns unpacked at a time, whole blocks of the format: a tile of 32 rows, and the activations of the
// tokens that it meets, then fit into the L1 cache. A unit's activations only pass through it.
constexpr std::int64_t max_column_block = 512, unit_column_block = 768;
constexpr std::int64_t column_block(WeightFormat format, std::int64_t group, packed::Pattern pattern) {
  if (format == WeightFormat::b3_strips && group == 0) return 20 * b3_strips::segment_columns;
  if (format != WeightFormat::lookup || lookup::shape_of(pattern).neighbours()) return max_column_block;
  return group ? 768 : 3 * lookup::triples.block_columns();  // multiples of three groups
}
constexpr std::int64_t group_rows = 8;  // whose group sums are taken together
constexpr std::int64_t max_groups_a_block = max_column_block / 32;
static_assert(unit_column_block / 64 <= max_groups_a_block && unit_column_block % b3_strips::segment_columns == 0);

// The same where weights are unpacked to 16 bits: all rows of a piece at once, for these tokens.
constexpr std::int64_t wide_column_block = 256;
constexpr std::int64_t max_wide_tokens = 4;

// Memory of one thread, of any content: weights unpacked to tiles, their scales where they are int4,
// activations in 16 bits, sums, and a token's rows of two products, one of which gates the other.
struct MatmulScratch {
  alignas(64) std::uint8_t tile[max_rows_a_call * wide_column_block * 2];
  alignas(64) float scales[max_unit_rows * max_groups_a_block];
  alignas(64) std::int16_t activations[max_wide_tokens * wide_column_block];
  alignas(64) std::int32_t dots[max_dots];
  alignas(64) std::int32_t group_dots[3][unit_side * unit_side];
  alignas(64) float rows[2][max_rows_of_few];
};
static_assert(sizeof MatmulScratch::tile >= unit_side * unit_column_block);

// The sums of a piece, [rows / block, max_tokens_a_call, codes and fine, block]: integers that are `offset` times the
// sum of the activations too high, or floats where groups are scaled. int8 with `fine` has two of them, of which only
// 128 times the first plus the second means something: kernels may split the sum as they like.
struct PieceSums {
  const std::int32_t* dots;
  std::int64_t block;
  std::int32_t offset;
};

// b3_strips times few tokens (matmul_sums-inl.h).
struct SumKernels {
  std::int64_t table_bytes;  // of a code
  // Writes the tables of a part (b3_strips.h): [codes of a part, table_bytes].
  void (*sum_tables)(const std::int8_t* codes, std::int64_t part, std::uint8_t* tables);
  // sums [tokens, sums_apart] of rows [begin, end), begin being the first of a strip; without group scales integers.
  void (*sum_strips)(const Matrix& matrix, std::int64_t begin, std::int64_t end, const Activations& x, float* sums);
};
extern const SumKernels matmul_sums_avx2, matmul_sums_avx512;

// One thread each. `x` holds at most max_tokens_a_call tokens.
struct MatmulKernels {
  // x [columns] -> codes and fine (or null) [stride], zeros behind `columns`; *scale, *sum, *fine_sum.
  void (*quantize_token)(const float* x, std::int64_t columns, std::int64_t stride,
                         std::int8_t* codes, std::int8_t* fine, float* scale, std::int32_t* sum,
                         std::int32_t* fine_sum);

  // codes [groups, group] -> sums [groups].
  void (*sum_groups)(const std::int8_t* codes, std::int64_t groups, std::int64_t group, std::int32_t* sums);

  // The sums of rows [begin, end), begin the first row of a strip. Maximum of end - begin: max_rows_a_call; for few
  // tokens max_rows_of_few; for some, with ternary weights, max_rows_of_some; on a unit max_unit_rows, or half with
  // `fine`. The sums lie in `dots`: half of scratch.dots, or all of it for more than max_rows_a_call on a unit.
  // group_sums, where the matrix has a summed_group and no unit multiplies: sum_groups of each token's codes, then, for
  // int4, of its fine.
  PieceSums (*multiply)(const Activations& x, const std::int32_t* group_sums, const Matrix& matrix, std::int64_t begin,
                        std::int64_t end, std::int32_t* dots, MatmulScratch& scratch);

  // The sums of token t -> y [end - begin], past the caches where it `streams`.
  void (*finish_token)(const Activations& x, std::int64_t t, const Product& product, std::int64_t begin,
                       std::int64_t end, const PieceSums& sums, float* y, bool streams);

  // y = activation(pair[0]) * pair[1] of rows [begin, end); null without a unit. Neither has groups, strips, a bias or
  // `fine`. `y` is that of row `begin`; past the caches if it `streams`.
  void (*multiply_gated)(const Activations& x, const Product* pair, std::int64_t begin, std::int64_t end, float* y,
                         bool streams, MatmulScratch& scratch);

  // From this many tokens on a matrix unit multiplies; 0: there is none.
  std::int64_t tiles_from;

  const SumKernels* sums;  // null: b3_strips are multiplied like other formats
};

extern const MatmulKernels matmul_generic, matmul_avx2, matmul_avxvnni, matmul_avx512vnni, matmul_avx512vbmi,
    matmul_amx_int8, matmul_neon, matmul_i8mm, matmul_emulated_unit;

}  // namespace sparse_bitnet
