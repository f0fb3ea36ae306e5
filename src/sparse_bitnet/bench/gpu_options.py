# SPDX-License-Identifier: Apache-2.0
"""What `sparse-bitnet bench prefill|decode|train|kernels|profile` measures. Imports nothing heavy."""

from dataclasses import dataclass, field
from typing import Literal

from sparse_bitnet.errors import UserError

PAPER_PREFILL = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
PAPER_DECODE = (64, 128, 256, 512)


@dataclass(kw_only=True)
class GpuBenchOptions:
    """A model of some shape with random weights: dense bf16, dense int8, sparse, and chosen."""

    model: str = "qwen2.5-3b"
    """Preset, or a folder whose config.json gives the shape."""

    pattern: str = "6:8"
    """n:m of the random weights."""

    tokens: list[int] = field(default_factory=list)
    """Prompt lengths (prefill), sequence lengths of a step (train), tokens of a product (kernels,
    profile). Default: the paper's, 2048, a few."""

    batch: list[int] = field(default_factory=list)
    """Sequences (decode: the paper's; train: 4, fewer where the GPU's memory is too small). Prefill is
    of one sequence."""

    context: int = 512
    """Tokens in the cache before the decoded ones."""

    rounds: int = 7
    """Measurements of each variant, interleaved; the median counts."""

    layers: int | None = None
    """Blocks of the model. Default: all."""

    compile: bool = False
    """torch.compile the blocks of training."""

    device: Literal["cuda", "cpu"] = "cuda"
    """cpu runs the plain PyTorch references: it tests the benchmark and says nothing of speed."""

    def __post_init__(self) -> None:
        for name in ("context", "rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be above 0")
        for name in ("tokens", "batch"):
            for value in getattr(self, name):
                if value < 1:
                    raise UserError(f"{name}={value}: must be above 0")
