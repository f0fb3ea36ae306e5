// Matrix kernels one by one, for tests and benchmarks: addresses and sizes in, nothing owned.

#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bindings.h"
#include "matmul_kernels.h"

namespace nb = nanobind;

namespace sparse_bitnet {
namespace {

Activations activations(std::int64_t tokens, std::int64_t columns, Address codes, Address fine,
                        Address scales, Address sums, Address fine_sums) {
  return {tokens,
          columns,
          activation_stride(columns),
          pointer<std::int8_t>(codes),
          pointer<std::int8_t>(fine),
          pointer<float>(scales),
          pointer<std::int32_t>(sums),
          pointer<std::int32_t>(fine_sums)};
}

void require_shape(int format, int n, int m, std::int64_t rows, std::int64_t columns) {
  require(int(WeightFormat::i2) <= format && format <= int(WeightFormat::int4), "no such weight format");
  require(packed::is_valid({n, m}), "the pattern is not 1 <= n <= m <= 32");
  require(rows >= 1 && rows < std::int64_t(1) << 31, "rows are outside 1..2^31 - 1");
  require(columns >= 1 && columns <= packed::max_in_features, "columns are outside 1..2^23");
}

void require_tokens(std::int64_t tokens, std::int64_t columns) {
  require(columns >= 1 && columns <= packed::max_in_features, "columns are outside 1..2^23");
  require(tokens >= 0 && tokens <= most_elements / columns, "tokens are out of range");
}

// A matrix with its output, as Python hands it over.
struct BoundProduct {
  Matrix matrix;
  Address bias, y;
  std::int64_t y_stride;
};

}  // namespace

void bind_matmul(nb::module_& module) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  module.attr("ACTIVATION_SLACK") = activation_slack;
  module.attr("MATRIX_ALIGNMENT") = matrix_alignment;
  module.def(
      "bytes_per_row",
      [](int format, int n, int m, std::int64_t columns) {
        require_shape(format, n, m, 1, columns);
        return Matrix::bytes_per_row(WeightFormat(format), {n, m}, columns);
      },
      nb::arg("format"), nb::arg("n"), nb::arg("m"), nb::arg("columns"),
      "Bytes that a row of a WeightFormat takes, without the padding to row_stride.");

  nb::class_<ThreadPool>(module, "ThreadPool", "The engine's threads, see csrc/thread_pool.h.")
      .def(
          "__init__",
          [](ThreadPool* self, int threads) {
            require(threads >= 1 && threads <= most_threads, "threads is outside 1..1024");
            new (self) ThreadPool(threads);
          },
          nb::arg("threads"))
      .def_prop_ro("threads", &ThreadPool::threads)
      .def(
          "count_visits",
          [](ThreadPool& pool, std::int64_t regions, std::int64_t count, std::int64_t size,
             Address visits, Address threads, bool in_ranges) {
            require(count >= 0 && count <= most_elements && size >= 1 && size <= most_elements,
                    "count or size is out of range");
            auto* visited = pointer<std::int32_t>(visits);
            auto* by = pointer<std::int32_t>(threads);
            auto visit = [&](std::int64_t begin, std::int64_t end, int thread) {
              for (std::int64_t j = begin; j < end; ++j) {
                ++visited[j];
                by[j] = thread;
              }
            };
            for (std::int64_t i = 0; i < regions; ++i) {
              if (in_ranges) {
                pool.parallel_for_ranges(count, size, visit);
              } else {
                pool.parallel_for(count, size, visit);
              }
            }
          },
          nb::arg("regions"), nb::arg("count"), nb::arg("size"), nb::arg("visits"),
          nb::arg("threads"), nb::arg("in_ranges") = false, unlocked,
          "Runs regions that add 1 to every int32 of visits [count] and note the thread: a test.");

  nb::class_<BoundProduct>(module, "Product", "A matrix and where its product goes.")
      .def(
          "__init__",
          [](BoundProduct* self, int format, int n, int m, std::int64_t rows, std::int64_t columns,
             std::int64_t row_stride, Address data, float scale, Address scales, Address bias,
             Address y, std::int64_t y_stride) {
            require_shape(format, n, m, rows, columns);
            const std::int64_t row_bytes =
                Matrix::bytes_per_row(WeightFormat(format), {n, m}, columns);
            require(row_stride >= row_bytes && row_stride % matrix_alignment == 0 &&
                        row_stride <= most_elements / rows,
                    "row_stride is too small, too large or no multiple of 64");
            require(y_stride >= rows && y_stride <= most_elements, "y_stride is out of range");
            new (self) BoundProduct{
                {WeightFormat(format), {n, m}, rows, columns, row_stride,
                 pointer<const std::uint8_t>(data), scale, pointer<const float>(scales)},
                bias,
                y,
                y_stride};
          },
          nb::arg("format"), nb::arg("n"), nb::arg("m"), nb::arg("rows"), nb::arg("columns"),
          nb::arg("row_stride"), nb::arg("data"), nb::arg("scale"), nb::arg("scales"),
          nb::arg("bias"), nb::arg("y"), nb::arg("y_stride"));

