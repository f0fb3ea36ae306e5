// The decoder for Python. Everything is validated here, before a pointer is formed into the data: sizes
// against the model's shape, strides, alignment. The caller keeps every array alive as long as the
// decoder, and gives addresses of arrays as large as they say they are.
//
//   matrix = (format, n, m, rows, columns, row_stride, address, scale, scales_address)
//     format: matmul.h's WeightFormat (0 i2, 1 b3, 2 nm_bitmap, 3 int8, 4 int4); n, m: the pattern, of
//     nm_bitmap (else 1, 1); scales_address: of int8 and int4, else 0.
//   table = (type, rows, columns, row_stride, address, scales_address)
//     type: decoder.h's TableType (0 int8, 1 int4, 2 bfloat16, 3 float32); row_stride in bytes.
//   A vector is the address of float32 values, 0 where the model has none.
//
//   model = ModelBuilder(hidden, intermediate, heads, kv_heads, head_dim, vocab, norm_epsilon,
//                        activation, inverse_frequencies, rope_scaling=1.0)
//     activation: 0 SiLU, 1 squared ReLU; inverse_frequencies: address of [head_dim / 2] float32.
//   model.set_embedding(table); model.set_head(table); model.set_final_norm(address)
//   model.add_block(q, k, v, o, gate, up, down, input_norm=, post_attention_norm=, q_bias=0, k_bias=0,
//                   v_bias=0, o_bias=0, attention_sub_norm=0, ffn_sub_norm=0, q_norm=0, k_norm=0)
//   decoder = Decoder(model, threads, cache, context_length, cache_tokens, isa="")
//     cache: 0 float32, 1 float16, 2 int8.
//   decoder.open() -> sequence; close(sequence); fork(sequence, length) -> sequence;
//   truncate(sequence, length); length(sequence); free_tokens (property); isa (property); shut()
//   decoder.forward(requests, which, logits)
//     requests: [(sequence, address of int32 tokens, count)]; which: 0 none, 1 last, 2 all; logits:
//     address of float32 [requests, vocab] (last) or [sum of counts, vocab] (all), 0 with none.
//
// ValueError: sizes that do not fit, context or cache full. IndexError: sequences and lengths that are
// not there, token ids outside the vocabulary. Nothing has changed then.

#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "decoder.h"
#include "platform.h"

namespace nb = nanobind;

