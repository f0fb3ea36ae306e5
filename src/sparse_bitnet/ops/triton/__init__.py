# SPDX-License-Identifier: Apache-2.0
"""Bodies of the CUDA kernels, compiled on first use; the ops import them when they first need them."""
