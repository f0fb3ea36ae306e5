// SPDX-License-Identifier: Apache-2.0
// Both ends of a product: activations to int8, and integer sums to floats. Included once per
// instruction set, inside its namespace, with TARGET defined; plain loops, which compilers turn into
// that set's vectors. Every operation is rounded to float32 by itself, so all sets agree.

// Adding this to a value within -127 and 127 rounds it to an integer, half to even, and leaves that in the low bits.
constexpr float round_to_low_bits = 12582912.0f;

TARGET __attribute__((always_inline)) static inline std::int8_t low_bits(float rounded) {
  std::int32_t bits;
  __builtin_memcpy(&bits, &rounded, 4);
  return std::int8_t(bits);
}

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
  // 127 / infinity is 0 and 0 * infinity is NaN, whose code is 0, like that of every NaN.
  const std::int64_t used = largest < infinity ? columns : 0;
  const float inverse = 1.0f / absmax * 127.0f;  // rounded twice, as PyTorch evaluates 127 / tensor
  std::int32_t total = 0, fine_total = 0;
  for (std::int64_t i = 0; i < used && !fine; ++i) {
    const std::int8_t code = low_bits(x[i] * inverse + round_to_low_bits);
    codes[i] = code;
    total += code;
  }
  for (std::int64_t i = 0; i < used && fine; ++i) {
    const float value = x[i] * inverse, rounded = value + round_to_low_bits;
    const std::int8_t code = low_bits(rounded);
    const std::int8_t fine_code = low_bits((value - (rounded - round_to_low_bits)) * 128.0f + round_to_low_bits);
    codes[i] = code;
    fine[i] = fine_code;
    total += code;
    fine_total += fine_code;
  }
  *sum = total;
  __builtin_memset(codes + used, 0, stride - used);
  if (!fine) return;
  *fine_sum = fine_total;
  __builtin_memset(fine + used, 0, stride - used);
}

// The sums of token t and rows [begin, end), which lie in one block -> y [end - begin].
TARGET static void finish_rows(const Activations& x, std::int64_t t, const Product& product, std::int64_t begin,
                               std::int64_t end, const PieceSums& sums, const std::int32_t* dots, float* y) {
  const Matrix& matrix = *product.matrix;
  const std::int64_t rows = end - begin;
  const float* scales = matrix.scales ? matrix.scales + begin : nullptr;
  const float scale = x.group ? 1.0f : x.scales[t];
  if (matrix.summed_group()) {
    const float* floats = reinterpret_cast<const float*>(dots);
    for (std::int64_t r = 0; r < rows; ++r) y[r] = floats[r] * scale;
  } else {
    const std::uint32_t excess = sums.offset * x.sums[t];  // unsigned: dots that are too high may have wrapped around
    if (x.fine && matrix.format == WeightFormat::int8) {
      const std::int32_t fine_excess = sums.offset * x.fine_sums[t];
      for (std::int64_t r = 0; r < rows; ++r) {
        const double both = double(std::int32_t(dots[r] - excess)) * 128.0 + double(dots[sums.block + r] - fine_excess);
        y[r] = float(both) * (1.0f / 128.0f) * (scale * scales[r]);
      }
    } else {
      for (std::int64_t r = 0; r < rows; ++r) {
        y[r] = float(std::int32_t(dots[r] - excess)) * (scale * (scales ? scales[r] : matrix.scale));
      }
    }
  }
  for (std::int64_t r = 0; product.bias && r < rows; ++r) y[r] += product.bias[begin + r];
}

// MatmulKernels::finish_token, without streaming.
TARGET static void finish_token(const Activations& x, std::int64_t t, const Product& product, std::int64_t begin,
                                std::int64_t end, const PieceSums& sums, float* y, bool) {
  const std::int64_t a_token = sums.block * (x.fine && product.matrix->format == WeightFormat::int8 ? 2 : 1);
  const std::int32_t* dots = sums.dots + t * a_token;
  for (std::int64_t r = begin; r < end; r += sums.block, dots += max_tokens_a_call * a_token) {
    finish_rows(x, t, product, r, r + sums.block < end ? r + sums.block : end, sums, dots, y + (r - begin));
  }
}
