# SPDX-License-Identifier: Apache-2.0
"""What `sparse-bitnet evaluate` scores, and how."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from sparse_bitnet.errors import UserError, check_least


@dataclass(kw_only=True)
class EvaluateConfig:
    """What to score, and how."""

    data: str | None = None
    """Folder written by `sparse-bitnet prepare` (its validation split), or a text file or glob (.txt,
    .jsonl, .jsonl.zst, .parquet; every document is scored)."""

    tasks: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """lm-eval tasks, groups or tags to score instead, joined by commas; `paper`: the paper's five
    zero-shot tasks."""

    include_path: str | None = None
    """Folder of the paper's data sets as they were downloaded (FOLDER/hellaswag, FOLDER/ai2_arc,
    FOLDER/piqa, FOLDER/super_glue), or of lm-eval task files (.yaml) of your own: no network needed."""

    fewshot: int = 0
    """Examples before each question of a task."""

    limit: int | None = None
    """Score only this many questions of each task, the first ones."""

    context_length: int | None = None
    """Tokens the model sees at once. Default: as in training, or 2048."""

    stride: int | None = None
    """Tokens between windows; below context-length windows overlap, and every token has at least
    context-length minus stride tokens before it. Default: no overlap."""

    batch_size: int = 8
    """Windows per forward."""

    max_tokens: int = 0
    """Score only this many tokens, the first ones; 0: all."""

    precision: Literal["auto", "bf16", "float32"] = "auto"
    """Compute type. auto: bf16 where the device has fast bf16 products."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""

    engine: Literal["auto", "cpu", "transformers"] = "auto"
    """cpu packs ternary models of other tools first; transformers runs anything that it can load. auto:
    cpu for what is packed, where it can."""

    threads: int | None = None
    """Threads of the CPU engine. Default: one for each core."""

    head: Literal["stored", "int8", "int4"] = "stored"
    """Form of the output head in the CPU engine."""

    kv_cache: Literal["float32", "float16", "int8", "int4"] = "float32"
    """Form of cached keys and values in the CPU engine."""

    activations: Literal["auto", "token", "group"] = "auto"
    """What shares a scale of int8 activations in the CPU engine: see `generate`."""

    column: str = "text"
    """Column of the text in .jsonl and .parquet files."""

    json: str | None = None
    """Also write the result to this file; of tasks, in lm-eval's form."""

    def __post_init__(self) -> None:
        """Raise `UserError` that names the option."""
        check_least(self, fewshot=0, limit=1, context_length=1, stride=1)
        check_least(self, batch_size=1, max_tokens=0, threads=1)
        others = ("context_length", "stride", "max_tokens", "column")
        for name in others if self.tasks else ("include_path", "fewshot", "limit"):
            if getattr(self, name) != getattr(type(self), name):
                raise UserError(
                    f"--{name.replace('_', '-')} is an option of {'--data' if self.tasks else '--tasks'}"
                )
        if self.engine == "cpu" and (self.device == "cuda" or self.precision == "bf16"):
            raise UserError(
                "--engine cpu computes in float32 on the CPU: leave out --device and --precision"
            )
