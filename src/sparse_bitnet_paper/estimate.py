# SPDX-License-Identifier: Apache-2.0
"""What a set of runs takes: by runs that have ended here, a few timed steps, or shapes alone."""

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.presets import PRESETS
from sparse_bitnet.progress import duration
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.footprint import GPU_FLOPS as GPUS
from sparse_bitnet.training.footprint import UTILISATION, flops_per_token, parameter_counts
from sparse_bitnet_paper.result_row import ResultRow
from sparse_bitnet_paper.scales import Scale
from sparse_bitnet_paper.table import Table, print_table
from sparse_bitnet_paper.training_run import Run

if TYPE_CHECKING:
    from rich.console import Console

OVERHEAD = 1.1
"""Validation, checkpoints and measuring, over the optimiser steps alone."""


class Speed:
    """Seconds a run takes, from those that have ended: of its model, else by the size of the model."""

    def __init__(self, rows: Sequence[ResultRow]) -> None:
        self._seconds: dict[str, float] = {}
        self._cost: dict[str, float] = {}
        for row in rows:
            self.add(row)

    def add(self, row: ResultRow) -> None:
        """Count a run that has ended."""
        for key in (row.model, "any"):
            self._seconds[key] = self._seconds.get(key, 0.0) + row.seconds
            self._cost[key] = self._cost.get(key, 0.0) + _cost(row.model, row.tokens)

    def seconds(self, config: TrainConfig) -> float | None:
        """None before the first run has ended."""
        key = config.model if config.model in self._cost else "any"
        if key not in self._cost:
            return None
        return OVERHEAD * cost(config) * self._seconds[key] / self._cost[key]


def cost(config: TrainConfig) -> float:
    """Tokens times weights: comparable between models before any was timed."""
    return _cost(config.model, config.steps * config.tokens_per_step)


def _cost(model: str, tokens: int) -> float:
    shape = PRESETS[model]
    return float(tokens * (shape.block_weights + shape.hidden_size * shape.vocab_size))


def timed_seconds(config: TrainConfig, vocab_size: int | None) -> float:
    """Of a whole run alone on this machine, from its fastest step of three on random tokens."""
    import torch

    from sparse_bitnet.checkpoint.build_model import build_model
    from sparse_bitnet.training.device import autocast, resolve_device, resolve_dtype
    from sparse_bitnet.training.loss import SummedLoss
    from sparse_bitnet.training.optimizer import build_optimizer

    device, threads = resolve_device(config.device), torch.get_num_threads()
    used = config.threads or threads
    torch.set_num_threads(used)
    # Processor time, so that whatever else runs now does not count.
    clock = (lambda: time.process_time() / used) if device.type == "cpu" else time.monotonic
    format = SparseBitConfig.parse(config.format)
    model = build_model(config.model, format, seed=0, vocab_size=vocab_size)
    model.to(device)  # type: ignore[arg-type]
    optimizer, summed_loss = build_optimizer(model, config), SummedLoss(model)
    size = (config.batch_size, config.sequence_length + 1)
    tokens = torch.randint(vocab_size or model.config.vocab_size, size, device=device)
    taken = []
    for _ in range(3):
        began = clock()
        with autocast(device, resolve_dtype(config.precision, device)):
            loss = summed_loss(tokens[:, :-1], tokens[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        taken.append(clock() - began)
    torch.set_num_threads(threads)
    return OVERHEAD * config.steps * min(taken)


def parameters(config: TrainConfig, vocab_size: int | None = None) -> int:
    """Weights of the blocks and of the embedding."""
    return sum(parameter_counts(PRESETS[config.model], vocab_size)[:2])


def flops(config: TrainConfig, vocab_size: int | None = None) -> float:
    """Of a whole run; the mask is simulated with dense products, so it is the same for all formats."""
    a_token = flops_per_token(PRESETS[config.model], config.sequence_length, vocab_size)
    return float(config.steps * config.tokens_per_step) * a_token


def gpu_hours(config: TrainConfig, gpu: str, vocab_size: int | None = None) -> float:
    """On one GPU; n of them take the n-th part as long as communication stays hidden."""
    return flops(config, vocab_size) / (GPUS[gpu] * UTILISATION) / 3600


def print_plan(
    scale: Scale,
    runs: Sequence[Run],
    done: Collection[str],
    speed: Speed | None,
    workers: int,
    console: "Console",
) -> None:
    """Runs by model size, which of them are done, and what the others take.

    Args:
        done: names of runs that have a row.
        speed: of this machine, for minutes on it; None for hours on GPUs.
        workers: runs at once, for the minutes.
    """
    vocab = scale.text.vocab_size
    by_model: dict[str, list[Run]] = {}
    for run in runs:
        by_model.setdefault(run.config.model, []).append(run)
    lines, hours = [], []
    seconds_left = 0.0
    for model, found in by_model.items():
        config, left = found[0].config, [run for run in found if run.name not in done]
        tokens = config.steps * config.tokens_per_step
        line = [model, str(len(found)), str(len(found) - len(left)), f"{tokens:.3g}"]
        line.append(f"{tokens / parameters(config, vocab):.1f}")
        if speed is None:
            lines.append(line)
            hours.append([len(left) * gpu_hours(config, gpu, vocab) for gpu in GPUS])
        else:
            one = speed.seconds(config)
            if left and one is None:
                one = timed_seconds(config, vocab)
            seconds = len(left) * (one or 0.0) / workers
            seconds_left += seconds
            lines.append([*line, f"{seconds / 60:.1f}"])
    head = ("model", "runs", "done", "tokens", "a weight", *(("minutes",) if speed else ()))
    print_table(Table(head, lines), console, f"Scale {scale.name}: {scale.summary}")
    if speed is None:
        sums = [sum(column) for column in zip(*hours, strict=True)]
        body = [
            (name, *(f"{value:,.2f}" for value in line))
            for name, line in zip((*by_model, "all runs"), (*hours, sums), strict=True)
        ]
        head = ("model", *(f"{gpu} h" for gpu in GPUS))
        print_table(Table(head, body), console, "Hours of what is left on one GPU")
        note = f"At {100 * UTILISATION:.0f} % of the dense bfloat16 rate."
    else:
        note = f"About {duration(seconds_left)} left on this machine, {workers} runs at once."
    console.print(note, style="dim", highlight=False)
    for run in runs:
        mark = "done" if run.name in done else "    "
        console.print(f"{mark}  {run.name}", highlight=False, soft_wrap=True)
