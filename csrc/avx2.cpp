#if defined(__x86_64__)

#define NAMESPACE avx2
#define TARGET __attribute__((target("avx2")))
#define VECTOR_BYTES 32
#define ISA_NAME "avx2"
#define ISA_SUPPORTED __builtin_cpu_supports("avx2")
#define TABLE avx2_kernels

#include "isa.h"

#endif
