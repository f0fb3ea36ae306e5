// SPDX-License-Identifier: Apache-2.0
#include "parallel.h"

#include <algorithm>
#include <atomic>

#include "platform.h"

namespace sparse_bitnet {
namespace {

struct Region {
  const std::int64_t count, size;
  const Piece piece;
  void* const context;
  std::atomic<std::int64_t> next{0};

  // Runs on every thread of the team; a late one finds less left to do.
  void take_pieces() {
    for (;;) {
      const std::int64_t begin = next.fetch_add(size, std::memory_order_relaxed);
      if (begin >= count) return;
      piece(context, begin, std::min(begin + size, count));
    }
  }
};

}  // namespace

void run_pieces(std::int64_t count, std::int64_t size, int threads, Piece piece, void* context) {
  static const OpenmpParallel openmp = find_openmp();
  const std::int64_t team = std::min<std::int64_t>(threads, (count + size - 1) / size);
  if (team <= 1 || !openmp || fork_count() > 0) {
    if (count > 0) piece(context, 0, count);
    return;
  }
  Region region{count, size, piece, context};
  openmp([](void* data) { static_cast<Region*>(data)->take_pieces(); }, &region, unsigned(team), 0);
}

}  // namespace sparse_bitnet
