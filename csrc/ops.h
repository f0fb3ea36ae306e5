// SPDX-License-Identifier: Apache-2.0
// The CPU ops: their inputs and results as bytes in memory.
//
// Everything is a contiguous array given by address and size; nothing is allocated for the caller,
// nothing is kept. The Python references define every result; it is the same bits on every instruction
// set and for every thread count.

#pragma once

#include <cstdint>

#include "isa.h"

namespace sparse_bitnet {

// `absmean` sums blocks of this many weights one by one and adds the sums in the order of the blocks,
// so that its result depends neither on the thread count nor on the instruction set.
constexpr std::int64_t sum_block = 1 << 16;

// Whole operations on up to `threads` threads. n == m is dense: all weights are kept. `codes` may be
// null: the mask alone.
void select_ternary(const Kernels& kernels, const void* weight, Dtype dtype, float weight_scale,
                    std::int64_t groups, int n, int m, std::int8_t* codes, std::uint8_t* mask,
                    int threads);
// mean(|weight|), at least 1e-5.
float absmean(const Kernels& kernels, const void* weight, Dtype dtype, std::int64_t count, int threads);
// Codes and scale, as of a dense matrix, of each of `groups` runs of `size` weights.
void quantize_groups(const Kernels& kernels, const void* weight, Dtype dtype, std::int64_t groups,
                     std::int64_t size, std::int8_t* codes, float* weight_scale, int threads);
void quantize_int8(const Kernels& kernels, const void* x, Dtype dtype, std::int64_t tokens,
                   std::int64_t features, std::int8_t* codes, float* activation_scale, int threads);

}  // namespace sparse_bitnet