namespace sparse_bitnet {
namespace {

constexpr std::int64_t most_rows = std::int64_t(1) << 31;

using MatrixArguments = std::tuple<int, int, int, std::int64_t, std::int64_t, std::int64_t, Address,
                                   float, Address>;
using TableArguments =
    std::tuple<int, std::int64_t, std::int64_t, std::int64_t, Address, Address>;
using RequestArguments = std::tuple<int, Address, std::int64_t>;

const float* floats(Address address, const std::string& name, bool wanted) {
  require(address != 0 || !wanted, name + ": the address is 0");
  require(address % alignof(float) == 0, name + ": not aligned to 4 bytes");
  return pointer<const float>(address);
}

Matrix matrix(const MatrixArguments& arguments, std::int64_t rows, std::int64_t columns,
              const std::string& name) {
  const auto& [format, n, m, has_rows, has_columns, row_stride, address, scale, scales] = arguments;
  require(format >= 0 && format <= int(WeightFormat::int4), name + ": unknown weight format");
  const packed::Pattern pattern{n, m};
  require(packed::is_valid(pattern), name + ": not a pattern");
  require(has_rows == rows && has_columns == columns,
          name + " is [" + std::to_string(has_rows) + ", " + std::to_string(has_columns) +
              "], the model's shape asks for [" + std::to_string(rows) + ", " +
              std::to_string(columns) + "]");
  const WeightFormat kind = WeightFormat(format);
  require(kind != WeightFormat::nm_bitmap || 64 % m == 0, name + ": m does not divide 64");
  require(kind != WeightFormat::int4 || columns % int4_group == 0,
          name + ": int4 needs columns in groups of 64");
  require(address != 0 && address % matrix_alignment == 0, name + ": not aligned to 64 bytes");
  require(row_stride % matrix_alignment == 0 &&
              row_stride >= Matrix::bytes_per_row(kind, pattern, columns) &&
              row_stride <= (std::int64_t(1) << 40) / rows,
          name + ": row_stride");
  const bool has_scales = kind == WeightFormat::int8 || kind == WeightFormat::int4;
  require(has_scales || std::isfinite(scale), name + ": the scale is not finite");
  return {kind,       pattern, rows,  columns,
          row_stride, pointer<const std::uint8_t>(address),
          scale,      floats(scales, name + ".scales", has_scales)};
}

std::int64_t table_row_bytes(TableType type, std::int64_t columns) {
  switch (type) {
    case TableType::int8: return columns;
    case TableType::int4: return columns / 2;
    case TableType::bfloat16: return columns * 2;
    case TableType::float32: return columns * 4;
  }
  return 0;
}

Table table(const TableArguments& arguments, std::int64_t rows, std::int64_t columns,
            const std::string& name) {
  const auto& [type, has_rows, has_columns, row_stride, address, scales] = arguments;
  require(type >= 0 && type <= int(TableType::float32), name + ": unknown table type");
  require(has_rows == rows && has_columns == columns,
          name + " is [" + std::to_string(has_rows) + ", " + std::to_string(has_columns) +
              "], the model's shape asks for [" + std::to_string(rows) + ", " +
              std::to_string(columns) + "]");
  const TableType kind = TableType(type);
  const bool integers = kind == TableType::int8 || kind == TableType::int4;
  require(kind != TableType::int4 || columns % int4_group == 0,
          name + ": int4 needs columns in groups of 64");
  const std::int64_t alignment = integers ? matrix_alignment : kind == TableType::float32 ? 4 : 2;
  require(address != 0 && address % alignment == 0, name + ": not aligned");
  require(row_stride % alignment == 0 && row_stride >= table_row_bytes(kind, columns) &&
              row_stride <= (std::int64_t(1) << 40) / rows,
          name + ": row_stride");
  return {kind,       rows, columns, row_stride, pointer<const std::uint8_t>(address),
          floats(scales, name + ".scales", integers)};
}

class ModelBuilder {
 public:
  ModelBuilder(std::int64_t hidden, std::int64_t intermediate, std::int64_t heads,
               std::int64_t kv_heads, std::int64_t head_dim, std::int64_t vocab, float norm_epsilon,
               int activation, Address inverse_frequencies, float rope_scaling) {
    const std::int64_t most_columns = packed::max_in_features;
    require(hidden >= 1 && hidden <= most_columns, "hidden is outside 1..2^23");
    require(intermediate >= 1 && intermediate <= most_columns, "intermediate is outside 1..2^23");
    require(head_dim >= 2 && head_dim % 2 == 0 && head_dim <= 1024,
            "head_dim is odd or outside 2..1024");
    require(heads >= 1 && heads <= most_columns / head_dim, "heads * head_dim is outside 1..2^23");
    require(kv_heads >= 1 && heads % kv_heads == 0, "heads is not a multiple of kv_heads");
    require(vocab >= 1 && vocab < most_rows, "vocab is outside 1..2^31 - 1");
    require(std::isfinite(norm_epsilon) && norm_epsilon >= 0, "norm_epsilon is not finite");
    require(activation == 0 || activation == 1, "activation is neither 0 nor 1");
    require(std::isfinite(rope_scaling), "rope_scaling is not finite");
    model_.hidden = hidden;
    model_.intermediate = intermediate;
    model_.heads = heads;
    model_.kv_heads = kv_heads;
    model_.head_dim = head_dim;
    model_.vocab = vocab;
    model_.norm_epsilon = norm_epsilon;
    model_.activation = Activation(activation);
    model_.inverse_frequencies = floats(inverse_frequencies, "inverse_frequencies", true);
    model_.rope_scaling = rope_scaling;
    model_.embedding = model_.head = {};
    model_.final_norm = nullptr;
  }

  void set_embedding(const TableArguments& arguments) {
    model_.embedding = table(arguments, model_.vocab, model_.hidden, "embedding");
  }

  void set_head(const TableArguments& arguments) {
    model_.head = table(arguments, model_.vocab, model_.hidden, "head");
  }

  void set_final_norm(Address address) { model_.final_norm = floats(address, "final_norm", true); }

