# SPDX-License-Identifier: Apache-2.0
"""Inference on GPUs through transformers models: merged ternary layers, static cache, CUDA graphs."""
