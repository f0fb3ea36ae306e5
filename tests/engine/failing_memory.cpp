// SPDX-License-Identifier: Apache-2.0
// To be loaded before all else: allocations of C++, of which one can be told to fail.

#include <atomic>
#include <cstdlib>
#include <new>

static std::atomic<long> left{-1};

// The next one after `more` others; none where that is negative.
extern "C" void fail_after(long more) { left = more; }

// Whether it is still to come.
extern "C" bool is_to_fail() { return left >= 0; }

static void* take(std::size_t size, std::size_t alignment) {
  if (left >= 0 && left-- == 0) throw std::bad_alloc();
  return std::aligned_alloc(alignment, size / alignment * alignment + alignment);
}

void* operator new(std::size_t size) { return take(size, 16); }
void* operator new(std::size_t size, std::align_val_t alignment) { return take(size, std::size_t(alignment)); }
