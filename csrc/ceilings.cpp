#include "ceilings.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

namespace sparse_bitnet {
namespace {

constexpr std::int64_t huge_page = 2 << 20;
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

// Reads [data, data + bytes), bytes a multiple of 1024, as four walks through its quarters at once:
// memory with several banks gives more to several streams.
using ReadPiece = void (*)(const std::uint8_t* data, std::int64_t bytes, int prefetch_bytes);

// `count` rounds of multiply-adds; ops_a_round operations each.
struct Loop {
  void (*run)(std::int64_t count);
  std::int64_t ops_a_round;
};

constexpr int streams = 4;

void read_generic(const std::uint8_t* data, std::int64_t bytes, int prefetch_bytes) {
  const std::int64_t quarter = bytes / streams;
  std::uint64_t sums[8] = {};
  for (std::int64_t i = 0; i < quarter; i += 64) {
    for (int s = 0; s < streams; ++s) {
      const std::uint8_t* at = data + s * quarter + i;
      if (prefetch_bytes) __builtin_prefetch(at + prefetch_bytes);
      std::uint64_t line[8];
      std::memcpy(line, at, sizeof line);
      for (int j = 0; j < 8; ++j) sums[j] ^= line[j];
    }
  }
  keep(sums, sizeof sums);
}

constexpr int generic_lanes = 256;

void int8_generic(std::int64_t count) {
  std::int8_t a[generic_lanes], b[generic_lanes];
  for (int i = 0; i < generic_lanes; ++i) a[i] = std::int8_t(i), b[i] = std::int8_t(3 * i);
  std::int32_t sum = 0;
  for (std::int64_t n = 0; n < count; ++n) {
    __asm__ volatile("" : : "r"(a), "r"(b) : "memory");
    for (int i = 0; i < generic_lanes; ++i) sum += std::int32_t(a[i]) * b[i];
  }
  keep(&sum, sizeof sum);
}

void float32_generic(std::int64_t count) {
  float sums[64];
  for (int i = 0; i < 64; ++i) sums[i] = float(i);
  float factor = 0.5f;
  for (std::int64_t n = 0; n < count; ++n) {
    __asm__ volatile("" : "+m"(factor));
    for (int i = 0; i < 64; ++i) sums[i] = sums[i] * factor + 1.0f;
  }
  keep(sums, sizeof sums);
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

#if defined(__x86_64__)

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

AVX2 void read_avx2(const std::uint8_t* data, std::int64_t bytes, int prefetch_bytes) {
  const std::int64_t quarter = bytes / streams;
  __m256i sums[streams] = {};
  for (std::int64_t i = 0; i < quarter; i += 64) {
#pragma GCC unroll 4
    for (int s = 0; s < streams; ++s) {
      const std::uint8_t* at = data + s * quarter + i;
      if (prefetch_bytes) _mm_prefetch(reinterpret_cast<const char*>(at + prefetch_bytes), _MM_HINT_T0);
      sums[s] = _mm256_xor_si256(sums[s], _mm256_load_si256(reinterpret_cast<const __m256i*>(at)));
      sums[s] = _mm256_xor_si256(sums[s], _mm256_load_si256(reinterpret_cast<const __m256i*>(at + 32)));
    }
  }
  KEEP(sums);
}

AVX512 void read_avx512(const std::uint8_t* data, std::int64_t bytes, int prefetch_bytes) {
  const std::int64_t quarter = bytes / streams;
  __m512i sums[streams] = {};
  for (std::int64_t i = 0; i < quarter; i += 64) {
#pragma GCC unroll 4
    for (int s = 0; s < streams; ++s) {
      const std::uint8_t* at = data + s * quarter + i;
      if (prefetch_bytes) _mm_prefetch(reinterpret_cast<const char*>(at + prefetch_bytes), _MM_HINT_T0);
      sums[s] = _mm512_xor_si512(sums[s], _mm512_load_si512(at));
    }
  }
  KEEP(sums);
}

AVX512 void int8_avx512vnni(std::int64_t count) {
  __m512i sums[sums_per_loop] = {}, a = _mm512_set1_epi8(1), b = _mm512_set1_epi8(3);
  for (std::int64_t n = 0; n < count; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < sums_per_loop; ++i) {
      OPAQUE(sums[i]);
      sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
    }
  }
  KEEP(sums);
}

AVX512 void float32_avx512(std::int64_t count) {
  __m512 sums[sums_per_loop] = {}, a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
  for (std::int64_t n = 0; n < count; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < sums_per_loop; ++i) {
      OPAQUE(sums[i]);
      sums[i] = _mm512_fmadd_ps(sums[i], a, b);
    }
  }
  KEEP(sums);
}

AVX2 void int8_avx2(std::int64_t count) {
  __m256i sums[sums_per_loop] = {}, a = _mm256_set1_epi8(1), b = _mm256_set1_epi8(3);
  for (std::int64_t n = 0; n < count; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < sums_per_loop; ++i) {
      OPAQUE(a);
      OPAQUE(sums[i]);
      sums[i] = _mm256_add_epi16(sums[i], _mm256_maddubs_epi16(a, b));
    }
  }
  KEEP(sums);
}

