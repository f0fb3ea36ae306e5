"""Checkpoints: a folder `checkpoints/step-00000100` with all it takes to go on as if never stopped.

Each is also an ordinary transformers folder, so it can be evaluated or loaded by itself:

    config.json, model.safetensors   the model, float32 masters
    optimizer.safetensors            "exp_avg/<parameter>", "exp_avg_sq/<parameter>", float32
    state.safetensors                "mask/<layer>" (bits of the last mask, packed), "rng/cpu", ...
    state.json                       step, optimiser step count, data identity, format version
    train_config.json                the resolved TrainConfig

The folder appears under its name only when all of it is on the disk.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparse_bitnet.convert import sparse_layers
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import atomic_folder, remove_leftovers
from sparse_bitnet.training.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECKPOINT_VERSION = 1
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on the disk."""

    path: Path
    step: int


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """Complete checkpoints of a run, oldest first."""
    folder = run / "checkpoints"
    found = [
        Checkpoint(path, int(path.name.removeprefix("step-")))
        for path in folder.glob("step-*")
        if (path / "state.json").is_file()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def save_checkpoint(
    run: Path,
    step: int,
    model: "PreTrainedModel",
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    data_identity: dict[str, Any],
) -> Checkpoint:
    """Write the state after `step` and drop checkpoints beyond `config.keep_checkpoints`.

    Raises `UserError` when the disk is full; older checkpoints are then untouched.
    """
    path = run / "checkpoints" / f"step-{step:08d}"
    with atomic_folder(path) as folder:
        model.save_pretrained(folder)
        save_file(_optimizer_tensors(model, optimizer), folder / "optimizer.safetensors")
        save_file(_state_tensors(model), folder / "state.safetensors")
        state = {"version": CHECKPOINT_VERSION, "step": step, "data": data_identity}
        (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n")
        (folder / "train_config.json").write_text(config.to_json())
    if config.keep_checkpoints:
        for old in list_checkpoints(run)[: -config.keep_checkpoints]:
            shutil.rmtree(old.path)
    return Checkpoint(path, step)


def load_checkpoint(
    checkpoint: Checkpoint,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data_identity: dict[str, Any],
) -> None:
    """Put model, optimiser, last masks and random state back as they were after that step.

    Raises `UserError` for an unreadable file, another model, or other data.
    """
    path = checkpoint.path
    state = json.loads((path / "state.json").read_text())
    if state["version"] != CHECKPOINT_VERSION:
        raise UserError(
            f"{path}: checkpoint version {state['version']}, this release reads {CHECKPOINT_VERSION}"
        )
    if state["data"] != data_identity:
        raise UserError(
            f"{path}: written while training on other data; use its data or a new --out"
        )
    _load_model(model, path)
    _load_optimizer(model, optimizer, _read(path / "optimizer.safetensors"), checkpoint.step)
    _load_state(model, _read(path / "state.safetensors"))


def clean_run(run: Path) -> None:
    """Remove what a killed process left half-written."""
    for folder in (run, run / "checkpoints"):
        if folder.is_dir():
            remove_leftovers(folder)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} is damaged ({error}); remove its folder to continue from an older checkpoint"
        ) from error


def _load_model(model: torch.nn.Module, path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("model*.safetensors")):
        tensors.update(_read(file))
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name not in tensors or tensors[name].shape != parameter.shape:
                raise UserError(f"{path}: {name} is missing or of another shape than the model's")
            parameter.copy_(tensors[name])


def _optimizer_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    return {
        f"{moment}/{name}": optimizer.state[parameter][moment].contiguous()
        for name, parameter in model.named_parameters()
        for moment in MOMENTS
        if moment in optimizer.state.get(parameter, {})
    }


def _load_optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    step: int,
) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for index, parameter in enumerate(order):
        name = names[id(parameter)]
        if f"{MOMENTS[0]}/{name}" in tensors:
            state[index] = {moment: tensors[f"{moment}/{name}"] for moment in MOMENTS}
            state[index]["step"] = torch.tensor(float(step))
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _state_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    tensors = {
        f"mask/{name}": torch.from_numpy(np.packbits(layer.mask.cpu().numpy()))
        for name, layer in sparse_layers(model).items()
        if layer.mask is not None
    }
    tensors["rng/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    return tensors


def _load_state(model: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, layer in sparse_layers(model).items():
        packed = tensors.get(f"mask/{name}")
        if packed is not None:
            bits = np.unpackbits(packed.numpy(), count=layer.weight.numel()).astype(bool)
            mask = torch.from_numpy(bits).view(layer.weight.shape)
            layer.mask = mask.to(layer.weight.device)
    torch.set_rng_state(tensors["rng/cpu"])
    if torch.cuda.is_available() and "rng/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng/cuda"])
