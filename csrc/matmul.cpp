// SPDX-License-Identifier: Apache-2.0
#include "matmul.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "aligned_vector.h"
#include "matmul_kernels.h"

namespace sparse_bitnet {
namespace {

// Another thread gains something from this many multiplications on.
constexpr std::int64_t work_per_thread = 1 << 16;

MatmulScratch& thread_scratch() {
  thread_local AlignedVector<MatmulScratch> scratch(1);
  return scratch.front();
}

// Memory for `count` values, kept for the next call.
template <class T>
T* room(AlignedVector<T>& memory, std::int64_t count) {
  if (std::int64_t(memory.size()) < count) memory.resize(std::size_t(count));
  return memory.data();
}

// [tokens, codes and fine, groups] for weights whose sums are scaled by groups; null otherwise.
const std::int32_t* group_sums(const Kernels& kernels, ThreadPool& pool, const Activations& x,
                               std::int64_t group) {
  thread_local AlignedVector<std::int32_t> memory;
  if (group == 0) return nullptr;
  if (x.group) return x.sums;
  const std::int64_t groups = packed::divide_up(x.columns, group), parts = x.fine ? 2 : 1;
  std::int32_t* to = room(memory, x.tokens * parts * groups);
  pool.parallel_for(x.tokens, 16, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t t = begin; t < end; ++t) {
      std::int32_t* of_token = to + t * parts * groups;
      kernels.matmul.sum_groups(x.codes + t * x.stride, groups, group, of_token);
      if (x.fine) kernels.matmul.sum_groups(x.fine + t * x.stride, groups, group, of_token + groups);
    }
  });
  return to;
}

// The activations as a matrix unit wants them (matmul.h).
Activations for_unit(const Activations& x) {
  thread_local AlignedVector<std::int8_t> memory[2];
  Activations result = x;
  result.on_unit = true;
  const std::int64_t last = x.tokens % unit_tile, begin = (x.tokens - last) * x.stride;
  if (last == 0) return result;
  for (const bool is_fine : {false, true}) {
    const std::int8_t* from = is_fine ? x.fine : x.codes;
    if (!from) break;
    std::int8_t* to = room(memory[is_fine], unit_tile * x.stride);
    (is_fine ? result.last_fine : result.last_codes) = to;
    std::memcpy(to, from + begin, last * x.stride);
    std::memset(to + last * x.stride, 0, (unit_tile - last) * x.stride);
  }
  return result;
}

// The codes of a token as codes of four neighbours want them (matmul.h).
void arrange_quads(const std::int8_t* codes, std::int64_t columns, std::int8_t* to) {
  constexpr int block = lookup::quads.block_columns(), plane = lookup::block_codes;
  for (std::int64_t first = 0; first < columns; first += block, to += block) {
    const std::int64_t count = std::min<std::int64_t>(plane, (columns - first) / 4);
    if (count < plane) std::memset(to, 0, block);
    for (std::int64_t j = 0; j < count; ++j) {
      for (int p = 0; p < 4; ++p) to[p * plane + j] = codes[first + 4 * j + p];
    }
  }
}

const std::int8_t* arranged_quads(ThreadPool& pool, const Activations& x) {
  thread_local AlignedVector<std::int8_t> memory;
  const std::int64_t stride = quad_stride(x.columns);
  std::int8_t* to = room(memory, x.tokens * stride);
  pool.parallel_for(x.tokens, 16, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t t = begin; t < end; ++t) arrange_quads(x.codes + t * x.stride, x.columns, to + t * stride);
  });
  return to;
}

const std::uint8_t* sum_tables(const SumKernels& sums, ThreadPool& pool, const Activations& x, std::int64_t group) {
  thread_local AlignedVector<std::uint8_t> memory;
  const std::int64_t part = b3_strips::part_columns(group), parts = packed::divide_up(x.columns, part);
  const std::int64_t of_part = b3_strips::part_codes(part) * sums.table_bytes;
  std::uint8_t* to = room(memory, x.tokens * parts * of_part);
  pool.parallel_for(x.tokens * parts, 4096 / part, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      sums.sum_tables(x.codes + i / parts * x.stride + i % parts * part, part, to + i * of_part);
    }
  });
  return to;
}

// Rows of a piece: few enough that the threads finish together, and whole cache lines of y, or strips.
std::int64_t rows_a_piece(std::int64_t rows, std::int64_t pieces, std::int64_t most, std::int64_t whole = 16) {
  return std::clamp<std::int64_t>(rows / pieces / whole * whole, whole, most);
}

}  // namespace

