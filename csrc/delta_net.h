// SPDX-License-Identifier: Apache-2.0
// Gated DeltaNet (arXiv 2412.06464) as Qwen3.5 has it: the work of one thread on one head, and its state.
//
// A layer keeps, for each sequence, the inputs of the last taps - 1 tokens to its convolution, and for each
// value head a matrix S [key_dim, value_dim], all float32. Value head h reads key head h / (V / K). One token:
//   a = S^T k, b = S^T q;  d = step (v - decay a);  out = decay b + (k q) d;  S = decay S + k d^T
// with k and q of length 1, q divided by sqrt(key_dim) besides. This is the recurrence S = decay S,
// d = step (v - S^T k), S = S + k d^T, out = S^T q, reading S once before it is updated.
// Tokens follow one another, so that a result does not depend on how a prompt was split; products and sums
// are in one order, and fused in the same places, so that it does not depend on the instruction set.

#pragma once

#include <cstdint>

namespace sparse_bitnet {

// Values of S that lie together: column c of S is column c % 16 of slab c / 16, [key_dim, 16]. Dimensions of
// heads are multiples of it.
constexpr std::int64_t slab_columns = 16;
constexpr std::int64_t max_delta_dim = 1024, max_taps = 8;

struct DeltaNetSizes {
  std::int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  std::int64_t taps = 0;  // tokens that the convolution sees, the token itself included

  std::int64_t keys() const { return key_heads * key_dim; }
  std::int64_t values() const { return value_heads * value_dim; }
  std::int64_t channels() const { return 2 * keys() + values(); }  // queries, keys, values
  std::int64_t past_floats() const { return (taps - 1) * channels(); }
  // Of a layer's state: [taps - 1, channels], then a head's slabs one behind another.
  std::int64_t state_floats() const { return past_floats() + values() * key_dim; }
};

// Causal depthwise convolution of some channels without bias, then silu.
struct Convolution {
  std::int64_t tokens, columns, taps;
  const float* weights;  // [taps, stride], the last one for the token itself
  const float* past;     // [taps - 1, columns], of the tokens before
  float* rows;           // [tokens, stride], in place
  std::int64_t stride;
};

// Some columns of one value head.
struct DeltaRule {
  std::int64_t tokens, key_dim, columns;
  const float *queries, *keys, *values;  // [tokens, stride]
  std::int64_t stride;
  const float *decays, *steps;  // [tokens, gate_stride]
  std::int64_t gate_stride;
  float* state;  // slabs
  float* out;    // [tokens, out_stride]
  std::int64_t out_stride;
};

}  // namespace sparse_bitnet
