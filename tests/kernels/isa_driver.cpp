// SPDX-License-Identifier: Apache-2.0
// Kernels without Python: products, quantisation and float tables of "neon", "i8mm" and AMX against "generic",
// and the decoder's float kernels against plain loops in double precision. AMX runs twice: first without the
// system's permission, which makes its instructions trap and the program emulate them; then, where the processor
// and the system have it, by itself. Memory starts as poison. Exits with 1 after printing what differs.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "aligned_vector.h"
#include "attention.h"
#include "checksum.h"
#include "delta_net.h"
#include "isa.h"
#include "matmul.h"
#include "matmul_kernels.h"
#include "packed_rows.h"
#include "platform.h"
#include "roofline.h"

#if defined(SPARSE_BITNET_AMX)
#include "amx_trap.h"
#endif

using namespace sparse_bitnet;

namespace {

constexpr std::uint8_t poison = 0xA5;
constexpr int y_padding = 5;
constexpr unsigned checksum_of_floats = 0xac1fd342;  // of all that test_floats makes
using Memory = AlignedVector<std::uint8_t>;

int failures = 0;

// Not from choose_kernels, which asks the system for the permission to use AMX.
const Kernels generic = {"generic", nullptr, vector_generic, matmul_generic, roofline_generic};

template <class... Values> void expect(bool same, const char* format, Values... values) {
  if (same) return;
  ++failures;
  std::printf(format, values...), std::printf("\n");
}

// The same numbers with every standard library.
struct Random {
  std::mt19937 bits{1};
  int below(int end) { return int(bits() % unsigned(end)); }
  float uniform() { return float(bits() >> 8) * 0x1p-24f; }
  float signed_float() { return (uniform() + uniform() + uniform() - 1.5f) * 4.0f; }
  std::vector<float> floats(std::int64_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = signed_float();
    return values;
  }
};

struct Tokens {
  Memory codes, fine;
  std::vector<float> scales;
  std::vector<std::int32_t> sums, fine_sums;
  Activations activations;

  Tokens(const Kernels& kernels, const std::vector<float>& x, std::int64_t tokens, bool with_fine, std::int64_t group = 0) {
    const std::int64_t columns = std::int64_t(x.size()) / tokens;
    const std::int64_t stride = activation_stride(columns);
    codes.assign(tokens * stride + activation_slack, poison);
    fine = codes;
    scales.assign(group ? tokens * columns / group : tokens, -1);
    sums.assign(scales.size(), -1);
    fine_sums.assign(tokens, -1);
    activations = {tokens, columns, stride, reinterpret_cast<std::int8_t*>(codes.data()),
                   with_fine ? reinterpret_cast<std::int8_t*>(fine.data()) : nullptr,
                   scales.data(), sums.data(), with_fine ? fine_sums.data() : nullptr, false, nullptr, nullptr, group};
    quantize(kernels, x.data(), activations);
  }

  bool operator==(const Tokens& other) const {
    return codes == other.codes && fine == other.fine && sums == other.sums && fine_sums == other.fine_sums &&
           !std::memcmp(scales.data(), other.scales.data(), 4 * scales.size());
  }
};

constexpr packed::Pattern dense = {1, 1};

struct Weights {
  Memory memory;
  std::vector<float> scales;
  std::vector<std::uint16_t> group_scales;
  Matrix matrix;

