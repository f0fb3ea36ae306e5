// SPDX-License-Identifier: Apache-2.0
// State of a decoder between steps, for decoder.cpp (requests, cache, chunks) and decoder_blocks.cpp
// (the work on one chunk).

#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "aligned_vector.h"
#include "attention.h"
#include "decoder.h"
#include "isa.h"
#include "kv_cache.h"
#include "recurrent_state.h"

namespace sparse_bitnet {

// Quantised activations with their memory.
class ActivationBuffer {
 public:
  void reserve(std::int64_t tokens, std::int64_t columns, bool fine, std::int64_t group) {
    if (tokens <= view_.tokens) return;
    view_.tokens = 0;  // until everything is allocated
    const std::int64_t stride = activation_stride(columns);
    const std::size_t bytes = std::size_t(tokens * stride + activation_slack);
    codes_.assign(bytes, 0);
    if (fine) fine_.assign(bytes, 0);
    const std::int64_t scales = tokens * (group ? columns / group : 1);
    scales_.assign(scales, 0);
    sums_.assign(scales, 0);
    fine_sums_.assign(tokens, 0);
    view_ = {tokens, columns, stride, codes_.data(), fine ? fine_.data() : nullptr, scales_.data(),
             sums_.data(), fine ? fine_sums_.data() : nullptr, false, nullptr, nullptr, group};
  }

  // Tokens [first, first + count).
  Activations rows(std::int64_t first, std::int64_t count) const { return view_.range(first, first + count); }

 private:
  AlignedVector<std::int8_t> codes_, fine_;
  std::vector<float> scales_;
  std::vector<std::int32_t> sums_, fine_sums_;
  Activations view_{};
};

struct Decoder::State {
  State(Model given, const DecoderOptions& options)
      : model(std::move(given)),
        context_length(options.context_length),
        kernels(options.kernels),
        pool(options.threads),
        cache(options.cache, model.blocks_of(false), model.kv_heads, model.head_dim, options.cache_tokens),
        states(model.blocks_of(true) * model.delta_net.state_floats(), most_states()),
        plan(cache, model.heads, model.kv_heads, model.head_dim, pool.threads()),
        q_width(model.heads * model.head_dim),
        kv_width(model.kv_heads * model.head_dim),
        rotated(model.rotated ? model.rotated : model.head_dim) {}

  const Model model;
  const std::int64_t context_length;
  const Kernels& kernels;
  ThreadPool pool;
  KvCache cache;
  RecurrentStates states;
  AttentionPlan plan;
  const std::int64_t q_width, kv_width, rotated;

  std::int64_t capacity = 0;     // tokens the buffers hold
  AlignedVector<float> residual;  // [tokens, hidden]
  AlignedVector<float> delta;     // [tokens, hidden], to be added to the residual
  AlignedVector<float> wide;      // q, k, v, attended; then gate times up
  std::vector<AlignedVector<float>> row;  // per thread: one token between norm and quantisation
  ActivationBuffer hidden_codes, attended_codes, recalled_codes, gated_codes, head_codes;
  struct Angles {
    std::vector<float> cosines, sines;  // [positions, rotated / 2]
  };
  std::vector<Angles> angles;         // of each rope
  std::vector<Segment> segments;      // of the current chunk
  // For Gated DeltaNet: the state of a segment's sequence, and a snapshot to fill after `cut` of its tokens; 0: none.
  struct Recurrence {
    float *state, *snapshot;
    std::int64_t cut;
  };
  std::vector<Recurrence> recurrences;  // of the segments
  std::vector<std::int64_t> wanted;   // its rows that need logits, ascending
  ReadOrder reads;                    // of the products of a chunk

