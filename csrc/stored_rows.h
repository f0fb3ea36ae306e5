// SPDX-License-Identifier: Apache-2.0
// Rows of a file on their way into memory: read once, in pieces that stay in a thread's cache between
// their checksum and what is made of them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "checksum.h"
#include "isa.h"
#include "matmul.h"
#include "packed_format.h"
#include "platform.h"
#include "thread_pool.h"

namespace sparse_bitnet {

struct Loaded {
  std::uint32_t crc32;  // of all stored bytes
  bool is_readable;     // whether they could be read
  const char* damage;   // what is wrong with the rows, or null
};

// Runs `work(row, from, thread)`, which says what is wrong with a row or returns null, over rows that
// follow each other in `bytes`; `slack` bytes behind each can be read. The result does not depend on the
// number of threads.
template <class Work>
Loaded load_rows(const Kernels& kernels, ThreadPool& pool, const ByteSource& bytes, std::int64_t rows,
                 std::int64_t row_bytes, std::int64_t slack, Work&& work) {
  constexpr std::int64_t piece_bytes = 1 << 17;
  // Rows of one strip (matmul.h) share bytes: they are one thread's.
  const std::int64_t strips = std::max<std::int64_t>(1, piece_bytes / row_bytes / strip_rows);
  const std::int64_t piece_rows = std::min(strips * strip_rows, rows);
  std::vector<Loaded> pieces(std::size_t(packed::divide_up(rows, piece_rows)), Loaded{0, true, nullptr});
  std::vector<std::vector<std::uint8_t>> buffers(
      std::size_t(pool.threads()), std::vector<std::uint8_t>(std::size_t(piece_rows * row_bytes + slack)));
  pool.parallel_for(rows, piece_rows, [&](std::int64_t begin, std::int64_t end, int thread) {
    const std::int64_t size = (end - begin) * row_bytes;
    std::uint8_t* buffer = buffers[std::size_t(thread)].data();
    Loaded& piece = pieces[std::size_t(begin / piece_rows)];
    const std::uint8_t* from = buffer;
    if (bytes.data != nullptr && (rows - end) * row_bytes >= slack) {
      from = bytes.data + begin * row_bytes;
    } else {
      piece.is_readable = bytes.read(begin * row_bytes, size, buffer);
    }
    if (!piece.is_readable) return;
    piece.crc32 = kernels.crc32(from, size);
    for (std::int64_t row = begin; row < end; ++row) {
      const char* damage = work(row, from + (row - begin) * row_bytes, thread);
      if (piece.damage == nullptr) piece.damage = damage;
    }
  });
  Loaded all = pieces[0];
  for (std::int64_t i = 1; i < std::int64_t(pieces.size()); ++i) {
    const std::int64_t count = std::min(piece_rows, rows - i * piece_rows);
    const Loaded& piece = pieces[std::size_t(i)];
    all.crc32 = crc32_joined(all.crc32, piece.crc32, count * row_bytes);
    all.is_readable &= piece.is_readable;
    if (all.damage == nullptr) all.damage = piece.damage;
  }
  return all;
}

}  // namespace sparse_bitnet
