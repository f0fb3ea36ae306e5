// SPDX-License-Identifier: Apache-2.0
#include "attention.h"

#include <algorithm>
#include <numeric>

namespace sparse_bitnet {
namespace {

// Maximum of a row that has seen no key: no score is so small, and 2^(this - score) is zero.
constexpr float least_score = -1e30f;

// Segments of at most this many rows have their chunks distributed over the threads.
constexpr std::int64_t max_rows_in_chunks = 64;

// Whole cache lines.
std::int64_t aligned_floats(std::int64_t count) { return packed::round_up(count, 16); }

// Rows times keys below which another thread costs more than it gains.
constexpr std::int64_t work_for_threads = 1500;

}  // namespace

AttentionPlan::AttentionPlan(const KvCache& cache, std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim,
                             int threads)
    : cache_(cache),
      group_(heads / kv_heads),
      kv_heads_(kv_heads),
      head_dim_(head_dim),
      padded_(padded_dim(head_dim)),
      scratch_(threads) {}

std::int64_t AttentionPlan::state_floats(std::int64_t rows) const {
  return rows * (padded_ + sum_lanes) + aligned_floats(rows);
}

// Queries; then what int8 and int4 need of them, codes, scales and sums.
std::int64_t AttentionPlan::query_floats(std::int64_t rows) const {
  return aligned_floats(rows * head_dim_) + aligned_floats(rows * (four_dim(head_dim_) / 4 + 2));
}

AttentionState AttentionPlan::state_at(float* memory, std::int64_t rows) const {
  float* sum = memory + rows * padded_;
  return {sum + rows * sum_lanes, sum, memory};
}

void AttentionPlan::set(const Segment* segments, std::int64_t count) {
  segments_.assign(segments, segments + count);
  pages_.clear();
  tasks_.clear();
  merges_.clear();
  work_ = 0;
  std::int64_t states = 0, largest_rows = 0;
  for (std::int64_t s = 0; s < count; ++s) {
    const Segment& segment = segments_[s];
    pages_.push_back(cache_.pages(segment.sequence));
    const std::int64_t rows = segment.count * group_;
    work_ += rows * kv_heads_ * (segment.position + segment.count);
    const bool in_chunks = rows <= max_rows_in_chunks;
    const std::int64_t block = in_chunks ? segment.count : query_block;
    for (std::int64_t head = 0; head < kv_heads_; ++head) {
      for (std::int64_t token = 0; token < segment.count; token += block) {
        const std::int64_t tokens = std::min(block, segment.count - token);
        const std::int64_t pages = packed::divide_up(segment.position + token + tokens, page_tokens);
        const std::int64_t step = in_chunks ? chunk_pages : pages, chunks = packed::divide_up(pages, step);
        const std::int64_t merge = chunks > 1 ? std::int64_t(merges_.size()) : -1;
        for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
          const std::int64_t first = chunk * step;
          tasks_.push_back({s, head, token, tokens, first, std::min(step, pages - first), merge, chunk});
        }
        largest_rows = std::max(largest_rows, tokens * group_);
        if (merge < 0) continue;
        merges_.push_back({chunks, states});
        states += chunks * state_floats(rows);
      }
    }
  }
  // Large tasks first, so that the threads end together.
  std::stable_sort(tasks_.begin(), tasks_.end(), [](const Task& a, const Task& b) {
    return a.page_count * a.tokens > b.page_count * b.tokens;
  });
  if (std::int64_t(states_.size()) < states) states_.resize(states);
  while (left_.size() < merges_.size()) left_.emplace_back();
  const std::int64_t scratch =
      query_floats(largest_rows) + 2 * page_tokens * padded_ + 2 * state_floats(largest_rows);
  for (AlignedVector<float>& memory : scratch_) {
    if (std::int64_t(memory.size()) < scratch) memory.resize(scratch);
  }
}

void AttentionPlan::run(const VectorKernels& kernels, ThreadPool& pool, std::int64_t layer, std::int64_t window,
                        const float* queries, float* out) {
  const Call call = {kernels, layer, window, queries, out};
  for (std::size_t i = 0; i < merges_.size(); ++i) left_[i].store(merges_[i].chunks, std::memory_order_relaxed);
  const std::int64_t count = std::int64_t(tasks_.size()), piece = work_ < work_for_threads ? count : 1;
  pool.parallel_for(count, piece, [&](std::int64_t begin, std::int64_t end, int thread) {
    for (std::int64_t t = begin; t < end; ++t) run_task(call, tasks_[t], thread);
  });
}

