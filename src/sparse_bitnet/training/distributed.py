"""The processes of one run: who they are, what they sum, and how they share a model.

Started by torchrun (or anything that sets its environment variables), the same `train` command runs as
N processes on M machines. A model's blocks are split over `shard` processes (FSDP2) and such groups are
replicated (HSDP); the batch is split over all. What is computed does not depend on their number.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_bitnet.convert import selected, sparse_layers
from sparse_bitnet.errors import UserError
from sparse_bitnet.training.loss import causal_lm_loss
from sparse_bitnet.training.rendezvous import rendezvous

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from sparse_bitnet.training.watchdog import Watchdog

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a run is spread over processes. Changes nothing that is computed, so no part of its config."""

    shard: int | None = None
    """Processes over which a model is split; the rest replicate it. Default: all of them."""

    timeout_seconds: float = 600.0
    """Without a finished step for so long, a process gives up and names whom it waited for."""

    def __post_init__(self) -> None:
        if self.shard is not None and self.shard < 1:
            raise UserError(f"shard={self.shard}: must be above 0")
        if self.timeout_seconds <= 0:
            raise UserError(f"timeout_seconds={self.timeout_seconds}: must be above 0")


class ErrorElsewhere(UserError):
    """The first process failed with this message, which it prints itself."""


