# SPDX-License-Identifier: Apache-2.0
"""A checkpoint: all it takes to go on as if never stopped, from any number of processes to any other.

    sharded/          torch.distributed.checkpoint: "model/<parameter>", "exp_avg/<parameter>" and
                      "exp_avg_sq/<parameter>", float32; "mask/<layer>", the words of its last mask;
                      "rng/cpu", "rng/cuda"; every process writes its rows
    model/            config.json, generation_config.json: what a model folder has beside its weights
    train_config.json, state.json    the resolved TrainConfig; step, data, version, checksums

The rows are copied to the CPU's memory and written while training goes on. The folder gets its name from
the first process when every file is on the disk; only then are older checkpoints dropped.
"""

import os
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from sparse_bitnet.checkpoint.consolidate import MOMENTS, first_reason, read_tensors
from sparse_bitnet.checkpoint.saved_steps import (
    FOLDER,
    MODEL_FOLDER,
    SavedStep,
    check_state,
    checkpoint_path,
    checksums,
    damage,
    drop_old,
    list_checkpoints,
    quarantine,
    write_state,
)
from sparse_bitnet.errors import UserError, os_errors_as
from sparse_bitnet.files import TEMPORARY_PREFIX, sync_tree
from sparse_bitnet.nn.layer import SparseBitLinear
from sparse_bitnet.ops.mask_words import word_dtype
from sparse_bitnet.progress import say
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.distributed import World
from sparse_bitnet.training.row_shard import local_rows
from sparse_bitnet.training.sharding import split_like

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything of a run that changes from step to step."""

    parameters: dict[str, torch.nn.Parameter]
    layers: dict[str, SparseBitLinear]
    optimizer: torch.optim.Optimizer

    def tensors(self) -> dict[str, Tensor]:
        """By key, as parts of whole tensors where they are split; all but "rng/" share their memory."""
        found: dict[str, Tensor] = {"rng/cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            found["rng/cuda"] = torch.cuda.get_rng_state()
        for name, parameter in self.parameters.items():
            found[f"model/{name}"] = split_like(local_rows(parameter), parameter)
            moments = self.optimizer.state.get(parameter, {})
            for moment in MOMENTS:
                if moment in moments:
                    found[f"{moment}/{name}"] = split_like(local_rows(moments[moment]), parameter)
        for name, layer in self.layers.items():
            if layer.input_norm is not None:
                found[f"model/{name}.input_norm"] = layer.input_norm
            if layer.mask_words is not None:
                found[f"mask/{name}"] = split_like(layer.mask_words, layer.weight)
        return found

    def allocate_(self, step: int) -> None:
        """Make what `tensors` names before a first step has: moments and masks, without values."""
        for parameter in self.parameters.values():
            if not parameter.requires_grad:
                continue
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(step), device=local_rows(parameter).device),
                **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
            }
        for layer in self.layers.values():
            m = layer.config.pattern.m
            rows = local_rows(layer.weight)
            if not layer.config.pattern.is_dense:
                layer.mask_words = rows.new_zeros(
                    (len(rows), layer.in_features // m), dtype=word_dtype(m)
                )


def model_files(model: "PreTrainedModel") -> dict[str, str]:
    """The files that `save_pretrained` writes beside the weights, by name; of a model that is whole."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    files = {"config.json": model.config.to_json_string()}
    if model.generation_config is not None:
        files["generation_config.json"] = model.generation_config.to_json_string()
    return files


