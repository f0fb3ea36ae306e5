// SPDX-License-Identifier: Apache-2.0
// A whole decoder step of the llama/qwen2 family over packed weights: embedding, blocks, final norm,
// output head, and the KV cache of many sequences. Also BitNet b1.58 (sub-norms, squared ReLU),
// Gemma 3 (norms of a block's outputs, two ropes), Hunyuan (norms of rotated heads), BitNet-embedding (a
// norm before each product; for o and down it is that of BitNet b1.58) and Qwen3.5 (Gated DeltaNet in place of
// attention in most blocks, delta_net.h; a gate of what attention returns; rope of a part of each head).
//
// Activations and the residual stream are float32; every linear of the blocks quantises its input per
// token to int8 and accumulates in int32 (matmul.h). The transformers model with packed layers, in
// float32, is the reference.

#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "delta_net.h"
#include "isa.h"
#include "matmul.h"

namespace sparse_bitnet {

enum class Logits : int { none = 0, last = 1, all = 2, hidden = 3 };

struct Block {
  // In a block with Gated DeltaNet, `q` projects to the convolution's inputs, [channels, hidden], `k` to the output's
  // gate, [values, hidden], `o` is [hidden, values], and there is no v. With gated attention, q has twice as many
  // rows: for each head the query, then the gate.
  Matrix q, k, v, o, gate, up, down;
  // All float32. Null where the model has none.
  const float *q_bias, *k_bias, *v_bias, *o_bias;
  const float *input_norm, *post_attention_norm;  // [hidden]
  const float *attention_sub_norm;                // [heads * head_dim], before o
  const float *ffn_sub_norm;                      // [intermediate], before down
  const float *q_norm, *k_norm;                   // [head_dim] (Qwen3)
  const float *attention_out_norm, *ffn_out_norm;  // [hidden], norms of the additions to the residual (Gemma 3)
  const float* linear_norms[5];  // [hidden], of the inputs of q, k, v, gate and up each (BitNet-embedding)
  std::int64_t window;                            // tokens that a token sees, itself included
  std::int64_t rope;                              // index of Model::ropes
  bool is_delta_net = false;
  std::int64_t of_kind = 0;  // number of blocks of the same kind before this one
  // Of Gated DeltaNet, float32.
  const float *decay_weights, *step_weights;  // [value_heads, hidden], dense
  const float* decay_bias;   // [value_heads]
  const float* decay_rates;  // [value_heads]; the decay is e^(rate * softplus(product + bias))
  const float* convolution;  // [taps, channels]
  const float* delta_norm;   // [value_dim]
};

// Rotate-half rotary embedding.
struct Rope {
  const float* inverse_frequencies;  // [rotated / 2]
  float scaling;                     // multiplies cos and sin, 1 by default
};

// Rotated weights: a matrix is stored as W S H, and its input x becomes H(s x), with Hadamard matrices H of
// `block` values (VectorKernels::hadamard) and signs s, the diagonal of S. A row of the embedding is s H(row).
struct Rotation {
  std::int64_t block = 0;  // 0: the weights are not rotated
  bool embedding = false, head = false;
  std::vector<std::pair<std::int64_t, const float*>> signs = {};  // of each width of inputs

  const float* signs_of(std::int64_t width) const {
    for (const auto& [of, values] : signs) {
      if (of == width) return values;
    }
    return nullptr;
  }
};

struct Model {
  std::int64_t hidden, intermediate, heads, kv_heads, head_dim, vocab;
  float norm_epsilon;
  Activation activation;
  std::int64_t activation_group;      // of all matrices of the blocks, see Activations; 0: none
  float query_scale;                  // multiplies the scores
  float embedding_scale;              // multiplies the embedding's rows
  bool norms_rotated = false;         // q_norm and k_norm are of rotated heads
  std::vector<Rope> ropes = {};
  Table embedding = {}, head = {};    // the same table if they are tied
  const float* final_norm = nullptr;  // [hidden]
  std::vector<Block> blocks = {};
  std::int64_t rotated = 0;           // first dimensions of a head that rope turns; 0: all
  bool gates_attention = false;
  DeltaNetSizes delta_net = {};
  Rotation rotation = {};

  std::int64_t blocks_of(bool is_delta_net) const {
    std::int64_t count = 0;
    for (const Block& block : blocks) count += block.is_delta_net == is_delta_net;
    return count;
  }
};

struct DecoderOptions {
  int threads;
  CacheType cache;
  std::int64_t context_length;  // maximum tokens of one sequence
  std::int64_t cache_tokens;    // tokens that fit into the cache, over all sequences, in whole pages
  const Kernels& kernels;
};

// Tokens per page of the cache. Sequences share whole pages after a fork (reference counts).
constexpr std::int64_t page_tokens = 64;

struct Request {
  int sequence;
  const std::int32_t* tokens;  // each in [0, vocab)
  std::int64_t count;          // >= 1
};

class Decoder {
 public:
  // Keeps pointers to the model's data. Throws std::bad_alloc.
  Decoder(Model model, const DecoderOptions& options);
  ~Decoder();

  int open();                                       // a new, empty sequence
  void close(int sequence);                         // frees its pages
  int fork(int sequence, std::int64_t length);      // a new sequence with the first `length` tokens
  void truncate(int sequence, std::int64_t length);  // forgets tokens from `length` on
  std::int64_t length(int sequence) const;
  // A recurrent state cannot be cut back: with Gated DeltaNet, fork and truncate, and a forward that throws,
  // leave the longest length whose state is there, and `length` says which. The rest is to be fed again.
  std::int64_t held(int sequence, std::int64_t length) const;  // what a fork at `length` would have
  std::int64_t most_states() const;  // recurrent ones, of all sequences
  std::int64_t free_tokens() const;  // tokens that fit into the free pages; 0 without a state for another sequence

  // Appends each request's tokens to its sequence. Logits: of the last token of each request
  // [requests, vocab], or of all tokens [sum of counts, vocab], float32; `hidden`: instead, the
  // states of all tokens after the final norm, [sum of counts, hidden].
  // Throws, before anything is changed, std::length_error when the context length or the cache does
  // not suffice, and std::out_of_range for a sequence that is not open or occurs twice. After
  // std::bad_alloc the sequences are unchanged, too.
  void forward(const Request* requests, int count, Logits which, float* logits);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sparse_bitnet
