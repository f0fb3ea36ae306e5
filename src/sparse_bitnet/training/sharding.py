# SPDX-License-Identifier: Apache-2.0
"""A model over the processes of a run: whole in a world of one, else split by blocks (FSDP2) over
`shard` processes and replicated over the rest (HSDP)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import sparse_layers
from sparse_bitnet.training.device import blocks_of
from sparse_bitnet.training.distributed import World
from sparse_bitnet.training.loss import SummedLoss
from sparse_bitnet.training.sharded_linear import local_rows, prepare_linears_

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_splits(model: "PreTrainedModel") -> None:
    """Raise `UserError` for a model of which a block shares weights with another one, or with what lies
    outside of all: split, each would have its own."""
    blocks = list(blocks_of(model))
    inside = {module for block in blocks for module in block.modules()}
    groups = [set(block.parameters()) for block in blocks]
    groups.append({p for m in model.modules() if m not in inside for p in m.parameters(False)})
    if sum(map(len, groups)) > len(set().union(*groups)):
        raise UserError(
            f"blocks of {type(model).__name__} share weights, and such a model trains in one process: "
            "leave out torchrun"
        )


def place_(
    loss: SummedLoss,
    world: World,
    device: torch.device,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype | None = None,
    whole: torch.nn.Module | None = None,
) -> None:
    """Bring a model, inside of its loss, to where it trains.

    Several processes split it block by block, so none holds more than its part and one block. The
    embedding, the final norm and the head form the root's group. Blocks of ternary layers, once gathered,
    stay so until `reshard_` or a backward that ends a step: 2 bits a weight are cheaper to hold than to
    gather again.

    In a world of one the model is on the CPU, else on the meta device; its values are then those of
    `whole`, on the CPU of the first process. Full-precision weights are sent and multiplied in
    `compute_dtype`, gradients summed in `reduce_dtype`, by default their own.
    """
    if world.mesh is None:
        loss.to(device)
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Without replicas the mesh of the shards alone: sums over groups of one process are collectives too.
    mesh = world.mesh if world.mesh.size(0) > 1 else world.mesh["shard"]
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    model: Any = loss.model
    for block in blocks_of(model):
        block.to_empty(device=device)
        prepare_linears_(block, compute_dtype)
        reshards = not _is_ternary(block)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
    for module in model.modules():
        if any(one.is_meta for one in [*module.parameters(False), *module.buffers(False)]):
            module.to_empty(device=device, recurse=False)
    model.tie_weights()
    fully_shard(loss, mesh=mesh, mp_policy=policy)
    _fill_(model, world, device, whole)


@torch.no_grad()
def _fill_(
    model: torch.nn.Module, world: World, device: torch.device, whole: torch.nn.Module | None
) -> None:
    """The values of a whole model in the first process to the parts of it in all, one at a time."""
    given = {} if whole is None else _tensors(whole)
    for name, part in _tensors(model).items():
        value = torch.empty(part.shape, dtype=part.dtype, device=device)
        if given:
            value.copy_(given[name])
        if isinstance(part, DTensor):
            placed = distribute_tensor(value, part.device_mesh, cast(Any, part).placements)
            local_rows(part).copy_(placed.to_local())
        else:
            torch.distributed.broadcast(value, 0)
            part.copy_(value)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def gather_once_(loss: torch.nn.Module, last: bool) -> None:
    """Before each forward of a step: keep what is gathered until the `last` of its backwards.

    The root's group always, blocks where they are ternary; gradients are summed over the processes in
    the last backward alone. Nothing is done to a whole model.
    """
    for module in loss.modules():
        sharded: Any = module
        if hasattr(module, "set_requires_gradient_sync"):
            sharded.set_requires_gradient_sync(last, recurse=False)
            if module is loss or _is_ternary(module):
                sharded.set_reshard_after_backward(last, recurse=False)
            if module is loss:
                sharded.set_is_last_backward(last)


def _is_ternary(module: torch.nn.Module) -> bool:
    return all(layer.config.weight == "ternary" for layer in sparse_layers(module).values())


def reshard_(loss: torch.nn.Module) -> None:
    """Let go of gathered parameters: a forward without a backward leaves the root's in place."""
    for module in loss.modules():
        if hasattr(module, "reshard"):
            cast(Any, module).reshard()


def whole_model(
    model: "PreTrainedModel", world: World, build: Callable[[], "PreTrainedModel"]
) -> "PreTrainedModel | None":
    """The model in one piece, in the first process; the others get None.

    A model that is not split is returned itself. `build` makes the one that is filled, on the CPU, with
    one parameter after another.
    """
    if world.mesh is None:
        return model
    with world.agreed():
        built = build() if world.is_main else None
    values = {} if built is None else _tensors(built)
    for name, part in _tensors(model).items():
        whole = split_like(local_rows(part), part)
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        if built is not None:
            values[name].detach().copy_(whole)
    return built


def split_like(rows: torch.Tensor, parameter: torch.Tensor) -> Any:
    """Some rows of a tensor as the part of the whole that a parameter's rows are of it; `rows`
    themselves where the parameter is whole. Memory is shared."""
    if not isinstance(parameter, DTensor):
        return rows
    shape = torch.Size((parameter.shape[0], *rows.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = parameter.device_mesh, cast(Any, parameter).placements
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=stride)
