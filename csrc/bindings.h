// SPDX-License-Identifier: Apache-2.0
// The parts of the extension module; each adds its functions and classes. Sizes are checked here, before
// anything is allocated or multiplied; addresses are trusted.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "isa.h"

namespace sparse_bitnet {

namespace nb = nanobind;
using namespace nb::literals;

using Address = std::uintptr_t;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::invalid_argument(what);
}

inline void require_pattern(packed::Pattern pattern) {
  require(packed::is_valid(pattern), "the pattern is not 1 <= n <= m <= 32");
}

// Most elements of an array from Python: sizes up to this, and small multiples of them, cannot overflow.
constexpr std::int64_t max_elements = std::int64_t(1) << 48;

constexpr std::int64_t max_rows = (std::int64_t(1) << 31) - 1;
constexpr int max_threads = 1024;

void bind_matmul(nb::module_& module, nb::class_<Kernels>& kernels);
void bind_decoder(nb::module_& module);
void bind_memory(nb::module_& module, nb::class_<Kernels>& kernels);

}  // namespace sparse_bitnet
