"""What a set of runs would take before any of it is trained: memory, tokens, FLOPs and hours.

Estimates, from formulas stated here, for choosing hardware; nothing is run. The mask is simulated with
dense products in training, so dense and sparse models take the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparse_bitnet.experiments.paper import Run
from sparse_bitnet.experiments.scales import Scale
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.presets import PRESETS
from sparse_bitnet.training import plan
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.plan import UTILISATION

if TYPE_CHECKING:
    from rich.console import Console

GPUS = {name.upper(): gpu.flops for name, gpu in plan.GPUS.items()}
"""Dense bfloat16 FLOP/s of the SXM boards, from the makers' data sheets."""


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
    """From shapes alone, on one GPU; `training.plan` states the formulas."""
    shape, format = PRESETS[config.model], SparseBitConfig.parse(config.format)
    block, embedding, _ = plan.parameter_counts(shape, vocab_size)
    tokens = config.steps * config.tokens_per_step
    rows = config.micro_batch_size or config.batch_size

    def activations(checkpointing: bool) -> int:
        return plan.activation_bytes(
            shape,
            format,
            rows * config.sequence_length,
            vocab_size=vocab_size,
            checkpointing=checkpointing,
            chunk_tokens=config.loss_chunk_tokens or plan.LOSS_CHUNK,
        )

    return Estimate(
        tokens=tokens,
        weights=block + embedding,
        flops=float(tokens) * plan.flops_per_token(shape, config.sequence_length, vocab_size),
        state_bytes=plan.state_bytes(shape, format, vocab_size),
        activation_bytes=activations(False),
        checkpointed_bytes=activations(True),
    )


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