class CheckpointWriter:
    """Writes the checkpoints of a run from all its processes, one at a time, in the background."""

    def __init__(
        self,
        run: Path,
        world: World,
        config: TrainConfig,
        data_identity: dict[str, Any],
        files: dict[str, str],
        state: RunState,
    ) -> None:
        """`run`: its folder; `files` are the `model_files`."""
        self.run, self.world, self.config = run, world, config
        self.data_identity, self.files, self.state = data_identity, files, state
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        # A single process may save alone.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

    def save(self, step: int) -> None:
        """Copy the state after `step` and write it while training goes on.

        Raises what the previous save ended with, see `wait`.
        """
        self.wait()
        path = checkpoint_path(self.run, step)
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
        self.world.on_main(lambda: self._begin(path, temporary))
        written = dcp.async_save(
            self.state.tensors(),
            storage_writer=dcp.FileSystemWriter(str(temporary / FOLDER)),
            process_group=self.world.background_group,
            no_dist=self.world.mesh is None,
        )
        assert isinstance(written, Future)
        self._pending = self._thread.submit(self._complete, step, path, temporary, written)

    def wait(self) -> None:
        """Until the save under way has ended.

        Raises `UserError`, in all processes, when it failed in any; older checkpoints are untouched.
        """
        if (pending := self._pending) is not None:
            self._pending = None
            pending.result()

    def close(self) -> None:
        """End a save under way: of several processes some may be gone, and it goes on by itself."""
        self._thread.shutdown(wait=self.world.size == 1)

    def _begin(self, path: Path, temporary: Path) -> None:
        with os_errors_as(f"cannot write {path}"):
            shutil.rmtree(temporary, ignore_errors=True)
            try:
                (temporary / FOLDER).mkdir(parents=True)
                (temporary / MODEL_FOLDER).mkdir()
                for name, text in self.files.items():
                    (temporary / MODEL_FOLDER / name).write_text(text, encoding="utf-8")
                (temporary / "train_config.json").write_text(
                    self.config.to_json(), encoding="utf-8"
                )
            except OSError:
                shutil.rmtree(temporary, ignore_errors=True)
                raise

    def _complete(self, step: int, path: Path, temporary: Path, written: "Future[Any]") -> None:
        main, shards = self.world.is_main, temporary / FOLDER
        try:
            self._together(path, written.result)
            own = [*shards.glob(f"__{self.world.rank}_*")]
            if main:
                own += [*shards.glob(".metadata"), *(temporary / MODEL_FOLDER).iterdir()]
            sums = self._together(path, lambda: checksums(temporary, own))
            files = {name: crc for part in sums for name, crc in part.items()}
            self._together(
                path, lambda: self._rename(temporary, path, step, files) if main else None
            )
        except UserError:
            if main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _rename(self, temporary: Path, path: Path, step: int, files: dict[str, str]) -> None:
        write_state(temporary, step, self.data_identity, files)
        sync_tree(temporary)
        shutil.rmtree(path, ignore_errors=True)
        os.rename(temporary, path)
        drop_old(self.run, self.config.keep_checkpoints)

    def _together(self, path: Path, function: Callable[[], T]) -> list[T]:
        """What `function` returns in each process; the `UserError` of any is raised in all."""
        result, reason, where = None, None, self.world.rank
        try:
            result = function()
        except OSError as error:
            reason = error.strerror or str(error)
        except CheckpointException as error:
            # Of any process: all get the same.
            reason, where = first_reason(error), next(iter(error.failures), where)
        outcomes: list[Any] = [(result, reason, where)]
        if self.world.background_group is not None:
            outcomes *= self.world.size
            dist.all_gather_object(outcomes, outcomes[0], group=self.world.background_group)
        for _, reason, where in outcomes:
            if reason is not None:
                rank = f" (rank {where})" if self.world.size > 1 else ""
                self.world.fail(f"cannot write {path}: {reason}{rank}")
        return [result for result, _, _ in outcomes]


def restore(run: Path, state: RunState, world: World, data_identity: dict[str, Any]) -> int:
    """Continue from the newest intact checkpoint; returns its step, 0 without one.

    Raises `UserError` when checkpoints are there but none is intact, or of other data or another model.
    """

    def find() -> list[SavedStep]:
        with os_errors_as(f"cannot read {run}"):
            return list_checkpoints(run)

    listed = world.on_main(find)
    for number, checkpoint in reversed(list(enumerate(listed))):
        # Each process reads its share of the files.
        parts = world.each(partial(damage, checkpoint, world.rank, world.size))
        what = next((found for found in parts if found is not None), None)
        if what is None:
            load(checkpoint, state, world, data_identity)
            return checkpoint.step
        if number == 0:
            raise UserError(
                f"{checkpoint.path}: {what}; no checkpoint of the run is intact: restore one, or "
                "remove the run folder to start over"
            )
        if world.is_main:
            quarantine(checkpoint)
            older = listed[number - 1].path.name
            say(f"{checkpoint.path}: {what}; quarantined, going on from {older}")
    return 0


def load(
    checkpoint: SavedStep, state: RunState, world: World, data_identity: dict[str, Any]
) -> None:
    """Put parameters, optimiser, last masks and random state back as they were after that step.

    Raises `UserError` for other data, or when the files are unreadable or of another model.
    """
    check_state(checkpoint, data_identity)
    state.allocate_(checkpoint.step)
    tensors = state.tensors()
    read_tensors(checkpoint, tensors, world.background_group, no_dist=world.mesh is None)
    for name, parameter in state.parameters.items():
        if f"{MOMENTS[0]}/{name}" not in tensors:  # no step has given it a gradient
            state.optimizer.state.pop(parameter, None)
    if "rng/cpu" in tensors:
        torch.set_rng_state(tensors["rng/cpu"])
    if "rng/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng/cuda"])
