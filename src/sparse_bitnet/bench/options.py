# SPDX-License-Identifier: Apache-2.0
"""What `sparse-bitnet bench` measures, on a CPU and on a GPU. Imports nothing heavy, so that `--help` is
immediate."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sparse_bitnet.engine.engine_options import WeightFormat
from sparse_bitnet.errors import UserError, check_least, refuse_unused
from sparse_bitnet.host import available_cores
from sparse_bitnet.pattern import NMPattern

PAPER_PREFILL = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
PAPER_DECODE = (64, 128, 256, 512)


@dataclass(kw_only=True)
class BenchOptions:
    """What to measure."""

    model: str = "qwen2.5-1.5b"
    """A preset or a published shape (bitnet-2b4t, qwen3-1.7b, qwen3-8b, falcon-e-3b, llama3-8b), which
    gets random weights, or a packed folder."""

    pattern: list[str] = field(default_factory=lambda: ["6:8"])
    """n:m of the random weights, a model each; 8:8 is dense. With " binary" after it none of them is zero
    but those that the pattern drops (quantizer=binary)."""

    scale_group: Literal[0, 32, 64, 128, 256] = 0
    """Random weights that share a scale in float16; 0: one scale a matrix."""

    embeddings: Literal["int8", "bf16", "ternary"] = "int8"
    """How the random model's file holds embedding and head; ternary: with a scale for 128 weights."""

    weight_format: list[WeightFormat] = field(default_factory=lambda: ["auto"])
    """Run-time formats of the weights."""

    head: Literal["auto", "stored", "int8", "int4"] = "auto"
    """Run-time format of the output head."""

    kv_cache: Literal["float32", "float16", "int8", "int4"] = "float16"
    """Cached keys and values."""

    isa: list[str] = field(default_factory=lambda: [""])
    """Instruction sets: amx_int8, avx512vbmi, avx512vnni, avx512, avxvnni, avx2,
    i8mm, neon, generic. Default: the best."""

    threads: list[int] = field(default_factory=lambda: sorted({1, available_cores()}))
    """Thread counts."""

    prefill: list[int] = field(default_factory=lambda: [128, 512, 2048])
    """Prompt lengths; the model's positions where these are fewer."""

    contexts: list[int] = field(default_factory=lambda: [0, 2048])
    """Tokens before those that are decoded; as many as the model's positions leave room for."""

    batches: list[int] = field(default_factory=lambda: [1, 8, 32])
    """Sequences that decode together."""

    steps: int = 16
    """Steps of one decode measurement."""

    rounds: int = 5
    """Turns of every measurement, of which medians are taken."""

    quick: bool = False
    """Two prompts and one sequence without context, all threads, three rounds."""

    models: Path | None = None
    """Folder that keeps random models. Default: one in the temporary folder."""

    def __post_init__(self) -> None:
        """Raise `UserError` for sizes that cannot be measured."""
        for name, least in {"threads": 1, "prefill": 1, "batches": 1, "contexts": 0}.items():
            if min(values := getattr(self, name), default=-1) < least:
                raise UserError(f"--{name} {values}: give numbers of at least {least}")
        for name in ("pattern", "weight_format", "isa"):
            if not getattr(self, name):
                raise UserError(f"--{name.replace('_', '-')}: give at least one")
        check_least(self, steps=1, rounds=1)
        if self.quick:
            refuse_unused(self, ("prefill", "contexts", "batches"), "--quick takes its own")
            self.prefill, self.contexts, self.batches = [128, 512], [0], [1]
            self.threads, self.rounds = [max(self.threads)], min(self.rounds, 3)


@dataclass(kw_only=True)
class GpuBenchOptions:
    """The paper's Table 3 on a GPU, with random weights: bf16, dense int8 and sparse int8 models."""

    step: Literal["all", "prefill", "decode", "train"] = "all"
    """What to measure of the three."""

    model: str = "qwen2.5-3b"
    """Preset that gives the shape."""

    pattern: list[str] = field(default_factory=lambda: ["6:8", "2:4"])
    """n:m of the ternary weights."""

    tokens: list[int] = field(default_factory=list)
    """Prompt lengths; for train the sequence length. Default: the paper's, 2048."""

    batch: list[int] = field(default_factory=list)
    """Sequences of decode and train. Default: the paper's; 4, or fewer where memory is short."""

    context: int = 512
    """Tokens in the cache before the decoded ones."""

    rounds: int = 7
    """Measurements of each variant, interleaved; the median counts."""

    rehearse: bool = False
    """Run the same steps on the CPU with a tiny model. The numbers say nothing about speed."""

    def __post_init__(self) -> None:
        """Raise `UserError` for sizes that cannot be measured."""
        if self.rehearse:
            self.model, self.rounds, self.context = "qwen2.5-0.3m", 1, 16
            self.tokens, self.batch = [32], [2]
        check_least(self, context=1, rounds=1)
        for name in ("tokens", "batch"):
            if any(value < 1 for value in getattr(self, name)):
                raise UserError(f"--{name} {getattr(self, name)}: give numbers above 0")
        for pattern in self.pattern:
            NMPattern.parse(pattern)

    @property
    def device(self) -> str:
        """Name of the device that computes."""
        return "cpu" if self.rehearse else "cuda"