  // `value` is the digit of all weights, or the byte of int8 and int4; -1: random ones.
  Weights(Random& random, WeightFormat format, packed::Pattern pattern, std::int64_t rows, std::int64_t columns, int value) {
    const std::int64_t width = Matrix::bytes_per_row(format, pattern, columns);
    const bool is_dense = format == WeightFormat::lookup || format == WeightFormat::b3_strips;
    const std::int64_t stride = is_dense ? width : packed::divide_up(width, matrix_alignment) * matrix_alignment;
    constexpr std::int64_t strip = b3_strips::rows;
    memory.assign(packed::divide_up(rows, strip) * strip * stride + matrix_alignment, poison);
    scales.resize(rows * packed::divide_up(columns, int4_group));
    for (float& scale : scales) scale = 0.01f + random.uniform() / 64;
    std::vector<std::uint8_t> digits(packed::divide_up(columns, pattern.m) * pattern.m + digits_size(0));
    for (std::int64_t r = 0; r < rows; ++r) {
      std::uint8_t* row = memory.data() + r * stride;
      std::fill(digits.begin(), digits.end(), std::uint8_t(1));
      for (std::int64_t c = 0; c < columns; ++c) {
        const int kept = int(c % pattern.m) < pattern.n;
        const int drawn = pattern.exact ? 2 * random.below(2) : random.below(3);
        if (kept) digits[c] = std::uint8_t(value >= 0 ? value : drawn);
        if ((c + 1) % pattern.m || value >= 0) continue;
        std::shuffle(&digits[c + 1 - pattern.m], &digits[c] + 1, random.bits);
      }
      switch (format) {
        case WeightFormat::i2: encode_i2(digits.data(), columns, row); break;
        case WeightFormat::b3_strips: b3_strips::encode_row(digits.data(), columns, 0, row - r % strip * (stride - 1)); break;
        case WeightFormat::lookup: {
          const int in_strip = int(r % lookup::shape_of(pattern).rows());
          lookup::encode_row(pattern, digits.data(), columns, in_strip, row - in_strip * stride);
          break;
        }
        default:
          for (std::int64_t i = 0; i < width; ++i) row[i] = std::uint8_t(value >= 0 ? value : random.below(256));
      }
    }
    const bool has_scales = !is_ternary(format) || rows % 2;
    matrix = {format, pattern, rows, columns, stride, memory.data(), 0.0371f, has_scales ? scales.data() : nullptr};
  }

