# SPDX-License-Identifier: Apache-2.0
"""Options of the inference engine, shared by `generate`, `chat`, `serve` and `evaluate`.

Imports nothing heavy, so that `--help` is immediate.
"""

from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from sparse_bitnet.errors import UserError, check_least
from sparse_bitnet.host import MOST_THREADS

WeightFormat = Literal["auto", "stored", "i2", "b3", "lookup"]


@dataclass(kw_only=True)
class EngineOptions:
    """Options that choose and configure the inference engine."""

    engine: Literal["auto", "cpu", "transformers"] = "auto"
    """Inference engine. cpu runs packed models, and packs ternary models of other tools first.
    transformers runs any model that it can load. auto: cpu if it can run the model."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on. cuda: an NVIDIA GPU, through transformers. auto: the CPU engine if it can run
    the model, else a GPU if there is one."""

    threads: int | None = None
    """Number of compute threads. Default: one for each core."""

    weight_format: WeightFormat = "auto"
    """Run-time format of the weights (cpu). i2: 2 bits per weight. b3: 1.67 bits, in another
    layout than b3 files. lookup: 1.25 to 1.67. auto: the fastest here, measured briefly.
    stored: i2 files are memory-mapped as they are, which starts sooner."""

    head: Literal["auto", "stored", "int8", "int4"] = "auto"
    """Run-time format of the output head (cpu). auto: int8, unless the head is ternary."""

    kv_cache: Literal["auto", "float32", "float16", "int8", "int4"] = "auto"
    """Data type of the KV cache (cpu). auto: int8, or float16 if any bias or norm weight of the keys is
    above 16."""

    activations: Literal["auto", "token", "group"] = "auto"
    """Granularity of the int8 activation scales (cpu). token: one per token, as models
    trained here expect. group: one per group of inputs whose weights share a scale. auto: group for
    models of other tools with such groups, else token."""

    context_length: int | None = None
    """Maximum length of prompt and generated text together, in tokens. Default: the model's."""

    cache_tokens: int | None = None
    """KV cache size in tokens. Default: context length; in `serve` 1024 x --max-running."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value, choices = getattr(self, name), get_args(hint)
            if get_origin(hint) is Literal and value not in choices:
                option = name.replace("_", "-")
                raise UserError(f"--{option} {value!r}: choose one of {', '.join(choices)}")
        check_least(self, threads=1, context_length=1, cache_tokens=1)
        if (self.cache_tokens or 1) > 1 << 31:
            raise UserError(f"--cache-tokens {self.cache_tokens}: must be at most {1 << 31}")
        if (self.threads or 1) > MOST_THREADS:
            raise UserError(f"--threads {self.threads}: must be at most {MOST_THREADS}")
        if self.device == "cuda" and self.engine == "cpu":
            raise UserError("--engine cpu does not compute on --device cuda: leave out one of them")
