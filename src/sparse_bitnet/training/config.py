# SPDX-License-Identifier: Apache-2.0
"""Everything a training run depends on, as one flat dataclass. Free of torch, so `--help` is quick."""

import dataclasses
import json
import math
import numbers
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from sparse_bitnet.checkpoint.model_folder import read_json
from sparse_bitnet.errors import UserError
from sparse_bitnet.host import MOST_THREADS


@dataclass(kw_only=True)
class TrainConfig:
    """One training run. Two runs with equal configs write the same bytes on one machine's CPU."""

    model: str = "qwen2.5-1m"
    """Preset name (`sparse-bitnet models` lists them). Not used with --init."""

    format: str = "ternary-6:8"
    """Weight format and N:M pattern, for example ternary-6:8, full-2:4, ternary-8:8 (dense)."""

    init: str | None = None
    """Model to start from instead of random weights: a folder, hub id or GGUF file."""

    teacher: str | None = None
    """Teacher to learn from: run folder, model folder or hub id. `sparse-bitnet distill` sets it."""

    logit_cache: str | None = None
    """Folder that caches the teacher's top logits; it is filled before training starts. The student then
    trains without the teacher in memory."""

    top_logits: int = 64
    """Number of top logits per token in --logit-cache."""

    temperature: float = 1.0
    """Distillation temperature; softens the distributions of teacher and student."""

    ce_weight: float = 0.0
    """Weight of the cross-entropy in the distillation loss. 0: learn from the teacher alone."""

    logits_weight: float = 1.0
    """Weight of temperature^2 * KL(teacher || student) in the distillation loss."""

    reconstruction_windows: int | None = None
    """Number of training sequences on which each block of the student is first fitted to the teacher's
    block, one block after another. 0: start from the converted weights. Default: 64 if the run starts
    from its teacher in one process, else 0."""

    lora: int = 0
    """Rank of the LoRA adapters (peft) to train instead of the pretrained weights. At the end they are
    merged into the weights, which are quantised again. 0: no adapters."""

    vocab_size: int | None = None
    """Rows of the embedding matrix. Default: the tokenizer's size, or 151,936 for presets above 30m."""

    data: str = "data"
    """Folder written by `sparse-bitnet prepare`."""

    out: str = "run"
    """Run folder. If it already holds a run of this config, training resumes."""

    seed: int = 0
    """Random seed for random initial weights, LoRA adapters and dropout."""

    data_seed: int = 0
    """Random seed for the data order."""

    steps: int = 1000
    """Number of optimiser steps."""

    batch_size: int = 16
    """Sequences per optimiser step, in total over all ranks."""

    micro_batch_size: int | None = None
    """Sequences per forward pass; must divide --batch-size. Default: the whole batch at once."""

    sequence_length: int = 256
    """Tokens per sequence."""

    sparse_fraction: float = 1.0
    """Fraction of the steps, at the end, that use the N:M mask (rho); 0.25: only the last quarter."""

    learning_rate: float = 3e-3
    """Peak learning rate."""

    schedule: Literal["cosine", "wsd"] = "cosine"
    """Learning rate schedule: cosine decay, or wsd (warm-up, stable, decay)."""

    warmup_fraction: float = 0.05
    """Fraction of the steps spent on linear learning rate warm-up."""

    decay_fraction: float = 0.2
    """Fraction of the steps, at the end, with a falling learning rate (wsd only)."""

    final_learning_rate_fraction: float = 0.1
    """Final learning rate, as a fraction of the peak."""

    beta1: float = 0.9
    """AdamW beta1: decay rate of the first moment."""

    beta2: float = 0.95
    """AdamW beta2: decay rate of the second moment."""

    epsilon: float = 1e-8
    """AdamW epsilon."""

    weight_decay: float = 0.1
    """AdamW weight decay of matrices; biases and norms have none."""

    final_weight_decay_fraction: float = 1.0
    """Final weight decay, as a fraction of --weight-decay; it changes linearly over the run."""

    decay_embeddings: bool = False
    """Apply weight decay to the embedding and the output head too."""

    gradient_clip: float = 1.0
    """Maximum global gradient norm; 0 turns clipping off."""

    precision: Literal["auto", "bf16", "float32"] = "auto"
    """Data type to compute in. auto: bf16 if the device has fast bf16 matrix products, else float32."""

    masters: Literal["float32", "bf16"] = "float32"
    """Data type of the master weights and the optimiser's moments; bf16 implies --precision bf16."""

    initial_weights: Literal["normal", "uniform"] = "normal"
    """Distribution of the initial weight matrices: normal with standard deviation 0.02, or uniform in
    ±1/sqrt(in_features), PyTorch's default."""

    forward: Literal["fake", "int8"] = "fake"
    """How ternary layers multiply in the forward pass. fake: in floating point, on fake-quantised values.
    int8: in int8, which is faster on GPUs; results differ from fake only by rounding."""

    gradient_reduction: Literal["float32", "bf16"] = "float32"
    """Data type in which gradients are summed over processes; bf16 halves most of a step's traffic."""

    compile: Literal["auto", "on", "off"] = "auto"
    """Apply torch.compile to the blocks. auto: on a CPU with a C++ compiler, if the run is long enough.
    Compiling changes losses by 1e-4 at the first step, by about 1e-2 over a run."""

    activation_checkpointing: bool = False
    """Recompute each block in the backward pass instead of storing its activations."""

    loss_chunk_tokens: int | None = None
    """Tokens per chunk of logits (all, if the head has a bias). Default: by vocabulary, >= 512."""

    threads: int | None = None
    """Number of CPU threads. Default: all cores. Byte-identical runs need the same number."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. auto: CUDA if available, else the CPU."""

    validation_every: int = 0
    """Steps between validations; 0: only at the end and, with a teacher, before the first step. The model
    is scored in its final format, even while a schedule or --sparse-fraction uses another."""

    validation_tokens: int = 131072
    """Maximum number of validation tokens to score; 0: all."""

    layer_metrics_every: int = 50
    """Steps between rows of metrics.jsonl with the mask flip rate of every layer; 0: never."""

    checkpoint_every: int = 500
    """Steps between checkpoints; the last step always writes one."""

    keep_checkpoints: int = 2
    """Number of latest checkpoints to keep; 0: all."""

    tensorboard: bool = False
    """Write TensorBoard events to OUT/tensorboard too."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimiser step, over all micro-batches and processes."""
        return self.batch_size * self.sequence_length

    def to_json(self) -> str:
        """Return the config as JSON text, which `read_config` reads."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def difference(self, other: Self) -> dict[str, tuple[Any, Any]]:
        """Return the fields that change what is computed, with both values."""
        changed = {
            name: (own, theirs)
            for name, own in vars(self).items()
            if own != (theirs := getattr(other, name)) and name not in WITHOUT_EFFECT_ON_WEIGHTS
        }
        if None not in changed.get("logit_cache", ()):  # both have one, in different folders
            changed.pop("logit_cache", None)
        return changed


WITHOUT_EFFECT_ON_WEIGHTS = (
    *("data", "out", "validation_every", "validation_tokens", "layer_metrics_every"),
    *("checkpoint_every", "keep_checkpoints", "tensorboard"),
)
"""Fields that may change between the parts of one run: the data is compared by its content instead."""


def read_config(run: Path, name: str = "config.json") -> TrainConfig:
    """Read the config of a run folder, or by another `name` that of a checkpoint.

    Raises `UserError` when the folder holds no run, or its config is damaged or of another version.
    """
    path = run / name
    if not path.is_file():
        raise UserError(f"{run} is not a run folder: it has no {name}")
    values = read_json(path)
    if "model_type" in values:
        raise UserError(f"{path} is that of a model, not of a run; choose another folder")
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    if wrong := sorted(names ^ values.keys()):
        raise UserError(
            f"{path}: missing or unknown keys {', '.join(wrong)} (written by another version?)"
        )
    return TrainConfig(**values)


_BOUNDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "steps batch_size sequence_length learning_rate epsilon temperature top_logits threads "
        "vocab_size loss_chunk_tokens",
        lambda value: value > 0,
        "must be above 0",
    ),
    (
        "steps batch_size seed data_seed vocab_size",
        lambda value: abs(value) < 2**63,
        "is too large",
    ),
    ("threads", lambda value: value <= MOST_THREADS, f"at most {MOST_THREADS:,}"),
    (
        "sparse_fraction warmup_fraction decay_fraction",
        lambda value: 0 <= value <= 1,
        "must lie in 0..1",
    ),
    ("beta1 beta2", lambda value: 0 <= value < 1, "must lie in 0..1, below 1"),
    (
        "validation_every validation_tokens layer_metrics_every checkpoint_every keep_checkpoints "
        "lora reconstruction_windows weight_decay final_weight_decay_fraction gradient_clip "
        "final_learning_rate_fraction ce_weight logits_weight",
        lambda value: value >= 0,
        "cannot be negative",
    ),
)
"""(fields, whether a value is in bounds, what is wrong otherwise)."""

_NEEDS = {
    "init": "lora",
    "teacher": "logit_cache temperature ce_weight logits_weight reconstruction_windows",
    "logit_cache": "top_logits",
    "logits_weight": "logit_cache temperature",
}
"""Field -> those fields that have no effect without it, unless they are at their defaults."""


def _check(config: TrainConfig) -> None:
    """Raise `UserError` that names the field and says what it may be."""
    values: dict[str, Any] = vars(config)
    number = {int: numbers.Integral, float: numbers.Real}
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        value, kinds = values[field.name], typing.get_args(hint) or (hint,)
        if typing.get_origin(hint) is Literal:
            if value not in kinds:
                raise UserError(f"{field.name}={value}: choose one of {kinds}")
        elif not isinstance(value, tuple(number.get(each, each) for each in kinds)):
            words = " or ".join(each.__name__ for each in kinds).replace("NoneType", "null")
            raise UserError(f"{field.name}={value!r}: must be of type {words}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{field.name}={value}: must be a finite number")
    for names, holds, reason in _BOUNDS:
        for name in names.split():
            if (value := values[name]) is not None and not holds(value):
                raise UserError(f"{name}={value}: {reason}")
    for other, names in _NEEDS.items():
        for name in names.split():
            if values[name] != getattr(TrainConfig, name) and not values[other]:
                raise UserError(
                    f"{name}={values[name]} has no effect without --{other.replace('_', '-')}: add "
                    "that option, or leave this one out"
                )
    if not (config.ce_weight or config.logits_weight):
        raise UserError("--ce-weight and --logits-weight are both 0: raise one")
    if config.schedule == "wsd" and config.warmup_fraction + config.decay_fraction > 1:
        raise UserError("--warmup-fraction and --decay-fraction add up to more than 1: lower one")
    batch, micro = config.batch_size, config.micro_batch_size
    if micro is not None and (micro < 1 or batch % micro):
        raise UserError(f"micro_batch_size={micro} does not divide batch_size={batch}")