  void add_block(const MatrixArguments& q, const MatrixArguments& k, const MatrixArguments& v,
                 const MatrixArguments& o, const MatrixArguments& gate, const MatrixArguments& up,
                 const MatrixArguments& down, Address input_norm, Address post_attention_norm,
                 Address q_bias, Address k_bias, Address v_bias, Address o_bias,
                 Address attention_sub_norm, Address ffn_sub_norm, Address q_norm, Address k_norm) {
    const std::string name = "block " + std::to_string(model_.blocks.size()) + " ";
    const std::int64_t hidden = model_.hidden, intermediate = model_.intermediate;
    const std::int64_t q_rows = model_.heads * model_.head_dim;
    const std::int64_t kv_rows = model_.kv_heads * model_.head_dim;
    Block block;
    block.q = matrix(q, q_rows, hidden, name + "q");
    block.k = matrix(k, kv_rows, hidden, name + "k");
    block.v = matrix(v, kv_rows, hidden, name + "v");
    block.o = matrix(o, hidden, q_rows, name + "o");
    block.gate = matrix(gate, intermediate, hidden, name + "gate");
    block.up = matrix(up, intermediate, hidden, name + "up");
    block.down = matrix(down, hidden, intermediate, name + "down");
    block.input_norm = floats(input_norm, name + "input_norm", true);
    block.post_attention_norm = floats(post_attention_norm, name + "post_attention_norm", true);
    block.q_bias = floats(q_bias, name + "q_bias", false);
    block.k_bias = floats(k_bias, name + "k_bias", false);
    block.v_bias = floats(v_bias, name + "v_bias", false);
    block.o_bias = floats(o_bias, name + "o_bias", false);
    block.attention_sub_norm = floats(attention_sub_norm, name + "attention_sub_norm", false);
    block.ffn_sub_norm = floats(ffn_sub_norm, name + "ffn_sub_norm", false);
    block.q_norm = floats(q_norm, name + "q_norm", false);
    block.k_norm = floats(k_norm, name + "k_norm", false);
    model_.blocks.push_back(block);
  }

  const Model& complete() const {
    require(model_.embedding.data != nullptr, "the model has no embedding: call set_embedding");
    require(model_.head.data != nullptr, "the model has no head: call set_head");
    require(model_.final_norm != nullptr, "the model has no final norm: call set_final_norm");
    require(!model_.blocks.empty(), "the model has no blocks: call add_block");
    return model_;
  }

 private:
  Model model_;
};

// A decoder for one caller at a time: what it holds is changed by every call, and its threads are those of
// the process that made it.
class DecoderHandle {
 public:
  DecoderHandle(const ModelBuilder& builder, int threads, int cache, std::int64_t context_length,
                std::int64_t cache_tokens, const std::string& isa) {
    require(threads >= 1 && threads <= most_threads, "threads is outside 1..1024");
    require(cache >= 0 && cache <= int(CacheType::int8), "unknown cache type");
    require(context_length >= 1 && context_length <= (std::int64_t(1) << 24),
            "context_length is outside 1..2^24");
    require(cache_tokens >= 1 && cache_tokens <= (std::int64_t(1) << 31),
            "cache_tokens is outside 1..2^31");
    decoder_ = std::make_unique<Decoder>(
        builder.complete(),
        DecoderOptions{threads, CacheType(cache), context_length, cache_tokens, isa});
    isa_ = decoder_->isa();
  }

  ~DecoderHandle() {
    if (is_forked()) static_cast<void>(decoder_.release());
  }

  const std::string& isa() const { return isa_; }

  // body(decoder), while nobody else is in it.
  template <class Body>
  auto use(Body&& body) {
    const auto lock = enter();
    if (!decoder_) throw std::runtime_error("the decoder is closed");
    return body(*decoder_);
  }

  // What it points to may then be freed. In the child of a fork, which may have caught the parent in the
  // middle of a call, the decoder is forgotten.
  void shut() {
    if (is_forked()) {
      static_cast<void>(decoder_.release());
      return;
    }
    const auto lock = enter();
    decoder_.reset();
  }

  void forward(const std::vector<RequestArguments>& arguments, int which, Address logits) {
    require(which >= 0 && which <= int(Logits::all), "unknown choice of logits");
    require(which == int(Logits::none) || logits != 0, "logits: the address is 0");
    require(logits % alignof(float) == 0, "logits: not aligned to 4 bytes");
    std::vector<Request> requests;
    requests.reserve(arguments.size());
    for (const auto& [sequence, tokens, count] : arguments) {
      require(tokens != 0 && tokens % alignof(std::int32_t) == 0, "tokens: not aligned to 4 bytes");
      require(count >= 1, "a request has no tokens");
      requests.push_back({sequence, pointer<const std::int32_t>(tokens), count});
    }
    use([&](Decoder& decoder) {
      nb::gil_scoped_release released;
      decoder.forward(requests.data(), int(requests.size()), Logits(which), pointer<float>(logits));
    });
  }

