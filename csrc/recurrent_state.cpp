// SPDX-License-Identifier: Apache-2.0
#include "recurrent_state.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace sparse_bitnet {
namespace {

// A prompt's snapshot is this many tokens before its end: prompts that differ only in their last tokens, as chat
// templates make them, start from it, and computing the rest again takes no longer than one token.
constexpr std::int64_t tokens_behind = 8;

}  // namespace

std::int64_t RecurrentStates::held(int sequence, std::int64_t length) const {
  std::int64_t longest = std::min<std::int64_t>(length, 0);  // callers refuse what is negative
  for (const State& state : sequences_.at(sequence).states) {
    if (state.length <= length) longest = state.length;
  }
  return longest;
}

void RecurrentStates::cut(int sequence, std::int64_t length) {
  Sequence& longer = sequences_.at(sequence);
  while (!longer.states.empty() && longer.states.back().length > length) longer.states.pop_back();
  longer.prompt_snapshot = 0;
}

void RecurrentStates::fork(int from, int to, std::int64_t length) {
  const Sequence& forked = sequences_.emplace(to, sequences_.at(from)).first->second;
  cut(to, length);
  if (!forked.states.empty()) forked.states.back().buffer->used = ++clock_;
}

bool RecurrentStates::drop_snapshot() {
  std::vector<State>* oldest = nullptr;
  std::ptrdiff_t place = 0;
  for (auto& [number, sequence] : sequences_) {
    std::vector<State>& states = sequence.states;
    for (std::size_t i = 0; i + 1 < states.size(); ++i) {
      if (oldest && states[i].buffer->used >= (*oldest)[place].buffer->used) continue;
      oldest = &states;
      place = std::ptrdiff_t(i);
    }
  }
  if (oldest) oldest->erase(oldest->begin() + place);
  return oldest != nullptr;
}

// Returns a new state, or null if the limit is reached.
RecurrentStates::Shared RecurrentStates::make() {
  while (alive_ >= most_) {
    if (!drop_snapshot()) return nullptr;
  }
  return std::make_shared<Buffer>(floats_, alive_);
}

std::vector<RecurrentStates::Step> RecurrentStates::take(const std::vector<Growth>& growths) {
  if (!is_used()) return {};
  std::vector<Step> steps(growths.size());
  // What may throw comes first.
  for (std::size_t i = 0; i < growths.size(); ++i) {
    Sequence& sequence = sequences_.at(growths[i].sequence);
    std::vector<State>& states = sequence.states;
    states.reserve(states.size() + 2);
    const std::int64_t behind = growths[i].length + growths[i].count - tokens_behind;
    const bool is_prompt = growths[i].count > 1, is_inside = behind > growths[i].length;
    if (is_prompt && is_inside) steps[i].snapshot_length = behind;
    const bool is_shared = !states.empty() && states.back().buffer.use_count() > 1;
    const bool is_snapshot = is_prompt && !is_inside && !states.empty() && sequence.prompt_snapshot == 0;
    if (!states.empty() && !is_shared && !is_snapshot) continue;
    steps[i].live = make();
    // What shared it may have been dropped just now.
    if (!steps[i].live && (states.empty() || states.back().buffer.use_count() > 1)) {
      throw std::length_error("all " + std::to_string(most_) + " recurrent states are in use");
    }
    if (steps[i].live && is_snapshot) sequence.prompt_snapshot = growths[i].length;
  }
  for (std::size_t i = 0; i < growths.size(); ++i) {
    if (steps[i].snapshot_length == 0) continue;
    Sequence& sequence = sequences_.at(growths[i].sequence);
    // The prompt's snapshot so far makes room for the next one.
    for (std::size_t k = 0; k + 1 < sequence.states.size() && !steps[i].snapshot; ++k) {
      State& state = sequence.states[k];
      if (state.length != sequence.prompt_snapshot || state.buffer.use_count() > 1) continue;
      steps[i].snapshot = std::move(state.buffer);
      sequence.states.erase(sequence.states.begin() + std::ptrdiff_t(k));
    }
    if (!steps[i].snapshot) steps[i].snapshot = make();
    if (!steps[i].snapshot) steps[i].snapshot_length = 0;
  }
  for (std::size_t i = 0; i < growths.size(); ++i) {
    std::vector<State>& states = sequences_.at(growths[i].sequence).states;
    if (states.empty()) continue;
    if (steps[i].live) {
      std::memcpy(steps[i].state(), states.back().buffer->floats(), floats_ * sizeof(float));
    } else {
      steps[i].live = std::move(states.back().buffer);
      states.pop_back();
    }
  }
  return steps;
}

void RecurrentStates::commit(std::vector<Step>& steps, const std::vector<Growth>& growths) {
  for (std::size_t i = 0; i < steps.size(); ++i) {
    Sequence& sequence = sequences_.at(growths[i].sequence);
    if (growths[i].count == 1) sequence.prompt_snapshot = 0;
    if (steps[i].snapshot) {
      steps[i].snapshot->used = ++clock_;
      sequence.prompt_snapshot = steps[i].snapshot_length;
      sequence.states.push_back({steps[i].snapshot_length, std::move(steps[i].snapshot)});
    }
    steps[i].live->used = ++clock_;
    sequence.states.push_back({growths[i].length + growths[i].count, std::move(steps[i].live)});
  }
}

}  // namespace sparse_bitnet
