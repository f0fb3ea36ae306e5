# SPDX-License-Identifier: Apache-2.0
"""The package's operators: what each computes, its reference, its shapes, its kernels."""
