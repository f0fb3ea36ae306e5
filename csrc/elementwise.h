// What a decoder step does besides products and attention: RMSNorm, gated activation, rotary embedding,
// rows of the embedding. float32, one token at a time; the caller shares tokens out over threads.

#pragma once

#include <cstdint>
#include <string>

#include "decoder.h"

namespace sparse_bitnet {

// One instruction set's functions. Norm and rotation have the same bits on all of them.
struct ElementwiseKernels {
  const char* isa;

  // residual [n] += delta [n] (if not null); out [n] = residual / sqrt(mean(residual^2) + epsilon) *
  // weight. `out` may be `residual`.
  void (*add_and_norm)(float* residual, const float* delta, const float* weight, float epsilon,
                       std::int64_t n, float* out);

  // gate [n] = activation(gate) * up.
  void (*gated)(Activation activation, float* gate, const float* up, std::int64_t n);

  // x [2 half] = (x * cosine + rotate_half(x) * sine) * scale, cosine and sine [half].
  void (*rotate)(float* x, const float* cosine, const float* sine, std::int64_t half, float scale);
};

// By the name of the matrix kernels: the widest that this machine runs and the name allows.
const ElementwiseKernels& choose_elementwise_kernels(const std::string& isa);

// out [columns] = a row of a table, dequantised.
void table_row(const Table& table, std::int64_t row, float* out);

}  // namespace sparse_bitnet
