// The body of generic.cpp, avx2.cpp and avx512.cpp: the kernels, compiled for one instruction set.
// The including file defines NAMESPACE, TARGET, VECTOR_BYTES, ISA_NAME, ISA_SUPPORTED and TABLE.
//
// Standard headers come first and contribute types only: an inline function of theirs, compiled here
// for a newer instruction set, could be the copy the linker keeps for the whole program.

#include <cstdint>
#include <limits>
#include <utility>

#include "kernels.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels assume a little-endian machine"
#endif

namespace sparse_bitnet {
namespace NAMESPACE {

#include "vector.h"
#include "select.h"
#include "quantize.h"

static bool supported() { return ISA_SUPPORTED; }

}  // namespace NAMESPACE

const Kernels TABLE = {
    ISA_NAME,
    NAMESPACE::supported,
    NAMESPACE::nm_mask,
    NAMESPACE::select_ternary,
    NAMESPACE::dense_ternary,
    NAMESPACE::sum_magnitudes,
    NAMESPACE::quantize_int8,
};

}  // namespace sparse_bitnet
