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

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h

LONGEST_PLAIN_ATTENTION = 512
"""Tokens of a sequence whose attention scores, all of them, are no burden."""

MOST_BLOCKS_AT_ONCE = 8
"""Most blocks of a model that is compiled as a whole: compile time grows with them."""

WORTH_COMPILING = 5e12
"""Tokens times weights of a run that takes some ten minutes on one core."""


def resolve_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is one. Raises `UserError` when CUDA is asked for and absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: torch sees no CUDA device; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def cpu_has_fast_bf16() -> bool:
    """Whether bfloat16 products are faster than float32 ones. Most processors emulate them, and Intel's
    without matrix tiles take twice as long."""
    info = cpu_info()
    flags = info.get("flags", "").split()
    return "amx_bf16" in flags or (
        "avx512_bf16" in flags and info.get("vendor_id") == "AuthenticAMD"
    )


def resolve_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Compute type: "auto" is bfloat16 where the device is fast at it, else float32."""
    if precision == "auto":
        fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else cpu_has_fast_bf16()
        precision = "bf16" if fast else "float32"
    return torch.bfloat16 if precision == "bf16" else torch.float32


def autocast(device: torch.device | str, dtype: torch.dtype) -> AbstractContextManager:
    """torch.autocast to a 16-bit type; nothing for float32."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=dtype)


def prepare_device(config: TrainConfig) -> tuple[torch.device, torch.dtype]:
    """Set seed, thread count and determinism; returns where and in which type to compute."""
    device = resolve_device(config.device)
    torch.manual_seed(config.seed)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    make_deterministic(device)
    if device.type == "cpu":
        keep_freed_memory()
    return device, resolve_dtype(config.precision, device)


def keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next one, which it else fetches again page by page.

    Compiled steps of 4 blocks of SmolLM2-135M's sizes (bfloat16, 2 x 512 tokens, a thread of an AMD EPYC
    with AVX512-BF16) take 9 % longer without it: median of five interleaved pairs, in processor time.
    """
    with suppress(AttributeError, OSError, TypeError):  # other C libraries
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the most it takes
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def make_deterministic(device: torch.device) -> None:
    """On CUDA have torch take deterministic kernels, where it has them, from here on."""
    if device.type != "cuda":
        return
    # Read when cuBLAS is first used; without it equal runs need not give equal bits.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # A debugging aid that comes with it and fills every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def compiles(config: TrainConfig, device: torch.device, weights: int) -> bool:
    """Whether a run of a model of this many weights compiles its blocks.

    "auto" does where it pays: on a CPU a step takes half as long, and compiling about a minute.
    """
    if config.compile != "auto":
        return config.compile == "on"
    has_compiler = any(map(shutil.which, (os.environ.get("CXX", "g++"), "c++", "clang++")))
    work = float(config.steps * config.tokens_per_step) * weights
    return device.type == "cpu" and has_compiler and work >= WORTH_COMPILING


def blocks_of(model: "PreTrainedModel") -> nn.ModuleList:
    """A decoder's blocks, whatever its list of them is called. Raises `UserError` where it has none."""
    lists = (part for part in model.get_decoder().children() if isinstance(part, nn.ModuleList))
    if (blocks := next(lists, None)) is None:
        raise UserError(f"{type(model).__name__} has no list of blocks")
    return blocks


def compile_decoder_(
    model: "PreTrainedModel", config: TrainConfig, device: torch.device, processes: int
) -> None:
    """Have the blocks compiled when they are first called; on a CPU with plain attention where it fits,
    and a shallow model as one, since what lies between its blocks takes as long as a loop of theirs."""
    # Code is cached by the process for some variants of a function only, and on the disk for all.
    torch._dynamo.reset()
    decoder, on_cpu = model.get_decoder(), device.type == "cpu"
    # Compiled, the plain products are faster than the CPU's flash attention; models that have none, as
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
    """Options of `torch.compile` for training."""
    return {"cpp_wrapper": True} if torch.device(device).type == "cpu" else None
