// SPDX-License-Identifier: Apache-2.0
// Causal attention of grouped queries over the pages of a KvCache.
//
// A row is one query of one head. The heads of a group share keys and values, so the rows of a task, all
// heads of the group and up to `query_block` tokens, use each page together. Softmax is computed on the
// way (running maximum and sum per row), page by page within chunks of `chunk_pages`, whose results are
// merged in order. A row's result depends on its query and its pages alone: not on the other rows, the
// thread count or the split of a prompt.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include "aligned_vector.h"
#include "isa.h"
#include "kv_cache.h"

namespace sparse_bitnet {

constexpr std::int64_t query_block = 32;  // tokens of a task with many queries
constexpr std::int64_t chunk_pages = 8;
constexpr int sum_lanes = 16;  // partial sums of floats, however wide a vector is: one order everywhere
constexpr float log2_e = 1.44269504f;  // powers of two are cheaper than those of e

// The running softmax of `rows` rows.
struct AttentionState {
  float* maximum;  // [rows]
  float* sum;      // [rows, sum_lanes]: partial sums
  float* out;      // [rows, padded_dim]
};

// One page's part in the attention of some rows.
struct PageAttention {
  CacheType type;
  std::int64_t head_dim, rows, group;
  std::int64_t visible;  // keys that the first token sees, its own included, counted from the page's start;
                         // each later token sees one more
  std::int64_t window;   // number of the last ones that a token sees
  const float* queries;  // [rows, head_dim], row = token * group + head, scaled, times log2_e
  // The queries as int8 [rows, four_dim], with a scale and a sum of codes per row; for int8 and int4 pages only.
  const std::int8_t* query_codes;
  const float* query_scales;
  const std::int32_t* query_sums;
  PageView page;
  const void* next_keys;  // keys that are read after this page, for prefetching
  float* wide;  // scratch [2, page_tokens * padded_dim]: a page in floats, or of int4 in int8
  AttentionState state;
};

// Multiplies each run of 2^k numbers of a head, 2^k the largest power of two that divides n, by a Hadamard matrix,
// its own inverse. With an int4 cache this rotates queries, keys and values, and rotates the output back: products
// stay the same, but outliers of a head, which would enlarge its scale, are spread over many numbers.
inline void hadamard_head(const VectorKernels& kernels, float* head, std::int64_t n) {
  kernels.hadamard(head, nullptr, nullptr, n, n & -n);
}

// Tokens of one sequence within a batch whose keys and values are already in the cache.
struct Segment {
  int sequence;
  std::int64_t first_row;  // of its first token in the batch
  std::int64_t position;   // of its first token in the sequence
  std::int64_t count;
};

// The tasks of one batch, the same for every layer.
class AttentionPlan {
 public:
  AttentionPlan(const KvCache& cache, std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim, int threads);

  void set(const Segment* segments, std::int64_t count);

  // queries, out: [rows, heads * head_dim]. A token sees itself and the tokens
  // before it, `window` tokens in all.
  void run(const VectorKernels& kernels, ThreadPool& pool, std::int64_t layer, std::int64_t window,
           const float* queries, float* out);

 private:
  struct QueryCodes {
    std::int8_t* codes;   // [rows, four_dim]
    float* scales;        // [rows]
    std::int32_t* sums;   // [rows]
  };
  // The queries of some tokens of a segment against all their pages, or one chunk of them.
  struct Task {
    std::int64_t segment, kv_head, token, tokens;
    std::int64_t first_page, page_count;
    std::int64_t merge;  // index in merges_ and left_, -1: the task is alone
    std::int64_t chunk;  // of those to be merged
  };
  struct Merge {
    std::int64_t chunks, first_state;  // states_ of its chunks, one after the other
  };

  // What the tasks of one call of `run` share.
  struct Call {
    const VectorKernels& kernels;
    std::int64_t layer, window;
    const float* queries;
    float* out;
  };

  void run_task(const Call& call, const Task& task, int thread);
  QueryCodes codes_of(float* scratch, std::int64_t rows) const;
  void quantize_queries(const VectorKernels& kernels, std::int64_t rows, float* scratch) const;
  void attend_pages(const Call& call, const Task& task, std::int64_t first, std::int64_t count, float* scratch,
                    const AttentionState& state) const;
  void write_rows(const Call& call, const Task& task, const AttentionState& state) const;
  AttentionState state_at(float* memory, std::int64_t rows) const;
  std::int64_t state_floats(std::int64_t rows) const;
  std::int64_t query_floats(std::int64_t rows) const;

  const KvCache& cache_;
  std::int64_t group_, kv_heads_, head_dim_, padded_;
  std::vector<Segment> segments_;
  std::vector<const std::int32_t*> pages_;
  std::vector<Task> tasks_;
  std::vector<Merge> merges_;
  std::deque<std::atomic<std::int64_t>> left_;  // tasks that each merge waits for
  AlignedVector<float> states_;
  std::vector<AlignedVector<float>> scratch_;  // per thread: queries and their codes, a page in floats, two states
  std::int64_t work_ = 0;                    // rows times keys
};

}  // namespace sparse_bitnet