  void set_groups(Random& random, std::int64_t group, ScaleType type) {
    matrix.group = group;
    matrix.scale_type = type;
    group_scales.resize(packed::divide_up(matrix.rows, b3_strips::rows) * b3_strips::rows * matrix.columns / group * 2);
    for (std::uint16_t& half : group_scales) half = std::uint16_t(random.below(0x3fff) | random.below(2) << 15);
    matrix.group_scales = group_scales.data();
    if (matrix.format == WeightFormat::i2) return;
    const std::int64_t strip_rows = matrix.rows_of_strip();
    const bool is_b3 = matrix.format == WeightFormat::b3_strips;
    if (is_b3) matrix.row_stride = Matrix::bytes_per_row(matrix.format, dense, matrix.columns, group);
    memory.resize(packed::divide_up(matrix.rows, strip_rows) * strip_rows * matrix.row_stride + matrix_alignment);
    matrix.data = memory.data();
    std::vector<std::uint8_t> digits(matrix.columns);
    for (std::int64_t r = 0; r < matrix.rows; ++r) {
      for (std::uint8_t& digit : digits) digit = std::uint8_t(random.below(3));
      std::uint8_t* strip = memory.data() + r / strip_rows * strip_rows * matrix.row_stride;
      if (is_b3) b3_strips::encode_row(digits.data(), matrix.columns, group, strip + r % strip_rows);
      if (!is_b3) lookup::encode_strip_row(digits.data(), matrix.columns, group, strip + r % strip_rows * 4);
    }
  }
};

std::vector<float> product(const Kernels& kernels, ThreadPool& pool, const Weights& weights,
                           const Tokens& x, const float* bias) {
  const std::int64_t stride = weights.matrix.rows + y_padding;
  std::vector<float> y(x.activations.tokens * stride, -77.0f);
  const Product product = {&weights.matrix, bias, y.data(), stride};
  matmul(kernels, pool, x.activations, &product, 1);
  return y;
}

constexpr std::pair<WeightFormat, packed::Pattern> layouts[] = {
    {WeightFormat::i2, dense},     {WeightFormat::b3_strips, dense}, {WeightFormat::int8, dense},
    {WeightFormat::int4, dense},   {WeightFormat::lookup, {2, 4}},   {WeightFormat::lookup, {6, 8}},
    {WeightFormat::lookup, dense}, {WeightFormat::lookup, {3, 4, true}},
};

void compare(const Kernels& ours, ThreadPool& pool, const Weights& weights, const std::vector<float>& x,
             std::int64_t tokens, bool fine, const float* bias, std::int64_t group = 0) {
  const Tokens theirs(generic, x, tokens, fine, group), codes(ours, x, tokens, fine, group);
  expect(theirs == codes, "quantised activations: %d columns", int(weights.matrix.columns));
  const auto a = product(generic, pool, weights, theirs, bias);
  const auto b = product(ours, pool, weights, codes, bias);
  expect(!std::memcmp(a.data(), b.data(), 4 * a.size()), "format %d, pattern %d:%d, %d rows, %d columns, %d tokens, fine %d",
         int(weights.matrix.format), weights.matrix.pattern.n, weights.matrix.pattern.m,
         int(weights.matrix.rows), int(weights.matrix.columns), int(tokens), int(fine));
}

void test_products(const Kernels& ours, Random& random) {
  ThreadPool one(1), two(2);
  for (const auto& [format, pattern] : layouts) {
    const std::pair<int, int> shapes[] = {{1, 64}, {3, 16}, {281, 336}, {33, 1072}, {6, 2576}};
    for (const auto& [rows, columns] : shapes) {
      const int odd = pattern.m == 1 ? columns - 1 - rows % 7 : columns;
      const Weights weights(random, format, pattern, rows, odd, -1);
      const std::vector<float> bias = random.floats(rows);
      for (int tokens : {1, 2, 3, 4, 7, 37}) {
        const bool fine = !is_ternary(format) && tokens % 3 != 0;
        const std::vector<float> x = random.floats(std::int64_t(tokens) * odd);
        compare(ours, tokens == 7 ? two : one, weights, x, tokens, fine, tokens % 2 ? bias.data() : nullptr);
      }
    }
    // The largest sums: every weight at its extreme, under activations of one sign.
    for (int value : {0, 2, 0x80, 0xff}) {
      if ((value > 2) == is_ternary(format)) continue;
      const Weights weights(random, format, pattern, 2, 8960, value);
      for (float sign : {1.0f, -1.0f}) {
        compare(ours, one, weights, std::vector<float>(8960, sign), 1, true, nullptr);
        compare(ours, one, weights, std::vector<float>(34 * 8960, sign), 34, true, nullptr);
      }
    }
  }
  // The last token is alone in its call.
  const Weights weights(random, WeightFormat::int8, dense, 20, 192, -1);
  compare(ours, one, weights, random.floats(513 * 192), 513, true, nullptr);
}

void test_groups(const Kernels& ours, Random& random) {
  ThreadPool pool(1);
  for (const auto& [format, pattern] : layouts) {
    for (std::int64_t group : {32, 64, 128, 256}) {
      if (!is_ternary(format) || (format != WeightFormat::i2 && (group == 32 || pattern.m != 1))) continue;
      for (std::int64_t columns : {std::int64_t(1280), 7 * group, 3 * group}) {
        Weights weights(random, format, pattern, 261, columns, -1);
        weights.set_groups(random, group, ScaleType(columns / group % 3));
        for (int tokens : {1, 3, 19}) {
          compare(ours, pool, weights, random.floats(tokens * columns), tokens, false, nullptr, tokens > 1 ? group : 0);
        }
      }
    }
  }
}

// A product whose activation gates the next one, or one that is there already; once written past the caches.
void test_gated(const Kernels& ours, Random& random) {
  ThreadPool pool(2);
  constexpr std::int64_t rows = 40, sizes[][3] = {{3, 64, 48}, {12, 2112, 48}, {31, 100, 48}, {37, 832, 7168}, {300, 4096, 48}};
  constexpr Activation silu = Activation::silu;
  for (const auto& [tokens, columns, stride] : sizes) {
    const Weights gate(random, WeightFormat::i2, dense, rows, columns, -1), up(random, WeightFormat::int8, dense, rows, columns, -1);
    const Tokens x(ours, random.floats(tokens * columns), tokens, false);
    AlignedVector<float> expected(tokens * stride), both = expected, alone = expected;
    const auto run = [&](const Kernels& on, std::vector<Product> products) { matmul(on, pool, x.activations, products.data(), int(products.size())); };
    run(generic, {{&gate.matrix, nullptr, expected.data(), stride}, {&up.matrix, nullptr, expected.data(), stride, &silu}});
    run(ours, {{&gate.matrix, nullptr, both.data(), stride}, {&up.matrix, nullptr, both.data(), stride, &silu}});
    run(ours, {{&gate.matrix, nullptr, alone.data(), stride}});
    run(ours, {{&up.matrix, nullptr, alone.data(), stride, &silu}});
    expect(both == expected && alone == expected, "gated products of %d tokens, %d columns", int(tokens), int(columns));
  }
}

void test_quantize(const Kernels& ours, Random& random) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (int columns : {1, 15, 64, 100, 1337}) {
    std::vector<float> x = random.floats(7 * columns);
    for (int i = 0; i < columns; ++i) {
      x[i] = 0;
      x[columns + i] *= 1e-8f;
      x[2 * columns + i] *= 1e37f;
      x[3 * columns + i] = std::nearbyint(x[3 * columns + i]) + 0.5f;
    }
    x[4 * columns] = infinity;
    x[6 * columns - 1] = std::nanf("");
    for (bool fine : {false, true}) {
      expect(Tokens(generic, x, 7, fine) == Tokens(ours, x, 7, fine), "quantisation of %d columns, fine %d", columns, fine);
    }
  }
}

