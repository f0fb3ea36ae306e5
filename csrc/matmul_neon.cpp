// SPDX-License-Identifier: Apache-2.0
// aarch64 with the dot product instructions: sdot multiplies signed bytes, four a lane. Codes up to 2
// and nibbles up to 15 are as good signed as unsigned.

#if defined(__aarch64__)

#include <arm_neon.h>

#include "matmul_kernels.h"

namespace sparse_bitnet {
namespace neon_matmul {

#if defined(__clang__)
#define TARGET __attribute__((target("dotprod")))
#else
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#define VECTOR_BYTES 16
#include "matmul_vectors-inl.h"

#include "matmul_neon-inl.h"

constexpr int tile_vectors = 4, tile_tokens = 4;
// Rows are decoded once for tokens_together tokens, so tiles pay off where decoding is dear. Tiles of
// int8 would be unsigned.
constexpr std::int64_t tile_from[weight_formats] = {32, 16, std::int64_t(1) << 62, 16, 16};

#include "matmul-inl.h"

}  // namespace neon_matmul

const MatmulKernels matmul_neon = neon_matmul::kernels_on<NoUnit>(0);

}  // namespace sparse_bitnet

#endif
