// Bytes that are read once, a piece at a time: from memory, or from a file by pread. A file is not
// mapped: faults of its pages would cost more than copying them through a buffer that stays in the
// cache, they would count as memory of ours, and a file cut short meanwhile would end the process.

#pragma once

#include <cstdint>

namespace sparse_bitnet {

struct ByteSource {
  const std::uint8_t* data;  // or null: then `descriptor`, from `offset` on
  int descriptor;
  std::int64_t offset;

  // Copies `size` bytes from `first` on; false where they cannot be read.
  bool read(std::int64_t first, std::int64_t size, std::uint8_t* buffer) const;
};

}  // namespace sparse_bitnet