@dataclass
class World:
    """The processes of a run; a single one needs no group and communicates nothing."""

    rank: int = 0
    size: int = 1
    mesh: "DeviceMesh | None" = None
    """[replicate, shard], None for a single process."""
    cpu_mesh: "DeviceMesh | None" = field(default=None, repr=False)
    """The same processes, for tensors on the CPU (checkpoints)."""
    background_group: "dist.ProcessGroup | None" = field(default=None, repr=False)
    """For a thread beside the training: its own order of collectives."""
    watchdog: "Watchdog | None" = field(default=None, repr=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.mesh is not None

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.mesh is not None:
            dist.all_reduce(value)
        return value

    def sum_shards(self, value: Tensor) -> Tensor:
        """The sum over the processes that hold one model together, in place."""
        if self.mesh is not None:
            dist.all_reduce(value, group=self.mesh.get_group("shard"))
        return value

    @property
    def replicas(self) -> int:
        """Models, each split over the same number of processes."""
        return 1 if self.mesh is None else self.mesh.size(0)

    @property
    def model_mesh(self) -> "DeviceMesh":
        """The mesh over which a model lies: without replicas that of its shards alone, since sums over
        groups of one process would be collectives too."""
        assert self.mesh is not None
        return self.mesh if self.replicas > 1 else self.mesh["shard"]

    @property
    def model_cpu_mesh(self) -> "DeviceMesh":
        """`model_mesh`, for tensors on the CPU."""
        assert self.cpu_mesh is not None
        return self.cpu_mesh if self.replicas > 1 else self.cpu_mesh["shard"]

    def gather(self, value: T) -> list[T]:
        """The value of every process, in the order of ranks."""
        if self.mesh is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def selection(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """`selected`, of a whole model or a sharded one."""
        if self.mesh is None:
            return selected(model)
        from sparse_bitnet.training.sharded_linear import selected_shards

        return selected_shards(model, self.sum_shards)

    def loss(self, model: Any, *arguments: Any, **options: Any) -> Tensor:
        """`causal_lm_loss`, of a whole model or a sharded one."""
        if self.mesh is None:
            return causal_lm_loss(model, *arguments, **options)
        self.progress()
        return model.summed_loss(*arguments, **options)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Turn the loss of another process into a `ProcessLost` that names it."""
        if self.watchdog is None:
            yield
            return
        from sparse_bitnet.training.watchdog import ProcessLost, is_communication_error

        with self.watchdog as watchdog:
            try:
                yield
            except Exception as error:
                if not is_communication_error(error):
                    raise
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                found = watchdog.diagnose() or f"all processes are alive ({reason})"
                raise ProcessLost(f"rank {self.rank}: {found}; start the run again") from error

    def progress(self, step: int | None = None) -> None:
        """Tell the watchdog that this process gets on (and to which step)."""
        if self.watchdog is not None:
            self.watchdog.progress(step)

    def fail(self, message: str) -> NoReturn:
        """Raise what went wrong in all processes alike; only the first one's is meant to be shown."""
        raise (UserError if self.is_main else ErrorElsewhere)(message)

    def on_main(self, function: Callable[[], T]) -> T:
        """Call `function` in the first process alone; all get its result, or its `UserError`."""
        if self.mesh is None:
            return function()
        outcome: list[Any] = [None, None]
        raised: UserError | None = None
        if self.is_main:
            try:
                outcome[0] = function()
            except UserError as error:
                raised, outcome[1] = error, str(error)
        dist.broadcast_object_list(outcome, src=0)
        if raised is not None:
            raise raised
        if outcome[1] is not None:
            raise ErrorElsewhere(outcome[1])
        return outcome[0]


def launched_processes() -> int:
    """How many processes the launcher started (torchrun's WORLD_SIZE), 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def open_world(launch: Launch, device: torch.device) -> Iterator[World]:
    """The processes that the environment describes; the group ends with the block.

    Raises `UserError` when `launch.shard` does not divide their number, or they do not find together.
    """
    size = launched_processes()
    if size == 1:
        yield World()
        return
    shard = launch.shard or size
    if size % shard:
        raise UserError(f"shard={shard} does not divide the {size} processes of this run")
    timeout = timedelta(seconds=launch.timeout_seconds)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        rank = int(os.environ["RANK"])
        store = _launcher_store(rank, timeout)
        name = rendezvous(store, rank, size, launch.timeout_seconds)
        own = dist.PrefixStore(f"processes/{name}", store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"rank {os.environ.get('RANK', '?')} on {socket.gethostname()}: the {size} processes did "
            f"not find together within {launch.timeout_seconds:.0f} s ({reason}); check MASTER_ADDR "
            "and that all were started"
        ) from error
    try:
        from torch.distributed.device_mesh import init_device_mesh

        from sparse_bitnet.training.watchdog import Watchdog

        def make_mesh(kind: str) -> "DeviceMesh":
            shape = (size // shard, shard)
            return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))

        mesh = make_mesh(device.type)
        yield World(
            rank=rank,
            size=size,
            mesh=mesh,
            cpu_mesh=mesh if device.type == "cpu" else make_mesh("cpu"),
            background_group=dist.new_group(backend="gloo", timeout=timeout),
            watchdog=Watchdog(rank, size, launch.timeout_seconds, name=name),
        )
    finally:
        dist.destroy_process_group()


def _launcher_store(rank: int, timeout: timedelta) -> dist.Store:
    """The key-value store of torchrun's agent, or without one a store of rank 0."""
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not hosted,
        wait_for_workers=False,
        timeout=timeout,
    )


def shard_model_(
    model: "PreTrainedModel", world: World, device: torch.device, compute_dtype: torch.dtype
) -> None:
    """Split a model over the processes, block by block; it then trains through `summed_loss`.

    Blocks move to `device` one at a time, so a GPU never holds more than its part and one block. The
    embedding, the final norm and the head form the root's group. Blocks of ternary layers, once
    gathered, stay so until `reshard_` or a backward that ends a step: 2 bits a weight are cheaper to
    hold than to gather again.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    from sparse_bitnet.training.sharded_linear import prepare_linears_

    assert world.mesh is not None
    for block in model.get_decoder().layers:
        block.to(device)
        prepare_linears_(block, world.mesh.size(-1), compute_dtype)
        fully_shard(block, mesh=world.model_mesh, reshard_after_forward=not _is_ternary(block))
    model.to(device)  # type: ignore[arg-type]
    fully_shard(model, mesh=world.model_mesh)
    # The loss never calls the model's own forward: this method stands for it.
    model.summed_loss = MethodType(causal_lm_loss, model)  # type: ignore[assignment]
    register_fsdp_forward_method(model, "summed_loss")


def gather_once_(model: torch.nn.Module, last: bool) -> None:
    """Before each forward of a step: keep what is gathered until the `last` of its backwards.

    The root's group always, blocks where they are ternary; gradients are summed over the processes in
    the last backward alone.
    """
    for module in model.modules():
        sharded: Any = module
        if hasattr(module, "set_requires_gradient_sync"):
            sharded.set_requires_gradient_sync(last, recurse=False)
            if module is model or _is_ternary(module):
                sharded.set_reshard_after_backward(last, recurse=False)
    root: Any = model
    root.set_is_last_backward(last)


def _is_ternary(module: torch.nn.Module) -> bool:
    return all(layer.config.weight == "ternary" for layer in sparse_layers(module).values())


def reshard_(model: torch.nn.Module) -> None:
    """Let go of gathered parameters: a forward without a backward leaves the root's in place."""
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:
            reshard()


def copy_whole_(target: torch.nn.Module | None, parameters: dict[str, torch.nn.Parameter]) -> None:
    """Gather sharded parameters, one after another, into a plain model of the same names.

    Args:
        target: on the CPU; None where the values are not wanted.
        parameters: sharded, by name, in all processes.
    """
    plain = {} if target is None else dict(target.named_parameters())
    for name, parameter in parameters.items():
        whole = _plain(parameter).full_tensor()
        if target is not None:
            with torch.no_grad():
                plain[name].copy_(whole)


def _plain(parameter: Any) -> Any:
    from torch.distributed.tensor import DTensor

    from sparse_bitnet.training.sharded_linear import local_rows

    return DTensor.from_local(
        local_rows(parameter),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
