// The CPU kernels: what each computes, on which bytes, and how an instruction set is chosen.
//
// Everything is a contiguous array given by address and size; nothing is allocated for the caller,
// nothing is kept. The Python references in sparsity.py and quantizer.py define every result; the
// kernels return the same bits on every instruction set and for every thread count.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace sparse_bitnet {

enum class Dtype : int { float32 = 0, bfloat16 = 1 };

inline std::size_t bytes_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

constexpr int max_group = 32;

// `absmean` sums blocks of this many weights one by one and adds the sums in the order of the blocks,
// so that its result depends neither on the thread count nor on the instruction set.
constexpr std::int64_t sum_block = 1 << 16;

// The inner functions of one instruction set: one thread, a contiguous piece.
struct Kernels {
  const char* isa;
  bool (*supported)();

  // weight [groups, m] -> mask [groups, m], 1 where the weight is among the n largest magnitudes of
  // its group, ties to the lower index. 1 <= n < m <= 32.
  void (*nm_mask)(const void* weight, Dtype dtype, std::int64_t groups, int n, int m,
                  std::uint8_t* mask);

  // Same mask; codes [groups, m] = mask * clip(round_half_even(weight / weight_scale), -1, 1).
  // weight_scale >= 2^-125.
  void (*select_ternary)(const void* weight, Dtype dtype, float weight_scale, std::int64_t groups,
                         int n, int m, std::int8_t* codes, std::uint8_t* mask);

  // codes [count] of a dense matrix.
  void (*dense_ternary)(const void* weight, Dtype dtype, float weight_scale, std::int64_t count,
                        std::int8_t* codes);

  // Sum of |weight| over at most sum_block weights, in float64, in a fixed order.
  double (*sum_magnitudes)(const void* weight, Dtype dtype, std::int64_t count);

  // x [tokens, features] -> codes [tokens, features], activation_scale [tokens].
  void (*quantize_int8)(const void* x, Dtype dtype, std::int64_t tokens, std::int64_t features,
                        std::int8_t* codes, float* activation_scale);
};

extern const Kernels generic_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

// Names of the instruction sets this machine runs, best first.
std::vector<std::string> supported_isas();

// The kernels for an instruction set; with an empty name for the one that SPARSE_BITNET_ISA names, or
// else the best. Throws std::invalid_argument that lists what this machine has.
const Kernels& choose_kernels(const std::string& isa);

// Whole operations on up to `threads` threads. n == m is dense: all weights are kept.
void nm_mask(const Kernels& kernels, const void* weight, Dtype dtype, std::int64_t groups, int n, int m,
             std::uint8_t* mask, int threads);
void select_ternary(const Kernels& kernels, const void* weight, Dtype dtype, float weight_scale,
                    std::int64_t groups, int n, int m, std::int8_t* codes, std::uint8_t* mask,
                    int threads);
// mean(|weight|), at least 1e-5.
float absmean(const Kernels& kernels, const void* weight, Dtype dtype, std::int64_t count, int threads);
void quantize_int8(const Kernels& kernels, const void* x, Dtype dtype, std::int64_t tokens,
                   std::int64_t features, std::int8_t* codes, float* activation_scale, int threads);

}  // namespace sparse_bitnet
