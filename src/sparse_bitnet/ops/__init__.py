# SPDX-License-Identifier: Apache-2.0
"""The package's operators, one file each: what it computes, its reference, its shapes, its kernels."""
