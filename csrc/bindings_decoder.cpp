// SPDX-License-Identifier: Apache-2.0
// The decoder for Python. Sizes are checked against the model's shape here. The caller keeps every array alive
// as long as the decoder; that an array has the size given for it is not checked.
//
//   model = ModelBuilder(...); model.set_embedding(table); model.set_head(table);
//   model.set_final_norm(address); model.add_block(matrices and addresses of vectors by name)
//   decoder = Decoder(model, threads, cache, context_length, cache_tokens, kernels)
//   decoder.open() -> sequence; decoder.forward([(sequence, address of int32 tokens, count)], which, logits)
//
//   A block with Gated DeltaNet has "decay_weights" and the like, see Block in decoder.h.
//   A vector is the address of float32 values. logits: address of float32
//   [requests, vocab] (last) or [sum of counts, vocab] (all), 0 with none.
//
// Raises ValueError for sizes that do not fit and for a full context or cache, IndexError for unknown sequences,
// lengths beyond a sequence and token ids outside the vocabulary. Nothing has changed then.

#include <cmath>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>

#include "bindings.h"
#include "decoder.h"
#include "platform.h"

namespace sparse_bitnet {
namespace {

constexpr std::int64_t max_positions = std::int64_t(1) << 24;

const float* floats(Address address, const std::string& name) {
  require(address != 0, name + ": the address is 0");
  require(address % alignof(float) == 0, name + ": not aligned to 4 bytes");
  return pointer<const float>(address);
}

// A matrix or table, which must have the model's shape.
template <class Shaped>
const Shaped& shaped(const Shaped& given, std::int64_t rows, std::int64_t columns,
                     const std::string& name) {
  require(given.rows == rows && given.columns == columns,
          name + " is [" + std::to_string(given.rows) + ", " + std::to_string(given.columns) +
              "], the model's shape asks for [" + std::to_string(rows) + ", " +
              std::to_string(columns) + "]");
  return given;
}

class ModelBuilder {
 public:
  ModelBuilder(std::int64_t hidden, std::int64_t intermediate, std::int64_t heads,
               std::int64_t kv_heads, std::int64_t head_dim, std::int64_t vocab, float norm_epsilon,
               Activation activation, Address inverse_frequencies, float rope_scaling,
               std::int64_t activation_group, float query_scale, float embedding_scale, bool norms_rotated) {
    const std::int64_t most_columns = packed::max_in_features;
    require(hidden >= 1 && hidden <= most_columns, "hidden is outside 1..2^23");
    require(intermediate >= 1 && intermediate <= most_columns, "intermediate is outside 1..2^23");
    require(head_dim >= 2 && head_dim % 2 == 0 && head_dim <= 1024,
            "head_dim is odd or outside 2..1024");
    require(heads >= 1 && heads <= most_columns / head_dim, "heads * head_dim is outside 1..2^23");
    require(kv_heads >= 1 && heads % kv_heads == 0, "heads is not a multiple of kv_heads");
    require(heads / kv_heads <= 1024, "more than 1024 heads share keys");
    require(vocab >= 1 && vocab <= max_rows, "vocab is outside 1..2^31 - 1");
    require(std::isfinite(norm_epsilon) && norm_epsilon >= 0, "norm_epsilon is not finite");
    require(std::isfinite(query_scale) && query_scale >= 0, "query_scale is not finite");
    require(std::isfinite(embedding_scale), "embedding_scale is not finite");
    model_ = {hidden, intermediate, heads, kv_heads, head_dim, vocab, norm_epsilon, activation, activation_group,
              query_scale, embedding_scale, norms_rotated};
    add_rope(inverse_frequencies, rope_scaling);
  }

  void add_rope(Address inverse_frequencies, float scaling) {
    require(std::isfinite(scaling), "rope_scaling is not finite");
    model_.ropes.push_back({floats(inverse_frequencies, "inverse_frequencies"), scaling});
  }

  // Qwen3.5: gates of attention, and rope of the first `rotated` dimensions of a head; Gated DeltaNet's sizes.
  void set_hybrid(std::int64_t rotated, std::int64_t key_heads, std::int64_t value_heads, std::int64_t key_dim,
                  std::int64_t value_dim, std::int64_t taps) {
    require(model_.blocks.empty(), "call set_hybrid before add_block");
    require(rotated >= 2 && rotated % 2 == 0 && rotated <= model_.head_dim,
            "rotated is odd or outside 2..head_dim");
    for (const std::int64_t dim : {key_dim, value_dim}) {
      require(dim >= slab_columns && dim % slab_columns == 0 && dim <= max_delta_dim,
              "a head of Gated DeltaNet is not a multiple of 16 from 16 to 1024");
    }
    require(taps >= 2 && taps <= max_taps, "taps is outside 2..8");
    const std::int64_t most = packed::max_in_features / 3 / max_delta_dim;
    require(key_heads >= 1 && value_heads >= 1 && value_heads <= most, "value_heads is outside 1..2730");
    require(value_heads % key_heads == 0, "value_heads is not a multiple of key_heads");
    model_.rotated = rotated;
    model_.gates_attention = true;
    model_.delta_net = {key_heads, value_heads, key_dim, value_dim, taps};
  }

