// SPDX-License-Identifier: Apache-2.0
// Activation functions of gates. Included like float_vector-inl.h, with Floats, FUSED and round_to_low_bits.

// e^x for x within -87 and 88, where neither result nor scaling leaves the normal numbers; other x count
// as the nearer bound, and NaN as -87. About one unit in the last place: x = n ln 2 + r with
// |r| <= ln 2 / 2, ln 2 in two parts; e^r by its Taylor polynomial of degree 7, whose remainder is below 2^-27.
INLINE Floats bounded_exponential(const Floats& x) {
  const Floats bounded = smaller(larger(x, splat(-87.0f)), splat(88.0f));
  const Floats shifted = FUSED(bounded, splat(1.44269504f), splat(round_to_low_bits));
  const Floats n = shifted - round_to_low_bits;
  Floats r = FUSED(n, splat(-0.693359375f), bounded);
  r = FUSED(n, splat(2.12194440e-4f), r);
  Floats y = splat(1.0f / 5040);
  y = FUSED(y, r, splat(1.0f / 720));
  y = FUSED(y, r, splat(1.0f / 120));
  y = FUSED(y, r, splat(1.0f / 24));
  y = FUSED(y, r, splat(1.0f / 6));
  y = FUSED(y, r, splat(0.5f));
  y = FUSED(y, r * r, r) + 1.0f;
  // The low bits of `shifted` are n; those above them leave the register.
  return y * bit_cast<Floats>((bit_cast<Vector<std::int32_t>>(shifted) << 23) + 0x3f800000);
}

INLINE Floats gated_vector(Activation activation, const Floats& gate, const Floats& up) {
  if (activation == Activation::silu) return gate / (1.0f + bounded_exponential(-gate)) * up;
  if (activation == Activation::sigmoid) return up / (1.0f + bounded_exponential(-gate));
  if (activation == Activation::gelu_tanh) {
    // (1 + tanh(y)) / 2 = 1 / (1 + e^(-2y)), y = sqrt(2 / pi) (x + 0.044715 x^3).
    const Floats twice = 1.5957691216f * (gate + 0.044715f * gate * gate * gate);
    return gate / (1.0f + bounded_exponential(-twice)) * up;
  }
  const Floats positive = larger(gate, Floats{});
  return positive * positive * up;
}
