// SPDX-License-Identifier: Apache-2.0
// The body of isa_avx2.cpp and isa_avxvnni.cpp, which define ISA, TARGET and DOT_*.

#define VECTOR_BYTES 32
#define FLOAT_REGISTERS 16
#define FUSED(a, b, c) Vector<float>(_mm256_fmadd_ps(a, b, c))
#define WIDEN_HALF(from) \
  Vector<float>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))))
#define NARROW_HALF(to, v)                         \
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), \
                   _mm256_cvtps_ph(clamp_to_half(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))

#include "isa-inl.h"
