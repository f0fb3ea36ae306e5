// What this machine can do at most, measured: memory read, int8 multiply-add, float32 multiply-add.
// Speeds of the engine are given as shares of these.

#pragma once

#include <cstdint>
#include <string>

#include "thread_pool.h"

namespace sparse_bitnet {

// Memory to be read: touched by the pool's threads, in huge pages where the system has them.
class ReadBuffer {
 public:
  // Throws std::bad_alloc.
  ReadBuffer(ThreadPool& pool, std::int64_t bytes);
  ~ReadBuffer();
  ReadBuffer(const ReadBuffer&) = delete;
  ReadBuffer& operator=(const ReadBuffer&) = delete;

  const std::uint8_t* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::uint8_t* data_;
  std::int64_t bytes_;
  void* mapping_;
  std::int64_t mapped_;
};

// Bytes a second of one pass over the buffer by plain vector loads, `prefetch_bytes` ahead of which
// the lines are prefetched (0: the hardware alone), as the widest loads of this machine do it.
double read_rate(ThreadPool& pool, const ReadBuffer& buffer, int prefetch_bytes);

// Operations a second, a multiply-add counting as two, of a loop that keeps everything in registers
// and runs about `seconds`. Instruction sets are those of matmul.h.
//   int8: avx512vnni vpdpbusd; neon sdot; avx2 vpmaddubsw with 16-bit additions, the most that a
//         ternary product needs; generic whatever the compiler makes of an int32 sum of products.
//   float32: fused multiply-adds; generic a multiplication and an addition.
// Throws std::invalid_argument for an instruction set that is unknown or that this machine lacks.
double int8_rate(ThreadPool& pool, const std::string& isa, double seconds);
double float32_rate(ThreadPool& pool, const std::string& isa, double seconds);

}  // namespace sparse_bitnet
