# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: one config, one process at a time, stopped only between steps. From its
checkpoints any number of processes can resume the run as if it had never stopped:

    sharded/          torch.distributed.checkpoint: "model/<parameter>", "exp_avg/<parameter>" and
                      "exp_avg_sq/<parameter>", float32; "mask/<layer>", the words of its last mask;
                      every process writes its rows
    model/            config.json, tokenizer.json, ...: the files of a model folder beside its weights
    train_config.json, state.json    the resolved TrainConfig; step, data, version, checksums
"""

import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from sparse_bitnet.checkpoint import saved_steps
from sparse_bitnet.checkpoint.model_folder import read_json, read_json_if_there
from sparse_bitnet.checkpoint.saved_steps import FOLDER, MODEL_FOLDER, MOMENTS, SavedStep
from sparse_bitnet.errors import UserError, library_errors_as
from sparse_bitnet.files import TEMPORARY_PREFIX, check_ours, file_crc32, locked_folder, sync_tree
from sparse_bitnet.nn.convert import sparse_layers
from sparse_bitnet.ops.mask_words import word_dtype
from sparse_bitnet.training.config import TrainConfig, read_config
from sparse_bitnet.training.distributed import World, split_like
from sparse_bitnet.training.sharded_linear import local_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of a finished run; `result.json` of the run folder."""

    run: str
    format: str
    steps: int
    tokens: int
    training_loss: float | None
    """Loss of the last step; None if none of its tokens counted."""
    validation_loss: float
    validation_perplexity: float
    validation_tokens: int
    flip_rate: float | None
    zero_fraction: float
    data: dict[str, Any]
    """`TokenDataset.identity` of each split, and the `fingerprint` of the teacher and of `init`."""


class Interrupted(KeyboardInterrupt):
    """Raised when a signal stopped the run after saving a checkpoint; the message says what to do."""


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Lock the folder for this process; remove it again if it is new and nothing was written into it.

    Raises `UserError` when another process holds the lock, and when the folder cannot be written.
    """
    made = [folder for folder in (run, *run.parents) if not folder.exists()]
    with locked_folder(run, f"{run} is in use by another running process"):
        try:
            yield
        finally:
            if made and os.listdir(run) == [".lock"]:
                with suppress(OSError):  # on Windows an open file cannot be removed
                    (run / ".lock").unlink()
                    for folder in made:
                        folder.rmdir()


def check_run(run: Path, config: TrainConfig) -> None:
    """Raise `UserError` when the folder holds other files, or a run of another config past its start."""
    check_ours(run, ["config.json"], "a run folder")
    if "steps" not in (read_json_if_there(run / "config.json") or ["steps"]):
        raise UserError(f"{run}: its config.json is not a run's; choose another folder")
    if saved_steps.is_started(run):
        _check_config(run, read_config(run), config)


def _check_config(run: Path, stored: TrainConfig, config: TrainConfig) -> None:
    if changed := stored.difference(config):
        listed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
        raise UserError(f"{run} holds a run of another config ({listed}); choose another folder")


def check_inputs(run: Path, stored: Any, data: dict[str, Any]) -> None:
    """Raise `UserError` when the stored inputs of a run are damaged, or other ones than `data`."""
    models = {name: data[name] for name in ("teacher", "init")}
    with library_errors_as(f"{run} is damaged"):  # older releases did not store the models
        known = {**models, **stored}
    for name in models:
        if known[name] != data[name]:
            other = f"another {'teacher' if name == 'teacher' else 'initial model'}"
            raise UserError(f"{run} holds a run with {other}; use it or choose another folder")
    if known != data:
        raise UserError(f"{run} holds a run on other data; use its data or choose another folder")


def finished_result(run: Path, config: TrainConfig, data: dict[str, Any]) -> RunResult | None:
    """Return the result of a finished run, else None. Raises `UserError` if its `data` are others, or
    if it was scored on another number of tokens."""
    if not (path := run / RESULT).is_file() or not any((run / "final").glob("*.safetensors")):
        return None
    with library_errors_as(f"{path} is damaged"):
        result = RunResult(**read_json(path))
        numbers = (result.steps, result.tokens, result.validation_tokens, result.zero_fraction)
        sum((*numbers, result.validation_perplexity, result.flip_rate or 0))  # fails for others
    check_inputs(run, result.data, data)
    if (scored := read_config(run).validation_tokens) != config.validation_tokens:
        raise UserError(
            f"{run} is finished, with --validation-tokens {scored}: leave that as it was"
        )
    return result


@contextmanager
def stop_signals(on_first: Callable[[], None]) -> Iterator[None]:
    """Inside the block, in the main thread, the first SIGINT or SIGTERM calls `on_first`, and the second
    raises `KeyboardInterrupt`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def receive(*_: Any) -> None:
        for caught in previous:
            signal.signal(caught, signal.default_int_handler)
        on_first()

    previous: dict[int, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, receive)
    try:
        yield
    finally:
        for caught, handler in previous.items():
            signal.signal(caught, handler)


