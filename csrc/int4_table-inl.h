// SPDX-License-Identifier: Apache-2.0
// quantize_int4 of isa.h, on top of float_vector-inl.h. Every instruction set adds in the same
// order, over the same number of lanes, and returns the same bits.

constexpr int group_size = int4_group, group_vectors = group_size / width;

// The value of largest magnitude of a group.
INLINE float extreme_of(const Floats* values) {
  Floats largest = values[0], smallest = values[0];
  UNROLL for (int i = 1; i < group_vectors; ++i) {
    largest = larger(largest, values[i]);
    smallest = smaller(smallest, values[i]);
  }
  const float most = largest_lane(largest), least = -largest_lane(-smallest);
  return most > -least ? most : least;
}

// Codes within -8..7, as floats.
INLINE Floats round_values(const Floats& values, float inverse) {
  const Floats code = (values * inverse + round_to_low_bits) - round_to_low_bits;
  return larger(smaller(code, splat(7.0f)), splat(-8.0f));
}

// The least-squares scale of the codes, and `gain`: the values' sum of squares less the squared error with
// that scale.
struct Fit {
  float scale, gain;
};

INLINE Fit fit(const Floats* values, float inverse) {
  Floats products[sum_vectors] = {}, squares[sum_vectors] = {};
  UNROLL for (int i = 0; i < group_vectors; ++i) {
    const Floats code = round_values(values[i], inverse);
    products[i % sum_vectors] += code * values[i];
    squares[i % sum_vectors] += code * code;
  }
  const float product = sum_of(products), scale = product / sum_of(squares);
  return {scale, product * scale};
}

// Writes 32 bytes and returns the scale. The values are finite.
INLINE float quantize_group(const float* from, std::uint8_t* out) {
  // How many steps the value of largest magnitude is from zero. With 8 it is represented exactly; fewer
  // use less of the range, more clip it for finer steps.
  constexpr float candidates[] = {8.0f, 7.25f, 9.0f};
  Floats values[group_vectors];
  __builtin_memcpy(values, from, sizeof values);
  const float extreme = extreme_of(values);
  float best_inverse = 0;
  Fit best = {0, 0};
  for (const float steps : candidates) {
    const float inverse = -steps / extreme;
    // Of groups of zeros, and of numbers too small to be divided by.
    if (!__builtin_isfinite(inverse)) break;
    const Fit candidate = fit(values, inverse);
    if (candidate.gain > best.gain) {
      best = candidate;
      best_inverse = inverse;
    }
  }
  std::int32_t digits[group_size];
  UNROLL for (int i = 0; i < group_vectors; ++i) {
    const Floats digit = round_values(values[i], best_inverse) + 8.0f;
    store(digits + i * width, __builtin_convertvector(digit, Ints));
  }
  for (int i = 0; i < group_size / 2; ++i) {
    out[i] = std::uint8_t(digits[i] | digits[i + group_size / 2] << 4);
  }
  return best.scale;
}

TARGET static void quantize_int4(const float* values, std::int64_t groups, std::uint8_t* out, float* scales) {
  for (std::int64_t i = 0; i < groups; ++i) {
    scales[i] = quantize_group(values + i * group_size, out + i * group_size / 2);
  }
}
