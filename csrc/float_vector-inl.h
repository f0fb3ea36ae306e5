// SPDX-License-Identifier: Apache-2.0
// Helpers of the float32 kernels: conversions, exp, horizontal sums. Included by isa-inl.h.

using Floats = Vector<float>;
using Ints = Vector<std::int32_t>;
constexpr int width = lanes<float>;

INLINE Floats load_floats(const float* from) { return load<Floats>(from); }

INLINE Floats choose(const Ints& mask, const Floats& yes, const Floats& no) {
  return bit_cast<Floats>((mask & bit_cast<Ints>(yes)) | (~mask & bit_cast<Ints>(no)));
}

constexpr float largest_half = 65504.0f;

// NaN stays NaN.
INLINE Floats clamp_to_half(const Floats& v) {
  return smaller(splat(largest_half), larger(splat(-largest_half), v));
}

// Shifting a float16's exponent and mantissa to float32's places leaves the exponent 112 too small,
// which one exact product corrects, subnormals included. The cache holds finite values and NaN.
INLINE Floats widen_half_in_software(const std::uint16_t* from) {
  const auto half = load<Vector<std::uint16_t, VECTOR_BYTES / 2>>(from);
  const Ints bits = __builtin_convertvector(half, Ints);
  const Floats magnitude = bit_cast<Floats>((bits & 0x7fff) << 13) * 0x1p112f;
  const Ints nan = ((bits & 0x7c00) == 0x7c00) & 0x7fc00000;
  return bit_cast<Floats>(bit_cast<Ints>(magnitude) | (bits & 0x8000) << 16 | nan);
}

// Normal values: half of the last place kept is added, less a bit where that place is even, then the
// rest cut off. Below 2^-14 adding 0.5 rounds to multiples of 2^-24, which are the subnormals' steps.
INLINE void narrow_half_in_software(std::uint16_t* to, const Floats& v) {
  const Ints clamped = bit_cast<Ints>(clamp_to_half(v));
  const Ints magnitude = clamped & 0x7fffffff;
  const Ints normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112 << 23)) >> 13;
  const Ints small = bit_cast<Ints>(bit_cast<Floats>(magnitude) + 0.5f) - 0x3f000000;
  const Ints is_small = magnitude < 0x38800000;
  const Ints nan = (magnitude > 0x7f800000) & 0x7e00;
  const Ints bits = (is_small & small) | (~is_small & normal) | ((clamped >> 16) & 0x8000) | nan;
  store(to, __builtin_convertvector(bits, Vector<std::uint16_t, VECTOR_BYTES / 2>));
}

INLINE Floats load_floats(const std::uint16_t* from) { return WIDEN_HALF(from); }

template <int STEP, class V, std::int32_t... I>
INLINE V exchanged(const V& v, std::integer_sequence<std::int32_t, I...>) {
  return PICK(std::int32_t, v, v, (I ^ STEP)...);
}

using LaneNumbers = std::make_integer_sequence<std::int32_t, width>;

using Quad = Vector<float, 16>;
constexpr int sum_vectors = sum_lanes / width;

// The sum of sum_lanes partial sums.
INLINE float sum_of(const Floats* partial) {
  Quad quad[sum_lanes / 4];
  __builtin_memcpy(quad, partial, sizeof quad);
  const Quad sums = (quad[0] + quad[2]) + (quad[1] + quad[3]);
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

template <int STEP = width / 2, class V>
INLINE auto largest_lane(const V& v) {
  const V top = larger(v, exchanged<STEP>(v, LaneNumbers()));
  if constexpr (STEP == 1) {
    return top[0];
  } else {
    return largest_lane<STEP / 2>(top);
  }
}

struct Halves {
  Vector<float, VECTOR_BYTES / 2> low, high;
};

#if VECTOR_BYTES == 16
__attribute__((noinline)) static inline void fuse_lanes(const Floats& a, const Floats& b, Floats& c) {
  for (int i = 0; i < width; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
}

// By a shuffle: halves that go through memory wait for each other.
struct Wide {
  Vector<double> low, high;
};
INLINE Wide to_doubles(const Floats& v) {
  const Halves low = bit_cast<Halves>(v), high = bit_cast<Halves>(PICK(std::int32_t, v, v, 2, 3, 2, 3));
  return {__builtin_convertvector(low.low, Vector<double>), __builtin_convertvector(high.low, Vector<double>)};
}

// a b + c rounded once, without an instruction for it. The product is exact in double. Rounding the sum to double
// first changes its float only where the dropped bits are exactly half of the last one kept, or where the float is
// subnormal: those few are left to the library.
INLINE Floats fused_in_software(const Floats& a, const Floats& b, const Floats& c) {
  const Wide x = to_doubles(a), y = to_doubles(b), z = to_doubles(c);
  const Vector<double> low = x.low * y.low + z.low, high = x.high * y.high + z.high;
  using Half = Vector<float, 8>;
  const Half first = __builtin_convertvector(low, Half), second = __builtin_convertvector(high, Half);
  using Longs = Vector<std::int64_t>;
  Floats sum = bit_cast<Floats>(Longs{bit_cast<std::int64_t>(first), bit_cast<std::int64_t>(second)});
  Ints lost, rest;
  unzip<std::int32_t>(bit_cast<Ints>(low), bit_cast<Ints>(high), lost, rest);
  const Ints is_small = (bit_cast<Ints>(sum) & 0x7fffffff) <= 0x00800000;
  const Longs is_unsure = bit_cast<Longs>(((lost & 0x1fffffff) == 0x10000000) | (is_small & (c != 0.0f)));
  if (__builtin_expect((is_unsure[0] | is_unsure[1]) != 0, 0)) {
    sum = c;
    fuse_lanes(a, b, sum);
  }
  return sum;
}
#endif

// Adding this to a float of at most 2^22 rounds it half to even to an integer, which is in the low bits of the sum.
constexpr float round_to_low_bits = 12582912.0f;

#include "gate-inl.h"

// 2^x for x <= 0: zero below -126, NaN for NaN. Within 2e-7 of it: x = n + r with |r| <= 1/2, both exact, 2^r by its
// Taylor polynomial of degree 6, whose remainder is below 2^-22.9.
INLINE Floats power_of_two(const Floats& x) {
  const Floats bounded = larger(splat(-126.0f), x), shifted = bounded + round_to_low_bits;
  const Floats r = bounded - (shifted - round_to_low_bits);
  Floats y = FUSED(splat(1.54035304e-4f), r, splat(1.33335581e-3f));
  y = FUSED(y, r, splat(9.61812911e-3f));
  y = FUSED(y, r, splat(0.0555041087f));
  y = FUSED(y, r, splat(0.240226507f));
  y = FUSED(y, r, splat(0.693147181f));
  y = FUSED(y, r, splat(1.0f));
  const Floats power = y * bit_cast<Floats>((bit_cast<Ints>(shifted) << 23) + 0x3f800000);
  return choose(x < -126.0f, Floats{}, power);
}
