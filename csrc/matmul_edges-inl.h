// SPDX-License-Identifier: Apache-2.0
// Both ends of a product: activations to int8, and integer sums to floats. Included once per
// instruction set, inside its namespace, with TARGET defined; plain loops, which compilers turn into
// that set's vectors. Every operation is rounded to float32 by itself, so all sets agree.

TARGET static void quantize_token(const float* x, std::int64_t columns, std::int64_t stride,
                                  std::int8_t* codes, std::int8_t* fine, float* scale,
                                  std::int32_t* sum, std::int32_t* fine_sum) {
  // As integers, magnitudes order like floats do, with NaN the largest of all.
  constexpr std::int32_t infinity = 0x7f800000;
  std::int32_t largest = 0;
  for (std::int64_t i = 0; i < columns; ++i) {
    std::int32_t bits;
    __builtin_memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  float absmax;
  __builtin_memcpy(&absmax, &largest, 4);
  if (absmax < 1e-5f) absmax = 1e-5f;
  *scale = absmax / 127.0f;
  *sum = 0;
  if (fine) *fine_sum = 0;
  std::int64_t used = columns;
  if (largest >= infinity) {
    // 127 / infinity is 0 and 0 * infinity is NaN, whose code is 0, like that of every NaN.
    used = 0;
  } else {
    // Rounded twice, as PyTorch evaluates 127 / tensor. Adding 1.5 * 2^23 rounds half to even and
    // leaves the integer in the low bits.
    const float inverse = 1.0f / absmax * 127.0f;
    constexpr float round_to_low_bits = 12582912.0f;
    std::int32_t total = 0, fine_total = 0;
    if (fine) {
      for (std::int64_t i = 0; i < columns; ++i) {
        const float value = x[i] * inverse, rounded = value + round_to_low_bits;
        const float fine_rounded =
            (value - (rounded - round_to_low_bits)) * 128.0f + round_to_low_bits;
        std::int32_t code, fine_code;
        __builtin_memcpy(&code, &rounded, 4);
        __builtin_memcpy(&fine_code, &fine_rounded, 4);
        codes[i] = std::int8_t(code);
        fine[i] = std::int8_t(fine_code);
        total += std::int8_t(code);
        fine_total += std::int8_t(fine_code);
      }
      *fine_sum = fine_total;
    } else {
      for (std::int64_t i = 0; i < columns; ++i) {
        const float rounded = x[i] * inverse + round_to_low_bits;
        std::int32_t code;
        __builtin_memcpy(&code, &rounded, 4);
        codes[i] = std::int8_t(code);
        total += std::int8_t(code);
      }
    }
    *sum = total;
  }
  __builtin_memset(codes + used, 0, stride - used);
  if (fine) __builtin_memset(fine + used, 0, stride - used);
}

// dots [tokens, row_step] of rows [begin, end), `offset` sums too high -> y.
TARGET __attribute__((always_inline)) static inline void finish_ternary(const Activations& x, const Product& product,
                                                                        std::int64_t begin, std::int64_t end,
                                                                        const std::int32_t* dots,
                                                                        std::int64_t row_step, std::int32_t offset) {
  const std::int64_t rows = end - begin;
  for (std::int64_t t = 0; t < x.tokens; ++t) {
    const std::int32_t* dot = dots + t * row_step;
    float* y = product.y + t * product.y_stride + begin;
    const std::int32_t excess = offset * x.sums[t];
    if (const float* scales = product.matrix->scales) {
      for (std::int64_t r = 0; r < rows; ++r) y[r] = float(dot[r] - excess) * (x.scales[t] * scales[begin + r]);
    } else {
      const float scale = x.scales[t] * product.matrix->scale;
      for (std::int64_t r = 0; r < rows; ++r) y[r] = float(dot[r] - excess) * scale;
    }
    for (std::int64_t r = 0; product.bias && r < rows; ++r) y[r] += product.bias[begin + r];
  }
}

// The same for int8 rows. With `fine` there are two rows of dots a token, and only 128 times the first
// plus the second means something: kernels may split the sum as they like.
TARGET static void finish_int8(const Activations& x, const Product& product, std::int64_t begin,
                               std::int64_t end, const std::int32_t* dots, std::int64_t row_step,
                               std::int32_t offset) {
  const std::int64_t rows = end - begin;
  const float* scales = product.matrix->scales + begin;
  for (std::int64_t t = 0; t < x.tokens; ++t) {
    const std::int32_t* dot = dots + t * row_step * (x.fine ? 2 : 1);
    float* y = product.y + t * product.y_stride + begin;
    const float scale = x.scales[t];
    const std::uint32_t excess = offset * x.sums[t];  // unsigned: dots that are too high may have wrapped around
    if (x.fine) {
      const std::int32_t* fine_dot = dot + row_step;
      const std::int32_t fine_excess = offset * x.fine_sums[t];
      for (std::int64_t r = 0; r < rows; ++r) {
        const double both = double(std::int32_t(dot[r] - excess)) * 128.0 + double(fine_dot[r] - fine_excess);
        y[r] = float(both) * (1.0f / 128.0f) * (scale * scales[r]);
      }
    } else {
      for (std::int64_t r = 0; r < rows; ++r) {
        y[r] = float(std::int32_t(dot[r] - excess)) * (scale * scales[r]);
      }
    }
    for (std::int64_t r = 0; product.bias && r < rows; ++r) y[r] += product.bias[begin + r];
  }
}

// float sums [tokens, row_step] of rows that are scaled by groups -> y.
TARGET static void finish_groups(const Activations& x, const Product& product, std::int64_t begin,
                               std::int64_t end, const float* sums, std::int64_t row_step) {
  const std::int64_t rows = end - begin;
  for (std::int64_t t = 0; t < x.tokens; ++t) {
    float* y = product.y + t * product.y_stride + begin;
    const float scale = x.group ? 1.0f : x.scales[t];
    for (std::int64_t r = 0; r < rows; ++r) y[r] = sums[t * row_step + r] * scale;
    for (std::int64_t r = 0; product.bias && r < rows; ++r) y[r] += product.bias[begin + r];
  }
}