  void set_embedding(const Table& table) {
    model_.embedding = shaped(table, model_.vocab, model_.hidden, "embedding");
  }

  void set_head(const Table& table) {
    require(table.type != TableType::int8 || table.columns <= max_int8_columns,
            "head of int8: hidden is larger than 2^17");
    model_.head = shaped(table, model_.vocab, model_.hidden, "head");
  }

  void set_final_norm(Address address) { model_.final_norm = floats(address, "final_norm"); }

  // A Matrix or the address of a vector by the name of each member of Block (decoder.h); the linear_norms are
  // q_linear_norm and so on. window: tokens that a token sees, itself included; 0: all. rope: which, from 0.
  void add_block(const nb::dict& weights, std::int64_t window, std::int64_t rope) {
    const std::string name = "block " + std::to_string(model_.blocks.size()) + " ";
    const std::int64_t hidden = model_.hidden, intermediate = model_.intermediate;
    const DeltaNetSizes& net = model_.delta_net;
    Block block{};
    block.is_delta_net = weights.contains("decay_weights");
    require(!block.is_delta_net || net.key_heads > 0, name + "has Gated DeltaNet: call set_hybrid");
    block.of_kind = model_.blocks_of(block.is_delta_net);
    const std::int64_t attended = model_.heads * model_.head_dim, kv_rows = model_.kv_heads * model_.head_dim;
    const std::int64_t q_rows = block.is_delta_net ? net.channels() : (1 + model_.gates_attention) * attended;
    const std::int64_t inner = block.is_delta_net ? net.values() : attended;
    std::size_t taken = 0;
    const auto take = [&](const char* key, Matrix& to, std::int64_t rows, std::int64_t columns) {
      require(weights.contains(key), name + key + " is missing");
      to = shaped(nb::cast<const Matrix&>(weights[key]), rows, columns, name + key);
      require(model_.activation_group == 0 || to.group == model_.activation_group,
              name + "has matrices whose groups are not those of the activations");
      ++taken;
    };
    take("q", block.q, q_rows, hidden);
    take("k", block.k, block.is_delta_net ? inner : kv_rows, hidden);
    if (!block.is_delta_net) take("v", block.v, kv_rows, hidden);
    take("o", block.o, hidden, inner);
    take("gate", block.gate, intermediate, hidden);
    take("up", block.up, intermediate, hidden);
    take("down", block.down, hidden, intermediate);
    require(block.q.summed_group() == block.k.summed_group() &&
                (block.is_delta_net || block.k.summed_group() == block.v.summed_group()) &&
                block.gate.summed_group() == block.up.summed_group(),
            name + "has matrices of one input with different groups");
    const std::pair<const char*, const float**> vectors[] = {
        {"input_norm", &block.input_norm}, {"post_attention_norm", &block.post_attention_norm},
        {"q_bias", &block.q_bias}, {"k_bias", &block.k_bias}, {"v_bias", &block.v_bias}, {"o_bias", &block.o_bias},
        {"attention_sub_norm", &block.attention_sub_norm}, {"ffn_sub_norm", &block.ffn_sub_norm},
        {"attention_out_norm", &block.attention_out_norm}, {"ffn_out_norm", &block.ffn_out_norm},
        {"q_norm", &block.q_norm}, {"k_norm", &block.k_norm},
        {"q_linear_norm", &block.linear_norms[0]}, {"k_linear_norm", &block.linear_norms[1]},
        {"v_linear_norm", &block.linear_norms[2]}, {"gate_linear_norm", &block.linear_norms[3]},
        {"up_linear_norm", &block.linear_norms[4]}, {"decay_weights", &block.decay_weights},
        {"step_weights", &block.step_weights}, {"decay_bias", &block.decay_bias}, {"decay_rates", &block.decay_rates},
        {"convolution", &block.convolution}, {"delta_norm", &block.delta_norm},
    };
    for (const auto& [key, to] : vectors) {
      if (!weights.contains(key)) continue;
      *to = floats(nb::cast<Address>(weights[key]), name + key);
      ++taken;
    }
    require(block.input_norm && block.post_attention_norm, name + "has no input_norm or post_attention_norm");
    for (const float* norm : block.linear_norms) {
      require(!norm == !block.linear_norms[0], name + "has not five linear norms");
    }
    for (const float* given : {block.step_weights, block.decay_bias, block.decay_rates, block.convolution, block.delta_norm}) {
      require(block.is_delta_net == (given != nullptr), name + "has not all vectors of Gated DeltaNet");
    }
    require(!block.is_delta_net || !(block.q_bias || block.k_bias || block.v_bias || block.linear_norms[0]),
            name + "has Gated DeltaNet, and biases or norms of attention");
    require(taken == weights.size(), name + "has weights of other names");
    require(window >= 0, name + "window is negative");
    block.window = window > 0 ? window : max_positions;
    require(rope >= 0 && rope < std::int64_t(model_.ropes.size()), name + "rope is not there");
    block.rope = rope;
    model_.blocks.push_back(block);
  }