void AttentionPlan::run_task(const Call& call, const Task& task, int thread) {
  const Segment& segment = segments_[task.segment];
  const std::int64_t rows = task.tokens * group_;
  float* scratch = scratch_[thread].data();
  for (std::int64_t token = 0; token < task.tokens; ++token) {
    const std::int64_t from = ((segment.first_row + task.token + token) * kv_heads_ + task.kv_head) * group_ * head_dim_;
    std::copy_n(call.queries + from, group_ * head_dim_, scratch + token * group_ * head_dim_);
  }
  if (has_codes(cache_.type())) quantize_queries(call.kernels, rows, scratch);
  if (task.merge < 0) {
    float* states = scratch + query_floats(rows) + 2 * page_tokens * padded_;
    const AttentionState own = state_at(states, rows), next = state_at(states + state_floats(rows), rows);
    for (std::int64_t first = 0; first < task.page_count; first += chunk_pages) {
      attend_pages(call, task, first, std::min(chunk_pages, task.page_count - first), scratch, first == 0 ? own : next);
      if (first > 0) call.kernels.merge(own, next, rows, padded_);
    }
    write_rows(call, task, own);
    return;
  }
  const Merge& merge = merges_[task.merge];
  const auto chunk_state = [&](std::int64_t chunk) {
    return state_at(states_.data() + merge.first_state + chunk * state_floats(rows), rows);
  };
  attend_pages(call, task, task.first_page, task.page_count, scratch, chunk_state(task.chunk));
  // The last task to finish merges, in the order of the chunks.
  if (left_[task.merge].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  for (std::int64_t chunk = 1; chunk < merge.chunks; ++chunk) {
    call.kernels.merge(chunk_state(0), chunk_state(chunk), rows, padded_);
  }
  write_rows(call, task, chunk_state(0));
}

AttentionPlan::QueryCodes AttentionPlan::codes_of(float* scratch, std::int64_t rows) const {
  float* scales = scratch + aligned_floats(rows * head_dim_);
  std::int32_t* sums = reinterpret_cast<std::int32_t*>(scales + rows);
  return {reinterpret_cast<std::int8_t*>(sums + rows), scales, sums};
}

void AttentionPlan::quantize_queries(const VectorKernels& kernels, std::int64_t rows, float* scratch) const {
  const QueryCodes queries = codes_of(scratch, rows);
  const std::int64_t stride = four_dim(head_dim_);
  std::fill_n(queries.codes, rows * stride, std::int8_t(0));
  for (std::int64_t row = 0; row < rows; ++row) {
    float* query = scratch + row * head_dim_;
    std::int8_t* codes = queries.codes + row * stride;
    if (cache_.type() == CacheType::int4) hadamard_head(kernels, query, head_dim_);
    kernels.quantize_int8(query, Dtype::float32, 1, head_dim_, codes, queries.scales + row);
    queries.sums[row] = std::accumulate(codes, codes + stride, 0);
  }
}

void AttentionPlan::attend_pages(const Call& call, const Task& task, std::int64_t first, std::int64_t count,
                                 float* scratch, const AttentionState& state) const {
  const std::int64_t rows = task.tokens * group_;
  std::fill_n(state.maximum, rows, least_score);
  std::fill_n(state.sum, rows * sum_lanes, 0.0f);
  std::fill_n(state.out, rows * padded_, 0.0f);
  const QueryCodes queries = codes_of(scratch, rows);
  const std::int32_t* pages = pages_[task.segment];
  const std::int64_t position = segments_[task.segment].position + task.token;
  // What is before the first token's window, later tokens do not see either: nothing would be added.
  const std::int64_t seen = std::max<std::int64_t>(position + 1 - call.window, 0) / page_tokens;
  for (std::int64_t page = std::max(first, seen); page < first + count; ++page) {
    const auto view = [&](std::int64_t at) { return cache_.view(pages[at], call.layer, task.kv_head); };
    call.kernels.attend({cache_.type(), head_dim_, rows, group_, position + 1 - page * page_tokens, call.window, scratch,
                         queries.codes, queries.scales, queries.sums, view(page),
                         view(std::min(page + 1, first + count - 1)).keys, scratch + query_floats(rows), state});
  }
}

void AttentionPlan::write_rows(const Call& call, const Task& task, const AttentionState& state) const {
  for (std::int64_t row = 0; row < task.tokens * group_; ++row) {
    const std::int64_t token = segments_[task.segment].first_row + task.token + row / group_;
    const std::int64_t head = task.kv_head * group_ + row % group_;
    float* to = call.out + (token * kv_heads_ * group_ + head) * head_dim_;
    call.kernels.finish(state, row, head_dim_, to);
    if (cache_.type() == CacheType::int4) hadamard_head(call.kernels, to, head_dim_);
  }
}

}  // namespace sparse_bitnet
