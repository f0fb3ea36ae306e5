#include "elementwise.h"

#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define FLOAT_KERNELS "elementwise_kernels.h"
#include "each_float_isa.h"

namespace sparse_bitnet {

const ElementwiseKernels& choose_elementwise_kernels(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512vnni") return float_avx512::elementwise_kernels;
  if (isa == "avx2" && __builtin_cpu_supports("fma")) return float_avx2::elementwise_kernels;
#endif
  (void)isa;
  return float_generic::elementwise_kernels;
}

void table_row(const Table& table, std::int64_t row, float* out) {
  const std::uint8_t* data = table.data + row * table.row_stride;
  const std::int64_t columns = table.columns;
  switch (table.type) {
    case TableType::float32:
      std::memcpy(out, data, columns * sizeof(float));
      break;
    case TableType::bfloat16:
      for (std::int64_t i = 0; i < columns; ++i) {
        std::uint16_t half;
        std::memcpy(&half, data + 2 * i, sizeof half);
        const std::uint32_t bits = std::uint32_t(half) << 16;
        std::memcpy(out + i, &bits, sizeof bits);
      }
      break;
    case TableType::int8:
      for (std::int64_t i = 0; i < columns; ++i) {
        out[i] = float(std::int8_t(data[i])) * table.scales[row];
      }
      break;
    case TableType::int4:
      for (std::int64_t i = 0; i < columns; ++i) {
        const std::int64_t group = i / int4_group, place = i % int4_group;
        const int byte = data[group * (int4_group / 2) + place % (int4_group / 2)];
        const int code = (place < int4_group / 2 ? byte & 15 : byte >> 4) - 8;
        out[i] = float(code) * table.scales[row * (columns / int4_group) + group];
      }
      break;
  }
}

}  // namespace sparse_bitnet
