# SPDX-License-Identifier: Apache-2.0
"""Device, compute type and compilation of a run."""

import ctypes
import os
import shutil
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparse_bitnet.errors import UserError
from sparse_bitnet.host import cpu_info
from sparse_bitnet.training.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h

LONGEST_PLAIN_ATTENTION = 512
"""Longest sequence, in tokens, whose attention scores all fit comfortably into memory."""

MOST_BLOCKS_AT_ONCE = 8
"""Largest number of blocks of a model to compile as a whole: compile time grows with them."""

WORTH_COMPILING = 5e12
"""Tokens times weights of a run that takes about ten minutes on one core."""


def resolve_device(name: str) -> torch.device:
    """Return the device; "auto" is CUDA if available. Raises `UserError` if "cuda" is unavailable."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: torch sees no CUDA device; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def cpu_has_fast_bf16() -> bool:
    """Whether bfloat16 products are faster than float32 ones. Most processors emulate them, and Intel's
    without AMX take twice as long."""
    info = cpu_info()
    flags = info.get("flags", "").split()
    return "amx_bf16" in flags or (
        "avx512_bf16" in flags and info.get("vendor_id") == "AuthenticAMD"
    )


def resolve_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the compute type; "auto" is bfloat16 if the device is fast with it, else float32."""
    if precision == "auto":
        fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else cpu_has_fast_bf16()
        precision = "bf16" if fast else "float32"
    return torch.bfloat16 if precision == "bf16" else torch.float32


def autocast(device: torch.device | str, dtype: torch.dtype) -> AbstractContextManager:
    """Return torch.autocast to a 16-bit type, or a context that does nothing for float32."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=dtype)


def prepare_device(config: TrainConfig) -> tuple[torch.device, torch.dtype]:
    """Set seed, thread count and determinism; return the device and the compute type."""
    device = resolve_device(config.device)
    torch.manual_seed(config.seed)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    make_deterministic(device)
    if device.type == "cpu":
        keep_freed_memory()
    return device, resolve_dtype("bf16" if config.masters == "bf16" else config.precision, device)


def keep_freed_memory() -> None:
    """Make glibc keep all memory that a step frees for the next step. Fetched again page by page, logits
    of 512 x 49,152 tokens take 2.8 s of processor time instead of 1.1 s."""
    with suppress(AttributeError, OSError, TypeError):  # other C libraries
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)  # a mapping of its own is returned to the system when it is freed
        mallopt(_M_TRIM_THRESHOLD, -1)


def make_deterministic(device: torch.device) -> None:
    """Make torch use deterministic kernels on CUDA, if it has them, from now on."""
    if device.type != "cuda":
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Determinism also turns on a debugging aid that fills every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def compiles(config: TrainConfig, device: torch.device, weights: int) -> bool:
    """Whether a run compiles the blocks of a model with this many weights.

    "auto" compiles if it pays: on a CPU a step takes half as long, and compiling about a minute.
    """
    has_compiler = any(map(shutil.which, (os.environ.get("CXX", "g++"), "c++", "clang++", "cl")))
    if config.compile == "on" and device.type == "cpu" and not has_compiler:
        raise UserError("--compile on: no C++ compiler found; install one, or leave the option out")
    if config.compile != "auto":
        return config.compile == "on"
    work = float(config.steps * config.tokens_per_step) * weights
    return device.type == "cpu" and has_compiler and work >= WORTH_COMPILING


def blocks_of(model: "PreTrainedModel") -> nn.ModuleList:
    """Return a decoder's list of blocks, whatever its name. Raises `UserError` if it has none."""
    lists = (part for part in model.get_decoder().children() if isinstance(part, nn.ModuleList))
    if (blocks := next(lists, None)) is None:
        raise UserError(f"{type(model).__name__} has no list of blocks")
    return blocks


def compile_decoder_(
    model: "PreTrainedModel", config: TrainConfig, device: torch.device, processes: int
) -> None:
    """Compile the blocks when they are first called; on a CPU with plain attention if it fits, and a
    shallow model as a whole, since the code between its blocks takes as long as their own loops."""
    # The process caches code for a few variants of a function only; the disk caches all.
    torch._dynamo.reset()
    decoder, on_cpu = model.get_decoder(), device.type == "cpu"
    # Compiled plain attention is faster than the CPU's flash attention; models without the latter, like
    # Gemma 2 with its capped scores, keep their own.
    plain = on_cpu and model.config._attn_implementation == "sdpa"
    if plain and config.sequence_length <= LONGEST_PLAIN_ATTENTION:
        from sparse_bitnet.training.causal_blocks import NAME, store_rotations_

        model.set_attn_implementation(NAME)
        store_rotations_(decoder)
    blocks = blocks_of(model)
    shallow = on_cpu and len(blocks) <= MOST_BLOCKS_AT_ONCE
    at_once = shallow and processes == 1 and not config.activation_checkpointing
    for part in [decoder] if at_once else blocks:
        part.compile(options=compile_options(device))


def compile_options(device: torch.device | str) -> dict[str, Any] | None:
    """Return options of `torch.compile` for training."""
    return {"cpp_wrapper": True} if torch.device(device).type == "cpu" else None
