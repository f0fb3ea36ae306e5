// SPDX-License-Identifier: Apache-2.0
#include "kv_cache.h"

#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

namespace sparse_bitnet {
namespace {

std::int64_t pages_of(std::int64_t tokens) { return packed::divide_up(tokens, page_tokens); }

}  // namespace

KvCache::KvCache(CacheType type, std::int64_t layers, std::int64_t kv_heads, std::int64_t head_dim,
                 std::int64_t cache_tokens)
    : type_(type), kv_heads_(kv_heads) {
  const int bits = type == CacheType::float32 ? 32 : type == CacheType::float16 ? 16 : type == CacheType::int8 ? 8 : 4;
  const std::int64_t key_dim = type == CacheType::int4 ? packed::round_up(head_dim, 8) : four_dim(head_dim);
  key_bytes_ = packed::round_up(key_dim * page_tokens * bits / 8, 64);
  value_bytes_ = packed::round_up(page_tokens * padded_dim(head_dim) * bits / 8, 64);
  const std::int64_t scale_bytes = has_codes(type) ? page_tokens * std::int64_t(sizeof(float)) : 0;
  head_bytes_ = key_bytes_ + value_bytes_ + 2 * scale_bytes;
  page_bytes_ = layers * kv_heads * head_bytes_;
  const std::int64_t count = pages_of(cache_tokens);
  if (count > std::numeric_limits<std::int32_t>::max() ||
      count > std::numeric_limits<std::int64_t>::max() / 2 / page_bytes_) {
    throw std::bad_alloc();
  }
  // Untouched memory costs nothing until a page is used, so the cache may be large.
  data_ = std::make_unique<HugeBuffer>(count * page_bytes_);
  references_.assign(count, 0);
  for (std::int64_t page = count; page-- > 0;) free_.push_back(std::int32_t(page));
}

KvCache::Sequence& KvCache::find(int sequence) {
  const auto entry = sequences_.find(sequence);
  if (entry == sequences_.end()) {
    throw std::out_of_range("sequence " + std::to_string(sequence) + " is not open");
  }
  return entry->second;
}

const KvCache::Sequence& KvCache::find(int sequence) const { return const_cast<KvCache*>(this)->find(sequence); }

KvCache::Sequence& KvCache::find(int sequence, std::int64_t length, const char* what) {
  Sequence& found = find(sequence);
  if (length < 0 || length > found.length) {
    throw std::out_of_range(what + std::to_string(length) + ": the sequence has " + std::to_string(found.length) +
                            " tokens");
  }
  return found;
}

std::int32_t KvCache::take_page() {
  const std::int32_t page = free_.back();
  free_.pop_back();
  references_[page] = 1;
  return page;
}

void KvCache::release_page(std::int32_t page) {
  if (--references_[page] == 0) free_.push_back(page);
}

void KvCache::copy_last(Sequence& sequence) {
  const std::int32_t shared = sequence.pages.back(), own = take_page();
  std::memcpy(data_->data() + own * page_bytes_, data_->data() + shared * page_bytes_, page_bytes_);
  release_page(shared);
  sequence.pages.back() = own;
}

bool KvCache::must_copy_last(const Sequence& sequence) const {
  return sequence.length % page_tokens != 0 && references_[sequence.pages.back()] > 1;
}

int KvCache::open() {
  const int sequence = next_++;
  sequences_[sequence];
  return sequence;
}

void KvCache::close(int sequence) {
  for (std::int32_t page : find(sequence).pages) release_page(page);
  sequences_.erase(sequence);
}

int KvCache::fork(int sequence, std::int64_t length) {
  const Sequence& from = find(sequence, length, "fork at ");
  const bool partial = length % page_tokens != 0;
  if (partial && free_.empty()) {
    throw std::length_error("the cache has no free page for a fork inside a page");
  }
  Sequence copy{{from.pages.begin(), from.pages.begin() + pages_of(length)}, length};
  const int forked = next_++;
  Sequence& placed = sequences_[forked] = std::move(copy);
  for (std::int32_t page : placed.pages) ++references_[page];
  if (partial) copy_last(placed);
  return forked;
}

void KvCache::truncate(int sequence, std::int64_t length) {
  Sequence& cut = find(sequence, length, "truncate to ");
  cut.length = length;
  while (std::int64_t(cut.pages.size()) > pages_of(length)) {
    release_page(cut.pages.back());
    cut.pages.pop_back();
  }
}

std::int64_t KvCache::length(int sequence) const { return find(sequence).length; }

std::int64_t KvCache::pages_for(int sequence, std::int64_t count) const {
  const Sequence& grown = find(sequence);
  const std::int64_t more = pages_of(grown.length + count) - std::int64_t(grown.pages.size());
  return more + must_copy_last(grown);
}

void KvCache::extend(int sequence, std::int64_t count) {
  Sequence& grown = find(sequence);
  grown.pages.reserve(pages_of(grown.length + count));  // what could throw comes first
  if (must_copy_last(grown)) copy_last(grown);
  grown.length += count;
  while (std::int64_t(grown.pages.size()) < pages_of(grown.length)) {
    grown.pages.push_back(take_page());
  }
}

const std::int32_t* KvCache::pages(int sequence) const { return find(sequence).pages.data(); }

PageView KvCache::view(std::int32_t page, std::int64_t layer, std::int64_t kv_head) const {
  std::uint8_t* keys = data_->data() + page * page_bytes_ + (layer * kv_heads_ + kv_head) * head_bytes_;
  std::uint8_t* values = keys + key_bytes_;
  float* scales = reinterpret_cast<float*>(values + value_bytes_);
  const bool has_scales = has_codes(type_);
  return {keys, values, has_scales ? scales : nullptr, has_scales ? scales + page_tokens : nullptr};
}

}  // namespace sparse_bitnet
