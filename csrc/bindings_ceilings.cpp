// The ceilings of csrc/ceilings.h, with threads and memory of their own.

#include <nanobind/stl/string.h>

#include "bindings.h"
#include "ceilings.h"

namespace nb = nanobind;

namespace sparse_bitnet {
namespace {

struct Ceilings {
  ThreadPool pool;
  ReadBuffer buffer;

  Ceilings(int threads, std::int64_t bytes) : pool(threads), buffer(pool, bytes) {}
};

constexpr std::int64_t most_bytes = std::int64_t(1) << 46;
constexpr int most_prefetch_bytes = 1 << 16;  // lie behind the buffer
constexpr double most_seconds = 60;

double checked(double seconds) {
  if (!(seconds > 0 && seconds <= most_seconds)) throw nb::value_error("seconds out of range");
  return seconds;
}

}  // namespace

void bind_ceilings(nb::module_& module) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Ceilings>(module, "Ceilings", "What this machine can do at most: see csrc/ceilings.h.")
      .def(
          "__init__",
          [](Ceilings* self, int threads, std::int64_t bytes) {
            if (threads < 1 || threads > most_threads || bytes < 1 || bytes > most_bytes) {
              throw nb::value_error("threads or bytes out of range");
            }
            new (self) Ceilings(threads, bytes);
          },
          nb::arg("threads"), nb::arg("bytes"))
      .def(
          "read_rate",
          [](Ceilings& self, int prefetch_bytes) {
            if (prefetch_bytes < 0 || prefetch_bytes > most_prefetch_bytes) {
              throw nb::value_error("prefetch_bytes out of range");
            }
            return read_rate(self.pool, self.buffer, prefetch_bytes);
          },
          nb::arg("prefetch_bytes"), unlocked, "Bytes a second of one pass over the memory.")
      .def(
          "int8_rate",
          [](Ceilings& self, const std::string& isa, double seconds) {
            return int8_rate(self.pool, isa, checked(seconds));
          },
          nb::arg("isa"), nb::arg("seconds"), unlocked,
          "Operations a second; a multiply-add is two. ValueError for an unknown isa.")
      .def(
          "float32_rate",
          [](Ceilings& self, const std::string& isa, double seconds) {
            return float32_rate(self.pool, isa, checked(seconds));
          },
          nb::arg("isa"), nb::arg("seconds"), unlocked, "As int8_rate, of float32.");
}

}  // namespace sparse_bitnet
