# SPDX-License-Identifier: Apache-2.0
"""A run that is planned, and the GPUs that it could be trained on. Free of torch."""

import math
from dataclasses import dataclass
from typing import Literal

from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import DenseLayersOption, SparseBitConfig
from sparse_bitnet.presets import find_preset


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Data-sheet numbers of one GPU and of the machine it usually sits in."""

    flops: float
    """Dense bfloat16 FLOP/s."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Of the memory, bytes/s."""
    link: float
    """To the GPUs of its machine, bytes/s in each direction."""
    network: float
    """Its share of the machine's network, bytes/s in each direction."""


GPUS: dict[str, Gpu] = {
    "a100": Gpu(flops=312e12, memory=80e9, bandwidth=2.0e12, link=300e9, network=25e9),
    "h100": Gpu(flops=989e12, memory=80e9, bandwidth=3.35e12, link=450e9, network=50e9),
    "h200": Gpu(flops=989e12, memory=141e9, bandwidth=4.8e12, link=450e9, network=50e9),
    "b200": Gpu(flops=2250e12, memory=180e9, bandwidth=8.0e12, link=900e9, network=50e9),
}
"""SXM boards, from the makers' data sheets; network: one adapter of 200 or 400 Gbit/s for each GPU."""


@dataclass(kw_only=True)
class Job(DenseLayersOption):
    """What is planned."""

    model: str = "qwen2.5-3b"
    """Preset name (`sparse-bitnet models` lists them)."""

    format: str = "ternary-6:8"
    """Weight format and N:M pattern."""

    gpus: int = 64
    """Processes, one for each GPU."""

    gpu: str = "h100"
    """a100, h100, h200 or b200."""

    shard: int | None = None
    """GPUs over which the model is split; the rest replicate it. Default: all."""

    batch_size: int = 512
    """Sequences per optimiser step, over all GPUs."""

    micro_batch_size: int | None = None
    """Sequences per forward on one GPU. Default: as many as fit."""

    sequence_length: int = 2048
    """Tokens per sequence."""

    activation_checkpointing: bool = False
    """Recompute each block in the backward pass."""

    gradient_reduction: Literal["float32", "bf16"] = "float32"
    """Type in which gradients are summed over processes."""

    tokens: float = 50e9
    """Tokens of the whole run."""

    storage: float = 2e9
    """Bytes/s that the shared storage takes from one machine."""

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            raise UserError(f"gpu {self.gpu!r} is unknown: choose one of {', '.join(GPUS)}")
        self.config.converted(find_preset(self.model).linears, self.model)
        for name in ("gpus", "batch_size", "sequence_length", "tokens", "storage"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name}={getattr(self, name)}: must be a number above 0")
        if self.batch_size % self.gpus:
            raise UserError(f"batch_size={self.batch_size} does not divide over {self.gpus} GPUs")
        if self.shard is not None and (self.shard < 1 or self.gpus % self.shard):
            raise UserError(f"shard={self.shard} does not divide the {self.gpus} GPUs")
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise UserError(f"micro_batch_size={self.micro_batch_size}: must be above 0")

    @property
    def config(self) -> SparseBitConfig:
        """The format and what stays dense."""
        return self.with_dense_layers(self.format)

    @property
    def shards(self) -> int:
        """GPUs over which one model is split."""
        return self.shard or self.gpus

    @property
    def rows(self) -> int:
        """Sequences per forward on one GPU."""
        own = self.batch_size // self.gpus
        return min(self.micro_batch_size or own, own)

    @property
    def tokens_on_gpu(self) -> int:
        """Of one optimiser step."""
        return self.batch_size // self.gpus * self.sequence_length

    @property
    def micro_steps(self) -> int:
        """Forwards of a GPU in one optimiser step."""
        return -(-(self.batch_size // self.gpus) // self.rows)