void test_tables(const Kernels& ours, Random& random, std::vector<float>& results) {
  ThreadPool pool(1);
  for (const auto& [rows, columns] : {std::pair(1, 1), {3, 7}, {33, 100}, {70, 333}}) {
    for (TableType type : {TableType::bfloat16, TableType::float32}) {
      const int size = type == TableType::float32 ? 4 : 2;
      std::vector<float> values = random.floats(rows * columns);
      std::vector<std::uint8_t> data(rows * columns * size);
      for (std::size_t i = 0; i < values.size(); ++i) {
        std::uint8_t bytes[4];
        std::memcpy(bytes, &values[i], 4);
        if (size == 2) bytes[0] = bytes[1] = 0;
        std::memcpy(&values[i], bytes, 4);
        std::memcpy(&data[i * size], bytes + 4 - size, size);
      }
      const Table table = {type, rows, columns, columns * size, data.data(), nullptr};
      for (int tokens : {1, 2, 5}) {
        const std::vector<float> x = random.floats(tokens * columns);
        std::vector<float> y(tokens * rows);
        matmul_table(ours, pool, x.data(), tokens, table, y.data());
        results.insert(results.end(), y.begin(), y.end());
        for (int i = 0; i < tokens * rows; ++i) {
          double exact = 0, bound = 0;
          for (int c = 0; c < columns; ++c) {
            const double term = double(x[i / rows * columns + c]) * values[i % rows * columns + c];
            exact += term;
            bound += std::abs(term);
          }
          expect(std::abs(y[i] - exact) <= 1e-6 * bound, "float table: %d rows, %d columns", rows, columns);
        }
      }
    }
  }
}

