// SPDX-License-Identifier: Apache-2.0
// The most that this machine can do, measured: memory read and int8 multiply-add. The engine's speeds are given as
// shares of these.

#pragma once

#include <cstdint>
#include <memory>

#include "platform.h"
#include "thread_pool.h"

namespace sparse_bitnet {

// The loops of one instruction set.
struct RooflineLoops {
  // Reads [data, data + bytes), bytes a multiple of 1024, as one stream, or as eight streams through its eighths:
  // some processors read faster in many streams, others in few (platform.h).
  void (*read)(const std::uint8_t* data, std::int64_t bytes, int streams, int prefetch_bytes);
  // `count` rounds of multiply-adds, each of this many operations.
  void (*int8)(std::int64_t count);
  std::int64_t int8_ops;
};

extern const RooflineLoops roofline_generic, roofline_avx2, roofline_avxvnni, roofline_avx512,
    roofline_avx512vnni, roofline_amx_int8, roofline_neon, roofline_i8mm;

// Memory to be read: `bytes`, rounded up to whole pieces, touched by the pool's threads.
std::unique_ptr<HugeBuffer> make_read_buffer(ThreadPool& pool, std::int64_t bytes);

// Bytes per second of one pass over the buffer, by plain vector loads in 1 stream or 8. Lines are prefetched
// `prefetch_bytes` ahead, at most max_prefetch_bytes (0: by the hardware alone).
constexpr int max_prefetch_bytes = 1 << 16;
double read_rate(const RooflineLoops& loops, ThreadPool& pool, const HugeBuffer& buffer, int streams,
                 int prefetch_bytes);

// Operations a second, a multiply-add counting as two, of a loop that keeps everything in registers
// and runs about `seconds`.
//   int8: amx_int8 tdpbssd; avx512vnni and avxvnni vpdpbusd; neon sdot; i8mm usmmla; avx2 and avx512
//         vpmaddubsw with 16-bit additions, the most that a ternary product needs; generic whatever the
//         compiler makes of an int32 sum of products.
double int8_rate(const RooflineLoops& loops, ThreadPool& pool, double seconds);

}  // namespace sparse_bitnet