std::int64_t Matrix::bytes_per_row(WeightFormat format, packed::Pattern pattern,
                                   std::int64_t columns, std::int64_t group) {
  switch (format) {
    case WeightFormat::i2:
      return packed::i2_row_bytes(columns);
    case WeightFormat::b3_strips:
      return packed::divide_up(columns, b3_strips::part_columns(group)) * b3_strips::part_bytes(b3_strips::part_columns(group));
    case WeightFormat::lookup:
      return lookup::shape_of(pattern).row_bytes(columns);
    case WeightFormat::int8:
      return columns;
    case WeightFormat::int4:
      return packed::divide_up(columns, int4_group) * (int4_group / 2);
  }
  throw std::invalid_argument("unknown weight format");
}

Activations Activations::range(std::int64_t begin, std::int64_t end) const {
  Activations part = *this;
  part.tokens = end - begin;
  part.codes += begin * stride;
  if (quads) part.quads += begin * quad_stride(columns);
  part.scales += begin * scales_a_token();
  part.sums += begin * scales_a_token();
  if (fine) {
    part.fine += begin * stride;
    part.fine_sums += begin;
  }
  return part;
}

int Matrix::code(std::int64_t row, std::int64_t column) const {
  const std::uint8_t* of_row = data + row * row_stride;
  if (format == WeightFormat::int8) return std::int8_t(of_row[column]);
  if (format == WeightFormat::int4) {
    const std::int64_t half = int4_group / 2, in_group = column % int4_group;
    const int byte = of_row[column / int4_group * half + in_group % half];
    return (in_group < half ? byte & 15 : byte >> 4) - 8;
  }
  if (!in_strips()) {
    if (format == WeightFormat::i2) return packed::i2_code(of_row, columns, column);
    const int in_strip = int(row % lookup::shape_of(pattern).rows());
    return lookup::digit_at(pattern, of_row - in_strip * row_stride, in_strip, column) - 1;
  }
  if (format == WeightFormat::lookup) {
    const lookup::StripPlace place = lookup::strip_place(columns, group, column);
    const std::int64_t block = place.block * lookup::triples.vectors() * lookup::block_codes;
    const std::uint8_t* at = data + row / strip_rows * strip_rows * row_stride + block;
    const int code = lookup::code_at(lookup::triples, at, place.vector, int(row % strip_rows * 4 + column % 4));
    return lookup::layout_of(pattern).digits[place.digit][code] - 1;
  }
  if (format == WeightFormat::b3_strips) {
    const std::int64_t in_strip = row % b3_strips::rows;
    return b3_strips::weight_at(data + (row - in_strip) * row_stride + in_strip, group, column);
  }
  const std::uint8_t* words = data + row / strip_rows * strip_rows * row_stride + row % strip_rows * 4;
  const std::uint8_t byte = words[column / strip_columns * 64 + column % 4];
  return (byte >> (column % strip_columns / 4 * 2) & 3) - 1;
}

float Matrix::group_scale(std::int64_t row, std::int64_t index) const {
  const std::int64_t strip = rows_of_strip(), place = (row / strip * (columns / group) + index) * strip + row % strip;
  if (scale_type == ScaleType::float32) return static_cast<const float*>(group_scales)[place];
  const std::uint32_t half = static_cast<const std::uint16_t*>(group_scales)[place];
  const bool is_float16 = scale_type == ScaleType::float16;
  const std::uint32_t bits = is_float16 ? (half & 0x7fff) << 13 : half << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  // Where float16's exponent and mantissa lie in float32 the exponent is 112 too small.
  return is_float16 ? (half >> 15 ? -0x1p112f : 0x1p112f) * value : value;
}

Matrix Table::matrix() const {
  const WeightFormat format = type == TableType::i2     ? WeightFormat::i2
                              : type == TableType::int8 ? WeightFormat::int8
                                                        : WeightFormat::int4;
  return {format, {1, 1}, rows, columns, row_stride, data, 1.0f, scales, group, scale_type, group_scales};
}

std::int64_t Table::bytes_per_row(TableType type, std::int64_t columns) {
  switch (type) {
    case TableType::i2: return packed::i2_row_bytes(columns);
    case TableType::int8: return columns;
    case TableType::int4: return columns / 2;
    case TableType::bfloat16: return columns * 2;
    case TableType::float32: return columns * 4;
  }
  throw std::invalid_argument("unknown table type");
}

