// SPDX-License-Identifier: Apache-2.0
// Includes the intrinsics without GCC's warnings about the undefined vectors in its own headers.

#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>
