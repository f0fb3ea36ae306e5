// SPDX-License-Identifier: Apache-2.0
// Gated DeltaNet on one chunk of tokens: from the residual to what the output projection multiplies.

#include "delta_net.h"

#include <algorithm>
#include <cmath>

#include "decoder_state.h"

namespace sparse_bitnet {
namespace {

constexpr float l2_epsilon = 1e-6f;

// Columns of a head that are one piece of work: their part of the state, 32 KiB with 128 keys, stays in the
// L1 cache for all tokens.
constexpr std::int64_t rule_columns = 64;

// Tokens whose inputs stay in the L2 cache while all rows of the gates are multiplied.
constexpr std::int64_t gate_tokens = 8;

double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// A decay below 1e-30 becomes 0: subnormal numbers would slow down every product.
float decay_of(double exponent) {
  const double decay = std::exp(exponent);
  return decay < 1e-30 ? 0 : float(decay);
}

}  // namespace

// Decays and steps: products with dense weights, from the norm that is in `delta`.
void Decoder::State::multiply_gates(const Block& block, std::int64_t tokens) {
  const std::int64_t n = model.hidden, heads = model.delta_net.value_heads, rows = 2 * heads;
  float* out = gates(tokens);
  const std::int64_t piece = std::max<std::int64_t>(1, work_for_threads / (n * std::min(tokens, gate_tokens)));
  pool.parallel_for(rows, piece, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t first = 0; first < tokens; first += gate_tokens) {
      for (std::int64_t row = begin; row < end; ++row) {
        const float* weights = row < heads ? block.decay_weights + row * n : block.step_weights + (row - heads) * n;
        for (std::int64_t token = first; token < std::min(tokens, first + gate_tokens); ++token) {
          const double x = kernels.vector.dot(&delta[token * n], weights, n);
          out[token * rows + row] =
              row < heads ? decay_of(block.decay_rates[row] * softplus(x + block.decay_bias[row]))
                          : float(1 / (1 + std::exp(-x)));
        }
      }
    }
  });
}

// One head of queries, keys or values of a segment: its convolution, and the norm of queries and keys.
void Decoder::State::convolve(const Block& block, std::int64_t segment, std::int64_t head) {
  const DeltaNetSizes& sizes = model.delta_net;
  const std::int64_t count = segments[segment].count, stride = sizes.channels(), taps = sizes.taps;
  const std::int64_t value_head = head - 2 * sizes.key_heads;
  const bool is_value = value_head >= 0;
  const std::int64_t columns = is_value ? sizes.value_dim : sizes.key_dim;
  const std::int64_t first = is_value ? 2 * sizes.keys() + value_head * columns : head * columns;
  float* rows = mixed() + segments[segment].first_row * stride + first;
  const std::int64_t place = block.of_kind * sizes.state_floats() + first;
  float* state = recurrences[segment].state + place;
  float past[(max_taps - 1) * max_delta_dim];
  for (std::int64_t i = 0; i + 1 < taps; ++i) std::copy_n(state + i * stride, columns, past + i * columns);
  // The inputs of the last taps - 1 of the first `tokens`.
  const auto keep = [&](std::int64_t tokens, float* to) {
    for (std::int64_t i = 0; i + 1 < taps; ++i) {
      const std::int64_t token = tokens - (taps - 1) + i;
      const float* from = token >= 0 ? rows + token * stride : past + (token + taps - 1) * columns;
      std::copy_n(from, columns, to + i * stride);
    }
  };
  keep(count, state);
  if (recurrences[segment].cut) keep(recurrences[segment].cut, recurrences[segment].snapshot + place);
  kernels.vector.convolve({count, columns, taps, block.convolution + first, past, rows, stride});
  for (std::int64_t token = 0; token < count && !is_value; ++token) {
    float* x = rows + token * stride;
    const float root = head < sizes.key_heads ? std::sqrt(float(columns)) : 1.0f;
    const float scale = 1 / (std::sqrt(kernels.vector.dot(x, x, columns) + l2_epsilon) * root);
    for (std::int64_t i = 0; i < columns; ++i) x[i] *= scale;
  }
}

// Some columns of one value head of a segment.
void Decoder::State::apply_delta_rule(const Block& block, std::int64_t segment, std::int64_t head,
                                      std::int64_t column) {
  const DeltaNetSizes& sizes = model.delta_net;
  const Segment& part = segments[segment];
  const Recurrence& recurrence = recurrences[segment];
  const std::int64_t end = segments.back().first_row + segments.back().count;
  const std::int64_t columns = std::min(rule_columns, sizes.value_dim - column);
  const std::int64_t place = block.of_kind * sizes.state_floats() + sizes.past_floats() +
                             (head * sizes.value_dim + column) * sizes.key_dim;
  const std::int64_t key_head = head / (sizes.value_heads / sizes.key_heads);
  const auto run = [&](std::int64_t first, std::int64_t count) {
    const std::int64_t row = part.first_row + first;
    const float* from = mixed() + row * sizes.channels();
    const float* gate = gates(end) + row * 2 * sizes.value_heads + head;
    const float* query = from + key_head * sizes.key_dim;
    kernels.vector.delta_rule({count, sizes.key_dim, columns, query, query + sizes.keys(),
                               from + 2 * sizes.keys() + head * sizes.value_dim + column, sizes.channels(), gate,
                               gate + sizes.value_heads, 2 * sizes.value_heads, recurrence.state + place,
                               recalled(end) + row * sizes.values() + head * sizes.value_dim + column,
                               sizes.values()});
  };
  run(0, recurrence.cut);
  if (recurrence.cut) {
    std::copy_n(recurrence.state + place, columns * sizes.key_dim, recurrence.snapshot + place);
  }
  run(recurrence.cut, part.count - recurrence.cut);
}

// A block's Gated DeltaNet, from the residual to `output_gate`.
void Decoder::State::apply_delta_net(const Block& block, std::int64_t tokens, bool add) {
  const DeltaNetSizes& sizes = model.delta_net;
  const Product products[] = {{&block.q, nullptr, mixed(), sizes.channels()},
                              {&block.k, nullptr, output_gate(tokens), sizes.values()}};
  norm_tokens(tokens, block.input_norm, add, nullptr, true);
  matmul(kernels, pool, hidden_codes.rows(0, tokens), products, 2, &reads);
  multiply_gates(block, tokens);
  const std::int64_t parts = std::int64_t(segments.size());
  const std::int64_t heads = 2 * sizes.key_heads + sizes.value_heads;
  const bool is_small = tokens * sizes.channels() * sizes.taps < work_for_threads;
  pool.parallel_for(parts * heads, is_small ? parts * heads : 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) convolve(block, i / heads, i % heads);
  });
  const std::int64_t pieces = packed::divide_up(sizes.value_dim, rule_columns);
  const std::int64_t of_segment = sizes.value_heads * pieces;
  pool.parallel_for(parts * of_segment, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t head = i % of_segment / pieces, column = i % pieces * rule_columns;
      apply_delta_rule(block, i / of_segment, head, column);
    }
  });
  // Norm of each head, times the gate, which is replaced.
  each_token(tokens, sizes.values(), [&](std::int64_t token, int) {
    float* out = recalled(tokens) + token * sizes.values();
    for (std::int64_t head = 0; head < sizes.value_heads; ++head) {
      norm(out + head * sizes.value_dim, block.delta_norm, sizes.value_dim);
    }
    float* gate = output_gate(tokens) + token * sizes.values();
    kernels.vector.gated(Activation::silu, gate, out, sizes.values(), gate, false);
  });
}

}  // namespace sparse_bitnet
