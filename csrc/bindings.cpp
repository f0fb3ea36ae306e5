// SPDX-License-Identifier: Apache-2.0
// Python's view: addresses and sizes in, nothing owned. The caller keeps the arrays alive and passes
// sizes that fit. The GIL is released during work.

#include "bindings.h"
#include "delta_net.h"
#include "ops.h"
#include "platform.h"
#include "roofline.h"

using namespace sparse_bitnet;

namespace {

void require_array(std::int64_t count, std::int64_t width) {
  require(width >= 0 && width <= max_elements && count >= 0 && count <= max_elements / (width + 1),
          "a size is out of range");
}

template <class T>
T checked(T value, T most, const char* name) {
  require(value > 0 && value <= most, std::string(name) + " out of range");
  return value;
}

// The roofline of csrc/roofline.h, with threads and memory of its own.
struct Roofline {
  ThreadPool pool;
  std::unique_ptr<HugeBuffer> buffer;

  Roofline(int threads, std::int64_t bytes)
      : pool(checked(threads, max_threads, "threads")),
        buffer(make_read_buffer(pool, checked(bytes, std::int64_t(1) << 46, "bytes"))) {}

  double measured_read_rate(int streams, int prefetch_bytes) {
    require(streams == 1 || streams == 8, "streams out of range");
    require(prefetch_bytes >= 0 && prefetch_bytes <= max_prefetch_bytes, "prefetch_bytes out of range");
    return read_rate(choose_kernels(supported_isas()[0]).roofline, pool, *buffer, streams, prefetch_bytes);
  }
  double measured_int8_rate(const std::string& isa, double seconds) {
    return int8_rate(choose_kernels(isa).roofline, pool, checked(seconds, 60.0, "seconds"));
  }
};

}  // namespace

NB_MODULE(_cpu, module) {
  // PyTorch's dispatcher holds the registered functions until the process ends.
  nb::set_leak_warnings(false);
  module.doc() = "CPU kernels of sparse_bitnet: raw addresses and sizes, see csrc/isa.h.";
  nb::enum_<Dtype>(module, "Dtype").value("float32", Dtype::float32).value("bfloat16", Dtype::bfloat16);
  module.def("supported_isas", &supported_isas, "for_tests"_a = false,
             "Instruction sets this machine runs, best first; with those that are only for tests.");
  module.def("change_vendor", [] { is_amd = !is_amd; },
             "Compute as on processors of another vendor, for tests: see csrc/platform.h.");
  module.def("amx_refusal", &amx_refusal, "Why amx_int8 is not among them, or nothing.");

  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Kernels> kernels(module, "Kernels", "The kernels of one instruction set, see csrc/ops.h.");
  kernels
      .def_static("choose", &choose_kernels, "isa"_a = "", nb::rv_policy::reference,
                  "By name, or by SPARSE_BITNET_ISA, or the best. ValueError if there is none.")
      .def_prop_ro("isa", [](const Kernels& self) { return std::string(self.isa); })
      .def(
          "select_ternary",
          [](const Kernels& self, Address weight, Dtype dtype, float weight_scale,
             std::int64_t groups, int n, int m, Address codes, Address mask, int threads) {
            require_pattern({n, m});
            require_array(groups, m);
            select_ternary(self, pointer<const void>(weight), dtype, weight_scale, groups, n, m,
                           pointer<std::int8_t>(codes), pointer<std::uint8_t>(mask), threads);
          },
          "weight"_a, "dtype"_a, "weight_scale"_a, "groups"_a, "n"_a, "m"_a, "codes"_a, "mask"_a,
          "threads"_a, unlocked, "codes may be 0: the mask alone.")
      .def(
          "absmean",
          [](const Kernels& self, Address weight, Dtype dtype, std::int64_t count, int threads) {
            require_array(count, 0);
            return absmean(self, pointer<const void>(weight), dtype, count, threads);
          },
          "weight"_a, "dtype"_a, "count"_a, "threads"_a, unlocked)
      .def(
          "quantize_groups",
          [](const Kernels& self, Address weight, Dtype dtype, std::int64_t groups, std::int64_t size,
             Address codes, Address weight_scale, int threads) {
            require_array(groups, size);
            require(size > 0, "a size is out of range");
            quantize_groups(self, pointer<const void>(weight), dtype, groups, size,
                            pointer<std::int8_t>(codes), pointer<float>(weight_scale), threads);
          },
          "weight"_a, "dtype"_a, "groups"_a, "size"_a, "codes"_a, "weight_scale"_a, "threads"_a, unlocked)
      .def(
          "quantize_int8",
          [](const Kernels& self, Address x, Dtype dtype, std::int64_t tokens, std::int64_t features,
             Address codes, Address activation_scale, int threads) {
            require_array(tokens, features);
            quantize_int8(self, pointer<const void>(x), dtype, tokens, features,
                          pointer<std::int8_t>(codes), pointer<float>(activation_scale), threads);
          },
          "x"_a, "dtype"_a, "tokens"_a, "features"_a, "codes"_a, "activation_scale"_a, "threads"_a,
          unlocked)
      .def(
          "convolve",
          [](const Kernels& self, std::int64_t tokens, std::int64_t columns, std::int64_t taps, Address weights,
             Address past, Address rows, std::int64_t stride) {
            require_array(tokens, stride);
            require(columns % slab_columns == 0 && columns <= stride && 2 <= taps && taps <= max_taps,
                    "sizes do not fit");
            self.vector.convolve({tokens, columns, taps, pointer<const float>(weights),
                                  pointer<const float>(past), pointer<float>(rows), stride});
          },
          "tokens"_a, "columns"_a, "taps"_a, "weights"_a, "past"_a, "rows"_a, "stride"_a,
          "See csrc/delta_net.h, like the next.")
      .def(
          "delta_rule",
          [](const Kernels& self, std::int64_t tokens, std::int64_t key_dim, std::int64_t columns, Address queries,
             Address keys, Address values, std::int64_t stride, Address decays, Address steps, Address state,
             Address out) {
            require_array(tokens, stride);
            require(columns % slab_columns == 0 && columns <= stride && key_dim <= stride, "sizes do not fit");
            self.vector.delta_rule({tokens, key_dim, columns, pointer<const float>(queries),
                                    pointer<const float>(keys), pointer<const float>(values), stride,
                                    pointer<const float>(decays), pointer<const float>(steps), 1,
                                    pointer<float>(state), pointer<float>(out), stride});
          },
          "tokens"_a, "key_dim"_a, "columns"_a, "queries"_a, "keys"_a, "values"_a, "stride"_a, "decays"_a,
          "steps"_a, "state"_a, "out"_a);

  bind_matmul(module, kernels);
  bind_memory(module, kernels);
  bind_decoder(module);
  nb::class_<Roofline>(module, "Roofline", "What this machine can do at most: see csrc/roofline.h.")
      .def(nb::init<int, std::int64_t>(), "threads"_a, "bytes"_a, unlocked)
      .def("read_rate", &Roofline::measured_read_rate, "streams"_a, "prefetch_bytes"_a, unlocked,
           "Bytes a second of one pass over the memory.")
      .def("int8_rate", &Roofline::measured_int8_rate, "isa"_a, "seconds"_a, unlocked,
           "Operations a second; a multiply-add is two. ValueError for an unknown isa.");
}
