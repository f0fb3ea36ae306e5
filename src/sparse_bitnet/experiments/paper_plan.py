"""What a set of runs would take before any of it is trained: memory, tokens, FLOPs and hours.

Estimates, from formulas stated here, for choosing hardware; nothing is run. The mask is simulated with
dense products in training, so dense and sparse models take the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparse_bitnet.experiments.paper import Run
from sparse_bitnet.experiments.scales import Scale
from sparse_bitnet.models import PRESETS, Shape
from sparse_bitnet.training.config import TrainConfig

if TYPE_CHECKING:
    from rich.console import Console

GPUS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bfloat16 FLOP/s of the SXM boards, from the makers' data sheets."""

UTILISATION = 0.4
"""Share of those that a well-tuned training run of dense models reaches (MFU)."""

# float32 master, gradient and two Adam moments; int8 codes and a bool mask of block weights.
_BYTES_PER_WEIGHT = 16
_BYTES_PER_BLOCK_WEIGHT = 2

# Of a vocabulary as large as Qwen2.5's, where the config leaves it open.
_LOSS_CHUNK = 512


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One run of one model size."""

    tokens: int
    weights: int
    flops: float
    state_bytes: int
    """Weights, gradients, optimiser, codes and masks."""

    activation_bytes: int
    """Of one micro-batch, its chunk of logits included."""

    checkpointed_bytes: int
    """The same with activation checkpointing."""

    def hours(self, gpu: str, utilisation: float = UTILISATION) -> float:
        """On one GPU; n of them take the n-th part as long as communication stays hidden."""
        return self.flops / (GPUS[gpu] * utilisation) / 3600


def estimate(config: TrainConfig, vocab_size: int | None = None) -> Estimate:
    """From shapes alone.

    FLOPs are 6 per token and weight (the tied head included, the look-up not) and 6 per token, layer,
    channel and token of context for causal attention, forward and backward together. Activations are
    those kept for the backward pass: 16 bytes per token, layer and channel of the residual stream, 11
    per channel of the MLP; with activation checkpointing the residual stream alone and one layer.
    """
    shape = PRESETS[config.model]
    vocab = vocab_size or shape.vocab_size
    weights = shape.block_weights + shape.hidden_size * vocab
    tokens = config.steps * config.tokens_per_step
    attention = 6 * shape.num_hidden_layers * shape.hidden_size * config.sequence_length
    return Estimate(
        tokens=tokens,
        weights=weights,
        flops=float(tokens) * (6 * weights + attention),
        state_bytes=_BYTES_PER_WEIGHT * weights + _BYTES_PER_BLOCK_WEIGHT * shape.block_weights,
        activation_bytes=_activation_bytes(config, shape, vocab, checkpointing=False),
        checkpointed_bytes=_activation_bytes(config, shape, vocab, checkpointing=True),
    )


def _activation_bytes(config: TrainConfig, shape: Shape, vocab: int, *, checkpointing: bool) -> int:
    rows = config.micro_batch_size or config.batch_size
    tokens = rows * config.sequence_length
    layer = 16 * shape.hidden_size + 11 * shape.intermediate_size
    if checkpointing:
        kept = 2 * shape.hidden_size * shape.num_hidden_layers + layer
    else:
        kept = layer * shape.num_hidden_layers
    chunk = min(config.loss_chunk_tokens or _LOSS_CHUNK, tokens)
    return tokens * kept + 8 * chunk * vocab


def print_estimates(scale: Scale, runs: Sequence[Run], console: "Console") -> None:
    """Runs by model size with what each would take, and the sum."""
    from rich import box
    from rich.table import Table

    vocab = scale.text.vocab_size
    by_model: dict[str, list[Run]] = {}
    for run in runs:
        by_model.setdefault(run.config.model, []).append(run)
    table = Table(title=f"Scale {scale.name}: {scale.summary}", box=box.SIMPLE_HEAD)
    table.add_column("model")
    for column in ("runs", "tokens each", "tokens/weight", "FLOPs each"):
        table.add_column(column, justify="right")
    for column in ("state GiB", "activations", "checkpointed"):
        table.add_column(column, justify="right")
    for gpu in GPUS:
        table.add_column(f"{gpu} h", justify="right")
    totals = dict.fromkeys(GPUS, 0.0)
    for model, found in by_model.items():
        one = estimate(found[0].config, vocab)
        sizes = (one.state_bytes, one.activation_bytes, one.checkpointed_bytes)
        for gpu in GPUS:
            totals[gpu] += len(found) * one.hours(gpu)
        table.add_row(
            model,
            str(len(found)),
            f"{one.tokens:.3g}",
            f"{one.tokens / one.weights:.1f}",
            f"{one.flops:.2g}",
            *(f"{size / 2**30:.1f}" for size in sizes),
            *(f"{one.hours(gpu):,.2f}" for gpu in GPUS),
        )
    table.add_section()
    table.add_row("all runs", str(len(runs)), *[""] * 6, *(f"{h:,.1f}" for h in totals.values()))
    console.print(table)
    console.print(
        f"Hours on one GPU at {100 * UTILISATION:.0f} % of its dense bfloat16 rate. State: float32 "
        "masters, gradients and AdamW moments, codes and masks; activations: GiB of one micro-batch "
        "(all of the run's, and with --activation-checkpointing).",
        style="dim",
        highlight=False,
    )
    for run in runs:
        console.print(f"  {run.name}  {run.purpose}", highlight=False, soft_wrap=True)
