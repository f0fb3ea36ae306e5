// SPDX-License-Identifier: Apache-2.0
#include "platform.h"

#if defined(_WIN32)
#define NOMINMAX
#include <windows.h>
#include <io.h>
#else
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#endif

#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>

namespace sparse_bitnet {
namespace {

std::atomic<int> forks{0};

#if defined(_WIN32)

void* take_pages(std::size_t size) {
  return VirtualAlloc(nullptr, size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

void give_pages(void* pages, std::size_t) { VirtualFree(pages, 0, MEM_RELEASE); }

// At most `size` bytes of a file; 0 or less where there are none.
std::int64_t read_at(int descriptor, std::int64_t offset, std::int64_t size, std::uint8_t* buffer) {
  OVERLAPPED place = {};
  place.Offset = DWORD(offset);
  place.OffsetHigh = DWORD(offset >> 32);
  const DWORD most = DWORD(size < (1 << 30) ? size : (1 << 30));
  DWORD count = 0;
  const auto file = reinterpret_cast<HANDLE>(_get_osfhandle(descriptor));
  return ReadFile(file, buffer, most, &count, &place) ? std::int64_t(count) : -1;
}

#else

// From the start on: threads of other runtimes, as of OpenMP, may be older than the first question.
[[maybe_unused]] const int counts_forks = pthread_atfork(nullptr, nullptr, [] { ++forks; });

void* take_pages(std::size_t size) {
  void* pages = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return pages == MAP_FAILED ? nullptr : pages;
}

void give_pages(void* pages, std::size_t size) { munmap(pages, size); }

std::int64_t read_at(int descriptor, std::int64_t offset, std::int64_t size, std::uint8_t* buffer) {
  for (;;) {
    const auto count = pread(descriptor, buffer, std::size_t(size), off_t(offset));
    if (count >= 0 || errno != EINTR) return count;
  }
}

#endif

}  // namespace

void ask_for_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] std::size_t size) {
#if defined(MADV_HUGEPAGE)
  static_cast<void>(madvise(memory, size, MADV_HUGEPAGE));
#endif
}

HugeBuffer::HugeBuffer(std::int64_t size) : size_(size) {
  // One huge page more, so that an aligned start is in it; a whole number of them, so that the last
  // bytes are in a huge page too.
  if (size < 0 || size > std::numeric_limits<std::int64_t>::max() - 2 * huge_page_bytes) {
    throw std::bad_alloc();
  }
  const std::int64_t whole = (size + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes;
  mapped_size_ = whole + huge_page_bytes;
  mapped_ = take_pages(std::size_t(mapped_size_));
  if (mapped_ == nullptr) throw std::bad_alloc();
  const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(mapped_);
  data_ = reinterpret_cast<std::uint8_t*>((start + huge_page_bytes - 1) / huge_page_bytes *
                                          huge_page_bytes);
  ask_for_huge_pages(data_, std::size_t(whole));
}

HugeBuffer::~HugeBuffer() { give_pages(mapped_, std::size_t(mapped_size_)); }

bool ByteSource::read(std::int64_t first, std::int64_t size, std::uint8_t* buffer) const {
  if (data != nullptr) {
    std::memcpy(buffer, data + first, std::size_t(size));
    return true;
  }
  for (std::int64_t done = 0; done < size;) {
    const std::int64_t count = read_at(descriptor, offset + first + done, size - done, buffer + done);
    if (count <= 0) return false;
    done += count;
  }
  return true;
}

int fork_count() { return forks.load(std::memory_order_relaxed); }

OpenmpParallel find_openmp() {
#if defined(_WIN32)
  return nullptr;
#else
  return reinterpret_cast<OpenmpParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
#endif
}

const char* amx_refusal() {
#if defined(SPARSE_BITNET_AMX)
  static const char* const refusal = [] {
    unsigned a, b, c, d = 0;
    constexpr unsigned tiles_and_int8 = 3u << 24;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & tiles_and_int8) != tiles_and_int8) {
      return "this processor has no int8 matrix tiles";
    }
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0
               ? ""
               : "the system refuses this process the state of matrix tiles";
  }();
  return refusal;
#else
  return "this build has no kernels for matrix tiles";
#endif
}

#if defined(__x86_64__)

// By CPUID: __builtin_cpu_supports is a function of a library that compilers for Windows do not link.
struct Cpuid {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Cpuid(unsigned leaf, unsigned subleaf) { __get_cpuid_count(leaf, subleaf, &a, &b, &c, &d); }
};

// Whether the system keeps all of these registers for each thread: bits of XCR0.
static bool system_keeps(unsigned states) {
  constexpr unsigned has_xgetbv = 1u << 27;
  if (!(Cpuid(1, 0).c & has_xgetbv)) return false;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & states) == states;
}

constexpr unsigned authentic_amd = 0x68747541;  // the first four letters
bool is_amd = Cpuid(0, 0).b == authentic_amd;

bool cpu_has_avx2() {
  constexpr unsigned pclmul = 1u << 1, fma = 1u << 12, sse4 = 3u << 19, popcnt = 1u << 23, avx = 1u << 28,
                     f16c = 1u << 29, first = pclmul | fma | sse4 | popcnt | avx | f16c;
  constexpr unsigned bmi1 = 1u << 3, avx2 = 1u << 5, bmi2 = 1u << 8, seventh = bmi1 | avx2 | bmi2;
  return system_keeps(0x6) && (Cpuid(1, 0).c & first) == first && (Cpuid(7, 0).b & seventh) == seventh;
}

bool cpu_has_avxvnni() { return cpu_has_avx2() && (Cpuid(7, 1).a & 1u << 4); }

bool cpu_has_avx512() {
  constexpr unsigned f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31, all = f | dq | bw | vl;
  return system_keeps(0xe6) && cpu_has_avx2() && (Cpuid(7, 0).b & all) == all;
}

bool cpu_has_avx512vnni() { return cpu_has_avx512() && (Cpuid(7, 0).c & 1u << 11); }

bool cpu_has_avx512vbmi() { return cpu_has_avx512vnni() && (Cpuid(7, 0).c & 1u << 1); }

bool cpu_has_amx_int8() { return cpu_has_avx512vbmi() && *amx_refusal() == 0; }

#else
bool is_amd = false;
#endif

#if defined(__aarch64__)
bool cpu_has_dotprod() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & (1 << 20);  // HWCAP_ASIMDDP
#elif defined(_WIN32)
  return IsProcessorFeaturePresent(43);  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
#else
  return true;  // every Apple processor
#endif
}

bool cpu_has_i8mm() {
#if defined(__linux__)
  return cpu_has_dotprod() && (getauxval(AT_HWCAP2) & (1 << 13));  // HWCAP2_I8MM
#elif defined(_WIN32)
  return IsProcessorFeaturePresent(66);  // PF_ARM_V82_I8MM_INSTRUCTIONS_AVAILABLE
#else
  int has = 0;
  std::size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, nullptr, 0) == 0 && has;
#endif
}

#endif

}  // namespace sparse_bitnet
