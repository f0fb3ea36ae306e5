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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from sparse_bitnet.checkpoint import saved_steps
from sparse_bitnet.checkpoint.consolidate import MOMENTS, first_reason, read_tensors
from sparse_bitnet.checkpoint.saved_steps import FOLDER, MODEL_FOLDER, SavedStep
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import TEMPORARY_PREFIX, sync_tree
from sparse_bitnet.nn.convert import sparse_layers
from sparse_bitnet.ops.mask_words import word_dtype
from sparse_bitnet.progress import say
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.distributed import World
from sparse_bitnet.training.sharded_linear import local_rows
from sparse_bitnet.training.sharding import split_like

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")


def model_files(model: "PreTrainedModel") -> dict[str, str]:
    """The files that `save_pretrained` writes beside the weights of a whole model, by name."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    files = {"config.json": model.config.to_json_string()}
    if model.generation_config is not None:
        files["generation_config.json"] = model.generation_config.to_json_string()
    return files


class RunCheckpoints:
    """The checkpoints of a run: restores the newest, and writes one at a time from all its processes, in
    the background."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        model: "PreTrainedModel",
        optimizer: torch.optim.Optimizer,
        *,
        files: dict[str, str],
        data_identity: dict[str, Any],
    ) -> None:
        """`files` are the `model_files`; `data_identity` is that of the training data."""
        self.config, self.world, self.run = config, world, Path(config.out)
        self.parameters, self.layers = dict(model.named_parameters()), sparse_layers(model)
        self.optimizer, self.files, self.data_identity = optimizer, files, data_identity
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        # A single process may save alone.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that changes from step to step, by key, as parts of whole tensors where they are
        split; all but "rng/" share their memory."""
        state: dict[str, Tensor] = {"rng/cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["rng/cuda"] = torch.cuda.get_rng_state()
        for name, parameter in self.parameters.items():
            state[f"model/{name}"] = split_like(local_rows(parameter), parameter)
            moments = self.optimizer.state.get(parameter, {})
            for moment in MOMENTS:
                if moment in moments:
                    state[f"{moment}/{name}"] = split_like(local_rows(moments[moment]), parameter)
        for name, layer in self.layers.items():
            if layer.input_norm is not None:
                state[f"model/{name}.input_norm"] = layer.input_norm
            if layer.mask_words is not None:
                state[f"mask/{name}"] = split_like(layer.mask_words, layer.weight)
        return state

    def restore(self) -> int:
        """Continue from the newest intact checkpoint; returns its step, 0 without one.

        Raises `UserError` when checkpoints are there but none is intact, or of other data or another
        model.
        """
        listed = self.world.on_main(lambda: saved_steps.list_checkpoints(self.run))
        for number, checkpoint in reversed(list(enumerate(listed))):
            # Each process reads its share of the files.
            parts = self.world.each(
                partial(saved_steps.damage, checkpoint, self.world.rank, self.world.size)
            )
            what = next((each for each in parts if each is not None), None)
            if what is None:
                self._load(checkpoint)
                return checkpoint.step
            if number == 0:
                raise UserError(
                    f"{checkpoint.path}: {what}; no checkpoint of the run is intact: restore one, or "
                    "remove the run folder to start over"
                )
            if self.world.is_main:
                saved_steps.quarantine(checkpoint)
                older = listed[number - 1].path.name
                say(f"{checkpoint.path}: {what}; quarantined, going on from {older}")
        return 0

    def _load(self, checkpoint: SavedStep) -> None:
        """Put parameters, optimiser, last masks and random state back as they were after that step.

        Raises `UserError` for other data, or when the files are unreadable or of another model.
        """
        saved_steps.check_state(checkpoint, self.data_identity)
        # What `tensors` names only after a first step.
        for parameter in self.parameters.values():
            if parameter.requires_grad:
                step = torch.tensor(float(checkpoint.step), device=local_rows(parameter).device)
                moments = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
                self.optimizer.state[parameter] = {"step": step, **moments}
        for layer in self.layers.values():
            m, rows = layer.config.pattern.m, local_rows(layer.weight)
            if not layer.config.pattern.is_dense:
                layer.mask_words = rows.new_zeros(
                    (len(rows), layer.in_features // m), dtype=word_dtype(m)
                )
        tensors, group = self.tensors(), self.world.background_group
        read_tensors(checkpoint, tensors, group, no_dist=self.world.mesh is None)
        for name, parameter in self.parameters.items():
            if f"{MOMENTS[0]}/{name}" not in tensors:  # no step has given it a gradient
                self.optimizer.state.pop(parameter, None)
        if "rng/cpu" in tensors:
            torch.set_rng_state(tensors["rng/cpu"])
        if "rng/cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng/cuda"])

    def save(self, step: int) -> None:
        """Copy the state after `step` and write it while training goes on.

        Raises what the previous save ended with, see `wait`.
        """
        self.wait()
        path = saved_steps.checkpoint_path(self.run, step)
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
        written = dcp.async_save(
            self.tensors(),
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

    def _complete(self, step: int, path: Path, temporary: Path, written: "Future[Any]") -> None:
        def together(function: Callable[[], T]) -> list[T]:
            """Return its results in all processes; a `UserError` names the one that failed."""

            def named() -> T:
                try:
                    return function()
                except (OSError, CheckpointException) as error:
                    reason = getattr(error, "strerror", None) or first_reason(error)
                    # All processes get the same CheckpointException.
                    rank = next(iter(getattr(error, "failures", ())), self.world.rank)
                    where = f" (rank {rank})" if self.world.size > 1 else ""
                    raise UserError(f"cannot write {path}: {reason}{where}") from error

            return self.world.each(named, self.world.background_group)

        def own_checksums() -> dict[str, str]:
            own = [*(temporary / FOLDER).glob(f"__{self.world.rank}_*")]
            if self.world.is_main:
                (temporary / MODEL_FOLDER).mkdir()
                files = {f"{MODEL_FOLDER}/{name}": text for name, text in self.files.items()}
                for name, text in {**files, "train_config.json": self.config.to_json()}.items():
                    (temporary / name).write_text(text, encoding="utf-8")
                own += [temporary / name for name in (*files, f"{FOLDER}/.metadata")]
            return saved_steps.checksums(temporary, own)

        def publish() -> None:
            if self.world.is_main:
                files = {name: crc for part in sums for name, crc in part.items()}
                saved_steps.write_state(temporary, step, self.data_identity, files)
                sync_tree(temporary)
                shutil.rmtree(path, ignore_errors=True)
                os.rename(temporary, path)
                saved_steps.drop_old(self.run, self.config.keep_checkpoints)

        try:
            together(written.result)
            sums = together(own_checksums)
            together(publish)
        except UserError:
            if self.world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
