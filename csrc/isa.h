// SPDX-License-Identifier: Apache-2.0
// The table of kernels: for each instruction set, the function of every operation. One row is chosen, by
// name or as the best, and passed down.
//
// Each function is one thread's work on contiguous arrays given by address; nothing is allocated or
// kept. The Python references define the results of `ops`; integers are the same bits in every row.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "packed_format.h"

namespace sparse_bitnet {

enum class Dtype : int { float32 = 0, bfloat16 = 1 };
enum class Activation : int { silu = 0, relu_squared = 1, gelu_tanh = 2, sigmoid = 3 };
enum class CacheType : int { float32 = 0, float16 = 1, int8 = 2, int4 = 3 };
struct PageView;
struct PageAttention;
struct AttentionState;
struct Convolution;
struct DeltaRule;
struct MatmulKernels;
struct RooflineLoops;
struct Table;

// Kernels written in terms of vectors of any width (isa-inl.h).
struct VectorKernels {
  // weight [groups, m] -> mask [groups, m], 1 where the weight is among the n largest magnitudes of
  // its group, ties to the lower index. 1 <= n < m <= 32. codes [groups, m], unless null:
  // mask * clip(round_half_even(weight / weight_scale), -1, 1). weight_scale >= 2^-125.
  void (*select_ternary)(const void* weight, Dtype dtype, float weight_scale, std::int64_t groups,
                         int n, int m, std::int8_t* codes, std::uint8_t* mask);

  // codes [count] of a dense matrix.
  void (*dense_ternary)(const void* weight, Dtype dtype, float weight_scale, std::int64_t count,
                        std::int8_t* codes);

  // Sum of |weight| over at most sum_block weights, in float64, in a fixed order.
  double (*sum_magnitudes)(const void* weight, Dtype dtype, std::int64_t count);

  // x [tokens, features] -> codes [tokens, features], activation_scale [tokens].
  void (*quantize_int8)(const void* x, Dtype dtype, std::int64_t tokens, std::int64_t features,
                        std::int8_t* codes, float* activation_scale);

  // Groups of 64 finite values -> a scale and 32 bytes of WeightFormat::int4 each.
  void (*quantize_int4)(const float* values, std::int64_t groups, std::uint8_t* out, float* scales);

  // residual [n] += delta [n] (if not null); out [n] = residual / sqrt(mean(residual^2) + epsilon) *
  // weight. `out` may be `residual`.
  void (*add_and_norm)(float* residual, const float* delta, const float* weight, float epsilon,
                       std::int64_t n, float* out);

  // out [n] = activation(gate) * up; `out` may be either. `streams`: past the caches.
  void (*gated)(Activation activation, const float* gate, const float* up, std::int64_t n, float* out, bool streams);

  // x [2 half] = (x * cosine + rotate_half(x) * sine) * scale, cosine and sine [half].
  void (*rotate)(float* x, const float* cosine, const float* sine, std::int64_t half, float scale);

  // x [n] = after * H(before * x): the normalised Hadamard matrix of each run of `block` values, a power of two
  // that divides n; row and column r, c of it: (-1)^popcount(r & c) / sqrt(block). before, after [n]: +1 or
  // -1, or null for ones. Butterflies of strides 1, 2, 4, ... in this order: the same bits on every instruction set.
  void (*hadamard)(float* x, const float* before, const float* after, std::int64_t n, std::int64_t block);

  // Attention of some rows to one page of the cache, see attention.h; then two states into one.
  void (*attend)(const PageAttention& work);
  void (*merge)(const AttentionState& into, const AttentionState& from, std::int64_t rows,
                std::int64_t padded);
  // out [head_dim] of one row = state.out / state.sum.
  void (*finish)(const AttentionState& state, std::int64_t row, std::int64_t head_dim, float* out);
  // Stores a key and a value [head_dim] as token `slot` of a page.
  void (*append)(CacheType type, const PageView& page, std::int64_t slot, const float* key,
                 const float* value, std::int64_t head_dim);

  // Sum of a [n] times b [n] in float32; then two of delta_net.h. The same bits everywhere.
  float (*dot)(const float* a, const float* b, std::int64_t n);
  void (*convolve)(const Convolution& work);
  void (*delta_rule)(const DeltaRule& work);

  // y[:, begin:end] of matmul_table, any number of tokens; the same bits everywhere.
  void (*multiply_table)(const float* x, std::int64_t tokens, const Table& table, std::int64_t begin,
                         std::int64_t end, float* y);
};

extern const VectorKernels vector_generic, vector_avx2, vector_avxvnni, vector_avx512, vector_avx512vnni,
    vector_amx_int8, vector_emulated_unit;

// A row.
struct Kernels {
  const char* isa;
  bool (*is_supported)();
  const VectorKernels& vector;
  const MatmulKernels& matmul;    // matmul_kernels.h
  const RooflineLoops& roofline;  // roofline.h
};

// Names of the rows that this machine runs, best first; rows for tests only come last.
std::vector<std::string> supported_isas(bool for_tests = false);

// The row of that name; for "", the one that SPARSE_BITNET_ISA names, or else the best. Throws
// std::invalid_argument that lists what this machine has.
const Kernels& choose_kernels(const std::string& isa);

}  // namespace sparse_bitnet
