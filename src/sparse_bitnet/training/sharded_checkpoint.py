"""Checkpoints of several processes: written beside the training, read by any number of processes.

    sharded/          torch.distributed.checkpoint: "model/<parameter>", "exp_avg/<parameter>",
                      "exp_avg_sq/<parameter>", float32, and "mask/<layer>", the bits of each row of
                      the last mask, packed; every process writes its rows
    model/            config.json, generation_config.json: what `consolidate` needs beside the weights
    train_config.json, state.json    as in `checkpoint`

All processes copy their rows to the CPU, train on, and write from a thread with a process group of its
own. The folder gets its name from the first process when every file is on the disk; only then are older
checkpoints dropped. A checkpoint of one process (`checkpoint`) is read here too, so a run may go on with
any number of processes, from any number.
"""

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from sparse_bitnet.checkpoint.consolidate import first_reason, read_shards
from sparse_bitnet.checkpoint.saved_steps import (
    FOLDER,
    MODEL_FOLDER,
    Checkpoint,
    check_state,
    checkpoint_path,
    checksums,
    drop_old,
    write_state,
)
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import TEMPORARY_PREFIX, sync_tree
from sparse_bitnet.layer import SparseBitLinear
from sparse_bitnet.training.checkpoint import MOMENTS
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.distributed import World
from sparse_bitnet.training.sharded_linear import local_rows

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunTensors:
    """Everything of a run that is saved, by name; parameters are DTensors where they are sharded."""

    parameters: dict[str, torch.nn.Parameter]
    layers: dict[str, SparseBitLinear]
    optimizer: torch.optim.Optimizer | None

    def saved(self) -> dict[str, tuple[Tensor, torch.nn.Parameter]]:
        """Key -> (this process's rows, the parameter that is split alike)."""
        found: dict[str, tuple[Tensor, torch.nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            found[f"model/{name}"] = (local_rows(parameter), parameter)
            moments = {} if self.optimizer is None else self.optimizer.state.get(parameter, {})
            for moment in MOMENTS:
                if moment in moments:
                    found[f"{moment}/{name}"] = (local_rows(moments[moment]), parameter)
        for name, layer in self.layers.items():
            if layer.mask is not None:
                bits = np.packbits(layer.mask.cpu().numpy(), axis=-1)
                found[f"mask/{name}"] = (torch.from_numpy(bits), self._weight(layer))
        return found

    def allocate_(self, step: int) -> None:
        """Make what `saved` names before a first step has: moments and masks, without values."""
        for parameter in self.parameters.values():
            if self.optimizer is not None and not self.optimizer.state.get(parameter):
                device = local_rows(parameter).device
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(step), device=device),
                    **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
                }
        for layer in self.layers.values():
            if not layer.config.pattern.is_dense:
                rows = local_rows(self._weight(layer))
                layer.mask = torch.zeros(rows.shape, dtype=torch.bool, device=rows.device)

    def load_mask(self, name: str, bits: Tensor) -> None:
        """Set a layer's last mask from the packed bits of this process's rows."""
        layer = self.layers[name]
        unpacked = np.unpackbits(bits.numpy(), axis=-1, count=layer.in_features).astype(bool)
        layer.mask = torch.from_numpy(unpacked).to(local_rows(self._weight(layer)).device)

    def _weight(self, layer: SparseBitLinear) -> torch.nn.Parameter:
        name = next(name for name, other in self.layers.items() if other is layer)
        return self.parameters[f"{name}.weight"]