  // signs: address of +-1 [width] for each width of inputs. block: a power of two that divides all widths.
  void set_rotation(std::int64_t block, const std::vector<std::pair<std::int64_t, Address>>& signs, bool embedding,
                    bool head) {
    require(block >= 1 && (block & (block - 1)) == 0, "rotation: block is not a power of two");
    Rotation rotation{block, embedding, head};
    for (const auto& [width, address] : signs) rotation.signs.emplace_back(width, floats(address, "signs"));
    model_.rotation = std::move(rotation);
  }

  const Model& complete() const {
    require(model_.embedding.data != nullptr, "the model has no embedding: call set_embedding");
    require(model_.head.data != nullptr, "the model has no head: call set_head");
    require(model_.final_norm != nullptr, "the model has no final norm: call set_final_norm");
    require(!model_.blocks.empty(), "the model has no blocks: call add_block");
    require(model_.blocks_of(false) > 0, "the model has no block with attention");
    for (const Block& block : model_.blocks) {
      for (const std::int64_t width : {block.q.columns, block.o.columns, block.down.columns}) {
        const Rotation& rotation = model_.rotation;
        require(!rotation.block || (width % rotation.block == 0 && rotation.signs_of(width)),
                "rotation: no signs, or no whole blocks, for inputs of " + std::to_string(width));
      }
    }
    return model_;
  }

 private:
  Model model_{};
};

// A decoder for one caller at a time: what it holds is changed by every call, and its threads are those of
// the process that made it.
class DecoderHandle {
 public:
  DecoderHandle(const ModelBuilder& builder, int threads, CacheType cache, std::int64_t context_length,
                std::int64_t cache_tokens, const Kernels& kernels) {
    require(threads >= 1 && threads <= max_threads, "threads is outside 1..1024");
    require(context_length >= 1 && context_length <= max_positions,
            "context_length is outside 1..2^24");
    require(cache_tokens >= 1 && cache_tokens <= (std::int64_t(1) << 31),
            "cache_tokens is outside 1..2^31");
    decoder_ = std::make_unique<Decoder>(builder.complete(),
                                         DecoderOptions{threads, cache, context_length, cache_tokens, kernels});
  }

  ~DecoderHandle() {
    if (is_forked()) static_cast<void>(decoder_.release());
  }

  // body(decoder), while nobody else is in it.
  template <class Body>
  auto use(Body&& body) {
    const auto lock = enter();
    if (!decoder_) throw std::runtime_error("the decoder is closed");
    return body(*decoder_);
  }

  // Frees the decoder; the memory that it points to may then be freed. In the child of a fork, which may have
  // caught the parent in the middle of a call, the decoder is leaked.
  void shut() {
    if (is_forked()) return static_cast<void>(decoder_.release());
    const auto lock = enter();
    decoder_.reset();
  }