 private:
  bool is_forked() const { return forks_ != fork_count(); }

  std::unique_lock<std::mutex> enter() {
    if (is_forked()) {
      throw std::runtime_error("the engine belongs to the parent of this process: load it after the fork");
    }
    std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
    if (!lock) {
      throw std::runtime_error("another thread is using the engine: it takes one call at a time");
    }
    return lock;
  }

  const int forks_ = fork_count();
  std::mutex busy_;
  std::unique_ptr<Decoder> decoder_;
  std::string isa_;
};

// A method of the decoder, for the handle.
template <class Result, class... Arguments>
auto used(Result (Decoder::*method)(Arguments...)) {
  return [method](DecoderHandle& handle, Arguments... arguments) {
    return handle.use([&](Decoder& decoder) { return (decoder.*method)(arguments...); });
  };
}

template <class Result, class... Arguments>
auto used(Result (Decoder::*method)(Arguments...) const) {
  return [method](DecoderHandle& handle, Arguments... arguments) {
    return handle.use([&](Decoder& decoder) { return (decoder.*method)(arguments...); });
  };
}

}  // namespace

void bind_decoder(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<ModelBuilder>(module, "ModelBuilder",
                           "The weights of a model by address, see csrc/bindings_decoder.cpp.")
      .def(nb::init<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                    std::int64_t, float, int, Address, float>(),
           "hidden"_a, "intermediate"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "vocab"_a,
           "norm_epsilon"_a, "activation"_a, "inverse_frequencies"_a, "rope_scaling"_a = 1.0f)
      .def("set_embedding", &ModelBuilder::set_embedding, "table"_a,
           "table: (type, rows, columns, row_stride, address, scales_address).")
      .def("set_head", &ModelBuilder::set_head, "table"_a)
      .def("set_final_norm", &ModelBuilder::set_final_norm, "address"_a)
      .def("add_block", &ModelBuilder::add_block, "q"_a, "k"_a, "v"_a, "o"_a, "gate"_a, "up"_a,
           "down"_a, "input_norm"_a, "post_attention_norm"_a, "q_bias"_a = 0, "k_bias"_a = 0,
           "v_bias"_a = 0, "o_bias"_a = 0, "attention_sub_norm"_a = 0, "ffn_sub_norm"_a = 0,
           "q_norm"_a = 0, "k_norm"_a = 0,
           "A matrix: (format, n, m, rows, columns, row_stride, address, scale, scales_address).");

  nb::class_<DecoderHandle>(
      module, "Decoder",
      "A decoder step over packed weights with a cache of many sequences. RuntimeError from a thread that "
      "calls while another one does, in the child of a fork, and after `shut`.")
      .def(nb::init<const ModelBuilder&, int, int, std::int64_t, std::int64_t, const std::string&>(),
           "model"_a, "threads"_a, "cache"_a, "context_length"_a, "cache_tokens"_a, "isa"_a = "")
      .def_prop_ro("isa", &DecoderHandle::isa)
      .def("open", used(&Decoder::open), "A new, empty sequence.")
      .def("close", used(&Decoder::close), "sequence"_a, "Give its pages back.")
      .def("fork", used(&Decoder::fork), "sequence"_a, "length"_a,
           "A new sequence with the first `length` tokens; ValueError where the cache is full.")
      .def("truncate", used(&Decoder::truncate), "sequence"_a, "length"_a,
           "Forget the tokens from `length` on.")
      .def("length", used(&Decoder::length), "sequence"_a)
      .def_prop_ro("free_tokens", used(&Decoder::free_tokens), "Room in whole free pages.")
      .def("forward", &DecoderHandle::forward, "requests"_a, "which"_a, "logits"_a,
           "requests: [(sequence, address of int32 tokens, count)]; which: 0 no logits, 1 those of "
           "each request's last token, 2 of every token, written to the address `logits`.")
      .def("shut", &DecoderHandle::shut,
           "Free the decoder, then its weights may go; again does nothing. RuntimeError while another "
           "thread is in a call.");
}

}  // namespace sparse_bitnet
