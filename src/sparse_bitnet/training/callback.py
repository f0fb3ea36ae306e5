# SPDX-License-Identifier: Apache-2.0
"""A callback of `transformers.Trainer` that selects masks and codes once per step, by the schedule.

    model = convert_(AutoModelForCausalLM.from_pretrained(...), SparseBitConfig())
    Trainer(model=model, callbacks=[SparseBitCallback()], ...).train()

Without it, every forward, recomputed ones included, computes masks and codes again, nothing is logged,
and the format's schedule and a score's gradient and input norms are not applied.
"""

from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback, TrainerState

from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import end_step_, selected, set_phase_, sparse_layers
from sparse_bitnet.training.metrics import selection_counts, selection_metrics
from sparse_bitnet.training.schedule import phase_at


class SparseBitCallback(TrainerCallback):
    """Callback of `transformers.Trainer` that selects mask and codes once per optimiser step, by the
    schedule of the format. Between steps, as in evaluations, the model is in its full format.

    Every training log gets `flip_rate` (share of mask positions that changed since the step before, from
    the second step on) and `zero_fraction` (share of zeros among the effective weights), both of the
    last step and over all sparse layers together. Trainer's own reporters (`report_to`) see them if this
    callback is first in `trainer.callback_handler.callbacks`.

    A score's extra gradient (SR-STE) is added after Trainer has clipped the gradients; our own loop
    clips the sum.

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

    def on_step_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        layers = sparse_layers(model)
        for layer in layers.values():
            set_phase_([layer], *phase_at(layer.config, state.global_step + 1, state.max_steps))
        # Trainer calls this only inside the step; in evaluation mode flips would not be counted.
        model.train()
        self._selection.enter_context(selected(model))
        rates = selection_metrics(layers, selection_counts(layers).tolist(), by_layer=False)
        self._metrics = {name: value for name, value in rates.items() if value is not None}

    def on_pre_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        end_step_(sparse_layers(kwargs["model"]).values(), _sum_over_processes)

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        self._selection.close()
        set_phase_(sparse_layers(kwargs["model"]).values(), None)

    on_train_end = on_step_end  # a callback may have ended the step halfway

    def on_log(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:
            logs.update(self._metrics)
            state.log_history[-1].update(self._metrics)


def _sum_over_processes(value: Tensor) -> Tensor:
    """Sum a tensor over all processes in place; with one process return it unchanged."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value)
    return value
