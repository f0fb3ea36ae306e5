// SPDX-License-Identifier: Apache-2.0
// A std::vector whose memory starts on a cache line, so that no vector load spans two lines. From the size of a huge
// page on, it lies in huge pages.

#pragma once

#include <cstddef>
#include <new>
#include <vector>

#include "platform.h"

namespace sparse_bitnet {

template <class T>
struct CacheLineAllocator {
  using value_type = T;

  CacheLineAllocator() = default;
  template <class U>
  CacheLineAllocator(const CacheLineAllocator<U>&) {}

  T* allocate(std::size_t count) {
    if (count > std::size_t(-1) / sizeof(T)) throw std::bad_array_new_length();
    void* memory = ::operator new(count * sizeof(T), alignment(count));
    if (is_huge(count)) ask_for_huge_pages(memory, count * sizeof(T));
    return static_cast<T*>(memory);
  }
  void deallocate(T* data, std::size_t count) { ::operator delete(data, alignment(count)); }

  bool operator==(const CacheLineAllocator&) const { return true; }
  bool operator!=(const CacheLineAllocator&) const { return false; }

 private:
  static bool is_huge(std::size_t count) { return count * sizeof(T) >= std::size_t(huge_page_bytes); }
  static std::align_val_t alignment(std::size_t count) { return std::align_val_t(is_huge(count) ? huge_page_bytes : 64); }
};

template <class T>
using AlignedVector = std::vector<T, CacheLineAllocator<T>>;

}  // namespace sparse_bitnet
