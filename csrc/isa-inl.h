// SPDX-License-Identifier: Apache-2.0
// The body of isa_generic.cpp and isa_avx*.cpp: VectorKernels (isa.h), compiled for one instruction set. The
// including file defines
//   ISA                  its name; the result is vector_<ISA>
//   TARGET, VECTOR_BYTES
//   FUSED(a, b, c)       a * b + c, rounded once
//   WIDEN_HALF(from)     a vector of float16 as floats
//   NARROW_HALF(to, v)   floats to the nearest finite float16, half to even; NaN stays NaN
//   FLOAT_REGISTERS      vector registers
// and, where it has better than plain C++ for codes from -127 to 127, four a lane of Ints,
//   DOT_SIGNED(sum, a, b)    sum + the products of four codes, per lane; b is loaded, a is one for all
//   DOT_UNSIGNED(sum, a, b)  the same where the codes of a are not negative
//   DOT_OFFSET               if DOT_SIGNED adds it to b: 128
//
// Standard headers come first and contribute types only: an inline function of theirs, compiled here
// for a newer instruction set, could be the copy the linker keeps for the whole program.

#include <cstdint>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "attention.h"
#include "delta_net.h"
#include "isa.h"
#include "matmul.h"
#include "matrix_unit.h"
#include "platform.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels assume a little-endian machine"
#endif

#define JOINED(a, b) a##b
#define JOIN(a, b) JOINED(a, b)

namespace sparse_bitnet {
namespace JOIN(kernels_, ISA) {

#include "vector-inl.h"
#include "float_vector-inl.h"
#include "select-inl.h"
#include "quantize-inl.h"
#include "int4_table-inl.h"
#include "elementwise-inl.h"
#include "delta_net-inl.h"
#include "matmul_table-inl.h"
#include "attention-inl.h"
#include "attention_int4-inl.h"
#include "unit_sums-inl.h"
#include "attention_int8-inl.h"

template <class Unit>
constexpr VectorKernels kernels_on() {
  return {
      select_ternary, dense_ternary, sum_magnitudes, quantize_int8,  quantize_int4, add_and_norm,
      gated,          rotate,        hadamard,       attend<Unit>,   merge,         finish,
      append,         dot,           convolve,       delta_rule,     multiply_table,
  };
}

}  // namespace JOIN(kernels_, ISA)

const VectorKernels JOIN(vector_, ISA) = JOIN(kernels_, ISA)::kernels_on<NoUnit>();

}  // namespace sparse_bitnet
