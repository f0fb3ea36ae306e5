"""Inference on GPUs through transformers models: merged ternary layers, static cache, CUDA graphs."""
