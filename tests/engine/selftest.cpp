// SPDX-License-Identifier: Apache-2.0
// A packed model without Python: loads it as a plan says (plan_of in test_selftest.py: sizes, and where in
// the file each tensor lies), decodes greedily and prints the ids, which have to be those that
// `sparse-bitnet generate --temperature 0` chooses. What a port to another system should run first.
//
//   selftest PLAN model.safetensors [ISA]

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "decoder.h"
#include "isa.h"
#include "loading.h"
#if defined(_WIN32)
#include <io.h>
#else
#include <unistd.h>
#define O_BINARY 0
#endif

using namespace sparse_bitnet;

class Loader {
 public:
  Loader(const char* plan, const char* file, const char* isa)
      : plan_(plan), descriptor_(open(file, O_RDONLY | O_BINARY)), kernels_(choose_kernels(isa)) {
    if (descriptor_ < 0) throw std::runtime_error("cannot open the model");
  }

  template <class T> T next() {
    T value;
    if (!(plan_ >> value)) throw std::runtime_error("the plan is cut off");
    return value;
  }

  // `length` float32 values; null where the plan says -1.
  const float* floats(std::int64_t length) {
    const auto offset = next<std::int64_t>();
    if (offset < 0) return nullptr;
    std::uint8_t* place = room(4 * length);
    check(ByteSource{nullptr, descriptor_, offset}.read(0, 4 * length, place));
    return reinterpret_cast<const float*>(place);
  }

  Matrix matrix(StoredFormat stored, packed::Pattern pattern) {
    const auto offset = next<std::int64_t>(), rows = next<std::int64_t>(), columns = next<std::int64_t>();
    const auto format = WeightFormat::i2;
    const std::int64_t stride = aligned(Matrix::bytes_per_row(format, pattern, columns));
    std::uint8_t* place = room(rows * stride);
    const StoredMatrix source = {stored, pattern, rows, columns, {nullptr, descriptor_, offset}};
    const Matrix out = {format, pattern, rows, columns, stride, place, 0, nullptr};
    check(repack(pool_, source, out));
    Matrix scaled = out;
    scaled.scale = *floats(1);
    return scaled;
  }

  Table table(std::int64_t rows, std::int64_t columns) {
    const TableType type = std::array{TableType::float32, TableType::bfloat16, TableType::int8}.at(next<int>());
    const auto offset = next<std::int64_t>();
    const std::int64_t stride = aligned(columns);
    auto* scales = reinterpret_cast<float*>(room(4 * rows));
    std::uint8_t* place = room(rows * stride);
    const Table out = {TableType::int8, rows, columns, stride, place, scales};
    check(load_table(kernels_, pool_, {type, rows, columns, {nullptr, descriptor_, offset}, nullptr}, out));
    return out;
  }

 private:
  static std::int64_t aligned(std::int64_t size) { return (size + 63) / 64 * 64; }

  static void check(bool is_intact) {
    if (!is_intact) throw std::runtime_error("a tensor is damaged");
  }

  void check(const Loaded& done) {
    check(done.is_readable && done.damage == nullptr && done.crc32 == next<std::uint32_t>());
  }

  std::uint8_t* room(std::int64_t size) {
    kept_.push_back(std::make_unique<HugeBuffer>(size + 512));
    return kept_.back()->data();
  }

  std::ifstream plan_;
  const int descriptor_;
  const Kernels& kernels_;
  ThreadPool pool_{2};
  std::vector<std::unique_ptr<HugeBuffer>> kept_;
};

int run(const char* plan, const char* file, const char* isa) {
  Loader from(plan, file, isa);
  Model model;
  for (auto* size : {&model.hidden, &model.intermediate, &model.heads, &model.kv_heads, &model.head_dim, &model.vocab}) {
    *size = from.next<std::int64_t>();
  }
  model.norm_epsilon = from.next<float>();
  model.activation = Activation(from.next<int>());
  model.activation_group = 0;
  model.query_scale = 1 / std::sqrt(float(model.head_dim));
  model.embedding_scale = 1;
  const float rope_scaling = from.next<float>();
  std::vector<float> frequencies(model.head_dim / 2);
  for (float& frequency : frequencies) frequency = from.next<float>();
  model.ropes = {{frequencies.data(), rope_scaling}};
  const int n = from.next<int>(), m = from.next<int>();
  const auto stored = StoredFormat(from.next<int>());
  model.embedding = model.head = from.table(model.vocab, model.hidden);
  if (!from.next<int>()) model.head = from.table(model.vocab, model.hidden);
  model.final_norm = from.floats(model.hidden);
  const std::int64_t queries = model.heads * model.head_dim, keys = model.kv_heads * model.head_dim;
  model.blocks.resize(from.next<std::size_t>());
  for (Block& block : model.blocks) {
    for (auto* matrix : {&block.q, &block.k, &block.v, &block.o, &block.gate, &block.up, &block.down}) {
      *matrix = from.matrix(stored, {n, m});
    }
    block.q_bias = from.floats(queries);
    block.k_bias = from.floats(keys);
    block.v_bias = from.floats(keys);
    block.o_bias = from.floats(model.hidden);
    block.input_norm = from.floats(model.hidden);
    block.post_attention_norm = from.floats(model.hidden);
    block.attention_sub_norm = from.floats(queries);
    block.ffn_sub_norm = from.floats(model.intermediate);
    block.q_norm = from.floats(model.head_dim);
    block.k_norm = from.floats(model.head_dim);
    block.window = 1 << 24, block.of_kind = &block - model.blocks.data();
  }
  std::vector<std::int32_t> tokens(from.next<std::size_t>());
  for (std::int32_t& token : tokens) token = from.next<std::int32_t>();
  const Kernels& kernels = choose_kernels(isa);
  Decoder decoder(model, {2, CacheType(from.next<int>()), 256, 256, kernels});
  std::fprintf(stderr, "%s\n", kernels.isa);
  const int sequence = decoder.open();
  std::vector<float> logits(model.vocab);
  for (int steps = from.next<int>(); steps > 0; --steps) {
    const Request request = {sequence, tokens.data(), std::int64_t(tokens.size())};
    decoder.forward(&request, 1, Logits::last, logits.data());
    tokens = {std::int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin())};
    std::printf("%d\n", int(tokens[0]));
  }
  return 0;
}

int main(int count, char** arguments) {
  try {
    if (count < 3) throw std::runtime_error("usage: selftest PLAN model.safetensors [ISA]");
    return run(arguments[1], arguments[2], count > 3 ? arguments[3] : "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "selftest: %s\n", error.what());
    return 1;
  }
}