void test_elementwise(const VectorKernels& kernels, Random& random, std::vector<float>& results) {
  for (int n : {2, 14, 64, 192, 898}) {
    const std::vector<float> x = random.floats(n), delta = random.floats(n), weight = random.floats(n);
    std::vector<float> residual = x, out(n), gate = x, turned = x, spread = x;
    kernels.add_and_norm(residual.data(), delta.data(), weight.data(), 1e-6f, n, out.data());
    for (Activation activation : {Activation::relu_squared, Activation::gelu_tanh, Activation::sigmoid, Activation::silu}) {
      gate = x;
      kernels.gated(activation, gate.data(), delta.data(), n, gate.data(), n % 2 == 0);
      results.insert(results.end(), gate.begin(), gate.end());
    }
    const int half = n / 2;
    kernels.rotate(turned.data(), delta.data(), weight.data(), half, 0.5f);
    kernels.hadamard(spread.data(), delta.data(), weight.data(), n, n & -n);
    for (const auto* each : {&out, &turned, &spread}) results.insert(results.end(), each->begin(), each->end());
    double squares = 0;
    for (int i = 0; i < n; ++i) squares += std::pow(double(x[i]) + delta[i], 2) / n;
    for (int i = 0; i < n; ++i) {
      const int k = i % half;
      const double norm = (double(x[i]) + delta[i]) / std::sqrt(squares + 1e-6) * weight[i];
      const double silu = x[i] / (1 + std::exp(-double(x[i]))) * delta[i];
      const double other = i < half ? -double(x[half + k]) : double(x[k]);
      const double rotated = (x[i] * double(delta[k]) + other * weight[k]) * 0.5;
      expect(std::abs(out[i] - norm) <= 2e-6 * (1 + std::abs(norm)), "norm of %d", n);
      expect(std::abs(gate[i] - silu) <= 2e-6 * (1 + std::abs(silu)), "gated activation of %d", n);
      expect(std::abs(turned[i] - rotated) <= 4e-6 * (1 + std::abs(rotated)), "rotation of %d", n);
    }
  }
}

// Gated DeltaNet, whose formulas tests/engine/test_delta_net.py checks.
void test_delta_net(const VectorKernels& kernels, Random& random, std::vector<float>& results) {
  for (std::int64_t tokens : {1, 3, 8}) {
    const std::int64_t keys = 16 * tokens, columns = 16 * (4 - tokens % 4), stride = 2 * keys + columns;
    std::vector<float> past = random.floats(3 * keys), weights = random.floats(4 * stride), rows = random.floats(tokens * stride);
    results.push_back(kernels.dot(weights.data(), past.data(), 2 * keys + tokens));
    kernels.convolve({tokens, keys, 4, weights.data(), past.data(), rows.data(), stride});
    std::vector<float> gates(2 * tokens), state = random.floats(keys * columns), out(tokens * columns);
    for (float& gate : gates) gate = random.uniform();
    const float* x = rows.data();
    kernels.delta_rule({tokens, keys, columns, x, x + keys, x + 2 * keys, stride, gates.data(), gates.data() + tokens, 1,
                        state.data(), out.data(), columns});
    for (const auto* each : {&rows, &state, &out}) results.insert(results.end(), each->begin(), each->end());
  }
}

// One page, several queries of two heads, each token seeing one key more.
void test_attention(const VectorKernels& kernels, Random& random, CacheType type, double tolerance,
                    int head_dim, int tokens, std::vector<float>& results) {
  const std::int64_t padded = padded_dim(head_dim), group = 2, rows = group * tokens;
  const std::int64_t visible = 40, window = tokens > 1 ? 25 : visible;
  Memory keys(4 * page_tokens * padded, poison), values = keys;
  std::vector<float> key_scales(page_tokens, -1), value_scales = key_scales;
  const PageView page = {keys.data(), values.data(), key_scales.data(), value_scales.data()};
  const std::int64_t stored = std::min<std::int64_t>(page_tokens, visible + tokens - 1);
  std::vector<float> key = random.floats(stored * head_dim), value = random.floats(stored * head_dim);
  for (std::int64_t slot = 0; slot < stored; ++slot) {
    kernels.append(type, page, slot, &key[slot * head_dim], &value[slot * head_dim], head_dim);
  }
  std::vector<float> queries = random.floats(rows * head_dim);
  for (float& q : queries) q *= 0.05f;
  AlignedVector<float> maximum(rows, -1e30f), sum(rows * sum_lanes), out(rows * padded);
  AlignedVector<float> wide(2 * page_tokens * padded, std::nanf(""));
  const AttentionState state = {maximum.data(), sum.data(), out.data()};
  std::vector<float> of_two = queries, scales(rows);
  for (float& q : of_two) q *= log2_e;
  const std::int64_t stride = four_dim(head_dim);
  std::vector<std::int8_t> codes(rows * stride);
  std::vector<std::int32_t> sums(rows);
  for (std::int64_t row = 0; row < rows; ++row) {
    std::int8_t* of_row = &codes[row * stride];
    kernels.quantize_int8(&of_two[row * head_dim], Dtype::float32, 1, head_dim, of_row, &scales[row]);
    for (std::int64_t i = 0; i < stride; ++i) sums[row] += of_row[i];
  }
  kernels.attend({type, head_dim, rows, group, visible, window, of_two.data(), codes.data(),
                  scales.data(), sums.data(), page, page.keys, wide.data(), state});
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t seen = std::min(visible + row / group, page_tokens);
    std::vector<double> exact(head_dim);
    double total = 0;
    for (std::int64_t slot = 0; slot < seen; ++slot) {
      if (slot < visible + row / group - window) continue;
      double score = 0;
      for (int i = 0; i < head_dim; ++i) {
        score += double(queries[row * head_dim + i]) * key[slot * head_dim + i];
      }
      total += std::exp(score);
      for (int i = 0; i < head_dim; ++i) exact[i] += std::exp(score) * value[slot * head_dim + i];
    }
    std::vector<float> ours(head_dim);
    kernels.finish(state, row, head_dim, ours.data());
    results.insert(results.end(), ours.begin(), ours.end());
    for (int i = 0; i < head_dim; ++i) {
      expect(std::abs(ours[i] - exact[i] / total) <= tolerance,
             "attention: cache type %d, head_dim %d, row %d: %g, not %g", int(type), head_dim,
             int(row), double(ours[i]), exact[i] / total);
    }
  }
}

