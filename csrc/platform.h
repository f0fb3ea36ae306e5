// SPDX-License-Identifier: Apache-2.0
// Everything that depends on the operating system or the processor: huge pages, reading of files,
// forks, the OpenMP runtime, instruction sets.

#pragma once

#include <cstddef>
#include <cstdint>

namespace sparse_bitnet {

constexpr std::int64_t huge_page_bytes = std::int64_t(1) << 21;

// For memory aligned to huge_page_bytes: where the system has no such pages all works, only slower.
void ask_for_huge_pages(void* memory, std::size_t size);

// Zeroed memory for weights and caches, in huge pages where the system has them: streaming from pages of
// 4 KiB costs visibly more, under virtualisation most of all.
class HugeBuffer {
 public:
  // `size` >= 0 zero bytes, aligned to huge_page_bytes. Pages are taken when first written to. Throws
  // std::bad_alloc.
  explicit HugeBuffer(std::int64_t size);
  ~HugeBuffer();
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;

  std::uint8_t* data() const { return data_; }
  std::int64_t size() const { return size_; }

 private:
  std::int64_t size_, mapped_size_;
  void* mapped_;
  std::uint8_t* data_;
};

// Bytes that are read once, a piece at a time: from memory, or from a file by pread. A file is not
// mapped: faults of its pages would cost more than copying them through a buffer that stays in the
// cache, they would count as memory of ours, and a file cut short meanwhile would end the process.
struct ByteSource {
  const std::uint8_t* data;  // or null: then `descriptor`, from `offset` on
  int descriptor;
  std::int64_t offset;

  // Copies `size` bytes from `first` on; returns false if they cannot be read.
  bool read(std::int64_t first, std::int64_t size, std::uint8_t* buffer) const;
};

// Number of forks since the start of the program: an object made at another count belongs to a parent,
// whose threads do not exist here.
int fork_count();

// GCC's entry point of a parallel region, which the runtimes of LLVM and Intel provide as well, of the
// OpenMP runtime in the process; null where there is none.
using OpenmpParallel = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);
OpenmpParallel find_openmp();

// How many rows or strips of weights a thread reads at once for one token, each of them a stream of memory. An Intel Xeon
// reads a fifth to a third more from many streams with prefetches; an AMD EPYC (Zen 4) does from few without, which its own
// prefetchers follow.
struct Streams { int rows, strips; };
constexpr Streams many_streams = {8, 4}, few_streams = {4, 1};
extern bool is_amd;  // tests change it

// Compilers with these headers, and their assemblers, know the instructions.
#if defined(__x86_64__) && defined(__has_include)
#if __has_include(<amxtileintrin.h>) && defined(__linux__)
#define SPARSE_BITNET_AMX
#endif
#if __has_include(<avxvnniintrin.h>)
#define SPARSE_BITNET_AVX_VNNI
#endif
#endif

// Why amx_int8 is not among the instruction sets; "" if it is.
const char* amx_refusal();

// Whether this machine runs the instruction sets of a row of isa.cpp.
#if defined(__x86_64__)
bool cpu_has_avx2();        // with FMA, F16C, BMI1, BMI2, PCLMUL, POPCNT
bool cpu_has_avxvnni();     // besides
bool cpu_has_avx512();      // F, BW, DQ, VL, with cpu_has_avx2
bool cpu_has_avx512vnni();  // besides
bool cpu_has_avx512vbmi();  // besides
bool cpu_has_amx_int8();    // besides, and the system lets this process use it: it is asked once
#elif defined(__aarch64__)
bool cpu_has_dotprod();
bool cpu_has_i8mm();  // besides
#endif

}  // namespace sparse_bitnet