void table_row(const Table& table, std::int64_t row, float* out) {
  const std::uint8_t* data = table.data + row * table.row_stride;
  const std::int64_t columns = table.columns;
  switch (table.type) {
    case TableType::float32:
      std::memcpy(out, data, columns * sizeof(float));
      break;
    case TableType::bfloat16:
      for (std::int64_t i = 0; i < columns; ++i) {
        std::uint16_t half;
        std::memcpy(&half, data + 2 * i, sizeof half);
        const std::uint32_t bits = std::uint32_t(half) << 16;
        std::memcpy(out + i, &bits, sizeof bits);
      }
      break;
    case TableType::int8:
      for (std::int64_t i = 0; i < columns; ++i) out[i] = float(std::int8_t(data[i])) * table.scales[row];
      break;
    case TableType::int4:
    case TableType::i2: {
      const Matrix matrix = table.matrix();
      const std::int64_t group = matrix.summed_group();
      for (std::int64_t i = 0; i < columns; i += group) {
        const float scale = table.scales ? table.scales[(row * columns + i) / group] : matrix.group_scale(row, i / group);
        for (std::int64_t c = i; c < i + group; ++c) out[c] = float(matrix.code(row, c)) * scale;
      }
    }
  }
}

void quantize(const Kernels& kernels, const float* x, const Activations& to) {
  const std::int64_t groups = to.scales_a_token(), columns = to.group ? to.group : to.columns;
  for (std::int64_t t = 0; t < to.tokens; ++t) {
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int64_t i = t * groups + g, column = g * columns, place = t * to.stride + column;
      kernels.matmul.quantize_token(x + i * columns, columns, g + 1 < groups ? columns : to.stride - column,
                                    to.codes + place, to.fine ? to.fine + place : nullptr, to.scales + i, to.sums + i,
                                    to.fine ? to.fine_sums + t : nullptr);
    }
  }
}