def model_files(model: "PreTrainedModel", tokenizer: Path) -> dict[str, str]:
    """Return the files, by name, that a whole model's folder has beside the weights; those of the
    tokenizer are in the folder `tokenizer`."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    files = {file.name: file.read_text("utf-8") for file in sorted(tokenizer.glob("*.j*"))}
    files["config.json"] = model.config.to_json_string()
    if model.generation_config is not None:
        files["generation_config.json"] = model.generation_config.to_json_string()
    return files


class RunCheckpoints:
    """The checkpoints of a run: restores the newest one, and writes one from all processes together."""

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
        """`files`: the `model_files`; `data_identity`: that of the training data."""
        self.config, self.world, self.run = config, world, Path(config.out)
        self.parameters, self.layers = dict(model.named_parameters()), sparse_layers(model)
        self.optimizer, self.files, self.data_identity = optimizer, files, data_identity
        # A single process may save alone.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that changes from step to step, by key: parts of whole tensors if they are
        split. They share their memory."""
        state: dict[str, Tensor] = {}
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
        """Resume from the newest checkpoint; return its step, or 0 without a checkpoint.

        Raises `UserError` when it is damaged, or of other data or another model.
        """
        listed = self.world.on_main(lambda: saved_steps.list_checkpoints(self.run))
        if not listed:
            return 0
        newest, rank, size = listed[-1], self.world.rank, self.world.size
        # Each process reads its share of the files.
        parts = self.world.each(lambda: saved_steps.damage(newest, rank, size))
        if damage := next(filter(None, parts), None):
            self.world.fail(
                f"{newest.path}: {damage}; bring the files back, or remove this checkpoint to continue "
                "from the one before it"
            )
        self._load(newest)
        return newest.step

    def _load(self, checkpoint: SavedStep) -> None:
        """Restore parameters, optimiser and last masks as they were after that step.

        Raises `UserError` for other data, and for files that are unreadable or of another model.
        """
        check_inputs(self.run, saved_steps.stored_inputs(checkpoint), self.data_identity)
        _check_config(self.run, read_config(checkpoint.path, "train_config.json"), self.config)
        # `tensors` names these only after a first step.
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
        tensors, group = self.tensors(), self.world.control_group
        saved_steps.read_tensors(checkpoint, tensors, group, no_dist=self.world.mesh is None)
        for name, parameter in self.parameters.items():
            if f"{MOMENTS[0]}/{name}" not in tensors:  # no step has given it a gradient
                self.optimizer.state.pop(parameter, None)

    def save(self, step: int) -> None:
        """Write the state after `step`.

        Raises `UserError`, in all processes, when that fails in any; older checkpoints are untouched.
        """
        path = saved_steps.checkpoint_path(self.run, step)
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")

        def together(function: Callable[[], T]) -> list[T]:
            """Return its results in all processes; a `UserError` names the one that failed."""

            def named() -> T:
                try:
                    return function()
                except (OSError, CheckpointException) as error:
                    reason = getattr(error, "strerror", None) or saved_steps.first_reason(error)
                    # All processes get the same CheckpointException.
                    rank = next(iter(getattr(error, "failures", ())), self.world.rank)
                    where = f" (rank {rank})" if self.world.size > 1 else ""
                    raise UserError(f"cannot write {path}: {reason}{where}") from error

            return self.world.each(named)

        def write_tensors() -> None:
            dcp.save(
                self.tensors(),
                storage_writer=dcp.FileSystemWriter(str(temporary / FOLDER)),
                process_group=self.world.control_group,
                no_dist=self.world.mesh is None,
            )

        def own_checksums() -> dict[str, str]:
            own = [*(temporary / FOLDER).glob(f"__{self.world.rank}_*")]
            if self.world.is_main:
                (temporary / MODEL_FOLDER).mkdir()
                files = {f"{MODEL_FOLDER}/{name}": text for name, text in self.files.items()}
                for name, text in {**files, "train_config.json": self.config.to_json()}.items():
                    (temporary / name).write_text(text, encoding="utf-8")
                own += [temporary / name for name in (*files, f"{FOLDER}/.metadata")]
            return {str(p.relative_to(temporary)): f"{file_crc32(p):08x}" for p in sorted(own)}

        def publish() -> None:
            if self.world.is_main:
                files = {name: crc for part in sums for name, crc in part.items()}
                saved_steps.write_state(temporary, step, self.data_identity, files)
                sync_tree(temporary)
                shutil.rmtree(path, ignore_errors=True)
                os.rename(temporary, path)
                saved_steps.drop_old(self.run, self.config.keep_checkpoints)

        try:
            together(write_tensors)
            sums = together(own_checksums)
            together(publish)
        except UserError:
            if self.world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
