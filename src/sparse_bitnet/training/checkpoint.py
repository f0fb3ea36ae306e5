"""A checkpoint of one process: all it takes to go on as if never stopped.

Each is also an ordinary transformers folder, so it can be evaluated or loaded by itself:

    config.json, model.safetensors   the model, float32 masters
    optimizer.safetensors            "exp_avg/<parameter>", "exp_avg_sq/<parameter>", float32
    state.safetensors                "mask/<layer>" (bits of the last mask, packed), "rng/cpu", ...
    train_config.json                the resolved TrainConfig
    state.json                       step, data identity, format version, checksums of the tensors' files

`sharded_checkpoint` writes those of several processes, and reads both kinds.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparse_bitnet.checkpoint.saved_steps import (
    Checkpoint,
    check_state,
    checkpoint_path,
    checksums,
    clean_run,
    drop_old,
    list_checkpoints,
    write_state,
)
from sparse_bitnet.convert import sparse_layers
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import atomic_folder
from sparse_bitnet.training.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Checkpoint", "clean_run", "list_checkpoints", "load_checkpoint", "save_checkpoint"]

MOMENTS = ("exp_avg", "exp_avg_sq")


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
    path = checkpoint_path(run, step)
    with atomic_folder(path) as folder:
        model.save_pretrained(folder)
        save_file(_optimizer_tensors(model, optimizer), folder / "optimizer.safetensors")
        save_file(_state_tensors(model), folder / "state.safetensors")
        files = checksums(folder)
        (folder / "train_config.json").write_text(config.to_json())
        write_state(folder, step, data_identity, files)
    drop_old(run, config.keep_checkpoints)
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
    check_state(checkpoint, data_identity)
    _load_model(model, path)
    _load_optimizer(model, optimizer, _read(path / "optimizer.safetensors"), checkpoint.step)
    _load_state(model, _read(path / "state.safetensors"))


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
