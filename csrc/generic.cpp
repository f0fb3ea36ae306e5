// Any machine: 16-byte vectors, which compilers lower to SSE2 on x86-64 and to NEON on aarch64.

#define NAMESPACE generic
#define TARGET
#define VECTOR_BYTES 16
#define ISA_NAME "generic"
#define ISA_SUPPORTED true
#define TABLE generic_kernels

#include "isa.h"
