// SPDX-License-Identifier: Apache-2.0
// aarch64 with matrix products of bytes: usmmla takes eight columns of two rows, unsigned, with those of two
// tokens, signed, to 2 x 2 sums: twice the products of sdot. Few tokens are as in matmul_neon.cpp.

#if defined(__aarch64__)

#include <arm_neon.h>

#include "matmul_kernels.h"

namespace sparse_bitnet {
namespace i8mm_matmul {

#if defined(__clang__)
#define TARGET __attribute__((target("dotprod,i8mm")))
#else
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
#endif
#define VECTOR_BYTES 16
#define PAIRED_TILES
#include "matmul_vectors-inl.h"
#include "matmul_neon-inl.h"

constexpr int tile_vectors = 4, tile_tokens = 6;
constexpr std::int64_t tile_from[weight_formats] = {16, 8, 16, 8, 8};

// Lanes 2 i + j: plus the products of row i and token j.
INLINE Sums dot_pairs(Sums sums, const Bytes& rows, const Bytes& tokens) {
  __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(rows), "w"(tokens));
  return sums;
}

#include "matmul-inl.h"

}  // namespace i8mm_matmul

const MatmulKernels matmul_i8mm = i8mm_matmul::kernels_on<NoUnit>(0);

}  // namespace sparse_bitnet

#endif
