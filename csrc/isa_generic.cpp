// SPDX-License-Identifier: Apache-2.0
// Any machine: 16-byte vectors, which compilers lower to SSE2 on x86-64 and to NEON on aarch64.

#define ISA generic
#define TARGET
#define VECTOR_BYTES 16
#if defined(__aarch64__)
#define FUSED(a, b, c) Vector<float>(vfmaq_f32(c, a, b))
#define FLOAT_REGISTERS 32
#define DOT_SIGNED(sum, a, b)                                                                   \
  Ints(vpadalq_s16(sum, vpaddq_s16(vmull_s8(vget_low_s8(int8x16_t(a)), vget_low_s8(int8x16_t(b))), \
                                   vmull_high_s8(int8x16_t(a), int8x16_t(b)))))
#define DOT_UNSIGNED DOT_SIGNED
#define WIDEN_HALF(from) Vector<float>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))))
#define NARROW_HALF(to, v) vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(float32x4_t(clamp_to_half(v)))))
#else
#define FUSED(a, b, c) fused_in_software(a, b, c)
#define FLOAT_REGISTERS 16
#define WIDEN_HALF(from) widen_half_in_software(from)
#define NARROW_HALF(to, v) narrow_half_in_software(to, v)
#endif

#include "isa-inl.h"
