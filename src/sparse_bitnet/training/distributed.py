# SPDX-License-Identifier: Apache-2.0
"""The processes of one run (sums, exchanges, errors), and how a model is placed on them: whole in one
process, else split by rows (FSDP2) over `shard` processes and replicated over the rest (HSDP).

Rendezvous, restarts and time limits are torchrun's and the process group's.

Started by torchrun (or anything that sets its environment variables), the same `train` command runs as N
processes on M machines; otherwise a run has one process. The batch is split over all processes; their
number changes only dropout and the rounding of sums.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from sparse_bitnet.errors import UserError, reason_of
from sparse_bitnet.nn.convert import sparse_layers
from sparse_bitnet.training.device import blocks_of
from sparse_bitnet.training.sharded_linear import local_rows, prepare_linears_

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
EXIT_CODE = 75
"""Exit code of a process that lost another one: "temporary failure"; the same command may continue."""

_LONE_WORK = timedelta(days=1)
"""Longest work of one process while the others wait: exports, reading data, writing checkpoints."""


class ErrorElsewhere(UserError):
    """Raised when another process failed; that process prints this message itself."""


class ProcessLost(UserError):
    """Raised when another process of the run cannot be reached."""


@dataclass
class World:
    """The processes of a run."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    """[replicate, shard]; None in one process, whose model is not split."""
    control_group: "dist.ProcessGroup | None" = field(default=None, repr=False)
    """Process group that exchanges objects between the training's collectives, on the CPU."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files that a run has once."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Sum a tensor over all processes in place; return it."""
        if self.mesh is not None:
            dist.all_reduce(value)
        return value

    def sum_shards(self, value: Tensor) -> Tensor:
        """Sum a tensor in place over the processes that share one copy of the model; return it."""
        if self.mesh is not None:
            dist.all_reduce(value, group=self.mesh.get_group("shard"))
        return value

    def each(self, function: Callable[[], T]) -> list[T]:
        """Return the results of `function` in all processes, in the order of ranks.

        A `UserError` in any process is raised in all; the first process that failed prints it.
        """
        result, raised = None, None
        try:
            result = function()
        except UserError as error:
            raised = error
        return self._exchanged(result, raised)

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Raise a `UserError` of any process in all processes, at the end of the block."""
        raised = None
        try:
            yield
        except UserError as error:
            raised = error
        self._exchanged(None, raised)

    def _exchanged(self, result: Any, raised: UserError | None) -> list[Any]:
        outcomes: list[Any] = [(result, raised and str(raised))] * self.size
        if self.control_group is not None:
            dist.all_gather_object(outcomes, outcomes[0], group=self.control_group)
        for rank, (_, message) in enumerate(outcomes):
            if message is not None:
                raise raised if raised and rank == self.rank else ErrorElsewhere(message)
        return [result for result, _ in outcomes]

    def on_main(self, function: Callable[[], T]) -> T:
        """Call `function` in the first process only; all get its result, or its `UserError`."""
        return self.each(function if self.is_main else lambda: None)[0]  # type: ignore[return-value]

    def fail(self, message: str) -> NoReturn:
        """Raise an error that occurs in all processes; only the first one prints it."""
        raise (UserError if self.is_main else ErrorElsewhere)(message)


@contextlib.contextmanager
def open_world(
    device: torch.device, shard: int | None = None, timeout_seconds: float = 600.0
) -> Iterator[World]:
    """Yield the processes that the environment describes; the group ends with the block.

    Args:
        device: device on which they compute.
        shard: number of processes over which a model is split; the rest replicate it. Default: all.
        timeout_seconds: a process that waits this long for the others in a step gives up.

    Raises `UserError` when `shard` does not divide their number, or not all of them come.
    """
    if not 0 < timeout_seconds <= 366 * 86400:
        raise UserError(f"timeout_seconds={timeout_seconds}: must be above 0, and a year at most")
    given = os.environ.get("WORLD_SIZE") or "1"
    size = int(given) if given.isdecimal() else 0
    if not size:
        raise UserError(f"WORLD_SIZE={given}: the number of processes, which torchrun sets")
    shard = size if shard is None else shard
    if shard < 1 or size % shard:
        those = f"{size} processes" if size > 1 else "one process"
        raise UserError(f"shard={shard} does not divide the {those} of this run")
    if size == 1:
        yield World()
        return
    if device.type == "cuda":
        local, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= gpus:
            raise UserError(
                f"LOCAL_RANK={local}: this machine has {gpus} GPUs; start one process for each"
            )
        torch.cuda.set_device(local)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        raise UserError(
            f"rank {os.environ.get('RANK', '?')} on {socket.gethostname()}: no rendezvous of the {size} "
            f"processes within {timeout_seconds:.0f} s ({reason_of(error)}); check MASTER_ADDR "
            "and that all were started"
        ) from error
    rank = dist.get_rank()
    try:
        shape, names = (size // shard, shard), ("replicate", "shard")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        yield World(rank, size, mesh, dist.new_group(backend="gloo", timeout=_LONE_WORK))
    except RuntimeError as error:
        # Gloo raises plain RuntimeErrors.
        words = ("gloo", "nccl", "connection", "timed out", "socket")
        if not (isinstance(error, dist.DistError) or any(w in str(error).lower() for w in words)):
            raise
        raise ProcessLost(
            f"rank {rank}: another process of the run died or hangs ({reason_of(error)}); start the run "
            "again"
        ) from error
    finally:
        dist.destroy_process_group()


# Placing the model on the processes.


def check_splits(model: "PreTrainedModel") -> None:
    """Raise `UserError` for a model in which a block shares weights with another block, or with layers
    outside of the blocks: after the split, each would have its own."""
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
    loss: nn.Module,
    world: World,
    device: torch.device,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype | None = None,
    whole: nn.Module | None = None,
) -> None:
    """Move a model, inside its loss, to the device where it trains.

    Several processes split it block by block, so none holds more than its part and one block. The
    embedding, the final norm and the head form the root's group. Blocks of ternary layers, once
    gathered, stay so until `reshard_` or a backward that ends a step: 2 bits per weight are cheaper to
    hold than to gather again.

    In one process the model is on the CPU, else on the meta device; its values are then those of
    `whole`, on the CPU of the first process. Full-precision weights are sent and multiplied in
    `compute_dtype`, gradients summed in `reduce_dtype`, by default their own.
    """
    if world.mesh is None:
        loss.to(device)
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Without replicas use the mesh of shards: sums over groups of one process would be collectives too.
    mesh = world.mesh if world.mesh.size(0) > 1 else world.mesh["shard"]
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    model = cast(Any, loss).model
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
    _fill_(model, device, whole)


@torch.no_grad()
def _fill_(model: nn.Module, device: torch.device, whole: nn.Module | None) -> None:
    """Copy the values of the first process's whole model to the parts in all, one tensor at a time."""
    given = {} if whole is None else _tensors(whole)
    for name, part in _tensors(model).items():
        value = torch.empty(part.shape, dtype=part.dtype, device=device)
        if given:
            value.copy_(given[name])
        if isinstance(part, DTensor):
            placed = distribute_tensor(value, part.device_mesh, cast(Any, part).placements)
            local_rows(part).copy_(placed.to_local())
        else:
            dist.broadcast(value, 0)
            part.copy_(value)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def gather_once_(loss: nn.Module, last: bool) -> None:
    """Keep gathered parameters until the `last` backward of a step; call this before each forward.

    This holds for the root's group, and for blocks if they are ternary. Gradients are summed over the
    processes in the last backward only. A model that is not split is unchanged.
    """
    for module in loss.modules():
        sharded: Any = module
        if hasattr(module, "set_requires_gradient_sync"):
            sharded.set_requires_gradient_sync(last, recurse=False)
            if module is loss or _is_ternary(module):
                sharded.set_reshard_after_backward(last, recurse=False)
            if module is loss:
                sharded.set_is_last_backward(last)


def _is_ternary(module: nn.Module) -> bool:
    return all(layer.config.weight == "ternary" for layer in sparse_layers(module).values())


def reshard_(loss: nn.Module) -> None:
    """Free gathered parameters; a forward without a backward leaves the root's in place."""
    for module in loss.modules():
        if hasattr(module, "reshard"):
            cast(Any, module).reshard()


def whole_model(
    model: "PreTrainedModel", world: World, build: Callable[[], "PreTrainedModel"]
) -> "PreTrainedModel | None":
    """Return the model in one piece in the first process, None in the others.

    A model that is not split is returned itself. `build` makes the model to fill, on the CPU, one
    parameter after another.
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


def split_like(rows: Tensor, parameter: Tensor) -> Any:
    """Return this process's `rows` as a DTensor that is split like a parameter, sharing memory; `rows`
    unchanged if the parameter is whole."""
    if not isinstance(parameter, DTensor):
        return rows
    shape = torch.Size((parameter.shape[0], *rows.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = parameter.device_mesh, cast(Any, parameter).placements
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=stride)
