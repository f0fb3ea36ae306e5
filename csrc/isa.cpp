// SPDX-License-Identifier: Apache-2.0
#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "matmul_kernels.h"
#include "platform.h"
#include "roofline.h"

namespace sparse_bitnet {

namespace {

// Best first.
const Kernels table[] = {
#if defined(__x86_64__)
#if defined(SPARSE_BITNET_AMX)
    {"amx_int8", cpu_has_amx_int8, vector_amx_int8, matmul_amx_int8, roofline_amx_int8},
#endif
    {"avx512vbmi", cpu_has_avx512vbmi, vector_avx512vnni, matmul_avx512vbmi, roofline_avx512vnni},
    {"avx512vnni", cpu_has_avx512vnni, vector_avx512vnni, matmul_avx512vnni, roofline_avx512vnni},
    {"avx512", cpu_has_avx512, vector_avx512, matmul_avx2, roofline_avx512},
#if defined(SPARSE_BITNET_AVX_VNNI)
    {"avxvnni", cpu_has_avxvnni, vector_avxvnni, matmul_avxvnni, roofline_avxvnni},
#endif
    {"avx2", cpu_has_avx2, vector_avx2, matmul_avx2, roofline_avx2},
#elif defined(__aarch64__)
    {"i8mm", cpu_has_i8mm, vector_generic, matmul_i8mm, roofline_i8mm},
    {"neon", cpu_has_dotprod, vector_generic, matmul_neon, roofline_neon},
#endif
    {"generic", [] { return true; }, vector_generic, matmul_generic, roofline_generic},
// A matrix unit in plain C++.
#if defined(__x86_64__)
    {"emulated_unit", cpu_has_avx2, vector_emulated_unit, matmul_emulated_unit, roofline_avx2},
#endif
};

bool is_emulation(const Kernels& row) { return std::strcmp(row.isa, "emulated_unit") == 0; }

}  // namespace

std::vector<std::string> supported_isas(bool for_tests) {
  std::vector<std::string> names;
  for (const Kernels& row : table) {
    if (row.is_supported() && (for_tests || !is_emulation(row))) names.push_back(row.isa);
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
    if (!is_emulation(row)) has += (has.empty() ? "" : ", ") + std::string(row.isa);
  }
  throw std::invalid_argument(std::string(from_variable ? "SPARSE_BITNET_ISA=" : "instruction set ") +
                              wanted + ": this machine has " + has);
}

}  // namespace sparse_bitnet
