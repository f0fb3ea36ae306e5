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

  // Calls piece(context, begin, end, thread) for all pieces of `size` items of [0, count), on all threads, the calling one
  // included; `thread` counts from 0. Returns when all are done.
  //
  // A thread first takes the pieces of its own stretch, so that what it prefetches is its own next piece, and then helps
  // the others. Pieces must not call the pool. An exception of a piece is rethrown here when all threads have stopped;
  // other pieces may be skipped. In the child of a fork the calling thread works alone. Throws std::runtime_error if
  // another thread is calling.
  void run(std::int64_t count, std::int64_t size, Piece piece, void* context);

  // The same for a callable (begin, end, thread).
  template <class Body>
  void parallel_for(std::int64_t count, std::int64_t size, Body&& body) {
    run(count, size, call<Body>, &body);
  }

 private:
  template <class Body>
  static void call(void* context, std::int64_t begin, std::int64_t end, int thread) {
    (*static_cast<std::remove_reference_t<Body>*>(context))(begin, end, thread);
  }

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sparse_bitnet
