// Python's view: addresses and sizes in, nothing owned. The caller keeps the arrays alive and passes
// sizes that fit; the package's kernels/cpu.py is the only caller. The GIL is released during work.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "kernels.h"

namespace nb = nanobind;
using namespace sparse_bitnet;

namespace {

void require_array(int dtype, std::int64_t count, std::int64_t width) {
  require(dtype == int(Dtype::float32) || dtype == int(Dtype::bfloat16), "no such dtype");
  require(width >= 0 && width <= most_elements && count >= 0 && count <= most_elements / (width + 1),
          "a size is out of range");
}

void require_groups(int dtype, std::int64_t groups, int n, int m) {
  require(1 <= n && n <= m && m <= max_group, "the pattern is not 1 <= n <= m <= 32");
  require_array(dtype, groups, m);
}

}  // namespace

NB_MODULE(_cpu, module) {
  // PyTorch's dispatcher holds the registered functions until the process ends.
  nb::set_leak_warnings(false);
  module.doc() = "CPU kernels of sparse_bitnet: raw addresses and sizes, see csrc/kernels.h.";
  module.attr("FLOAT32") = int(Dtype::float32);
  module.attr("BFLOAT16") = int(Dtype::bfloat16);
  module.def("supported_isas", &supported_isas, "Instruction sets this machine runs, best first.");

  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Kernels>(module, "Kernels", "The kernels of one instruction set.")
      .def_static("choose", &choose_kernels, nb::arg("isa") = "", nb::rv_policy::reference,
                  "By name, or by SPARSE_BITNET_ISA, or the best. ValueError if there is none.")
      .def_prop_ro("isa", [](const Kernels& kernels) { return std::string(kernels.isa); })
      .def(
          "nm_mask",
          [](const Kernels& kernels, Address weight, int dtype, std::int64_t groups, int n, int m,
             Address mask, int threads) {
            require_groups(dtype, groups, n, m);
            nm_mask(kernels, pointer<const void>(weight), Dtype(dtype), groups, n, m,
                    pointer<std::uint8_t>(mask), threads);
          },
          nb::arg("weight"), nb::arg("dtype"), nb::arg("groups"), nb::arg("n"), nb::arg("m"),
          nb::arg("mask"), nb::arg("threads"), unlocked)
      .def(
          "select_ternary",
          [](const Kernels& kernels, Address weight, int dtype, float weight_scale,
             std::int64_t groups, int n, int m, Address codes, Address mask, int threads) {
            require_groups(dtype, groups, n, m);
            select_ternary(kernels, pointer<const void>(weight), Dtype(dtype), weight_scale, groups,
                           n, m, pointer<std::int8_t>(codes), pointer<std::uint8_t>(mask), threads);
          },
          nb::arg("weight"), nb::arg("dtype"), nb::arg("weight_scale"), nb::arg("groups"),
          nb::arg("n"), nb::arg("m"), nb::arg("codes"), nb::arg("mask"), nb::arg("threads"), unlocked)
      .def(
          "absmean",
          [](const Kernels& kernels, Address weight, int dtype, std::int64_t count, int threads) {
            require_array(dtype, count, 1);
            return absmean(kernels, pointer<const void>(weight), Dtype(dtype), count, threads);
          },
          nb::arg("weight"), nb::arg("dtype"), nb::arg("count"), nb::arg("threads"), unlocked)
      .def(
          "quantize_int8",
          [](const Kernels& kernels, Address x, int dtype, std::int64_t tokens,
             std::int64_t features, Address codes, Address activation_scale, int threads) {
            require_array(dtype, tokens, features);
            quantize_int8(kernels, pointer<const void>(x), Dtype(dtype), tokens, features,
                          pointer<std::int8_t>(codes), pointer<float>(activation_scale), threads);
          },
          nb::arg("x"), nb::arg("dtype"), nb::arg("tokens"), nb::arg("features"), nb::arg("codes"),
          nb::arg("activation_scale"), nb::arg("threads"), unlocked);

  bind_matmul(module);
  bind_decoder(module);
  bind_memory(module);
  bind_ceilings(module);
}
