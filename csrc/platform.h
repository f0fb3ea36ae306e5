// All that an operating system decides: memory in huge pages, reading of files, forks.

#pragma once

#include <cstdint>

namespace sparse_bitnet {

constexpr std::int64_t huge_page_bytes = std::int64_t(1) << 21;

// Zeroed memory for weights and caches, in huge pages where the system has them: streaming from pages of
// 4 KiB costs visibly more, under virtualisation most of all.
class HugeBuffer {
 public:
  // `size` >= 0 zero bytes, aligned to huge_page_bytes. Pages are taken when first written to. Throws
  // std::bad_alloc.
  explicit HugeBuffer(std::int64_t size);
  ~HugeBuffer();
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;

  std::uint8_t* data() const { return data_; }
  std::int64_t size() const { return size_; }

  // Bytes that lie in huge pages now, as the system tells; -1 where it does not.
  std::int64_t huge_bytes() const;

 private:
  std::int64_t size_, mapped_size_;
  void* mapped_;
  std::uint8_t* data_;
};

// Forks between the start of the program and this process: what was made at another count is of a parent,
// whose threads do not exist here.
int fork_count();

}  // namespace sparse_bitnet
