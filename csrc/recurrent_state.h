// SPDX-License-Identifier: Apache-2.0
// Recurrent states of many sequences (delta_net.h). A state stands for all tokens up to one length and cannot
// be cut back, so a sequence also keeps snapshots: states at shorter lengths. Truncated or forked, it falls
// back to the longest one that is not too long, and the caller computes the tokens behind that again.
//
// States are shared after a fork and copied before they change. Their number is limited, over all sequences;
// at the limit the least recently used snapshots are dropped.

#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "platform.h"

namespace sparse_bitnet {

class RecurrentStates {
  struct Buffer {
    Buffer(std::int64_t floats, std::int64_t& alive) : data(floats * std::int64_t(sizeof(float))), alive(alive) {
      ++alive;
    }
    ~Buffer() { --alive; }
    float* floats() const { return reinterpret_cast<float*>(data.data()); }

    HugeBuffer data;
    std::int64_t& alive;
    std::int64_t used = 0;
  };
  using Shared = std::shared_ptr<Buffer>;

 public:
  // States of `floats` each, 0 if the model has none; at most `most` of them.
  RecurrentStates(std::int64_t floats, std::int64_t most) : floats_(floats), most_(most) {}

  bool is_used() const { return floats_ > 0; }
  // Whether more sequences are open than can have a state.
  bool is_crowded() const { return is_used() && std::int64_t(sequences_.size()) > most_; }

  void open(int sequence) { sequences_[sequence]; }
  void close(int sequence) { sequences_.erase(sequence); }
  // The largest length of at most `length` whose state a sequence has; 0 if it has none.
  std::int64_t held(int sequence, std::int64_t length) const;
  // Forgets states of more than `length` tokens.
  void cut(int sequence, std::int64_t length);
  // A new sequence `to` with a state of `from` at a length that is held.
  void fork(int from, int to, std::int64_t length);

  // A step's state of a sequence, which changes in place, and its snapshot, null for none, with the length
  // at which to fill it.
  struct Step {
    Shared live, snapshot;
    std::int64_t snapshot_length = 0;

    float* state() const { return live->floats(); }
    float* kept() const { return snapshot ? snapshot->floats() : nullptr; }
  };

  struct Growth {
    int sequence;
    std::int64_t length, count;
  };
  // Takes the latest states of sequences, at `length`, for `count` more tokens, which are part of a prompt if
  // they are several. Until `commit` the sequences have snapshots alone. Throws std::length_error or
  // std::bad_alloc, and then only snapshots may be gone. No steps if the model has no states.
  std::vector<Step> take(const std::vector<Growth>& growths);
  void commit(std::vector<Step>& steps, const std::vector<Growth>& growths);

 private:
  struct State {
    std::int64_t length;
    Shared buffer;
  };
  struct Sequence {
    std::vector<State> states;  // ascending; the last is the latest
    std::int64_t prompt_snapshot = 0;  // length of the snapshot of the prompt that is being computed, or 0
  };

  bool drop_snapshot();
  Shared make();

  const std::int64_t floats_, most_;
  std::int64_t alive_ = 0, clock_ = 0;
  std::unordered_map<int, Sequence> sequences_;
};

}  // namespace sparse_bitnet
