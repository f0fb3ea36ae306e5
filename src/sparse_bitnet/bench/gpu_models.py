# SPDX-License-Identifier: Apache-2.0
"""The compared models: random weights of a preset's shape, dense bf16 and ternary with all its forms."""

from pathlib import Path
from typing import Any

import torch

from sparse_bitnet.bench.gpu_options import GpuBenchOptions
from sparse_bitnet.checkpoint.build_model import preset_config
from sparse_bitnet.checkpoint.load import load_with, skeleton
from sparse_bitnet.checkpoint.model_folder import read_config
from sparse_bitnet.engine.gpu.blocks import int8_head_, prepare_
from sparse_bitnet.engine.gpu.linear import RoutePolicy
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.nn.layer import SparseBitConfig


def bench_device(options: GpuBenchOptions) -> torch.device:
    """Raises `UserError` where CUDA is asked for and absent."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("bench: torch sees no CUDA device; --device cpu tests the benchmark itself")
    return torch.device(options.device)


def random_model(
    options: GpuBenchOptions, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """A transformers model of the preset's or folder's shape, with fewer layers if asked for, and the
    same weights in every call.

    Raises `UserError` for more layers than there are, or none.
    """
    from transformers import AutoModelForCausalLM

    folder = Path(options.model)
    config: Any = (
        skeleton(read_config(folder), folder).config
        if folder.is_dir()
        else preset_config(options.model)
    )
    if options.layers is not None:
        if not 1 <= options.layers <= config.num_hidden_layers:
            raise UserError(
                f"--layers {options.layers}: {options.model} has 1 to {config.num_hidden_layers}"
            )
        config.num_hidden_layers = options.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: options.layers]
    torch.manual_seed(0)
    with device:
        return load_with(AutoModelForCausalLM.from_config, config, dtype=dtype)


def dense_model(options: GpuBenchOptions, device: torch.device) -> Any:
    """The bf16 baseline, merged and fused as the ternary models are."""
    model = random_model(options, device).eval().requires_grad_(False)
    return prepare_(model, RoutePolicy())


def ternary_model(options: GpuBenchOptions, device: torch.device) -> Any:
    """Random ternary weights within the pattern, and an int8 head."""
    model = random_model(options, device).eval().requires_grad_(False)
    convert_(model, SparseBitConfig.parse(f"ternary-{options.pattern}"))
    int8_head_(prepare_(model, RoutePolicy()))
    return model