// The float kernels return the same bits everywhere; heads of more than 64, Hadamard matrices and Gated DeltaNet are
// compared by these alone.
void test_floats(const Kernels& ours) {
  const VectorKernels& kernels = ours.vector;
  Random random{std::mt19937(2)};
  std::vector<float> results;
  for (int tokens : {1, 30}) {
    for (int head_dim : {20, 64}) {
      test_attention(kernels, random, CacheType::float32, 1e-5, head_dim, tokens, results);
      test_attention(kernels, random, CacheType::float16, 5e-3, head_dim, tokens, results);
      test_attention(kernels, random, CacheType::int8, 0.1, head_dim, tokens, results);
      test_attention(kernels, random, CacheType::int4, 0.6, head_dim, tokens, results);
    }
  }
  for (int head_dim : {80, 128}) {
    for (CacheType type : {CacheType::int8, CacheType::int4}) {
      test_attention(kernels, random, type, std::numeric_limits<double>::infinity(), head_dim, 30, results);
    }
  }
  test_tables(ours, random, results);
  test_elementwise(kernels, random, results);
  test_delta_net(kernels, random, results);
  const unsigned sum = crc32(reinterpret_cast<const std::uint8_t*>(results.data()), 4 * std::int64_t(results.size()));
  expect(sum == checksum_of_floats, "float kernels of %s: checksum %08x", ours.isa, sum);
}

void test(const Kernels& ours) {
  Random random;
  test_groups(ours, random);
  test_quantize(ours, random);
  test_products(ours, random);
  test_gated(ours, random);
  test_floats(ours);
}

}  // namespace

int main() {
#if defined(SPARSE_BITNET_AMX)
  const Kernels amx = {"amx_int8", nullptr, vector_amx_int8, matmul_amx_int8, roofline_amx_int8};
  emulate_amx();
  test(amx);
  expect(amx_trap::products > 0, "no product was met");
  std::printf("amx_int8 (emulated)\n");
  std::signal(SIGILL, SIG_DFL);
  if (cpu_has_amx_int8()) {
    test(amx);
    std::printf("amx_int8\n");
  }
  for (const std::string& isa : supported_isas(true)) test_floats(choose_kernels(isa));
#elif defined(__aarch64__)
  for (const char* isa : {"neon", "i8mm"}) test(choose_kernels(isa));
  std::printf("neon (qemu)\ni8mm (qemu)\n");
#endif
  std::printf("%d differences\n", failures);
  return failures ? 1 : 0;
}
