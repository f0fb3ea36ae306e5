// SPDX-License-Identifier: Apache-2.0
#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "decoder_state.h"

namespace sparse_bitnet {
namespace {

// Maximum tokens that go through the blocks together.
constexpr std::int64_t max_chunk_tokens = 512;

// Maximum floats of a chunk in `wide`: a small file can describe a model a million wide.
constexpr std::int64_t max_wide_floats = std::int64_t(1) << 26;

constexpr std::int64_t min_states = 8;

}  // namespace

void Decoder::State::check(const Request* requests, int count) const {
  std::vector<int> seen;
  std::int64_t pages = 0;
  for (int r = 0; r < count; ++r) {
    const Request& request = requests[r];
    const std::int64_t length = cache.length(request.sequence);
    if (request.count < 1) throw std::invalid_argument("a request has no tokens");
    if (request.count > context_length - length) {
      throw std::length_error(std::to_string(request.count) + " more tokens for sequence " +
                              std::to_string(request.sequence) + ", which has " +
                              std::to_string(length) + ": the context length is " +
                              std::to_string(context_length));
    }
    for (std::int64_t t = 0; t < request.count; ++t) {
      if (request.tokens[t] < 0 || request.tokens[t] >= model.vocab) {
        throw std::out_of_range("token " + std::to_string(request.tokens[t]) +
                                " is outside the vocabulary of " + std::to_string(model.vocab));
      }
    }
    seen.push_back(request.sequence);
    pages += cache.pages_for(request.sequence, request.count);
  }
  std::sort(seen.begin(), seen.end());
  const auto twice = std::adjacent_find(seen.begin(), seen.end());
  if (twice != seen.end()) {
    throw std::out_of_range("sequence " + std::to_string(*twice) + " occurs twice");
  }
  if (pages * page_tokens > cache.free_tokens()) {
    throw std::length_error("the cache has room for " + std::to_string(cache.free_tokens()) +
                            " more tokens in whole pages, the step takes " + std::to_string(pages * page_tokens));
  }
}

// As many states as take the memory of the keys and values, but enough for a few sequences.
std::int64_t Decoder::State::most_states() const {
  const std::int64_t bytes = model.blocks_of(true) * model.delta_net.state_floats() * std::int64_t(sizeof(float));
  return bytes ? std::max<std::int64_t>(cache.bytes() / bytes, min_states) : 0;
}

std::int64_t Decoder::State::wide_floats() const {
  const DeltaNetSizes& sizes = model.delta_net;
  const std::int64_t own_queries = model.gates_attention ? q_width : 0;
  return std::max({q_rows() + 2 * kv_width + q_width + own_queries, model.intermediate, 2 * model.hidden,
                   sizes.channels() + 2 * (sizes.values() + sizes.value_heads)});
}

std::int64_t Decoder::State::chunk_tokens() const {
  return std::clamp<std::int64_t>(max_wide_floats / wide_floats(), 1, max_chunk_tokens);
}

void Decoder::State::reserve(std::int64_t tokens) {
  if (tokens <= capacity) return;
  capacity = 0;  // until everything is allocated
  residual.resize(tokens * model.hidden);
  delta.resize(tokens * model.hidden);
  wide.resize(tokens * wide_floats());
  row.resize(pool.threads());
  for (AlignedVector<float>& one : row) one.resize(model.hidden);
  hidden_codes.reserve(tokens, model.hidden, false, model.activation_group);
  attended_codes.reserve(tokens, q_width, false, model.activation_group);
  recalled_codes.reserve(tokens, model.delta_net.values(), false, model.activation_group);
  gated_codes.reserve(tokens, model.intermediate, false, model.activation_group);
  capacity = tokens;
}

// float32 throughout, as transformers computes them.
void Decoder::State::reserve_positions(std::int64_t positions) {
  const std::int64_t half = rotated / 2;
  angles.resize(model.ropes.size());
  for (std::size_t r = 0; r < angles.size(); ++r) {
    const Rope& rope = model.ropes[r];
    auto& [cosines, sines] = angles[r];
    const std::int64_t first = std::int64_t(sines.size()) / half;  // the last to grow
    if (positions <= first) continue;
    const std::int64_t grown = std::min(context_length, std::max(positions, first + first / 2));
    cosines.resize(grown * half);
    sines.resize(grown * half);
    for (std::int64_t position = first; position < grown; ++position) {
      for (std::int64_t i = 0; i < half; ++i) {
        const float angle = float(position) * rope.inverse_frequencies[i];
        cosines[position * half + i] = std::cos(angle) * rope.scaling;
        sines[position * half + i] = std::sin(angle) * rope.scaling;
      }
    }
  }
}

// Runs the requests in chunks; growths[i] is what the sequence of request i grows by, `steps` of recurrent states.
void Decoder::State::run(const Request* requests, const std::vector<RecurrentStates::Growth>& growths,
                         const std::vector<RecurrentStates::Step>& steps, Logits which, float* logits) {
  std::size_t request = 0;
  std::int64_t done = 0;  // tokens of that request
  const std::int64_t most = chunk_tokens();
  while (request < growths.size()) {
    segments.clear();
    recurrences.clear();
    wanted.clear();
    std::vector<const std::int32_t*> tokens;
    std::int64_t row = 0;
    while (request < growths.size() && row < most) {
      const Request& from = requests[request];
      const std::int64_t part = std::min(from.count - done, most - row), position = growths[request].length + done;
      segments.push_back({from.sequence, row, position, part});
      if (!steps.empty()) {
        const RecurrentStates::Step& step = steps[request];
        const std::int64_t cut = step.snapshot_length - position;
        recurrences.push_back({step.state(), step.kept(), cut > 0 && cut <= part ? cut : 0});
      }
      tokens.push_back(from.tokens + done);
      for (std::int64_t token = 0; token < part; ++token) {
        const bool is_last = done + token + 1 == from.count;
        if (which == Logits::all || which == Logits::hidden || (which == Logits::last && is_last)) {
          wanted.push_back(row + token);
        }
      }
      row += part;
      done += part;
      if (done == from.count) ++request, done = 0;
    }
    run_chunk(tokens.data(), which, logits);
    const std::int64_t width = which == Logits::hidden ? model.hidden : model.vocab;
    if (logits) logits += std::int64_t(wanted.size()) * width;
  }
}

Decoder::Decoder(Model model, const DecoderOptions& options)
    : state_(std::make_unique<State>(std::move(model), options)) {}

Decoder::~Decoder() = default;

int Decoder::open() {
  const int sequence = state_->cache.open();
  state_->states.open(sequence);
  return sequence;
}

void Decoder::close(int sequence) {
  state_->cache.close(sequence);
  state_->states.close(sequence);
}

int Decoder::fork(int sequence, std::int64_t length) {
  length = held(sequence, length);
  const int forked = state_->cache.fork(sequence, length);
  state_->states.fork(sequence, forked, length);
  return forked;
}

void Decoder::truncate(int sequence, std::int64_t length) {
  const bool has_states = state_->states.is_used();
  if (has_states) length = held(sequence, std::min(length, state_->cache.length(sequence)));
  state_->cache.truncate(sequence, length);
  if (has_states) state_->states.cut(sequence, length);
}

std::int64_t Decoder::length(int sequence) const { return state_->cache.length(sequence); }

std::int64_t Decoder::held(int sequence, std::int64_t length) const {
  state_->cache.length(sequence);  // throws where it is not open
  return state_->states.is_used() ? state_->states.held(sequence, length) : length;
}

std::int64_t Decoder::most_states() const { return state_->most_states(); }
std::int64_t Decoder::free_tokens() const { return state_->states.is_crowded() ? 0 : state_->cache.free_tokens(); }

void Decoder::forward(const Request* requests, int count, Logits which, float* logits) {
  State& state = *state_;
  state.check(requests, count);
  std::int64_t all = 0, positions = 0;
  std::vector<RecurrentStates::Growth> growths;
  for (int r = 0; r < count; ++r) {
    growths.push_back({requests[r].sequence, state.cache.length(requests[r].sequence), requests[r].count});
    all += requests[r].count;
    positions = std::max(positions, growths.back().length + requests[r].count);
  }
  state.reserve(std::min(all, state.chunk_tokens()));
  state.reserve_positions(positions);
  try {
    std::vector<RecurrentStates::Step> steps = state.states.take(growths);
    for (const auto& growth : growths) state.cache.extend(growth.sequence, growth.count);
    state.run(requests, growths, steps, which, logits);
    state.states.commit(steps, growths);
  } catch (...) {
    for (const auto& growth : growths) truncate(growth.sequence, growth.length);
    throw;
  }
}

}  // namespace sparse_bitnet
