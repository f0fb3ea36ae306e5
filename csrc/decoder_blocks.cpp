// SPDX-License-Identifier: Apache-2.0
// One chunk of tokens through embedding, blocks, final norm and head.

#include <algorithm>

#include "decoder_state.h"

namespace sparse_bitnet {

// Products of the residual's norm, as `norm_tokens` makes it; `own`: of each product, or null.
void Decoder::State::multiply_normed(std::int64_t tokens, const float* weight, bool add,
                                     const Product* products, int count, const float* const* own) {
  const int together = own[0] ? 1 : count;
  for (int first = 0; first < count; first += together) {
    norm_tokens(tokens, weight, add && first == 0, own[first]);
    matmul(kernels, pool, hidden_codes.rows(0, tokens), products + first, together, &reads);
  }
}

// Queries and keys are rotated, keys and values go to the cache.
void Decoder::State::rotate_and_append(const Block& block, std::int64_t tokens) {
  const std::int64_t head_dim = model.head_dim, half = rotated / 2;
  const Angles& rotation = angles[block.rope];
  float *queries = this->queries(tokens), *keys = k(tokens), *values = v(tokens);
  each_token(tokens, q_width + 4 * kv_width, [&](std::int64_t token, int) {
    const auto after = std::upper_bound(
        segments.begin(), segments.end(), token,
        [](std::int64_t row, const Segment& segment) { return row < segment.first_row; });
    const Segment& segment = *(after - 1);
    const std::int64_t position = segment.position + token - segment.first_row;
    const float* cosine = &rotation.cosines[position * half];
    const float* sine = &rotation.sines[position * half];
    const auto rotate = [&](float* head, const float* head_norm, float scale) {
      const bool is_last = head_norm && model.norms_rotated;
      if (is_last) kernels.vector.rotate(head, cosine, sine, half, 1.0f);
      norm(head, head_norm, head_dim);
      if (!is_last) kernels.vector.rotate(head, cosine, sine, half, scale);
      for (std::int64_t i = is_last ? 0 : rotated; i < head_dim; ++i) head[i] *= scale;
    };
    for (std::int64_t head = 0; head < model.heads; ++head) {
      float* query = queries + token * q_width + head * head_dim;
      if (model.gates_attention) std::copy_n(q() + token * q_rows() + 2 * head * head_dim, head_dim, query);
      rotate(query, block.q_norm, model.query_scale * log2_e);
    }
    const std::int32_t page = cache.pages(segment.sequence)[position / page_tokens];
    for (std::int64_t head = 0; head < model.kv_heads; ++head) {
      float *key = keys + token * kv_width + head * head_dim, *value = values + (key - keys);
      rotate(key, block.k_norm, 1.0f);
      if (cache.type() == CacheType::int4) {
        hadamard_head(kernels.vector, key, head_dim);
        hadamard_head(kernels.vector, value, head_dim);
      }
      kernels.vector.append(cache.type(), cache.view(page, block.of_kind, head), position % page_tokens, key, value,
                       head_dim);
    }
  });
}

// A block's attention, from the residual to `attended`. In the last block only the wanted rows attend.
void Decoder::State::attend(const Block& block, std::int64_t tokens, bool add) {
  const Product products[] = {{&block.q, block.q_bias, q(), q_rows()},
                              {&block.k, block.k_bias, k(tokens), kv_width},
                              {&block.v, block.v_bias, v(tokens), kv_width}};
  multiply_normed(tokens, block.input_norm, add, products, 3, block.linear_norms);
  rotate_and_append(block, tokens);
  if (&block == &model.blocks.back() && std::int64_t(wanted.size()) < tokens) {
    std::vector<Segment> parts;
    for (const Segment& segment : segments) {
      for (std::int64_t row : wanted) {
        const std::int64_t token = row - segment.first_row;
        if (token < 0 || token >= segment.count) continue;
        parts.push_back({segment.sequence, row, segment.position + token, 1});
      }
    }
    plan.set(parts.data(), std::int64_t(parts.size()));
  }
  plan.run(kernels.vector, pool, block.of_kind, block.window, queries(tokens), attended(tokens));
  if (!model.gates_attention) return;
  const std::int64_t n = model.head_dim;  // each head times the sigmoid of its gate
  each_token(tokens, q_width, [&](std::int64_t token, int) {
    for (std::int64_t head = 0; head < model.heads; ++head) {
      const float* gate = q() + token * q_rows() + (2 * head + 1) * n;
      float* out = attended(tokens) + token * q_width + head * n;
      kernels.vector.gated(Activation::sigmoid, gate, out, n, out, false);
    }
  });
}

// Moves the wanted of `rows` [tokens, width], and of the residual, to the front.
void Decoder::State::keep_wanted(float* rows, std::int64_t width) {
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (std::int64_t(i) == wanted[i]) continue;
    std::copy_n(rows + wanted[i] * width, width, rows + i * width);
    std::copy_n(&residual[wanted[i] * model.hidden], model.hidden, &residual[i * model.hidden]);
  }
}

