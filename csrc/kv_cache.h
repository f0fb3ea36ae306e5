// SPDX-License-Identifier: Apache-2.0
// KV cache of many sequences, in pages of 64 tokens with reference counts. Sequences share whole
// pages after a fork; a page that others hold is copied before tokens are appended to it.
//
// A page holds all layers. Of each layer and key-value head it has, 64-byte aligned:
//   keys   [head_dim][64 tokens], transposed: a query's scores against 16 tokens are one chain of
//          fused multiply-adds, without a horizontal sum;
//   values [64 tokens][padded head_dim], zeros behind head_dim;
// with int8 four elements along the sum together, for products of integers:
//   keys   [head_dim / 4, rounded up][64 tokens][4], zeros behind head_dim;
//   values [16][padded head_dim][4], of tokens t, t + 16, t + 32 and t + 48;
//   key scales, value scales [64] float32;
// with int4 the same in half the bytes, a code u from 0 to 15 standing for 2u - 15: of each `key_run` or
// `value_run` bytes the low bits are as many bytes of int8, the high bits the next ones.

#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "decoder.h"
#include "platform.h"

namespace sparse_bitnet {

// Values are padded to whole vectors of every instruction set.
constexpr std::int64_t padded_dim(std::int64_t head_dim) { return packed::round_up(head_dim, 16); }

constexpr std::int64_t four_dim(std::int64_t head_dim) { return packed::round_up(head_dim, 4); }

// Bytes of int4 whose low bits are one run of int8: a line of keys; eight columns of values. The codes of a
// token share no byte with those of another.
constexpr std::int64_t key_run = 4 * page_tokens, value_run = 32;

inline bool has_codes(CacheType type) { return type == CacheType::int8 || type == CacheType::int4; }

// One layer and head of a page.
struct PageView {
  void *keys, *values;
  float *key_scales, *value_scales;  // null unless int8 or int4
};

class KvCache {
 public:
  KvCache(CacheType type, std::int64_t layers, std::int64_t kv_heads, std::int64_t head_dim,
          std::int64_t cache_tokens);

  // As in decoder.h. Throw std::out_of_range for a sequence that is not open or is shorter,
  // std::length_error if no page is free for the last one of a fork.
  int open();
  void close(int sequence);
  int fork(int sequence, std::int64_t length);
  void truncate(int sequence, std::int64_t length);
  std::int64_t length(int sequence) const;
  std::int64_t bytes() const { return data_->size(); }
  std::int64_t free_tokens() const { return std::int64_t(free_.size()) * page_tokens; }

  // Number of free pages that appending `count` tokens needs.
  std::int64_t pages_for(int sequence, std::int64_t count) const;
  // Takes those pages, which must be free, and adds the tokens to the length.
  void extend(int sequence, std::int64_t count);

  const std::int32_t* pages(int sequence) const;
  PageView view(std::int32_t page, std::int64_t layer, std::int64_t kv_head) const;
  CacheType type() const { return type_; }

 private:
  struct Sequence {
    std::vector<std::int32_t> pages;
    std::int64_t length = 0;
  };

  Sequence& find(int sequence);
  const Sequence& find(int sequence) const;
  // The same, of at least `length` tokens, else std::out_of_range; `what` begins its message.
  Sequence& find(int sequence, std::int64_t length, const char* what);
  std::int32_t take_page();
  void release_page(std::int32_t page);
  void copy_last(Sequence& sequence);
  bool must_copy_last(const Sequence& sequence) const;

  CacheType type_;
  std::int64_t kv_heads_, key_bytes_, value_bytes_, head_bytes_, page_bytes_;
  std::unique_ptr<HugeBuffer> data_;
  std::vector<std::int32_t> references_;
  std::vector<std::int32_t> free_;  // a stack: recently used pages come first
  std::unordered_map<int, Sequence> sequences_;
  int next_ = 0;
};

}  // namespace sparse_bitnet