  void forward(const std::vector<std::tuple<int, Address, std::int64_t>>& arguments, Logits which, Address logits) {
    require(which == Logits::none || logits != 0, "logits: the address is 0");
    require(logits % alignof(float) == 0, "logits: not aligned to 4 bytes");
    std::vector<Request> requests;
    requests.reserve(arguments.size());
    for (const auto& [sequence, tokens, count] : arguments) {
      require(tokens != 0 && tokens % alignof(std::int32_t) == 0, "tokens: not aligned to 4 bytes");
      requests.push_back({sequence, pointer<const std::int32_t>(tokens), count});
    }
    use([&](Decoder& decoder) {
      nb::gil_scoped_release released;
      decoder.forward(requests.data(), int(requests.size()), which, pointer<float>(logits));
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
};

// A method of the decoder, for the handle. Arguments: the method's own types.
template <class... Arguments, class Method>
auto used(Method method) {
  return [method](DecoderHandle& handle, Arguments... arguments) {
    return handle.use([&](Decoder& decoder) { return (decoder.*method)(arguments...); });
  };
}

}  // namespace

void bind_decoder(nb::module_& module) {
  module.attr("PAGE_TOKENS") = page_tokens;
  nb::enum_<Activation>(module, "Activation")
      .value("silu", Activation::silu)
      .value("relu_squared", Activation::relu_squared)
      .value("gelu_tanh", Activation::gelu_tanh);
  nb::enum_<CacheType>(module, "CacheType", "Keys and values of the cache.")
      .value("float32", CacheType::float32)
      .value("float16", CacheType::float16)
      .value("int8", CacheType::int8)
      .value("int4", CacheType::int4);
  nb::enum_<Logits>(module, "Logits", "Of which tokens a step writes logits.")
      .value("none", Logits::none)
      .value("last", Logits::last)
      .value("all", Logits::all)
      .value("hidden", Logits::hidden);
  nb::class_<ModelBuilder>(module, "ModelBuilder",
                           "The weights of a model by address, see csrc/bindings_decoder.cpp.")
      .def(nb::init<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                    std::int64_t, float, Activation, Address, float, std::int64_t, float, float, bool>(),
           "hidden"_a, "intermediate"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "vocab"_a,
           "norm_epsilon"_a, "activation"_a, "inverse_frequencies"_a, "rope_scaling"_a = 1.0f,
           "activation_group"_a = 0, "query_scale"_a = 1.0f, "embedding_scale"_a = 1.0f,
           "norms_rotated"_a = false)
      .def("add_rope", &ModelBuilder::add_rope, "inverse_frequencies"_a, "scaling"_a = 1.0f,
           "Another one, for blocks that say so; the first is the constructor's.")
      .def("set_hybrid", &ModelBuilder::set_hybrid, "rotated"_a, "key_heads"_a, "value_heads"_a, "key_dim"_a,
           "value_dim"_a, "taps"_a,
           "Gates of attention, rope of the first `rotated` dimensions of a head, sizes of Gated DeltaNet.")
      .def("set_embedding", &ModelBuilder::set_embedding, "table"_a)
      .def("set_head", &ModelBuilder::set_head, "table"_a)
      .def("set_final_norm", &ModelBuilder::set_final_norm, "address"_a)
      .def("add_block", &ModelBuilder::add_block, "weights"_a, "window"_a = 0, "rope"_a = 0,
           "weights: see csrc/bindings_decoder.cpp. window: tokens that a token sees, itself included; 0: all. "
           "rope: which one, from 0.")
      .def("set_rotation", &ModelBuilder::set_rotation, "block"_a, "signs"_a, "embedding"_a, "head"_a,
           "Weights are rotated: signs: [(width, address of float32 [width])]; see csrc/decoder.h.");

  nb::class_<DecoderHandle>(
      module, "Decoder",
      "A decoder step over packed weights with a cache of many sequences. RuntimeError from a thread that "
      "calls while another one does, in the child of a fork, and after `shut`.")
      .def(nb::init<const ModelBuilder&, int, CacheType, std::int64_t, std::int64_t, const Kernels&>(),
           "model"_a, "threads"_a, "cache"_a, "context_length"_a, "cache_tokens"_a, "kernels"_a)
      .def("open", used(&Decoder::open), "A new, empty sequence.")
      .def("close", used<int>(&Decoder::close), "sequence"_a, "Give its pages back.")
      .def("fork", used<int, std::int64_t>(&Decoder::fork), "sequence"_a, "length"_a,
           "A new sequence with the first `length` tokens; ValueError where the cache is full.")
      .def("truncate", used<int, std::int64_t>(&Decoder::truncate), "sequence"_a, "length"_a,
           "Forget the tokens from `length` on.")
      .def("length", used<int>(&Decoder::length), "sequence"_a)
      .def("held", used<int, std::int64_t>(&Decoder::held), "sequence"_a, "length"_a,
           "Tokens that a fork at `length` would have: fewer where a recurrent state is not there.")
      .def_prop_ro("most_states", used(&Decoder::most_states), "Recurrent states of all sequences, or 0.")
      .def_prop_ro("free_tokens", used(&Decoder::free_tokens), "Room in whole free pages.")
      .def("forward", &DecoderHandle::forward, "requests"_a, "which"_a, "logits"_a,
           "requests: [(sequence, address of int32 tokens, count)]; logits of no token, of each request's "
           "last one or of all, or all states behind the final norm, written to the address `logits`.")
      .def("shut", &DecoderHandle::shut,
           "Free the decoder, then its weights may go; again does nothing. RuntimeError while another "
           "thread is in a call.");
}

}  // namespace sparse_bitnet
