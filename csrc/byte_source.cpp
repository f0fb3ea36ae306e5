#include "byte_source.h"

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

namespace sparse_bitnet {

bool ByteSource::read(std::int64_t first, std::int64_t size, std::uint8_t* buffer) const {
  if (data != nullptr) {
    std::memcpy(buffer, data + first, std::size_t(size));
    return true;
  }
  for (std::int64_t done = 0; done < size;) {
    const auto count = pread(descriptor, buffer + done, std::size_t(size - done),
                             off_t(offset + first + done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    done += count;
  }
  return true;
}

}  // namespace sparse_bitnet
