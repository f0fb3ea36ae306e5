// SPDX-License-Identifier: Apache-2.0
#include "roofline.h"

#include <atomic>
#include <chrono>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "matrix_unit.h"

namespace sparse_bitnet {
namespace {

constexpr std::int64_t piece_bytes = 4 << 20;

// Where loops leave a bit of their results, so that no compiler drops them.
std::atomic<unsigned> sink{0};

void keep(const void* results, std::size_t bytes) {
  unsigned all = 0;
  for (std::size_t i = 0; i < bytes; ++i) all ^= static_cast<const unsigned char*>(results)[i];
  sink.fetch_xor(all, std::memory_order_relaxed);
}

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr int generic_lanes = 256;

void int8_generic(std::int64_t count) {
  std::int8_t a[generic_lanes], b[generic_lanes];
  for (int i = 0; i < generic_lanes; ++i) a[i] = std::int8_t(i), b[i] = std::int8_t(3 * i);
  std::uint32_t sum = 0;  // wraps around
  for (std::int64_t n = 0; n < count; ++n) {
    __asm__ volatile("" : : "r"(a), "r"(b) : "memory");
    for (int i = 0; i < generic_lanes; ++i) sum += std::uint32_t(std::int32_t(a[i]) * b[i]);
  }
  keep(&sum, sizeof sum);
}

// Keeps a value in a register, and the compiler from knowing that two of them are equal.
#if defined(__x86_64__)
#define OPAQUE(value) __asm__("" : "+v"(value))
#elif defined(__aarch64__)
#define OPAQUE(value) __asm__("" : "+w"(value))
#endif

// A copy, because sums whose address is taken would not stay in registers.
#define KEEP(sums)                                                             \
  do {                                                                         \
    unsigned char copy[sizeof sums];                                           \
    _Pragma("GCC unroll 32")                                                   \
    for (unsigned i = 0; i < sizeof sums / sizeof sums[0]; ++i) {              \
      const auto sum = sums[i];                                                \
      __builtin_memcpy(copy + i * sizeof sum, &sum, sizeof sum);               \
    }                                                                          \
    keep(copy, sizeof copy);                                                   \
  } while (0)

// Enough independent sums to cover the latency of two instructions a cycle.
constexpr int sums_per_loop = 12;

// A loop over `sums_per_loop` sums of type Vector, each of which becomes `step` of `sum`, `a` and `b`.
// `a` is opaque too, or what a step computes of `a` and `b` alone would be computed once.
#define LOOP(TARGET, name, Vector, broadcast, step)                       \
  TARGET void name(std::int64_t count) {                                  \
    Vector sums[sums_per_loop] = {};                                      \
    auto a = broadcast(1);                                                \
    const auto b = broadcast(3);                                          \
    for (std::int64_t n = 0; n < count; ++n) {                            \
      _Pragma("GCC unroll 12")                                            \
      for (int i = 0; i < sums_per_loop; ++i) {                           \
        Vector sum = sums[i];                                             \
        OPAQUE(a);                                                        \
        OPAQUE(sum);                                                      \
        sums[i] = step;                                                   \
      }                                                                   \
    }                                                                     \
    KEEP(sums);                                                           \
  }

// RooflineLoops::read with loads of the type Vector.
#define READ(TARGET, name, Vector)                                                                  \
  template <int STREAMS>                                                                            \
  TARGET void name##_streams(const std::uint8_t* data, std::int64_t bytes, int prefetch_bytes) {    \
    const std::int64_t part = bytes / STREAMS;                                                      \
    Vector sums[STREAMS] = {};                                                                      \
    for (std::int64_t i = 0; i < part; i += 64) {                                                   \
      _Pragma("GCC unroll 8")                                                                       \
      for (int s = 0; s < STREAMS; ++s) {                                                           \
        const std::uint8_t* at = data + s * part + i;                                               \
        if (prefetch_bytes) __builtin_prefetch(at + prefetch_bytes);                                \
        _Pragma("GCC unroll 4")                                                                     \
        for (unsigned j = 0; j < 64; j += sizeof(Vector)) {                                         \
          Vector loaded;                                                                            \
          std::memcpy(&loaded, at + j, sizeof loaded);                                              \
          sums[s] ^= loaded;                                                                        \
        }                                                                                           \
      }                                                                                             \
    }                                                                                               \
    KEEP(sums);                                                                                     \
  }                                                                                                 \
  void name(const std::uint8_t* data, std::int64_t bytes, int streams, int prefetch_bytes) {        \
    (streams > 1 ? name##_streams<8> : name##_streams<1>)(data, bytes, prefetch_bytes);             \
  }

typedef std::uint64_t Words __attribute__((vector_size(16)));
READ(, read_generic, Words)

#if defined(__x86_64__)

#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

READ(AVX2, read_avx2, __m256i)
READ(AVX512, read_avx512, __m512i)

LOOP(AVX512, int8_avx512vnni, __m512i, _mm512_set1_epi8, _mm512_dpbusd_epi32(sum, a, b))
LOOP(AVX2, int8_avx2, __m256i, _mm256_set1_epi8, _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b)))
#if defined(SPARSE_BITNET_AVX_VNNI)
#define AVXVNNI __attribute__((target("avx2,avxvnni")))
LOOP(AVXVNNI, int8_avxvnni, __m256i, _mm256_set1_epi8, _mm256_dpbusd_avx_epi32(sum, a, b))
#endif