class ShardedSaver:
    """Writes the checkpoints of a run from all its processes, one at a time, in the background."""

    def __init__(
        self,
        run: Path,
        world: World,
        config: TrainConfig,
        data_identity: dict[str, Any],
        model_files: dict[str, str],
    ) -> None:
        self.run, self.world, self.config = run, world, config
        self.data_identity, self.model_files = data_identity, model_files
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, tensors: RunTensors) -> None:
        """Copy the state after `step` and write it while training goes on.

        Raises what the previous save ended with, see `wait`.
        """
        self.wait()
        state = {
            key: _copy_for_saving(rows, like, self.world)
            for key, (rows, like) in tensors.saved().items()
        }
        self._thread = threading.Thread(
            target=self._guarded, args=(step, state), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Until the save under way has ended.

        Raises `UserError`, in all processes, when it failed in any; older checkpoints are untouched.
        """
        while self._thread is not None:
            self._thread.join(timeout=1.0)
            self.world.progress()
            if not self._thread.is_alive():
                self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _guarded(self, step: int, state: dict[str, Tensor]) -> None:
        try:
            self._write(step, state)
        except (UserError, RuntimeError) as error:
            self._error = error

    def _write(self, step: int, state: dict[str, Tensor]) -> None:
        path = checkpoint_path(self.run, step)
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
        shards = temporary / FOLDER
        main = self.world.is_main
        try:
            self._together(path, lambda: self._begin(temporary) if main else None)
            self._together(path, lambda: self._save_shards(shards, state))
            rank = self.world.rank
            own = [*shards.glob(f"__{rank}_*")]
            if main:
                own += [*shards.glob(".metadata"), *(temporary / MODEL_FOLDER).iterdir()]
            sums = self._together(path, lambda: checksums(temporary, own))
            files = {name: crc for part in sums for name, crc in part.items()}
            self._together(
                path, lambda: self._complete(temporary, path, step, files) if main else None
            )
        except UserError:
            if main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _begin(self, temporary: Path) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / FOLDER).mkdir(parents=True)
        (temporary / MODEL_FOLDER).mkdir()
        for name, text in self.model_files.items():
            (temporary / MODEL_FOLDER / name).write_text(text)

    def _save_shards(self, shards: Path, state: dict[str, Tensor]) -> None:
        writer = dcp.FileSystemWriter(shards, sync_files=True)
        dcp.save(state, storage_writer=writer, process_group=self.world.background_group)

    def _complete(self, temporary: Path, path: Path, step: int, files: dict[str, str]) -> None:
        (temporary / "train_config.json").write_text(self.config.to_json())
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
        outcomes: list[Any] = [None] * self.world.size
        dist.all_gather_object(outcomes, (result, reason, where), group=self.world.background_group)
        for _, reason, where in outcomes:
            if reason is not None:
                self.world.fail(f"cannot write {path}: {reason} (rank {where})")
        return [result for result, _, _ in outcomes]


def load_sharded(
    checkpoint: Checkpoint, tensors: RunTensors, world: World, data_identity: dict[str, Any] | None
) -> None:
    """Read a checkpoint of several processes into any number of them.

    Args:
        checkpoint: `is_sharded`.
        tensors: filled; those of a plain model in a single process.
        world: the processes that read.
        data_identity: of the data to go on with; None for a reader that only wants the weights.

    Raises `UserError` for other data, or when the files are unreadable or of another model.
    """
    if data_identity is not None:
        check_state(checkpoint, data_identity)
    tensors.allocate_(checkpoint.step)
    saved = tensors.saved()
    state = {key: _copy_for_saving(rows, like, world) for key, (rows, like) in saved.items()}
    read_shards(checkpoint, state, world.background_group, world.is_distributed)
    with torch.no_grad():
        for key, (rows, _) in saved.items():
            read = local_rows(state[key])
            if key.startswith("mask/"):
                tensors.load_mask(key.removeprefix("mask/"), read)
            else:
                rows.copy_(read)


def load_whole(
    checkpoint: Checkpoint, tensors: RunTensors, world: World, data_identity: dict[str, Any]
) -> None:
    """Read a checkpoint of one process into several: every process takes its rows of each tensor.

    Raises `UserError` as `load_sharded` does.
    """
    from safetensors import SafetensorError, safe_open

    check_state(checkpoint, data_identity)
    tensors.allocate_(checkpoint.step)
    path = checkpoint.path
    files: dict[str, Any] = {}
    try:
        for file in [*path.glob("model*.safetensors"), path / "optimizer.safetensors"]:
            opened = safe_open(file, framework="pt")
            prefix = "model/" if file.name.startswith("model") else ""
            files |= {prefix + key: (opened, key) for key in opened.keys()}  # noqa: SIM118
        state = safe_open(path / "state.safetensors", framework="pt")
        with torch.no_grad():
            for key, (rows, like) in tensors.saved().items():
                first = first_row(like, world)
                if key.startswith("mask/"):
                    bits = np.unpackbits(state.get_tensor(key).numpy(), count=like.numel())
                    own = bits.reshape(like.shape)[first : first + len(rows)]
                    packed = torch.from_numpy(np.packbits(own, axis=-1))
                    tensors.load_mask(key.removeprefix("mask/"), packed)
                else:
                    opened, name = files[key]
                    rows.copy_(opened.get_slice(name)[first : first + len(rows)])
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise UserError(f"{path}: cannot be read ({first_reason(error)})") from error


def first_row(parameter: Tensor, world: World) -> int:
    """Where this process's rows begin in the whole matrix."""
    assert world.mesh is not None
    rows, shards = parameter.shape[0], world.mesh.size(1)
    return min(world.mesh.get_local_rank("shard") * -(-rows // shards), rows)


def _copy_for_saving(rows: Tensor, like: torch.nn.Parameter, world: World) -> Tensor:
    copied = rows.detach().to("cpu", copy=True)
    if not isinstance(like, DTensor):
        return copied
    shape = torch.Size((like.shape[0], *rows.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        copied, world.model_cpu_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