AVX2 void float32_avx2(std::int64_t count) {
  __m256 sums[sums_per_loop] = {}, a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
  for (std::int64_t n = 0; n < count; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < sums_per_loop; ++i) {
      OPAQUE(sums[i]);
      sums[i] = _mm256_fmadd_ps(sums[i], a, b);
    }
  }
  KEEP(sums);
}

bool has_avx512vnni() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

#elif defined(__aarch64__)

#if defined(__clang__)
#define DOTPROD __attribute__((target("dotprod")))
#else
#define DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))
#endif

DOTPROD void int8_neon(std::int64_t count) {
  int32x4_t sums[sums_per_loop] = {};
  const int8x16_t a = vdupq_n_s8(1), b = vdupq_n_s8(3);
  for (std::int64_t n = 0; n < count; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < sums_per_loop; ++i) {
      // Some compilers declare vdotq_s32 only where the whole file is compiled for it.
      __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(sums[i]) : "w"(a), "w"(b));
    }
  }
  KEEP(sums);
}

void float32_neon(std::int64_t count) {
  float32x4_t sums[sums_per_loop] = {};
  const float32x4_t a = vdupq_n_f32(0.5f), b = vdupq_n_f32(0.25f);
  for (std::int64_t n = 0; n < count; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < sums_per_loop; ++i) {
      OPAQUE(sums[i]);
      sums[i] = vfmaq_f32(b, sums[i], a);
    }
  }
  KEEP(sums);
}

bool has_dotprod() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & (1 << 20);  // HWCAP_ASIMDDP
#else
  return true;  // every Apple processor
#endif
}

#endif

ReadPiece widest_read() {
#if defined(__x86_64__)
  if (has_avx512vnni()) return read_avx512;
  if (has_avx2()) return read_avx2;
#endif
  return read_generic;
}

struct Loops {
  Loop int8, float32;
};

Loops loops_of(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512vnni" && has_avx512vnni()) {
    return {{int8_avx512vnni, sums_per_loop * 64 * 2}, {float32_avx512, sums_per_loop * 16 * 2}};
  }
  if (isa == "avx2" && has_avx2()) {
    return {{int8_avx2, sums_per_loop * 32 * 2}, {float32_avx2, sums_per_loop * 8 * 2}};
  }
#elif defined(__aarch64__)
  if (isa == "neon" && has_dotprod()) {
    return {{int8_neon, sums_per_loop * 16 * 2}, {float32_neon, sums_per_loop * 4 * 2}};
  }
#endif
  if (isa == "generic") return {{int8_generic, generic_lanes * 2}, {float32_generic, 64 * 2}};
  throw std::invalid_argument("no ceiling is known for instruction set " + isa + " on this machine");
}

double rate(ThreadPool& pool, const Loop& loop, double seconds) {
  // A piece is about 50 us at the speed that a first one shows, so that no thread ends much later.
  std::int64_t rounds = 1 << 12;
  const auto probe = Clock::now();
  loop.run(rounds);
  rounds = std::int64_t(rounds * 50e-6 / (seconds_since(probe) + 1e-9)) + 1;
  const std::int64_t pieces = std::int64_t(seconds / 50e-6 * pool.threads()) + pool.threads();
  const auto start = Clock::now();
  pool.parallel_for(pieces, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t piece = begin; piece < end; ++piece) loop.run(rounds);
  });
  return double(pieces) * double(rounds) * double(loop.ops_a_round) / seconds_since(start);
}

}  // namespace

ReadBuffer::ReadBuffer(ThreadPool& pool, std::int64_t bytes)
    : bytes_((bytes + piece_bytes - 1) / piece_bytes * piece_bytes) {
  // Behind the last piece lies what prefetches may touch.
  mapped_ = bytes_ + 2 * huge_page;
#if defined(__linux__)
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  madvise(mapping_, mapped_, MADV_HUGEPAGE);
#else
  mapping_ = std::malloc(mapped_);
  if (!mapping_) throw std::bad_alloc();
#endif
  const auto address = reinterpret_cast<std::uintptr_t>(mapping_);
  data_ = reinterpret_cast<std::uint8_t*>((address + huge_page - 1) / huge_page * huge_page);
  pool.parallel_for(bytes_ / piece_bytes, 1, [&](std::int64_t begin, std::int64_t end, int) {
    std::memset(data_ + begin * piece_bytes, 1, (end - begin) * piece_bytes);
  });
}

ReadBuffer::~ReadBuffer() {
#if defined(__linux__)
  munmap(mapping_, mapped_);
#else
  std::free(mapping_);
#endif
}

double read_rate(ThreadPool& pool, const ReadBuffer& buffer, int prefetch_bytes) {
  const ReadPiece read = widest_read();
  const auto start = Clock::now();
  pool.parallel_for(buffer.bytes() / piece_bytes, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t piece = begin; piece < end; ++piece) {
      read(buffer.data() + piece * piece_bytes, piece_bytes, prefetch_bytes);
    }
  });
  return double(buffer.bytes()) / seconds_since(start);
}

double int8_rate(ThreadPool& pool, const std::string& isa, double seconds) {
  return rate(pool, loops_of(isa).int8, seconds);
}

double float32_rate(ThreadPool& pool, const std::string& isa, double seconds) {
  return rate(pool, loops_of(isa).float32, seconds);
}

}  // namespace sparse_bitnet