void matmul(const Kernels& kernels, ThreadPool& pool, const Activations& given,
            const Product* products, int count, ReadOrder* order) {
  bool on_unit = kernels.matmul.tiles_from > 0 && given.tokens >= kernels.matmul.tiles_from;
  bool in_quads = false, in_b3_strips = false, all_ternary = true;
  std::int64_t rows = 0;
  for (int i = 0; i < count; ++i) {
    const Matrix& matrix = *products[i].matrix;
    on_unit &= is_for_unit(matrix);
    in_quads |= matrix.format == WeightFormat::lookup && lookup::shape_of(matrix.pattern).neighbours();
    in_b3_strips |= matrix.format == WeightFormat::b3_strips;
    all_ternary &= is_ternary(matrix.format);
    rows += matrix.rows;
  }
  Activations x = on_unit ? for_unit(given) : given;
  if (in_quads && !on_unit) x.quads = arranged_quads(pool, x);
  const std::int64_t work = rows * x.columns * x.tokens;
  const int threads =
      int(std::clamp<std::int64_t>(work / work_per_thread, 1, std::int64_t(pool.threads())));
  // Of a gated product alone, y is the gate already.
  const bool is_gated = count > 0 && products[count - 1].gated_by, has_gate = is_gated && count == 1;
  const std::int64_t group = count > 0 ? products->matrix->summed_group() : 0;
  // Whether a unit multiplies the gate and what it gates at once.
  const bool is_pair = is_gated && count == 2 && x.on_unit && !x.fine && group == 0 && !in_b3_strips &&
                       !products[0].bias && !products[1].bias;
  const bool is_large = x.on_unit && x.columns * std::min(x.tokens, max_tokens_a_call) > max_unit_activations;
  const bool is_long = is_large && !is_gated;
  const std::int64_t tokens_a_call = is_large && is_pair ? max_tokens_a_call / 2 : max_tokens_a_call;
  const std::int64_t pieces_a_thread = is_long ? 2 : x.on_unit ? 4 : 8;
  const std::int64_t most = is_long                                      ? max_unit_rows / (x.fine ? 2 : 1)
                            : x.on_unit                                  ? max_rows_a_call
                            : x.tokens <= max_few_tokens                 ? max_rows_of_few
                            : x.tokens <= max_some_tokens && all_ternary ? max_rows_of_some
                                                                         : max_rows_without_unit;
  // For few tokens pieces begin large, many slices, so that the streams of memory are long, and end small.
  const bool tapers = x.tokens <= max_few_tokens && !x.on_unit;
  const std::int64_t slice_rows = rows_a_piece(rows, pieces_a_thread * threads, tapers ? max_rows_a_call : most,
                                               in_b3_strips ? b3_strips::rows : 16);
  const std::int64_t sums_a_token = group ? packed::divide_up(x.columns, group) * (x.fine ? 2 : 1) : 0;
  const std::int32_t* sums = x.on_unit || !kernels.matmul.sum_groups ? nullptr : group_sums(kernels, pool, x, group);
  const bool by_sums = in_b3_strips && x.tokens <= max_summed_tokens && !x.on_unit;
  if (by_sums && kernels.matmul.sums) x.sum_tables = sum_tables(*kernels.matmul.sums, pool, x, group);
  // Slice i of the group belongs to the product in whose range of slices it lies; that of a gated product to the
  // one before.
  const auto slices_of = [&](const Product& product) {
    return product.gated_by && &product != products ? 0 : packed::divide_up(product.matrix->rows, slice_rows);
  };
  const auto place_of = [&](std::int64_t i) {
    const Product* product = products;
    while (i >= slices_of(*product)) i -= slices_of(*product++);
    return std::pair(product, i);
  };
  const auto multiply = [&](const Product* product, std::int64_t begin, std::int64_t end) {
    MatmulScratch& scratch = thread_scratch();
    for (std::int64_t t = 0; t < x.tokens; t += tokens_a_call) {
      const Activations tokens = x.range(t, std::min(t + tokens_a_call, x.tokens));
      const std::int32_t* of_groups = sums ? sums + t * sums_a_token : nullptr;
      float* y = product->y + t * product->y_stride + begin;
      const bool streams = x.on_unit && x.tokens * product->y_stride > min_streamed;
      const int first = has_gate ? 1 : 0, last = is_gated ? 1 : 0;
      if (is_pair) {
        kernels.matmul.multiply_gated(tokens, product, begin, end, y, streams, scratch);
        continue;
      }
      PieceSums of_piece[2];
      const auto part = [&](int i) -> const Product& { return product[has_gate ? 0 : i]; };
      for (int i = first; i <= last; ++i) {
        std::int32_t* dots = scratch.dots + i * (max_dots / 2);
        of_piece[i] = kernels.matmul.multiply(tokens, of_groups, *part(i).matrix, begin, end, dots, scratch);
      }
      for (std::int64_t token = 0; token < tokens.tokens; ++token, y += product->y_stride) {
        for (int i = first; i <= last; ++i) {
          float* to = is_gated ? scratch.rows[i] : y;
          kernels.matmul.finish_token(tokens, token, part(i), begin, end, of_piece[i], to, streams && !is_gated);
        }
        if (!is_gated) continue;
        kernels.vector.gated(*products[count - 1].gated_by, has_gate ? y : scratch.rows[0], scratch.rows[1],
                             end - begin, y, streams);
      }
    }
  };
  std::int64_t slices = 0;
  for (int i = 0; i < count; ++i) slices += slices_of(products[i]);
  const std::int64_t largest = tapers ? std::clamp<std::int64_t>(slices / (2 * threads), 1, most / slice_rows) : 1;
  auto body = [&](std::int64_t first, std::int64_t last, int) {
    for (std::int64_t taken; first < last; first += taken) {
      const auto [product, index] = place_of(first);
      taken = std::min({last - first, slices_of(*product) - index, largest});
      multiply(product, index * slice_rows, std::min((index + taken) * slice_rows, product->matrix->rows));
    }
  };
  if (order && slices > 0) {
    std::vector<ThreadPool::Stretch>& stretches = order->stretches;
    const std::int64_t all = pool.threads();
    stretches.resize(std::max(stretches.size(), std::size_t(order->next + all)));
    for (std::int64_t i = 0; i < all; ++i) {
      const auto [product, index] = place_of(slices * i / all);
      const std::int64_t bytes = slice_rows * product->matrix->row_stride;
      stretches[order->next++] = {product->matrix->data + index * bytes, threads > 1 ? slices / all * bytes : 0};
    }
    pool.expect_reads(&stretches[order->next < stretches.size() ? order->next : 0]);
  }
  pool.parallel_for(slices, threads > 1 ? largest : slices, body, threads > 1 ? 1 : slices);
}

void matmul_table(const Kernels& kernels, ThreadPool& pool, const float* x, std::int64_t tokens,
                  const Table& table, float* y) {
  const std::int64_t size = rows_a_piece(table.rows, 8 * pool.threads(), max_rows_without_unit);
  pool.parallel_for(table.rows, size, [&](std::int64_t begin, std::int64_t end, int) {
    kernels.vector.multiply_table(x, tokens, table, begin, end, y);
  });
}

}  // namespace sparse_bitnet
