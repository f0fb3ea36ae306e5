// SPDX-License-Identifier: Apache-2.0
#include "ops.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "platform.h"

namespace sparse_bitnet {
namespace {

// Input bytes of one piece of work: small enough to share out evenly.
constexpr std::int64_t piece_bytes = 1 << 18;

// Another thread gains something from this many input bytes on; less stays on the calling thread.
constexpr std::int64_t bytes_per_thread = 1 << 18;

// Calls body(begin, end) for consecutive pieces of `size` of [0, count), on up to `threads` threads, the
// calling one among them: those of the OpenMP runtime that PyTorch has loaded. Bodies must not throw.
//
// After a parallel region those threads spin for some milliseconds and hold their cores: they start at once, where
// threads of our own would wait for a core (two cores, mask of 896 x 4864 weights: 0.77 ms against 1.00 ms). The
// runtime is looked up in the process, never linked. The calling thread does all the work where there is none, and
// in the child of a fork, where the runtime would wait for the parent's threads.
template <class Body>
void parallel_for(std::int64_t count, std::int64_t size, int threads, const Body& body) {
  static const OpenmpParallel openmp = find_openmp();
  const std::int64_t team = std::min<std::int64_t>(threads, packed::divide_up(count, size));
  if (team <= 1 || !openmp || fork_count() > 0) {
    if (count > 0) body(std::int64_t(0), count);
    return;
  }
  struct Region {
    const std::int64_t count, size;
    const Body& body;
    std::atomic<std::int64_t> next{0};
  } region{count, size, body};
  // Runs on every thread of the team; a late one finds less left to do.
  const auto take_pieces = [](void* data) {
    auto& all = *static_cast<Region*>(data);
    for (;;) {
      const std::int64_t begin = all.next.fetch_add(all.size, std::memory_order_relaxed);
      if (begin >= all.count) return;
      all.body(begin, std::min(begin + all.size, all.count));
    }
  };
  openmp(take_pieces, &region, unsigned(team), 0);
}

int useful_threads(int threads, std::int64_t bytes) {
  return int(std::min<std::int64_t>(threads, bytes / bytes_per_thread));
}

// A multiple of 64 items, so that a piece is whole tiles and starts on a cache line of the outputs.
std::int64_t items_per_piece(std::int64_t bytes_per_item) {
  return std::max<std::int64_t>(64, piece_bytes / bytes_per_item / 64 * 64);
}

std::int64_t bytes_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

const std::uint8_t* at(const void* base, std::int64_t index, Dtype dtype) {
  return static_cast<const std::uint8_t*>(base) + index * bytes_of(dtype);
}

// A weight scale: the mean of `count` magnitudes, at least 1e-5.
float scale_of(double sum, std::int64_t count) {
  const float mean = float(sum / double(count));
  return mean < 1e-5f ? 1e-5f : mean;
}

}  // namespace

void select_ternary(const Kernels& kernels, const void* weight, Dtype dtype, float weight_scale,
                    std::int64_t groups, int n, int m, std::int8_t* codes, std::uint8_t* mask,
                    int threads) {
  const std::int64_t bytes = m * bytes_of(dtype);
  const int team = useful_threads(threads, groups * bytes);
  parallel_for(groups, items_per_piece(bytes), team, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t first = begin * m, count = (end - begin) * m;
    if (n == m) {
      std::memset(mask + first, 1, count);
      if (codes == nullptr) return;
      kernels.vector.dense_ternary(at(weight, first, dtype), dtype, weight_scale, count, codes + first);
    } else {
      kernels.vector.select_ternary(at(weight, first, dtype), dtype, weight_scale, end - begin, n, m,
                                    codes ? codes + first : nullptr, mask + first);
    }
  });
}

float absmean(const Kernels& kernels, const void* weight, Dtype dtype, std::int64_t count,
              int threads) {
  std::vector<double> sums(packed::divide_up(count, sum_block));
  const int team = useful_threads(threads, count * bytes_of(dtype));
  parallel_for(std::int64_t(sums.size()), 1, team, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      const std::int64_t first = b * sum_block;
      sums[b] = kernels.vector.sum_magnitudes(at(weight, first, dtype), dtype,
                                       std::min(sum_block, count - first));
    }
  });
  double total = 0;
  for (double sum : sums) total += sum;
  return scale_of(total, count);
}

void quantize_groups(const Kernels& kernels, const void* weight, Dtype dtype, std::int64_t groups,
                     std::int64_t size, std::int8_t* codes, float* weight_scale, int threads) {
  const std::int64_t bytes = size * bytes_of(dtype);
  const int team = useful_threads(threads, groups * bytes);
  parallel_for(groups, items_per_piece(bytes), team, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t g = begin; g < end; ++g) {
      const void* group = at(weight, g * size, dtype);
      weight_scale[g] = scale_of(kernels.vector.sum_magnitudes(group, dtype, size), size);
      kernels.vector.dense_ternary(group, dtype, weight_scale[g], size, codes + g * size);
    }
  });
}

void quantize_int8(const Kernels& kernels, const void* x, Dtype dtype, std::int64_t tokens,
                   std::int64_t features, std::int8_t* codes, float* activation_scale, int threads) {
  const std::int64_t bytes = std::max<std::int64_t>(1, features * bytes_of(dtype));
  const std::int64_t piece = std::max<std::int64_t>(1, piece_bytes / bytes);
  const int team = useful_threads(threads, tokens * bytes);
  parallel_for(tokens, piece, team, [&](std::int64_t begin, std::int64_t end) {
    kernels.vector.quantize_int8(at(x, begin * features, dtype), dtype, end - begin, features,
                          codes + begin * features, activation_scale + begin);
  });
}

}  // namespace sparse_bitnet
