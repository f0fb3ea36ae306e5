// SPDX-License-Identifier: Apache-2.0
// The intrinsics, quietly: GCC's own headers start from vectors that they leave undefined on purpose.

#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>
