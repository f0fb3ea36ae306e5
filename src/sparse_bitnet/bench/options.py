# SPDX-License-Identifier: Apache-2.0
"""Options of `sparse-bitnet bench`, on a CPU and on a GPU. Imports nothing heavy: `--help` is quick."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from sparse_bitnet.engine.engine_options import WeightFormat
from sparse_bitnet.errors import check_least, refuse_unused
from sparse_bitnet.host import available_cores
from sparse_bitnet.pattern import NMPattern

PAPER_PREFILL = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
PAPER_DECODE = (64, 128, 256, 512)


@dataclass(kw_only=True)
class BenchOptions:
    """Models, formats and sizes to measure on the CPU."""

    GROUPS: ClassVar = {"pattern": "random weights", "weight_format": "engine", "prefill": "sizes"}

    model: Annotated[str, "[MODEL]"] = "qwen2.5-1.5b"
    """Model to measure: a packed folder; or, with random weights, a preset (`sparse-bitnet models` lists
    them), bitnet-2b4t, qwen3-8b, bonsai-2b, bonsai-4b, bonsai-9b or bonsai-27b."""

    pattern: tuple[str, ...] = ()
    """N:M patterns of the random weights, one model each; 8:8 is dense. "6:8 binary": no kept weight is
    zero (quantizer=binary). Default: 6:8; for bonsai 8:8, its only one."""

    weight_format: tuple[WeightFormat, ...] = ("auto",)
    """Run-time formats of the weights to measure."""

    head: Literal["auto", "stored", "int8", "int4"] = "auto"
    """Run-time format of the output head."""

    kv_cache: Literal["float32", "float16", "int8", "int4"] = "float16"
    """Data type of the KV cache."""

    isa: tuple[str, ...] = ("",)
    """Instruction sets to measure: amx_int8, avx512vbmi, avx512vnni, avx512, avxvnni, avx2, i8mm, neon or
    generic. Default: the fastest that this machine has."""

    threads: tuple[int, ...] = tuple(sorted({1, available_cores()}))
    """Thread counts to measure."""

    prefill: tuple[int, ...] = (128, 512, 2048)
    """Prompt lengths to measure prefill with, in tokens; at most the model's context length."""

    contexts: tuple[int, ...] = (0, 2048)
    """Context lengths to measure decode with: tokens in the KV cache at the start."""

    batches: tuple[int, ...] = (1, 8, 32)
    """Batch sizes to measure decode with: number of sequences that decode together."""

    steps: int = 16
    """Number of decode steps per measurement."""

    rounds: int = 5
    """Number of repetitions of every measurement; the median is reported."""

    quick: bool = False
    """Measure less: two prompt lengths, decode of one sequence without context, all threads, 3 rounds."""

    def __post_init__(self) -> None:
        check_least(self, threads=1, prefill=1, batches=1, contexts=0, steps=1, rounds=1)
        if self.quick:
            refuse_unused(self, ("prefill", "contexts", "batches"), "--quick takes its own")
            self.prefill, self.contexts, self.batches = (128, 512), (0,), (1,)
            self.threads = (max(self.threads),)
            self.rounds = 3 if self.rounds == BenchOptions.rounds else self.rounds


@dataclass(kw_only=True)
class GpuBenchOptions:
    """The paper's Table 3 on a GPU, with random weights: bf16, dense int8 and sparse int8 models."""

    step: Literal["all", "prefill", "decode", "train"] = "all"
    """Phase to measure: prefill, decode, train or all three."""

    model: str = "qwen2.5-3b"
    """Preset of the model's size (`sparse-bitnet models` lists them)."""

    pattern: tuple[str, ...] = ("6:8", "2:4")
    """N:M patterns of the ternary weights."""

    tokens: tuple[int, ...] = ()
    """Prompt lengths of prefill, or sequence length of train. Default: the paper's, or 2048 for train."""

    batch: tuple[int, ...] = ()
    """Batch sizes. Default: the paper's for decode; for train 4, or fewer if memory is short."""

    context: int = 512
    """Context length of decode: tokens in the KV cache at the start."""

    rounds: int = 7
    """Number of interleaved measurements of each variant; the median is reported."""

    rehearse: bool = False
    """Try the command on the CPU with a tiny model; the numbers mean nothing."""

    def __post_init__(self) -> None:
        if self.rehearse:
            names = ("model", "rounds", "context", "tokens", "batch")
            refuse_unused(self, names, "--rehearse takes its own")
            self.model, self.rounds, self.context = "qwen2.5-0.3m", 1, 16
            self.tokens, self.batch = (32,), (2,)
        check_least(self, context=1, rounds=1, tokens=1, batch=1)
        for pattern in self.pattern:
            NMPattern.parse(pattern)

    @property
    def device(self) -> str:
        """Name of the device that computes."""
        return "cpu" if self.rehearse else "cuda"
