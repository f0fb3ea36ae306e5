// SPDX-License-Identifier: Apache-2.0
// The roofline of csrc/roofline.h, with threads and memory of its own.

#include <nanobind/stl/string.h>

#include "bindings.h"
#include "isa.h"
#include "roofline.h"

namespace nb = nanobind;

namespace sparse_bitnet {
namespace {

struct Roofline {
  ThreadPool pool;
  std::unique_ptr<HugeBuffer> buffer;

  Roofline(int threads, std::int64_t bytes)
      : pool(threads), buffer(make_read_buffer(pool, bytes)) {}
};

constexpr std::int64_t most_bytes = std::int64_t(1) << 46;
constexpr double most_seconds = 60;

double checked(double seconds) {
  if (!(seconds > 0 && seconds <= most_seconds)) throw nb::value_error("seconds out of range");
  return seconds;
}

}  // namespace

void bind_roofline(nb::module_& module) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Roofline>(module, "Roofline", "What this machine can do at most: see csrc/roofline.h.")
      .def(
          "__init__",
          [](Roofline* self, int threads, std::int64_t bytes) {
            if (threads < 1 || threads > most_threads || bytes < 1 || bytes > most_bytes) {
              throw nb::value_error("threads or bytes out of range");
            }
            new (self) Roofline(threads, bytes);
          },
          nb::arg("threads"), nb::arg("bytes"), unlocked)
      .def(
          "read_rate",
          [](Roofline& self, int prefetch_bytes) {
            if (prefetch_bytes < 0 || prefetch_bytes > most_prefetch_bytes) {
              throw nb::value_error("prefetch_bytes out of range");
            }
            return read_rate(choose_kernels(supported_isas()[0]).roofline, self.pool, *self.buffer,
                             prefetch_bytes);
          },
          nb::arg("prefetch_bytes"), unlocked, "Bytes a second of one pass over the memory.")
      .def(
          "int8_rate",
          [](Roofline& self, const std::string& isa, double seconds) {
            return int8_rate(choose_kernels(isa).roofline, self.pool, checked(seconds));
          },
          nb::arg("isa"), nb::arg("seconds"), unlocked,
          "Operations a second; a multiply-add is two. ValueError for an unknown isa.")
      .def(
          "clock_rate", [](Roofline& self, double seconds) { return clock_rate(self.pool, checked(seconds)); },
          nb::arg("seconds"), unlocked, "Cycles a second of a thread, while all of them work.");
}

}  // namespace sparse_bitnet
