#include "isa.h"

#include <cstdlib>
#include <stdexcept>

#include "matmul_kernels.h"
#include "platform.h"
#include "roofline.h"

namespace sparse_bitnet {

namespace {

// Best first.
const Kernels table[] = {
#if defined(__x86_64__)
    {"avx512vnni", cpu_has_avx512vnni, vector_avx512, matmul_avx512vnni, roofline_avx512vnni},
    {"avx512", cpu_has_avx512, vector_avx512, matmul_avx2, roofline_avx512},
    {"avx2", cpu_has_avx2, vector_avx2, matmul_avx2, roofline_avx2},
#elif defined(__aarch64__)
    {"neon", cpu_has_dotprod, vector_generic, matmul_neon, roofline_neon},
#endif
    {"generic", [] { return true; }, vector_generic, matmul_generic, roofline_generic},
};

}  // namespace

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Kernels& row : table) {
    if (row.is_supported()) names.push_back(row.isa);
  }
  return names;
}

const Kernels& choose_kernels(const std::string& isa) {
  const char* variable = std::getenv("SPARSE_BITNET_ISA");
  const bool from_variable = isa.empty() && variable && *variable;
  const std::string wanted = from_variable ? variable : isa;
  std::string has;
  for (const Kernels& row : table) {
    if (!row.is_supported()) continue;
    if (wanted.empty() || wanted == row.isa) return row;
    has += (has.empty() ? "" : ", ") + std::string(row.isa);
  }
  throw std::invalid_argument(std::string(from_variable ? "SPARSE_BITNET_ISA=" : "instruction set ") +
                              wanted + ": this machine has " + has);
}

}  // namespace sparse_bitnet
