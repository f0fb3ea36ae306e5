// The parts of the extension module; each adds its functions and classes.

#pragma once

#include <cstdint>

#include <nanobind/nanobind.h>

namespace sparse_bitnet {

using Address = std::uintptr_t;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

void bind_matmul(nanobind::module_& module);
void bind_decoder(nanobind::module_& module);
void bind_memory(nanobind::module_& module);
void bind_ceilings(nanobind::module_& module);

}  // namespace sparse_bitnet