#if defined(SPARSE_BITNET_AMX)

constexpr std::int64_t amx_ops = 4 * 2 * 16 * 16 * 64;

// The tiles hold no zeros: on zeros a Xeon runs faster than on the operands of a product.
void int8_amx(std::int64_t count) {
  std::int8_t codes[1024];
  for (int i = 0; i < 1024; ++i) codes[i] = std::int8_t(i * 73 | 1);
  AmxUnit unit;
  unit.begin();
  unit.load<4>(codes, 64), unit.load<5>(codes, 64), unit.load<6>(codes, 64), unit.load<7>(codes, 64);
  for (std::int64_t n = 0; n < count; ++n) {
    __asm__ volatile(
        "tdpbssd %tmm6, %tmm4, %tmm0\n\ttdpbssd %tmm7, %tmm4, %tmm1\n\t"
        "tdpbssd %tmm6, %tmm5, %tmm2\n\ttdpbssd %tmm7, %tmm5, %tmm3");
  }
  unit.end();
}

#endif

#elif defined(__aarch64__)

#if defined(__clang__)
#define DOTPROD __attribute__((target("dotprod")))
#define I8MM __attribute__((target("i8mm")))
#else
#define DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))
#define I8MM __attribute__((target("arch=armv8.2-a+i8mm")))
#endif

DOTPROD int32x4_t dot(int32x4_t sum, int8x16_t a, int8x16_t b) {
  // Some compilers declare vdotq_s32 only where the whole file is compiled for it.
  __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b));
  return sum;
}

I8MM int32x4_t dot_pairs(int32x4_t sum, int8x16_t a, int8x16_t b) {
  __asm__("usmmla %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b));
  return sum;
}

LOOP(DOTPROD, int8_neon, int32x4_t, vdupq_n_s8, dot(sum, a, b))
LOOP(I8MM, int8_i8mm, int32x4_t, vdupq_n_s8, dot_pairs(sum, a, b))

#endif

// Operations of a round of LOOP with registers of so many bytes.
constexpr std::int64_t int8_ops(int bytes) { return sums_per_loop * bytes * 2; }

double rate(ThreadPool& pool, void (*run)(std::int64_t), std::int64_t ops, double seconds) {
  // A piece is about 50 us at the speed that a first one shows, so that no thread ends much later.
  std::int64_t rounds = 1 << 12;
  const auto probe = Clock::now();
  run(rounds);
  rounds = std::int64_t(rounds * 50e-6 / (seconds_since(probe) + 1e-9)) + 1;
  const std::int64_t pieces = std::int64_t(seconds / 50e-6 * pool.threads()) + pool.threads();
  const auto start = Clock::now();
  pool.parallel_for(pieces, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t piece = begin; piece < end; ++piece) run(rounds);
  });
  return double(pieces) * double(rounds) * double(ops) / seconds_since(start);
}

}  // namespace

const RooflineLoops roofline_generic = {read_generic, int8_generic, generic_lanes * 2};
#if defined(__x86_64__)
const RooflineLoops roofline_avx2 = {read_avx2, int8_avx2, int8_ops(32)};
#if defined(SPARSE_BITNET_AVX_VNNI)
const RooflineLoops roofline_avxvnni = {read_avx2, int8_avxvnni, int8_ops(32)};
#endif
const RooflineLoops roofline_avx512 = {read_avx512, int8_avx2, int8_ops(32)};
const RooflineLoops roofline_avx512vnni = {read_avx512, int8_avx512vnni, int8_ops(64)};
#if defined(SPARSE_BITNET_AMX)
const RooflineLoops roofline_amx_int8 = {read_avx512, int8_amx, amx_ops};
#endif
#elif defined(__aarch64__)
const RooflineLoops roofline_neon = {read_generic, int8_neon, int8_ops(16)};
const RooflineLoops roofline_i8mm = {read_generic, int8_i8mm, int8_ops(32)};
#endif

std::unique_ptr<HugeBuffer> make_read_buffer(ThreadPool& pool, std::int64_t bytes) {
  const std::int64_t pieces = (bytes + piece_bytes - 1) / piece_bytes;
  // Behind the last piece lies what prefetches may touch.
  auto buffer = std::make_unique<HugeBuffer>(pieces * piece_bytes + max_prefetch_bytes);
  pool.parallel_for(pieces, 1, [&](std::int64_t begin, std::int64_t end, int) {
    std::memset(buffer->data() + begin * piece_bytes, 1, (end - begin) * piece_bytes);
  });
  return buffer;
}

double read_rate(const RooflineLoops& loops, ThreadPool& pool, const HugeBuffer& buffer, int streams,
                 int prefetch_bytes) {
  const std::int64_t pieces = buffer.size() / piece_bytes;
  const auto start = Clock::now();
  pool.parallel_for(pieces, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t piece = begin; piece < end; ++piece) {
      loops.read(buffer.data() + piece * piece_bytes, piece_bytes, streams, prefetch_bytes);
    }
  });
  return double(pieces * piece_bytes) / seconds_since(start);
}

double int8_rate(const RooflineLoops& loops, ThreadPool& pool, double seconds) {
  return rate(pool, loops.int8, loops.int8_ops, seconds);
}

}  // namespace sparse_bitnet
