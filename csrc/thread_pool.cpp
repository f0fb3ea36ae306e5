// SPDX-License-Identifier: Apache-2.0
#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "platform.h"

namespace sparse_bitnet {
namespace {

// A decoder step leaves gaps of a few microseconds between regions. Longer ones are between tokens,
// where another thread of the process may need the core.
constexpr std::chrono::microseconds spin_time{100};

// Pauses between two looks at the clock; from the second look on the core is offered to others, who
// may be the threads that are waited for.
constexpr int pauses_a_look = 256;

// Bytes that a waiting thread fetches at most: half of a small L2 cache.
constexpr std::int64_t max_fetched_bytes = 1 << 17, line_bytes = 64;

void pause_core() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Waits until ready(), at most spin_time if `limited`, and fetches the first lines of `ahead`. Returns whether it became
// true.
template <class Ready>
bool spin_until(bool limited, const ThreadPool::Stretch& ahead, Ready&& ready) {
  const std::int64_t wanted = std::min(ahead.bytes, max_fetched_bytes);
  std::int64_t fetched = 0;
  std::chrono::steady_clock::time_point start;
  for (int look = 0;; ++look) {
    for (int i = 0; i < pauses_a_look; ++i) {
      if (ready()) return true;
      fetched < wanted ? __builtin_prefetch(ahead.begin + fetched, 0, 2) : pause_core();
      fetched += line_bytes;
    }
    const auto now = std::chrono::steady_clock::now();
    if (look == 0) start = now;
    if (limited && now - start > spin_time) return ready();
    if (look > 0) std::this_thread::yield();
  }
}

// A region's state in one word, so that joining and closing it cannot be torn apart: a serial number
// from bit 32 on, whether it is open, and how many workers are inside. A worker that comes late, or
// that has no core, is not waited for: once the region is closed it cannot join.
constexpr std::uint64_t serial_one = std::uint64_t(1) << 32;
constexpr std::uint64_t open_bit = std::uint64_t(1) << 31;
constexpr std::uint64_t inside_mask = open_bit - 1;

}  // namespace

struct ThreadPool::State {
  // A thread's stretch of the open region: what is left of it.
  struct alignas(64) Range {
    std::atomic<std::int64_t> next{0};
    std::int64_t end = 0;
    Stretch ahead;  // what the thread will read; a worker takes it along from inside a region
  };

  explicit State(int threads) : ranges(new Range[threads]) {}

  alignas(64) std::atomic<std::uint64_t> region{0};
  const std::unique_ptr<Range[]> ranges;  // [threads]
  // Of the open region; written by the caller while nobody is inside.
  int range_count = 1;
  std::int64_t size = 0, least = 0;
  Piece piece = nullptr;
  void* context = nullptr;

  alignas(64) std::atomic<int> sleepers{0};
  std::atomic<bool> stopping{false};
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<std::thread> workers;
  std::atomic<bool> has_caller{false};
  std::exception_ptr thrown;  // the first one, under the mutex
  const int forks = fork_count();

  ~State() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      stopping.store(true);
    }
    wake.notify_all();
    for (std::thread& worker : workers) worker.join();
  }

  // Takes the pieces of the thread's own range first, then what is left of the others.
  void take_pieces(int thread) try {
    for (int i = 0; i < range_count; ++i) {
      Range& range = ranges[(thread + i) % range_count];
      std::int64_t begin = range.next.load(std::memory_order_relaxed);
      while (begin < range.end) {
        const std::int64_t taken = std::clamp((range.end - begin) / 2 / least * least, least, size);
        if (!range.next.compare_exchange_weak(begin, begin + taken, std::memory_order_relaxed)) continue;
        piece(context, begin, std::min(begin + taken, range.end), thread);
        begin = range.next.load(std::memory_order_relaxed);
      }
    }
  } catch (...) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!thrown) thrown = std::current_exception();
    for (int i = 0; i < range_count; ++i) ranges[i].next.store(ranges[i].end);
  }

  // Whether the region `seen` is over and a worker should look again.
  bool changed(std::uint64_t seen) const {
    return region.load() / serial_one != seen || stopping.load(std::memory_order_relaxed);
  }

  // The sleeper counts itself before its last look at the region and the caller opens the region
  // before it looks for sleepers, all sequentially consistent: one of them sees the other.
  void sleep(std::uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex);
    sleepers.fetch_add(1);
    wake.wait(lock, [&] { return changed(seen); });
    sleepers.fetch_sub(1);
  }

  void work(int thread) {
    std::uint64_t seen = 0;
    Stretch ahead;
    while (!stopping.load()) {
      std::uint64_t now = region.load(std::memory_order_acquire);
      if (now / serial_one == seen) {
        if (!spin_until(true, ahead, [&] { return changed(seen); })) sleep(seen);
        continue;
      }
      seen = now / serial_one;
      while (now & open_bit && now / serial_one == seen) {
        if (!region.compare_exchange_weak(now, now + 1)) continue;
        take_pieces(thread);
        ahead = ranges[thread].ahead;
        region.fetch_sub(1, std::memory_order_release);
        break;
      }
    }
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>(threads)) {
  try {
    for (int thread = 1; thread < threads; ++thread) {
      state_->workers.emplace_back([state = state_.get(), thread] { state->work(thread); });
    }
  } catch (const std::system_error&) {
    // A limit of processes or of memory: the threads that started do the work.
  }
}

ThreadPool::~ThreadPool() {
  // In the child of a fork the threads are the parent's: there is nobody to stop.
  if (state_->forks != fork_count()) static_cast<void>(state_.release());
}

int ThreadPool::threads() const { return int(state_->workers.size()) + 1; }

void ThreadPool::expect_reads(const Stretch* of_threads) {
  for (int i = 0; i < threads(); ++i) state_->ranges[i].ahead = of_threads[i];
}

void ThreadPool::run(std::int64_t count, std::int64_t size, std::int64_t least, Piece piece, void* context) {
  State& state = *state_;
  if (count <= 0) return;
  if (count <= size || state.workers.empty() || state.forks != fork_count()) {
    for (std::int64_t begin = 0; begin < count; begin += size) {
      piece(context, begin, std::min(begin + size, count), 0);
    }
    return;
  }
  if (state.has_caller.exchange(true, std::memory_order_acquire)) {
    throw std::runtime_error("another thread is using this thread pool");
  }
  state.size = size;
  state.least = least;
  state.piece = piece;
  state.context = context;
  state.range_count = threads();
  const std::int64_t parts = (count + least - 1) / least;
  for (std::int64_t i = 0; i < state.range_count; ++i) {
    State::Range& range = state.ranges[i];
    range.next.store(parts * i / state.range_count * least, std::memory_order_relaxed);
    range.end = std::min(parts * (i + 1) / state.range_count * least, count);
  }
  const std::uint64_t serial = state.region.load(std::memory_order_relaxed) / serial_one + 1;
  state.region.store(serial % serial_one * serial_one | open_bit);
  if (state.sleepers.load() > 0) {
    { std::lock_guard<std::mutex> lock(state.mutex); }
    state.wake.notify_all();
  }
  state.take_pieces(0);
  // Workers that are inside have a piece to finish.
  const std::uint64_t last = state.region.fetch_sub(open_bit, std::memory_order_acq_rel);
  if (last & inside_mask) {
    spin_until(false, state.ranges[0].ahead,
               [&] { return (state.region.load(std::memory_order_acquire) & inside_mask) == 0; });
  }
  const std::exception_ptr thrown = std::exchange(state.thrown, nullptr);
  state.has_caller.store(false, std::memory_order_release);
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace sparse_bitnet
