// SPDX-License-Identifier: Apache-2.0
// Matrices, tables, and their products one by one, for the engine's loader, tests and benchmarks.

#include <cmath>
#include <vector>

#include "bindings.h"
#include "matmul.h"

namespace sparse_bitnet {
namespace {

void require_columns(std::int64_t columns) {
  require(columns >= 1 && columns <= packed::max_in_features, "columns are outside 1..2^23");
}

void require_stride(std::int64_t rows, std::int64_t row_stride, std::int64_t row_bytes,
                    std::int64_t alignment) {
  require(rows >= 1 && rows <= max_rows, "rows are outside 1..2^31 - 1");
  require(row_stride >= row_bytes && row_stride % alignment == 0 && row_stride <= max_elements / rows,
          "row_stride is less than a row, too large, or not aligned");
}

std::int64_t bytes_per_row(WeightFormat format, int n, int m, std::int64_t columns, bool exact, std::int64_t group) {
  require_pattern({n, m});
  require(format != WeightFormat::int8 || columns <= max_int8_columns, "int8 takes at most 2^17 columns");
  require(!exact || format == WeightFormat::lookup, "exact counts of non-zeros are for lookup");
  require(format != WeightFormat::lookup || columns % m == 0, "m does not divide the columns");
  require_columns(columns);
  require(group == 0 || (is_ternary(format) && packed::is_scale_group(group, columns)),
          "group scales are for 32, 64, 128 or 256 ternary weights that divide the columns");
  return Matrix::bytes_per_row(format, {n, m, exact}, columns, group);
}

void make_matrix(Matrix* place, WeightFormat format, int n, int m, std::int64_t rows,
                 std::int64_t columns, std::int64_t row_stride, Address address, float scale,
                 Address scales, std::int64_t group, ScaleType scale_type, bool exact) {
  const std::int64_t row_bytes = bytes_per_row(format, n, m, columns, exact, group);
  const bool is_lookup = format == WeightFormat::lookup, is_b3 = format == WeightFormat::b3_strips;
  require_stride(rows, row_stride, row_bytes, is_lookup ? 8 : is_b3 ? 1 : matrix_alignment);
  require((!is_lookup && !is_b3) || row_stride == row_bytes, "rows of lookup and b3 lie one behind another");
  require(address != 0 && address % matrix_alignment == 0, "the address is not aligned to 64 bytes");
  require(std::isfinite(scale), "the scale is not finite");
  const bool is_triple = lookup::shape_of({n, m, exact}).weights == lookup::triples.weights;
  require(group == 0 || !is_lookup || is_triple, "lookup has groups of pattern 1:1");
  require(group != 32 || format == WeightFormat::i2, "groups of 32 are for i2");
  require(group != 0 || scale_type == ScaleType::float32, "scales of rows are float32");
  require((scales != 0 || (is_ternary(format) && group == 0)) && scales % alignof(float) == 0,
          "the scales are missing or not aligned to 4 bytes");
  new (place) Matrix{format,     {n, m, exact}, rows, columns,
                     row_stride, pointer<const std::uint8_t>(address), scale,
                     group ? nullptr : pointer<const float>(scales), group, scale_type,
                     group ? pointer<const void>(scales) : nullptr};
}

void make_table(Table* place, TableType type, std::int64_t rows, std::int64_t columns,
                std::int64_t row_stride, Address address, Address scales) {
  require_columns(columns);
  require(type != TableType::i2, "tables of i2 are made from a matrix");
  const bool integers = type == TableType::int8 || type == TableType::int4;
  require(type != TableType::int4 || columns % int4_group == 0, "int4 needs columns in groups of 64");
  const std::int64_t alignment = integers ? matrix_alignment : type == TableType::float32 ? 4 : 2;
  require_stride(rows, row_stride, Table::bytes_per_row(type, columns), alignment);
  require(address != 0 && address % alignment == 0, "the address is not aligned");
  require((scales != 0 || !integers) && scales % alignof(float) == 0,
          "the scales are missing or not aligned to 4 bytes");
  new (place) Table{type,       rows, columns, row_stride, pointer<const std::uint8_t>(address),
                    pointer<const float>(scales)};
}

void make_activations(Activations* place, std::int64_t tokens, std::int64_t columns, Address codes,
                      Address fine, Address scales, Address sums, Address fine_sums, std::int64_t group) {
  require_columns(columns);
  require(group == 0 || (packed::is_scale_group(group, columns) && fine == 0),
          "scales are for 32, 64, 128 or 256 activations that divide the columns, without fine");
  require((fine == 0) == (fine_sums == 0), "fine and fine_sums go together");
  require(tokens >= 0 && tokens <= max_elements / columns, "tokens are out of range");
  new (place) Activations{tokens, columns, activation_stride(columns), pointer<std::int8_t>(codes),
                          pointer<std::int8_t>(fine), pointer<float>(scales), pointer<std::int32_t>(sums),
                          pointer<std::int32_t>(fine_sums), false, nullptr, nullptr, group};
}

// A matrix with its output, as Python hands it over.
struct BoundProduct {
  Matrix matrix;
  Address bias, y;
  std::int64_t y_stride;
};

void multiply(const Kernels& kernels, ThreadPool& pool, const Activations& x,
              const std::vector<BoundProduct>& bound, int repeats) {
  std::vector<Product> group;
  for (const BoundProduct& product : bound) {
    require(product.matrix.columns == x.columns, "the matrix has other columns");
    require(product.matrix.summed_group() == bound[0].matrix.summed_group() &&
                (x.group == 0 || product.matrix.group == x.group),
            "the matrix has other groups");
    require(x.tokens <= max_elements / product.y_stride, "tokens are out of range");
    group.push_back({&product.matrix, pointer<const float>(product.bias), pointer<float>(product.y),
                     product.y_stride});
  }
  nb::gil_scoped_release release;
  for (int i = 0; i < repeats; ++i) matmul(kernels, pool, x, group.data(), int(group.size()));
}

void count_visits(ThreadPool& pool, std::int64_t regions, std::int64_t count, std::int64_t size,
                  Address visits, Address threads, std::int64_t failing, std::int64_t least) {
  require(count >= 0 && count <= max_elements && size >= 1 && size <= max_elements && least >= 0 && least <= size,
          "count, size or least is out of range");
  auto visit = [&](std::int64_t begin, std::int64_t end, int thread) {
    if (begin <= failing && failing < end) throw std::bad_alloc();
    for (std::int64_t j = begin; j < end; ++j) {
      ++pointer<std::int32_t>(visits)[j];
      pointer<std::int32_t>(threads)[j] = thread;
    }
  };
  for (std::int64_t i = 0; i < regions; ++i) pool.parallel_for(count, size, visit, least);
}

}  // namespace

void bind_matmul(nb::module_& module, nb::class_<Kernels>& kernels) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  module.attr("ACTIVATION_SLACK") = activation_slack;
  module.attr("STRIP_ROWS") = strip_rows;
  module.attr("B3_STRIP_ROWS") = b3_strips::rows;
  nb::enum_<WeightFormat>(module, "WeightFormat", "See csrc/matmul.h.")
      .value("i2", WeightFormat::i2)
      .value("b3", WeightFormat::b3_strips)
      .value("int8", WeightFormat::int8)
      .value("int4", WeightFormat::int4)
      .value("lookup", WeightFormat::lookup);
  nb::enum_<ScaleType>(module, "ScaleType", "Group scales, see csrc/packed_format.h.")
      .value("float32", ScaleType::float32)
      .value("float16", ScaleType::float16)
      .value("bfloat16", ScaleType::bfloat16);
  nb::enum_<TableType>(module, "TableType", "How an embedding or head is stored, see csrc/matmul.h.")
      .value("int8", TableType::int8)
      .value("int4", TableType::int4)
      .value("bfloat16", TableType::bfloat16)
      .value("float32", TableType::float32)
      .value("i2", TableType::i2);
  module.def("bytes_per_row", &bytes_per_row, "format"_a, "n"_a, "m"_a, "columns"_a,
             "exact"_a = false, "group"_a = 0, "Bytes that a row takes, without the padding to row_stride.");

