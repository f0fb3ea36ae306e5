// SPDX-License-Identifier: Apache-2.0
// The engine's own threads. A decoder step hands out hundreds of short pieces of work a token, so the
// threads spin for a moment before they sleep. Independent of any other runtime in the process.

#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace sparse_bitnet {

class ThreadPool {
 public:
  // threads >= 1, the calling one included; starts threads - 1, or those that the system lets it start.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  using Piece = void (*)(void* context, std::int64_t begin, std::int64_t end, int thread);

  // Calls piece(context, begin, end, thread) for pieces that together make up [0, count), on all threads, the calling one
  // included; `thread` counts from 0. Returns when all are done. 1 <= least <= size.
  //
  // A thread first takes the pieces of its own stretch, so that what it prefetches is its own next piece, and then helps
  // the others. If `least` is `size`, all pieces but the last have that many items. Otherwise a piece is half of what is
  // left of a stretch, from `least` to `size` items, so that threads finish together; a thread alone takes `size`.
  //
  // Pieces must not call the pool. An exception of a piece is rethrown here when all threads have stopped; other pieces
  // may be skipped. In the child of a fork the calling thread works alone. Throws std::runtime_error if another thread is
  // calling.
  void run(std::int64_t count, std::int64_t size, std::int64_t least, Piece piece, void* context);

  // The same for a callable (begin, end, thread), with least = size by default.
  template <class Body>
  void parallel_for(std::int64_t count, std::int64_t size, Body&& body, std::int64_t least = 0) {
    run(count, size, least ? least : size, call<Body>, &body);
  }

  // Memory that a thread reads in one go. It may be freed meanwhile: prefetching freed memory does no harm.
  struct Stretch {
    const std::uint8_t* begin = nullptr;
    std::int64_t bytes = 0;
  };

  // What each thread will read in a region to come, [threads]: when it has done its part of the next region, it fetches
  // the first lines into its L2 cache while it waits. Not while another thread calls `run`.
  void expect_reads(const Stretch* of_threads);

 private:
  template <class Body>
  static void call(void* context, std::int64_t begin, std::int64_t end, int thread) {
    (*static_cast<std::remove_reference_t<Body>*>(context))(begin, end, thread);
  }

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sparse_bitnet
