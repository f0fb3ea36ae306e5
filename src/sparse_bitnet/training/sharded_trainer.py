"""The trainer of one process among several: a sharded model, sums over all, one set of files."""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor

from sparse_bitnet.checkpoint import saved_steps
from sparse_bitnet.checkpoint.saved_steps import Checkpoint
from sparse_bitnet.hub import save_pretrained
from sparse_bitnet.training.distributed import copy_whole_, gather_once_, reshard_, shard_model_
from sparse_bitnet.training.sharded_checkpoint import (
    RunTensors,
    ShardedSaver,
    load_sharded,
    load_whole,
)
from sparse_bitnet.training.sharded_linear import gathered_bytes, sharded_layers
from sparse_bitnet.training.trainer import Trainer, say

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ShardedTrainer(Trainer):
    """What differs from a single process. Losses, norms and decisions are the same in all of them."""

    def _place(self, model: "PreTrainedModel") -> "PreTrainedModel":
        self._prepare(model)
        described = _describe(model)
        shard_model_(model, self.world, self.device, self.dtype)
        self.parameters = dict(model.named_parameters())
        self.saver = ShardedSaver(
            self.run, self.world, self.config, self.dataset.identity(), described
        )
        self.stop_requested = False
        return model

    def _restore(self) -> int:
        world = self.world
        listed = world.on_main(lambda: saved_steps.list_checkpoints(self.run))

        def find_damage(checkpoint: Checkpoint) -> str | None:
            parts = world.gather(saved_steps.damage(checkpoint, world.rank, world.size))
            return next((found for found in parts if found is not None), None)

        def put_aside(checkpoint: Checkpoint, message: str) -> None:
            if world.is_main:
                saved_steps.rename_damaged(checkpoint)
                say(message)

        found = saved_steps.newest_intact(listed, find_damage, put_aside)
        if found is None:
            return 0
        load = load_sharded if found.is_sharded else load_whole
        load(found, self._tensors(), world, self.dataset.identity())
        return found.step

    def _tensors(self) -> RunTensors:
        return RunTensors(parameters=self.parameters, layers=self.layers, optimizer=self.optimizer)

    def _forward_backward(self, step: int) -> float:
        loss = super()._forward_backward(step)
        for layer in sharded_layers(self.model):
            layer.mask_gradient_()
        mine = torch.tensor(
            [loss, float(self.stop.received)], dtype=torch.float64, device=self.device
        )
        total, stops = self.world.sum(mine).tolist()
        self.stop_requested = stops > 0
        self.world.progress(step)
        return total

    def _loss(self, input_ids: torch.Tensor, labels: torch.Tensor, *, last: bool) -> torch.Tensor:
        gather_once_(self.model, last)
        return self.world.loss(
            self.model, input_ids, labels, chunk_tokens=self.config.loss_chunk_tokens
        )

    def _backward(self, loss: torch.Tensor) -> None:
        # The gradients are averaged over the processes; the loss is already divided by all tokens.
        (loss * self.world.size).backward()

    def _clip_gradient(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(
            self.parameters.values(), self.config.gradient_clip or float("inf")
        )
        return cast(DTensor, norm).full_tensor().item()

    def _communication(self) -> dict[str, Any]:
        received, dense = gathered_bytes(self.model)
        return {"gathered_bytes": received, "gathered_bytes_as_bf16": dense}

    def _stopping(self) -> bool:
        return self.stop_requested

    def _save(self, step: int) -> None:
        self.saver.save(step, self._tensors())

    def _settle(self) -> None:
        self.saver.wait()

    def _validate(self, step: int) -> dict[str, Any]:
        row = super()._validate(step)
        reshard_(self.model)
        gathered_bytes(self.model)
        return row

    def _last_row(self) -> dict[str, Any]:
        return self.world.on_main(super()._last_row)

    def _export(self) -> None:
        plain = self._build_model() if self.world.is_main else None
        copy_whole_(plain, self.parameters)
        self.world.on_main(
            lambda: save_pretrained(
                cast("PreTrainedModel", plain), self.run / "final", self.tokenizer
            )
        )


def _describe(model: "PreTrainedModel") -> dict[str, str]:
    """The files that `save_pretrained` writes beside the weights, by name; before the model is split,
    since then its class is another."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    files = {"config.json": model.config.to_json_string()}
    if model.generation_config is not None:
        files["generation_config.json"] = model.generation_config.to_json_string()
    return files
