// SPDX-License-Identifier: Apache-2.0
// Loading for Python: memory for weights, and what is written into it.

#include <optional>
#include <tuple>

#include <nanobind/stl/optional.h>

#include "bindings.h"
#include "loading.h"
#include "platform.h"

namespace sparse_bitnet {
namespace {

constexpr std::int64_t max_file_bytes = std::int64_t(1) << 62;

void require_source(std::int64_t rows, std::int64_t columns, const ByteSource& source) {
  require(source.data != nullptr ||
              (source.descriptor >= 0 && source.offset >= 0 && source.offset <= max_file_bytes),
          "neither an address nor a file");
  require(0 < rows && rows <= max_rows && 0 < columns && columns <= packed::max_in_features,
          "the shape is out of range");
}

void make_stored_matrix(StoredMatrix* place, StoredFormat format, int n, int m, std::int64_t rows,
                        std::int64_t columns, std::int64_t bytes, Address address, int descriptor,
                        std::int64_t offset) {
  const packed::Pattern pattern = {n, m, format == StoredFormat::nm_sign};
  const ByteSource source = {pointer<const std::uint8_t>(address), descriptor, offset};
  require_source(rows, columns, source);
  require_pattern(pattern);
  require(columns % packed::coded(pattern).m == 0, "columns are no multiple of m");
  require(bytes == rows * StoredMatrix::bytes_per_row(format, pattern, columns),
          "the stored bytes do not make up the matrix");
  new (place) StoredMatrix{format, pattern, rows, columns, source};
}

void make_stored_table(StoredTable* place, TableType type, std::int64_t rows, std::int64_t columns,
                       std::int64_t bytes, Address address, int descriptor, std::int64_t offset,
                       Address scales) {
  const ByteSource source = {pointer<const std::uint8_t>(address), descriptor, offset};
  require_source(rows, columns, source);
  require(type != TableType::int4 && type != TableType::i2, "a stored table is int8 or floats");
  require(bytes == rows * Table::bytes_per_row(type, columns), "the stored bytes do not make up the table");
  new (place) StoredTable{type, rows, columns, source, pointer<const float>(scales)};
}

// The CRC-32 of the stored bytes, whether they could be read, and what is wrong with them.
using Report = std::tuple<std::uint32_t, bool, std::optional<std::string>>;

Report report(const Loaded& loaded) {
  return {loaded.crc32, loaded.is_readable, loaded.damage ? std::optional<std::string>(loaded.damage) : std::nullopt};
}

Report repack_matrix(ThreadPool& pool, const StoredMatrix& stored, const Matrix& out) {
  require(is_ternary(out.format), "the format is not one of ternary weights");
  const bool is_any = out.group != 0 && out.format == WeightFormat::lookup;
  require(out.rows == stored.rows && out.columns == stored.columns &&
              (is_any || (out.pattern.n == stored.pattern.n && out.pattern.m == stored.pattern.m)),
          "the matrix has another shape or pattern than the stored one");
  return report(repack(pool, stored, out));
}

Report fill_table(const Kernels& kernels, ThreadPool& pool, const StoredTable& stored, const Table& out) {
  require(out.rows == stored.rows && out.columns == stored.columns,
          "the table has another shape than the stored one");
  require(out.type == stored.type || out.type == TableType::int8 || out.type == TableType::int4,
          "the type is not int8 or int4");
  require(out.type == stored.type || stored.type != TableType::int8 || stored.scales != nullptr, "int8 without scales");
  return report(load_table(kernels, pool, stored, out));
}

}  // namespace

void bind_memory(nb::module_& module, nb::class_<Kernels>& kernels) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<HugeBuffer>(module, "HugeBuffer",
                         "Zeroed memory aligned to 2 MiB, in huge pages where the system has them.")
      .def(nb::init<std::int64_t>(), "size"_a)
      .def_prop_ro("address",
                   [](const HugeBuffer& buffer) { return reinterpret_cast<Address>(buffer.data()); })
      .def_prop_ro("size", &HugeBuffer::size);

  nb::enum_<StoredFormat>(module, "StoredFormat", "See csrc/loading.h.")
      .value("i2", StoredFormat::i2)
      .value("b3", StoredFormat::b3)
      .value("nm_enum", StoredFormat::nm_enum)
      .value("nm_sign", StoredFormat::nm_sign);
  nb::class_<StoredMatrix>(module, "StoredMatrix",
                           "A packed matrix of so many bytes, at an address or at an offset of a file.")
      .def("__init__", &make_stored_matrix, "format"_a, "n"_a, "m"_a, "rows"_a, "columns"_a, "bytes"_a,
           "address"_a = 0, "descriptor"_a = -1, "offset"_a = 0);
  nb::class_<StoredTable>(module, "StoredTable",
                          "A table of so many bytes, at an address or at an offset of a file, with the address "
                          "of the scales of int8.")
      .def("__init__", &make_stored_table, "type"_a, "rows"_a, "columns"_a, "bytes"_a, "address"_a = 0,
           "descriptor"_a = -1, "offset"_a = 0, "scales"_a = 0);

  module.def("repack", &repack_matrix, "pool"_a, "stored"_a, "out"_a, unlocked,
             "Writes the rows of `out`. Returns the CRC-32 of the stored bytes, whether they could be read, "
             "and why they encode no matrix, or None.");
  kernels.def("load_table", &fill_table, "pool"_a, "stored"_a, "out"_a, unlocked,
              "Writes the rows of `out`, copied, or quantised with its scales to int8 or int4. Returns the "
              "CRC-32 of the stored bytes, whether they could be read, and what is wrong with those that were "
              "quantised, or None.");
}

}  // namespace sparse_bitnet