// delta = a matrix times `rows` [tokens, columns], which are first normalised, rotated and quantised in place. Norms
// may be null.
void Decoder::State::project(const Matrix& matrix, const float* bias, std::int64_t tokens, float* rows,
                             const float* sub_norm, const ActivationBuffer& codes, const float* out_norm) {
  const std::int64_t width = matrix.columns, n = model.hidden;
  each_token(tokens, width, [&](std::int64_t token, int) {
    float* x = rows + token * width;
    norm(x, sub_norm, width);
    rotate_basis(x, width);
    quantize(kernels, x, codes.rows(token, 1));
  });
  const Product product{&matrix, bias, delta.data(), n};
  matmul(kernels, pool, codes.rows(0, tokens), &product, 1, &reads);
  if (out_norm) each_token(tokens, n, [&](std::int64_t token, int) { norm(&delta[token * n], out_norm, n); });
}

void Decoder::State::feed_forward(const Block& block, std::int64_t tokens) {
  const std::int64_t n = model.intermediate;
  float* gated = wide.data();
  const Product products[] = {{&block.gate, nullptr, gated, n}, {&block.up, nullptr, gated, n, &model.activation}};
  multiply_normed(tokens, block.post_attention_norm, true, products, 2, block.linear_norms + 3);
  project(block.down, nullptr, tokens, gated, block.ffn_sub_norm, gated_codes, block.ffn_out_norm);
}

// Final norm and, unless hidden states are requested, the head of the wanted rows, which come first.
void Decoder::State::write_logits(Logits which, float* logits) {
  const std::int64_t tokens = std::int64_t(wanted.size()), n = model.hidden;
  const Table& table = model.head;
  const bool ends_here = which == Logits::hidden;
  const bool codes = !ends_here && table.type != TableType::bfloat16 && table.type != TableType::float32;
  if (codes) head_codes.reserve(tokens, n, table.group == 0, table.group);
  each_token(tokens, n, [&](std::int64_t token, int) {
    float* x = &residual[token * n];
    float* out = ends_here ? logits + token * n : x;
    kernels.vector.add_and_norm(x, &delta[token * n], model.final_norm, model.norm_epsilon, n, out);
    if (model.rotation.head && !ends_here) rotate_basis(x, n);
    if (codes) quantize(kernels, x, head_codes.rows(token, 1));
  });
  if (ends_here) return;
  if (!codes) {
    matmul_table(kernels, pool, residual.data(), tokens, table, logits);
    return;
  }
  const Matrix matrix = table.matrix();
  const Product product{&matrix, nullptr, logits, model.vocab};
  matmul(kernels, pool, head_codes.rows(0, tokens), &product, 1, &reads);
}

// Runs the tokens of `segments`; tokens[i] are those of segments[i]. Logits, or states, of the wanted rows.
void Decoder::State::run_chunk(const std::int32_t* const* tokens, Logits which, float* logits) {
  const Segment& end = segments.back();
  reads.next = 0;
  std::int64_t count = end.first_row + end.count;
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const Segment& segment = segments[s];
    each_token(segment.count, model.hidden, [&](std::int64_t token, int) {
      float* x = &residual[(segment.first_row + token) * model.hidden];
      table_row(model.embedding, tokens[s][token], x);
      if (model.rotation.embedding) {
        const Rotation& rotation = model.rotation;
        kernels.vector.hadamard(x, nullptr, rotation.signs_of(model.hidden), model.hidden, rotation.block);
      }
      if (model.embedding_scale == 1.0f) return;
      for (std::int64_t i = 0; i < model.hidden; ++i) x[i] *= model.embedding_scale;
    });
  }
  plan.set(segments.data(), std::int64_t(segments.size()));
  for (std::size_t layer = 0; layer < model.blocks.size(); ++layer) {
    const Block& block = model.blocks[layer];
    float* rows = block.is_delta_net ? output_gate(count) : attended(count);
    block.is_delta_net ? apply_delta_net(block, count, layer > 0) : attend(block, count, layer > 0);
    if (layer + 1 == model.blocks.size()) {
      keep_wanted(rows, block.o.columns);
      count = std::int64_t(wanted.size());
      if (count == 0) return;
    }
    project(block.o, block.o_bias, count, rows, block.attention_sub_norm,
            block.is_delta_net ? recalled_codes : attended_codes, block.attention_out_norm);
    feed_forward(block, count);
  }
  write_logits(which, logits);
}

}  // namespace sparse_bitnet