  nb::class_<MatmulKernels>(module, "MatmulKernels", "Matrix kernels of one instruction set.")
      .def_static("choose", &choose_matmul_kernels, nb::arg("isa") = "", nb::rv_policy::reference,
                  "By name, or by SPARSE_BITNET_ISA, or the best. ValueError if there is none.")
      .def_prop_ro("isa", [](const MatmulKernels& kernels) { return std::string(isa_name(kernels)); })
      .def(
          "quantize",
          [](const MatmulKernels& kernels, ThreadPool& pool, Address x, std::int64_t tokens,
             std::int64_t columns, Address codes, Address fine, Address scales, Address sums,
             Address fine_sums) {
            require_tokens(tokens, columns);
            Activations a = activations(tokens, columns, codes, fine, scales, sums, fine_sums);
            quantize(kernels, pool, pointer<const float>(x), a);
          },
          nb::arg("pool"), nb::arg("x"), nb::arg("tokens"), nb::arg("columns"), nb::arg("codes"),
          nb::arg("fine"), nb::arg("scales"), nb::arg("sums"), nb::arg("fine_sums"), unlocked,
          "x [tokens, columns] float32 to Activations with stride activation_stride(columns).")
      .def(
          "matmul",
          [](const MatmulKernels& kernels, ThreadPool& pool, std::int64_t tokens,
             std::int64_t columns, Address codes, Address fine, Address scales, Address sums,
             Address fine_sums, nb::list products, int repeats) {
            std::vector<BoundProduct> bound;
            for (nb::handle product : products) {
              bound.push_back(nb::cast<const BoundProduct&>(product));
            }
            require_tokens(tokens, columns);
            std::vector<Product> group;
            for (const BoundProduct& product : bound) {
              require(product.matrix.columns == columns, "the matrix has other columns");
              require(tokens <= most_elements / product.y_stride, "tokens are out of range");
              group.push_back({&product.matrix, pointer<const float>(product.bias),
                               pointer<float>(product.y), product.y_stride});
            }
            const Activations a = activations(tokens, columns, codes, fine, scales, sums, fine_sums);
            nb::gil_scoped_release release;
            for (int i = 0; i < repeats; ++i) {
              matmul(kernels, pool, a, group.data(), int(group.size()));
            }
          },
          nb::arg("pool"), nb::arg("tokens"), nb::arg("columns"), nb::arg("codes"), nb::arg("fine"),
          nb::arg("scales"), nb::arg("sums"), nb::arg("fine_sums"), nb::arg("products"),
          nb::arg("repeats") = 1, "The products of one group, `repeats` times over.")
      .def(
          "matmul_table",
          [](const MatmulKernels& kernels, ThreadPool& pool, Address x, std::int64_t tokens,
             std::int64_t x_stride, int type, std::int64_t rows, std::int64_t columns,
             std::int64_t row_stride, Address data, Address y, std::int64_t y_stride) {
            require_tokens(tokens, columns);
            require(0 <= type && type <= int(FloatType::float32), "no such type of floats");
            require(rows >= 1 && rows < std::int64_t(1) << 31, "rows are outside 1..2^31 - 1");
            const std::int64_t bytes = type == int(FloatType::float32) ? 4 : 2;
            require(row_stride >= bytes * columns && row_stride <= most_elements / rows &&
                        x_stride >= columns && x_stride <= most_elements / (tokens + 1) &&
                        y_stride >= rows && y_stride <= most_elements / (tokens + 1),
                    "a stride is out of range");
            const FloatTable table = {FloatType(type), rows, columns, row_stride,
                                      pointer<const std::uint8_t>(data)};
            matmul_table(kernels, pool, pointer<const float>(x), tokens, x_stride, table,
                         pointer<float>(y), y_stride);
          },
          nb::arg("pool"), nb::arg("x"), nb::arg("tokens"), nb::arg("x_stride"), nb::arg("type"),
          nb::arg("rows"), nb::arg("columns"), nb::arg("row_stride"), nb::arg("data"), nb::arg("y"),
          nb::arg("y_stride"), unlocked);
}

}  // namespace sparse_bitnet
