// SPDX-License-Identifier: Apache-2.0
// Work split over threads: those of the OpenMP runtime that PyTorch has loaded.
//
// After a parallel region those threads spin for some milliseconds and hold their cores. Threads of our
// own, woken right after a matrix product, wait for a core and gain nothing (two cores, mask of 896 x
// 4864 weights: 1.00 ms with two threads, 0.98 ms with one); the spinning ones start at once (0.77 ms).
// So the runtime is looked up in the process, never linked; where there is none, the calling thread
// does all the work, as it does in the child of a fork, where the runtime would wait for the parent's.

#pragma once

#include <cstdint>

namespace sparse_bitnet {

using Piece = void (*)(void* context, std::int64_t begin, std::int64_t end);

// Calls piece(context, begin, end) for consecutive pieces of `size` of [0, count), on up to `threads`
// threads, the calling one among them. Returns when all are done. Pieces must not throw.
void run_pieces(std::int64_t count, std::int64_t size, int threads, Piece piece, void* context);

// The same for a callable (begin, end).
template <class Body>
void parallel_for(std::int64_t count, std::int64_t size, int threads, Body&& body) {
  run_pieces(
      count, size, threads,
      [](void* context, std::int64_t begin, std::int64_t end) {
        (*static_cast<Body*>(context))(begin, end);
      },
      &body);
}

}  // namespace sparse_bitnet
