#if defined(__x86_64__)

#define NAMESPACE avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define VECTOR_BYTES 64
#define ISA_NAME "avx512"
#define ISA_SUPPORTED                                                             \
  __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&      \
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
#define TABLE avx512_kernels

#include "isa.h"

#endif
