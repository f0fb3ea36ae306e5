# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step, the files that hold them, and a sample of the model's text.

`metrics.jsonl` holds what the seed determines, so two runs of one config write the same bytes;
`timing.jsonl` holds what the machine determines.
"""

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparse_bitnet.errors import UserError, os_errors_as
from sparse_bitnet.files import write_atomic
from sparse_bitnet.nn.convert import evaluation_mode, selected
from sparse_bitnet.nn.layer import SparseBitLinear
from sparse_bitnet.nn.ternary_tables import rounded_tables

METRICS_FILE = "metrics.jsonl"
TIMING_FILE = "timing.jsonl"
QUESTION = "Why is the sky blue?"


def selection_counts(
    layers: dict[str, SparseBitLinear], total: Callable[[Tensor], Tensor] = lambda counts: counts
) -> Tensor:
    """Return for each selected layer its zeros among the effective weights, and the positions in which
    its mask differs from the step before; int64 [2, layers], on their device.

    Effective weights are codes, or masked full-precision weights. `total` sums counts over the processes
    that hold the layers' rows. `selection_metrics` turns the counts into rates once the host may wait.
    """
    none = torch.zeros((), dtype=torch.int64, device=next(iter(layers.values())).weight.device)
    zeros, flips = [], []
    for layer in layers.values():
        chosen = layer.current
        values = chosen and (chosen.mask if chosen.codes is None else chosen.codes)
        zeros.append(none if values is None else values.numel() - torch.count_nonzero(values))
        flips.append(none if layer.mask_flips is None else layer.mask_flips)
    return total(torch.stack([*zeros, *flips])).view(2, -1)


def selection_metrics(
    layers: dict[str, SparseBitLinear], counts: Sequence[Sequence[float]], by_layer: bool
) -> dict[str, Any]:
    """Return flip rate and zero fraction over all selected layers together, and per layer on request.

    flip_rate is None until a mask has a predecessor; 0 for a dense model. `counts` come from
    `selection_counts` in the same step.
    """
    sizes = {name: layer.weight.numel() for name, layer in layers.items()}
    zeros, flips = counts
    flipped = {
        name: int(count)
        for (name, layer), count in zip(layers.items(), flips, strict=True)
        if layer.mask_flips is not None
    }
    masked = any(layer.mask_words is not None for layer in layers.values())
    size = sum(sizes.values())
    row: dict[str, Any] = {
        "flip_rate": sum(flipped.values()) / size if flipped or not masked else None,
        "zero_fraction": int(sum(zeros)) / size,
    }
    if by_layer and flipped:
        row["flip_rate_by_layer"] = {name: count / sizes[name] for name, count in flipped.items()}
    return row


@torch.no_grad()
def sample(model: Any, tokenizer: Any, text: list[int]) -> str:
    """Return what a model answers to `QUESTION`, or writes after `text` without a chat template for that:
    the prompt, and at most 40 likeliest tokens. Mode, masks, weights and random state stay."""
    shown, said = tokenizer.decode(text), list[int]()
    with contextlib.suppress(Exception):  # an untrusted template may raise anything
        chat = [{"role": "user", "content": QUESTION}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        text, shown = tokenizer(prompt, add_special_tokens=False)["input_ids"], QUESTION
    with evaluation_mode(model), selected(model), rounded_tables(model):
        ids, cached = text, dict[str, Any]()
        while len(said) < 40 and not np.isin(said[-1:], model.generation_config.eos_token_id).any():
            output = model(torch.tensor([ids], device=model.device), use_cache=True, **cached)
            said.append(int(output.logits[0, -1].argmax()))
            cached = {name: output[name] for name in ("past_key_values",) if name in output}
            ids = said[-1:] if cached else [*text, *said]  # with another cache, all again
    shown, answer = (" ".join(words.split()) for words in (shown, tokenizer.decode(said)))
    return f"{shown} ... {answer or '(white space)'}"


class JsonLines:
    """Appends one JSON object per line; opening it keeps whole lines up to `after_step` and drops the
    rest.

    A run that starts at step 0 repeats step 0, and a resumed run repeats what follows the last training
    step: with `at_end`, only the training's own row of `after_step` stays.
    """

    def __init__(self, path: Path, after_step: int, *, at_end: bool = False) -> None:
        bound = after_step - (at_end or not after_step)
        kept = (
            json.dumps(row) + "\n"
            for row in read_rows(path)
            if row["step"] <= bound or (row["step"] == after_step and "loss" in row)
        )
        write_atomic(path, "".join(kept))
        with os_errors_as(f"cannot write {path}"):
            self._file = open(path, "a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Append a row. Raises `UserError` when the disk is full."""
        with os_errors_as(f"cannot write {self._file.name}"):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file. Raises nothing: `write` has named the row that could not be written."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all whole rows of a JSON-lines file, without a last line cut short by a kill.

    Raises `UserError` that names a damaged line.
    """
    with os_errors_as(f"cannot read {path}"):
        content = path.read_bytes() if path.exists() else b""
    rows = []
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        if line.endswith(b"\n"):
            try:
                rows.append(json.loads(line))
                if not isinstance(rows[-1]["step"], int):
                    raise TypeError("no step")
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise UserError(f"{path}:{number} is damaged: remove that line") from error
    return rows


class TensorBoard:
    """Writes the numbers of every row as TensorBoard events."""

    def __init__(self, folder: Path, after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        first = after_step + bool(after_step)
        self._writer: Any = SummaryWriter(str(folder), purge_step=first)

    def write(self, row: dict[str, Any]) -> None:
        """Log the numbers of a row under its step."""
        by_layer = row.get("flip_rate_by_layer", {})
        named = row | {f"flip_rate/{name}": value for name, value in by_layer.items()}
        for name, value in named.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, float(value), row["step"])

    def close(self) -> None:
        """Write the buffered events."""
        self._writer.close()


def describe(row: dict[str, Any]) -> str:
    """Return one step's metrics and timing in a few words."""
    flip = "" if not row["flip_rate"] else f" flip {row['flip_rate']:.1e}"
    loss = "-" if row["loss"] is None else f"{row['loss']:.3f}"
    names = {"kl_divergence": "KL", "cross_entropy": "CE"}
    loss += "".join(f" {names[name]} {row[name]:.3f}" for name in names if name in row)
    return (
        f"loss {loss} lr {row['learning_rate']:.1e} norm {row['gradient_norm']:.2f}"
        f"{flip} {row['tokens_per_second']:,.0f} tok/s"
    )
