# SPDX-License-Identifier: Apache-2.0
"""The per-step selection as a callback of `transformers.Trainer`.

    model = convert_(AutoModelForCausalLM.from_pretrained(...), SparseBitConfig())
    Trainer(model=model, callbacks=[SparseBitCallback()], ...).train()

A converted model trains the same without it, but then every forward, recomputed ones included, selects
mask and codes again, and nothing is logged.
"""

from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback, TrainerState

from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import end_step_, selected, sparse_layers
from sparse_bitnet.training.metrics import selection_counts, selection_metrics


class SparseBitCallback(TrainerCallback):
    """Selects mask and codes once per optimiser step.

    Every training log gets `flip_rate` (share of mask positions that changed since the step before,
    from the second step on) and `zero_fraction` (share of zeros among the effective weights), both of
    the last step and over all sparse layers together. Trainer's own reporters (`report_to`) see them
    where this callback is put first in `trainer.callback_handler.callbacks`.

    What a selection adds to gradients (SR-STE) is added when Trainer has clipped them; our own loop clips
    the sum.

    Raises `UserError` at the start of training when the model holds no `SparseBitLinear`.
    """

    def __init__(self) -> None:
        self._selection = ExitStack()
        self._metrics: dict[str, float] = {}

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        self._selection.close()
        if not sparse_layers(kwargs["model"]):
            name = type(kwargs["model"]).__name__
            raise UserError(f"SparseBitCallback: {name} has no SparseBitLinear; use convert_ first")

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        # Trainer does so only inside the step; an evaluation mode would leave the flips uncounted.
        model.train()
        self._selection.enter_context(selected(model))
        layers = sparse_layers(model)
        rates = selection_metrics(layers, selection_counts(layers).tolist(), by_layer=False)
        self._metrics = {name: value for name, value in rates.items() if value is not None}

    def on_pre_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        end_step_(sparse_layers(kwargs["model"]).values(), _sum_over_processes)

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        self._selection.close()

    def on_log(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:
            logs.update(self._metrics)
            state.log_history[-1].update(self._metrics)


def _sum_over_processes(value: Tensor) -> Tensor:
    """In place; the value itself where there is one process."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value)
    return value
