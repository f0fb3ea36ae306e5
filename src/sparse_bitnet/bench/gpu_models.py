# SPDX-License-Identifier: Apache-2.0
"""The compared models: random weights of a preset's shape, dense bf16 and ternary with all its forms."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparse_bitnet.bench.gpu_options import GpuBenchOptions
from sparse_bitnet.checkpoint.build_model import preset_config
from sparse_bitnet.checkpoint.load import load_with, skeleton
from sparse_bitnet.checkpoint.model_folder import read_config
from sparse_bitnet.engine.gpu.fused_layers import MERGED, fuse_, int8_head_, prepare_, put_merged_
from sparse_bitnet.engine.gpu.linear import RoutePolicy
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.nn.layer import SparseBitConfig


def bench_device(options: GpuBenchOptions) -> torch.device:
    """Raises `UserError` where CUDA is asked for and absent."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("bench: torch sees no CUDA device; --device cpu tests the benchmark itself")
    return torch.device(options.device)


def bench_config(options: GpuBenchOptions) -> Any:
    """The transformers config of the preset or folder, with fewer layers if asked for."""
    folder = Path(options.model)
    config: Any = (
        skeleton(read_config(folder), folder).config
        if folder.is_dir()
        else preset_config(options.model)
    )
    if options.layers is not None:
        config.num_hidden_layers = options.layers
        config.layer_types = config.layer_types[: options.layers]
    return config


def random_model(
    options: GpuBenchOptions, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """A transformers model of that shape, the same weights in every call."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device:
        return load_with(AutoModelForCausalLM.from_config, bench_config(options), dtype=dtype)


def inference_model(options: GpuBenchOptions, device: torch.device) -> Any:
    """In bf16 and evaluation mode."""
    return random_model(options, device).eval().requires_grad_(False)


def dense_model(options: GpuBenchOptions, device: torch.device) -> Any:
    """The bf16 baseline, with the same projections merged as in the ternary models."""
    model = inference_model(options, device)
    for parent in list(model.modules()):
        children = dict(parent.named_children())
        for names in MERGED:
            if all(type(children.get(name)) is nn.Linear for name in names):
                parts = [children[name] for name in names]
                put_merged_(parent, names, _merged_dense(parts), parts)
    return model


def ternary_model(options: GpuBenchOptions, device: torch.device) -> Any:
    """Random ternary weights within the pattern, and an int8 head."""
    model = convert_(
        inference_model(options, device), SparseBitConfig.parse(f"ternary-{options.pattern}")
    )
    fuse_(prepare_(model, RoutePolicy()))
    int8_head_(model)
    return model


def _merged_dense(parts: list[Any]) -> nn.Linear:
    weight, bias = torch.cat([part.weight for part in parts]), parts[0].bias
    merged = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
    merged.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        merged.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
    return merged
