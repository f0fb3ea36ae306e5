// Includes FLOAT_KERNELS, a header of float32 kernels, once for each instruction set, inside
// sparse_bitnet::float_<isa>, on top of vector.h and float_vector.h. The including file has all standard
// headers and the intrinsics' before, for their types only: an inline function of theirs, compiled here
// for a newer instruction set, could be the copy the linker keeps for the whole program.
//
//   FUSED(a, b, c)       a * b + c, rounded once where the instruction set can
//   WIDEN_HALF(from)     a vector of float16 as floats
//   NARROW_HALF(to, v)   floats to the nearest finite float16, half to even
//   WIDEN_BYTES(from)    a vector of int8 as int32; what __builtin_convertvector gives is scalar code
//   FLOAT_REGISTERS      vector registers
//
// Masked conversions under a full mask are those that GCC 12 compiles without a false warning.

namespace sparse_bitnet {

namespace float_generic {
#define TARGET
#define VECTOR_BYTES 16
#define FLOAT_ISA "generic"
#if defined(__aarch64__)
#define FUSED(a, b, c) Vector<float>(vfmaq_f32(c, a, b))
#define FLOAT_REGISTERS 32
#else
#define FUSED(a, b, c) ((a) * (b) + (c))
#define FLOAT_REGISTERS 16
#endif
#define WIDEN_HALF(from) widen_half_in_software(from)
#define NARROW_HALF(to, v) narrow_half_in_software(to, v)
#define WIDEN_BYTES(from) \
  __builtin_convertvector((load<Vector<std::int8_t, VECTOR_BYTES / 4>>(from)), Vector<std::int32_t>)
#include "vector.h"
#include "float_vector.h"
#include FLOAT_KERNELS
#undef TARGET
#undef VECTOR_BYTES
#undef FLOAT_ISA
#undef FUSED
#undef FLOAT_REGISTERS
#undef WIDEN_HALF
#undef NARROW_HALF
#undef WIDEN_BYTES
}  // namespace float_generic

#if defined(__x86_64__)

namespace float_avx2 {
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define VECTOR_BYTES 32
#define FLOAT_ISA "avx2"
#define FUSED(a, b, c) Vector<float>(_mm256_fmadd_ps(a, b, c))
#define FLOAT_REGISTERS 16
#define WIDEN_HALF(from) \
  Vector<float>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))))
#define NARROW_HALF(to, v)                         \
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), \
                   _mm256_cvtps_ph(clamp_to_half(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#define WIDEN_BYTES(from)       \
  bit_cast<Vector<std::int32_t>>( \
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))))
#include "vector.h"
#include "float_vector.h"
#include FLOAT_KERNELS
#undef TARGET
#undef VECTOR_BYTES
#undef FLOAT_ISA
#undef FUSED
#undef FLOAT_REGISTERS
#undef WIDEN_HALF
#undef NARROW_HALF
#undef WIDEN_BYTES
}  // namespace float_avx2

namespace float_avx512 {
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define VECTOR_BYTES 64
#define FLOAT_ISA "avx512vnni"
#define FUSED(a, b, c) Vector<float>(_mm512_fmadd_ps(a, b, c))
#define FLOAT_REGISTERS 32
#define WIDEN_HALF(from)               \
  Vector<float>(_mm512_maskz_cvtph_ps( \
      __mmask16(-1), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))))
#define NARROW_HALF(to, v)                                                 \
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),                      \
                      _mm512_maskz_cvtps_ph(__mmask16(-1), clamp_to_half(v), \
                                            _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#define WIDEN_BYTES(from)                             \
  bit_cast<Vector<std::int32_t>>(_mm512_maskz_cvtepi8_epi32( \
      __mmask16(-1), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from))))
#include "vector.h"
#include "float_vector.h"
#include FLOAT_KERNELS
#undef TARGET
#undef VECTOR_BYTES
#undef FLOAT_ISA
#undef FUSED
#undef FLOAT_REGISTERS
#undef WIDEN_HALF
#undef NARROW_HALF
#undef WIDEN_BYTES
}  // namespace float_avx512

#endif

}  // namespace sparse_bitnet
