// Loading for Python: memory for weights, and what is written into it. Addresses and sizes in; all
// sizes are checked here against each other before anything is read or written.

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "bindings.h"
#include "checksum.h"
#include "platform.h"
#include "repack.h"
#include "tables.h"

namespace nb = nanobind;

namespace sparse_bitnet {
namespace {

// (address, -1, 0) of memory, or (0, file descriptor, offset in the file).
using SourceArguments = std::tuple<Address, int, std::int64_t>;

constexpr std::int64_t most_file_bytes = std::int64_t(1) << 62;

ByteSource byte_source(const SourceArguments& arguments) {
  const auto& [address, descriptor, offset] = arguments;
  require(address != 0 || (descriptor >= 0 && offset >= 0 && offset <= most_file_bytes),
          "neither an address nor a file");
  return {pointer<const std::uint8_t>(address), descriptor, offset};
}

constexpr std::int64_t largest_rows = std::int64_t(1) << 31;

// Whether [rows, row_bytes] fits with rows `stride` apart.
void require_room(std::int64_t rows, std::int64_t row_bytes, std::int64_t stride, Address out,
                  std::int64_t out_bytes) {
  require(stride >= row_bytes && stride % matrix_alignment == 0 && stride < (1 << 28),
          "row_stride is too small or no multiple of 64");
  require(out != 0 && out % matrix_alignment == 0, "the output is not aligned to 64 bytes");
  require(rows * stride <= out_bytes, "the output is too small");
}

std::tuple<std::uint32_t, bool, std::optional<std::string>> bound_repack(
    ThreadPool& pool, int stored_format, int n, int m, std::int64_t rows, std::int64_t columns,
    const SourceArguments& source, std::int64_t source_bytes, int format, Address out, std::int64_t out_bytes,
    std::int64_t row_stride) {
  const packed::Pattern pattern = {n, m};
  require(0 <= stored_format && stored_format <= int(StoredFormat::codes), "no such stored format");
  require(int(WeightFormat::i2) <= format && format <= int(WeightFormat::nm_bitmap),
          "the format is none of i2, b3 and nm_bitmap");
  require(packed::is_valid(pattern), "the pattern is not 1 <= n <= m <= 32");
  require(0 < rows && rows < largest_rows, "rows are out of range");
  require(0 < columns && columns <= packed::max_in_features &&
              columns % packed::coded(pattern).m == 0,
          "columns are out of range or no multiple of m");
  const bool is_bitmap = StoredFormat(stored_format) == StoredFormat::nm_bitmap ||
                         WeightFormat(format) == WeightFormat::nm_bitmap;
  require(!is_bitmap || packed::nm_bitmap_supports(pattern), "nm_bitmap does not hold the pattern");
  const StoredMatrix stored = {StoredFormat(stored_format), pattern, rows, columns,
                               byte_source(source)};
  require(source_bytes == rows * stored_row_bytes(stored.format, pattern, columns),
          "the stored bytes do not make up the matrix");
  require_room(rows, Matrix::bytes_per_row(WeightFormat(format), pattern, columns), row_stride, out,
               out_bytes);
  const Repacked result =
      repack(pool, stored, WeightFormat(format), pointer<std::uint8_t>(out), row_stride);
  std::optional<std::string> damage;
  if (result.damage != nullptr) damage = result.damage;
  return {result.crc32, result.is_readable, damage};
}

TableSource checked_table(int type, std::int64_t rows, std::int64_t columns,
                          const SourceArguments& source, std::int64_t source_bytes,
                          Address scales) {
  require(0 <= type && type <= int(StoredTable::int8), "no such table type");
  require(0 < rows && rows < largest_rows && 0 < columns && columns <= packed::max_in_features,
          "the table's shape is out of range");
  const TableSource table = {StoredTable(type), rows, columns, byte_source(source),
                             pointer<const float>(scales)};
  require(source_bytes == rows * columns * bytes_of(table.type),
          "the stored bytes do not make up the table");
  return table;
}

using TableReport = std::tuple<std::uint32_t, bool, bool>;

}  // namespace

void bind_memory(nb::module_& module) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<HugeBuffer>(module, "HugeBuffer",
                         "Zeroed memory aligned to 2 MiB, in huge pages where the system has them.")
      .def(nb::init<std::int64_t>(), nb::arg("size"))
      .def_prop_ro("address",
                   [](const HugeBuffer& buffer) { return reinterpret_cast<Address>(buffer.data()); })
      .def_prop_ro("size", &HugeBuffer::size)
      .def_prop_ro("huge_bytes", &HugeBuffer::huge_bytes,
                   "Bytes in huge pages now; -1 where the system does not tell.");

