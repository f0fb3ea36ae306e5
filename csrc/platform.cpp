// SPDX-License-Identifier: Apache-2.0
#include "platform.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#endif

#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <new>

namespace sparse_bitnet {

HugeBuffer::HugeBuffer(std::int64_t size) : size_(size) {
  // One huge page more, so that an aligned start is in it; a whole number of them, so that the last
  // bytes are in a huge page too.
  if (size < 0 || size > std::numeric_limits<std::int64_t>::max() - 2 * huge_page_bytes) {
    throw std::bad_alloc();
  }
  const std::int64_t whole = (size + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes;
  mapped_size_ = whole + huge_page_bytes;
  mapped_ = mmap(nullptr, std::size_t(mapped_size_), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped_ == MAP_FAILED) throw std::bad_alloc();
  const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(mapped_);
  data_ = reinterpret_cast<std::uint8_t*>((start + huge_page_bytes - 1) / huge_page_bytes *
                                          huge_page_bytes);
#if defined(MADV_HUGEPAGE)
  // Without them all works, only slower.
  static_cast<void>(madvise(data_, std::size_t(whole), MADV_HUGEPAGE));
#endif
}

HugeBuffer::~HugeBuffer() { munmap(mapped_, std::size_t(mapped_size_)); }

std::int64_t HugeBuffer::huge_bytes() const {
  std::FILE* maps = std::fopen("/proc/self/smaps", "r");
  if (maps == nullptr) return -1;
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(data_);
  const std::uintptr_t end = begin + std::uintptr_t(size_);
  std::int64_t kibibytes = 0;
  bool is_ours = false;
  char line[512];
  while (std::fgets(line, sizeof line, maps) != nullptr) {
    std::uintptr_t first, last;
    std::int64_t count;
    if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &first, &last) == 2) {
      is_ours = first < end && begin < last;
    } else if (is_ours && std::sscanf(line, "AnonHugePages: %" SCNd64, &count) == 1) {
      kibibytes += count;
    }
  }
  std::fclose(maps);
  return kibibytes * 1024;
}

bool ByteSource::read(std::int64_t first, std::int64_t size, std::uint8_t* buffer) const {
  if (data != nullptr) {
    std::memcpy(buffer, data + first, std::size_t(size));
    return true;
  }
  for (std::int64_t done = 0; done < size;) {
    const auto count = pread(descriptor, buffer + done, std::size_t(size - done),
                             off_t(offset + first + done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    done += count;
  }
  return true;
}

int fork_count() {
  static std::atomic<int> forks{0};
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });
  static_cast<void>(registered);
  return forks.load(std::memory_order_relaxed);
}

OpenmpParallel find_openmp() {
  return reinterpret_cast<OpenmpParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
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

// Whatever has FMA has F16C, which not every compiler can ask for.
bool cpu_has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2");
}

bool cpu_has_avxvnni() {
  unsigned a = 0, b, c, d;
  return cpu_has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}

bool cpu_has_avx512() {
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool cpu_has_avx512vnni() { return cpu_has_avx512() && __builtin_cpu_supports("avx512vnni"); }

bool cpu_has_amx_int8() { return cpu_has_avx512vnni() && *amx_refusal() == 0; }

#elif defined(__aarch64__)

bool cpu_has_dotprod() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & (1 << 20);  // HWCAP_ASIMDDP
#else
  return true;  // every Apple processor
#endif
}

#endif

}  // namespace sparse_bitnet
