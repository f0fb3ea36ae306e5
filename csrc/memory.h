// Memory for weights: aligned, zeroed, in huge pages where the system has them. Streaming weights from
// pages of 4 KiB costs visibly more, under virtualisation most of all.

#pragma once

#include <cstdint>

namespace sparse_bitnet {

constexpr std::int64_t huge_page_bytes = std::int64_t(1) << 21;

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

}  // namespace sparse_bitnet