  module.def("repack", &bound_repack, nb::arg("pool"), nb::arg("stored_format"), nb::arg("n"),
             nb::arg("m"), nb::arg("rows"), nb::arg("columns"), nb::arg("source"),
             nb::arg("source_bytes"), nb::arg("format"), nb::arg("out"), nb::arg("out_bytes"),
             nb::arg("row_stride"), unlocked,
             "A packed matrix (StoredFormat of csrc/repack.h) to a WeightFormat of csrc/matmul.h. "
             "source: (address, -1, 0), or (0, file descriptor, offset). "
             "Returns the CRC-32 of the stored bytes, whether they could be read, and why they encode no "
             "matrix, or None.");
  module.def(
      "copy_table",
      [](ThreadPool& pool, int type, std::int64_t rows, std::int64_t columns,
         const SourceArguments& source, std::int64_t source_bytes, Address out,
         std::int64_t out_bytes, std::int64_t row_stride) {
        const TableSource table = checked_table(type, rows, columns, source, source_bytes, 0);
        require_room(rows, columns * bytes_of(table.type), row_stride, out, out_bytes);
        const CopiedTable result =
            copy_table(pool, table, pointer<std::uint8_t>(out), row_stride);
        return TableReport(result.crc32, result.is_readable, true);
      },
      nb::arg("pool"), nb::arg("type"), nb::arg("rows"), nb::arg("columns"), nb::arg("source"),
      nb::arg("source_bytes"), nb::arg("out"), nb::arg("out_bytes"), nb::arg("row_stride"), unlocked,
      "Rows of a table (StoredTable of csrc/tables.h) to rows row_stride apart. Returns the CRC-32 of "
      "the stored bytes, whether they could be read, and True.");
  module.def(
      "quantize_table",
      [](ThreadPool& pool, int type, std::int64_t rows, std::int64_t columns,
         const SourceArguments& source, std::int64_t source_bytes, Address stored_scales,
         int format, Address out, std::int64_t out_bytes, std::int64_t row_stride,
         Address scales) {
        const TableSource table =
            checked_table(type, rows, columns, source, source_bytes, stored_scales);
        const bool is_int4 = format == int(WeightFormat::int4);
        require(is_int4 || format == int(WeightFormat::int8), "the format is not int8 or int4");
        require(!is_int4 || columns % int4_group == 0, "int4 needs columns in groups of 64");
        require(table.type != StoredTable::int8 || stored_scales != 0, "int8 without scales");
        require(scales != 0 && scales % alignof(float) == 0, "the scales are not aligned");
        require_room(rows, Matrix::bytes_per_row(WeightFormat(format), {1, 1}, columns), row_stride,
                     out, out_bytes);
        const CopiedTable result = quantize_table(pool, table, WeightFormat(format),
                                                  pointer<std::uint8_t>(out), row_stride,
                                                  pointer<float>(scales));
        return TableReport(result.crc32, result.is_readable, result.is_finite);
      },
      nb::arg("pool"), nb::arg("type"), nb::arg("rows"), nb::arg("columns"), nb::arg("source"),
      nb::arg("source_bytes"), nb::arg("stored_scales"), nb::arg("format"), nb::arg("out"),
      nb::arg("out_bytes"), nb::arg("row_stride"), nb::arg("scales"), unlocked,
      "A table to int8 or int4. Returns the CRC-32 of the stored bytes, whether they could be read, and "
      "whether all values are finite.");
  module.def(
      "crc32",
      [](Address data, std::int64_t size) {
        require(size == 0 || (size > 0 && data != 0), "no data");
        return crc32(pointer<const std::uint8_t>(data), size);
      },
      nb::arg("data"), nb::arg("size"), unlocked, "zlib's CRC-32 of so many bytes.");
}

}  // namespace sparse_bitnet
