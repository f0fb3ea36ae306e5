// SPDX-License-Identifier: Apache-2.0
// Shared by isa_avx512.cpp and isa_avx512vnni.cpp. Conversions use a full mask, since GCC 12
// compiles these without a false warning.
#define VECTOR_BYTES 64
#define FLOAT_REGISTERS 32
#define FUSED(a, b, c) Vector<float>(_mm512_fmadd_ps(a, b, c))
#define WIDEN_HALF(from)               \
  Vector<float>(_mm512_maskz_cvtph_ps( \
      __mmask16(-1), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))))
#define NARROW_HALF(to, v)                                                   \
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),                        \
                      _mm512_maskz_cvtps_ph(__mmask16(-1), clamp_to_half(v), \
                                            _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))

#include "isa-inl.h"
