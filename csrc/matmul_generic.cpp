// SPDX-License-Identifier: Apache-2.0
// Any machine, and the oracle of the other instruction sets: rows are unpacked one weight at a time by the
// functions that specify the formats, then multiplied by plain loops.

#include <cstdint>

#include "matmul_kernels.h"

namespace sparse_bitnet {
namespace generic_matmul {

#define TARGET
#include "matmul_edges-inl.h"

static std::int32_t dot(const std::int8_t* a, const std::int8_t* b, std::int64_t count) {
  std::int32_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += std::int32_t(a[i]) * b[i];
  return sum;
}

// Groups of `group` columns with `scales`, those of x besides where it has some, onto `sum`.
static float group_dots(const std::int8_t* weights, const float* scales, const std::int8_t* codes,
                        const std::int8_t* fine, const float* activation_scales, std::int64_t count,
                        std::int64_t group, float sum) {
  for (std::int64_t g = 0; g * group < count; ++g) {
    const std::int64_t c = g * group, left = count - c < group ? count - c : group;
    float value = float(dot(weights + c, codes + c, left));
    if (fine) value += float(dot(weights + c, fine + c, left)) * (1.0f / 128.0f);
    value *= scales[g];
    sum += activation_scales ? value * activation_scales[g] : value;
  }
  return sum;
}

static PieceSums multiply(const Activations& x, const std::int32_t*, const Matrix& matrix, std::int64_t begin,
                          std::int64_t end, std::int32_t* dots, MatmulScratch& scratch) {
  std::int8_t* weights = reinterpret_cast<std::int8_t*>(scratch.tile);
  float* sums = reinterpret_cast<float*>(dots);
  const bool int4 = matrix.format == WeightFormat::int4;
  const bool fine = x.fine && matrix.format == WeightFormat::int8;
  const std::int64_t group = matrix.summed_group(), groups = group ? packed::divide_up(matrix.columns, group) : 0;
  const std::int64_t step = sums_apart(begin, end), block = column_block(matrix.format, group, matrix.pattern);
  __builtin_memset(dots, 0, x.tokens * step * (fine ? 2 : 1) * sizeof(std::int32_t));
  for (std::int64_t r = begin; r < end; ++r) {
    for (std::int64_t c = 0; c < matrix.columns; c += block) {
      const std::int64_t count = matrix.columns - c < block ? matrix.columns - c : block;
      for (std::int64_t i = 0; i < count; ++i) weights[i] = std::int8_t(matrix.code(r, c + i));
      const float* scales = nullptr;
      float row_scales[max_groups_a_block];
      if (int4) {
        scales = matrix.scales + r * groups + c / group;
      } else if (group) {
        for (std::int64_t g = 0; g < count / group; ++g) row_scales[g] = matrix.group_scale(r, c / group + g);
        scales = row_scales;
      }
      for (std::int64_t t = 0; t < x.tokens; ++t) {
        const std::int8_t* codes = x.codes + t * x.stride + c;
        const std::int8_t* finer = x.fine ? x.fine + t * x.stride + c : nullptr;
        if (group) {
          const float* activation_scales = x.group ? x.scales + t * groups + c / group : nullptr;
          float& sum = sums[t * step + r - begin];
          sum = group_dots(weights, scales, codes, int4 ? finer : nullptr, activation_scales, count, group, sum);
        } else if (fine) {
          dots[2 * t * step + r - begin] += dot(weights, codes, count);
          dots[(2 * t + 1) * step + r - begin] += dot(weights, finer, count);
        } else {
          dots[t * step + r - begin] += dot(weights, codes, count);
        }
      }
    }
  }
  return {dots, step, 0};
}

}  // namespace generic_matmul

const MatmulKernels matmul_generic = {generic_matmul::quantize_token, nullptr,
                                      generic_matmul::multiply, generic_matmul::finish_token, nullptr, 0,
                                      nullptr};

}  // namespace sparse_bitnet
