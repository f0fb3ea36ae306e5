// SPDX-License-Identifier: Apache-2.0
// CRC-32 as zlib computes it (polynomial 0x04c11db7, bits reflected), fast enough to run over a file
// while it is copied, and combinable from pieces of several threads.

#pragma once

#include <cstdint>

namespace sparse_bitnet {

std::uint32_t crc32(const std::uint8_t* data, std::int64_t size);

// The checksum of two consecutive pieces, from the checksum of each and the size of the second.
std::uint32_t crc32_joined(std::uint32_t first, std::uint32_t second, std::int64_t second_size);

}  // namespace sparse_bitnet