  nb::class_<ThreadPool>(module, "ThreadPool", "The engine's threads, see csrc/thread_pool.h.")
      .def(
          "__init__",
          [](ThreadPool* self, int threads) {
            require(threads >= 1 && threads <= max_threads, "threads is outside 1..1024");
            new (self) ThreadPool(threads);
          },
          "threads"_a)
      .def_prop_ro("threads", &ThreadPool::threads)
      .def("count_visits", &count_visits, "regions"_a, "count"_a, "size"_a, "visits"_a, "threads"_a,
           "failing"_a = -1, "least"_a = 0, unlocked,
           "Runs regions that add 1 to every int32 of visits [count] and note the thread: a test. The piece "
           "with item `failing` throws.");

  nb::class_<Matrix>(module, "Matrix",
                     "Weights ready to be multiplied: addresses of rows, 64-byte aligned, row_stride bytes "
                     "apart, and of the scales: float32 of int8, int4 and rows of ternary weights, or, where `group` "
                     "weights have one, of STRIP_ROWS rows together, [ceil(rows / 16), columns / group, 16], or of "
                     "B3_STRIP_ROWS; rows are then filled up to such strips, those of b3 always (csrc/matmul.h). "
                     "n, m: the pattern of lookup; exact: lookup where every group has n non-zeros.")
      .def("__init__", &make_matrix, "format"_a, "n"_a, "m"_a, "rows"_a, "columns"_a, "row_stride"_a,
           "address"_a, "scale"_a = 1.0f, "scales"_a = 0, "group"_a = 0, "scale_type"_a = ScaleType::float32,
           "exact"_a = false);
  nb::class_<Table>(module, "Table",
                    "Embedding or output head: addresses of rows, row_stride bytes apart, and of the float32 "
                    "scales of int8 and int4; or those of a matrix of i2 with group scales.")
      .def(
          "__init__",
          [](Table* self, const Matrix& m) {
            require(m.in_strips() && m.format == WeightFormat::i2, "a table of ternary weights is i2 with group scales");
            new (self) Table{TableType::i2, m.rows, m.columns, m.row_stride, m.data, nullptr, m.group, m.scale_type,
                             m.group_scales};
          },
          "matrix"_a)
      .def("__init__", &make_table, "type"_a, "rows"_a, "columns"_a, "row_stride"_a, "address"_a,
           "scales"_a = 0);
  nb::class_<Activations>(module, "Activations",
                          "Addresses of quantised activations, see csrc/matmul.h; fine and fine_sums may be 0. With "
                          "`group`, scales and sums are [tokens, columns / group].")
      .def("__init__", &make_activations, "tokens"_a, "columns"_a, "codes"_a, "fine"_a, "scales"_a,
           "sums"_a, "fine_sums"_a, "group"_a = 0);
  nb::class_<BoundProduct>(module, "Product", "A matrix and the addresses of its bias (or 0) and output.")
      .def(
          "__init__",
          [](BoundProduct* self, const Matrix& matrix, Address bias, Address y, std::int64_t y_stride) {
            require(y_stride >= matrix.rows && y_stride <= max_elements, "y_stride is out of range");
            new (self) BoundProduct{matrix, bias, y, y_stride};
          },
          "matrix"_a, "bias"_a, "y"_a, "y_stride"_a);

  kernels
      .def(
          "quantize",
          [](const Kernels& self, Address x, Activations& activations) {
            quantize(self, pointer<const float>(x), activations);
          },
          "x"_a, "activations"_a, unlocked, "x [tokens, columns] float32 to activations.")
      .def("matmul", &multiply, "pool"_a, "x"_a, "products"_a, "repeats"_a = 1,
           "The products of one group, `repeats` times over.")
      .def(
          "hadamard",
          [](const Kernels& self, Address x, Address before, Address after, std::int64_t n, std::int64_t block) {
            require(n >= 1 && n <= max_elements && block >= 1 && (block & (block - 1)) == 0 && n % block == 0,
                    "n is out of range, or block is no power of two that divides it");
            self.vector.hadamard(pointer<float>(x), pointer<const float>(before), pointer<const float>(after), n, block);
          },
          "x"_a, "before"_a, "after"_a, "n"_a, "block"_a, unlocked,
          "x [n] = after * H(before * x) (csrc/isa.h); addresses of float32 [n], before and after may be 0.");
}

}  // namespace sparse_bitnet