  void check(const Request* requests, int count) const;
  std::int64_t most_states() const;
  std::int64_t wide_floats() const;  // of a token in `wide`
  std::int64_t chunk_tokens() const;  // maximum tokens that go through the blocks together
  void reserve(std::int64_t tokens);
  void reserve_positions(std::int64_t positions);
  void run(const Request* requests, const std::vector<RecurrentStates::Growth>& growths,
           const std::vector<RecurrentStates::Step>& steps, Logits which, float* logits);
  void run_chunk(const std::int32_t* const* tokens, Logits which, float* logits);
  void attend(const Block& block, std::int64_t tokens, bool add);
  void project(const Matrix& matrix, const float* bias, std::int64_t tokens, float* rows, const float* sub_norm,
               const ActivationBuffer& codes, const float* out_norm);
  void rotate_and_append(const Block& block, std::int64_t tokens);
  void keep_wanted(float* rows, std::int64_t width);
  void apply_delta_net(const Block& block, std::int64_t tokens, bool add);
  void multiply_gates(const Block& block, std::int64_t tokens);
  void convolve(const Block& block, std::int64_t segment, std::int64_t head);
  void apply_delta_rule(const Block& block, std::int64_t segment, std::int64_t head, std::int64_t column);
  void feed_forward(const Block& block, std::int64_t tokens);
  void multiply_normed(std::int64_t tokens, const float* weight, bool add, const Product* products,
                       int count, const float* const* own);
  void write_logits(Logits which, float* logits);

  // Of the chunk's tokens, in `wide`.
  std::int64_t q_rows() const { return model.gates_attention ? 2 * q_width : q_width; }
  float* q() { return wide.data(); }
  float* k(std::int64_t tokens) { return q() + tokens * q_rows(); }
  float* v(std::int64_t tokens) { return k(tokens) + tokens * kv_width; }
  float* attended(std::int64_t tokens) { return v(tokens) + tokens * kv_width; }
  // Rotated ones, apart from their gates.
  float* queries(std::int64_t tokens) {
    return model.gates_attention ? attended(tokens) + tokens * q_width : q();
  }
  // With Gated DeltaNet: inputs of the convolution, then queries, keys and values; gate of the output, then the
  // output; decays and steps, of all heads each; what the delta rule returns.
  float* mixed() { return wide.data(); }
  float* output_gate(std::int64_t tokens) { return mixed() + tokens * model.delta_net.channels(); }
  float* gates(std::int64_t tokens) { return output_gate(tokens) + tokens * model.delta_net.values(); }
  float* recalled(std::int64_t tokens) { return gates(tokens) + 2 * tokens * model.delta_net.value_heads; }

  // Floats of elementwise work below which another thread costs more than it gains.
  static constexpr std::int64_t work_for_threads = 16384;

  // body(token, thread) for every token.
  template <class Body>
  void each_token(std::int64_t tokens, std::int64_t columns, Body&& body) {
    const std::int64_t piece = tokens * columns < work_for_threads
                                   ? tokens
                                   : std::max<std::int64_t>(1, work_for_threads / columns);
    pool.parallel_for(tokens, piece, [&](std::int64_t begin, std::int64_t end, int thread) {
      for (std::int64_t token = begin; token < end; ++token) body(token, thread);
    });
  }

  // The input of a matrix, `n` wide, in the basis of its weights.
  void rotate_basis(float* x, std::int64_t n) {
    const Rotation& rotation = model.rotation;
    if (rotation.block) kernels.vector.hadamard(x, rotation.signs_of(n), nullptr, n, rotation.block);
  }

  // Normalises x [n] in place; without a weight does nothing.
  void norm(float* x, const float* weight, std::int64_t n) const {
    if (weight) kernels.vector.add_and_norm(x, nullptr, weight, model.norm_epsilon, n, x);
  }

  // residual += delta (if `add`); quantises its norm, and if `own` is not null the norm of that. `keeps`: also
  // writes it to `delta`.
  void norm_tokens(std::int64_t tokens, const float* weight, bool add, const float* own = nullptr,
                   bool keeps = false) {
    const std::int64_t n = model.hidden;
    each_token(tokens, n, [&](std::int64_t token, int thread) {
      float* out = row[thread].data();
      kernels.vector.add_and_norm(&residual[token * n], add ? &delta[token * n] : nullptr, weight,
                               model.norm_epsilon, n, out);
      norm(out, own, n);
      if (keeps) std::copy_n(out, n, &delta[token * n]);
      rotate_basis(out, n);
      quantize(kernels, out, hidden_codes.rows(token, 1));
    });
  }
};

}  // namespace sparse_bitnet
