# SPDX-License-Identifier: Apache-2.0
"""The processes of one run: who they are, what they sum, what they tell each other.

Rendezvous, restarts and time limits are torchrun's and the process group's.

Started by torchrun (or anything that sets its environment variables), the same `train` command runs as
N processes on M machines; without it a run is a world of one, of which every sum is its own. The batch is
split over all processes; what is computed does not depend on their number.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_bitnet.errors import UserError, reason_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
EXIT_CODE = 75
"""Exit code of a process that lost another one: "temporary failure", the same command may continue."""

_LONE_WORK = timedelta(days=1)
"""Longest work of one process while the others wait: exports, reading data, writing checkpoints."""


class ErrorElsewhere(UserError):
    """Another process failed with this message, which it prints itself."""


class ProcessLost(UserError):
    """Another process of the run cannot be reached."""


@dataclass
class World:
    """The processes of a run."""

    rank: int = 0
    size: int = 1
    mesh: "DeviceMesh | None" = None
    """[replicate, shard]; None in a world of one, whose model lies whole."""
    control_group: "dist.ProcessGroup | None" = field(default=None, repr=False)
    """Exchanges objects between the training's collectives, on the CPU."""
    background_group: "dist.ProcessGroup | None" = field(default=None, repr=False)
    """Serves a thread beside the training, with its own order of collectives, on the CPU."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes what a run has one of."""
        return self.rank == 0

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

    def each(self, function: Callable[[], T], group: "dist.ProcessGroup | None" = None) -> list[T]:
        """Return the results of `function` in all processes, in the order of ranks.

        A `UserError` of any is raised in all: as it is in the first that failed, which prints it.
        """
        result, raised = None, None
        try:
            result = function()
        except UserError as error:
            raised = error
        return self._exchanged(result, raised, group)

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """A `UserError` inside, of any process, is raised in all where the block ends."""
        raised = None
        try:
            yield
        except UserError as error:
            raised = error
        self._exchanged(None, raised)

    def _exchanged(
        self, result: Any, raised: UserError | None, group: "dist.ProcessGroup | None" = None
    ) -> list[Any]:
        outcomes: list[Any] = [(result, raised and str(raised))] * self.size
        if self.control_group is not None:
            dist.all_gather_object(outcomes, outcomes[0], group=group or self.control_group)
        for rank, (_, message) in enumerate(outcomes):
            if message is not None:
                raise raised if raised and rank == self.rank else ErrorElsewhere(message)
        return [result for result, _ in outcomes]

    def on_main(self, function: Callable[[], T]) -> T:
        """Call `function` in the first process alone; all get its result, or its `UserError`."""
        return self.each(function if self.is_main else lambda: None)[0]  # type: ignore[return-value]

    def fail(self, message: str) -> NoReturn:
        """Raise what went wrong in all processes alike; only the first one's is meant to be shown."""
        raise (UserError if self.is_main else ErrorElsewhere)(message)


@contextlib.contextmanager
def open_world(
    device: torch.device, shard: int | None = None, timeout_seconds: float = 600.0
) -> Iterator[World]:
    """The processes that the environment describes; the group ends with the block.

    Args:
        device: where they compute.
        shard: processes over which a model is split, the rest replicate it; default all.
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
        from torch.distributed.device_mesh import init_device_mesh

        yield World(
            rank=rank,
            size=size,
            mesh=init_device_mesh(
                device.type, (size // shard, shard), mesh_dim_names=("replicate", "shard")
            ),
            control_group=dist.new_group(backend="gloo", timeout=_LONE_WORK),
            background_group=dist.new_group(backend="gloo", timeout=_LONE_WORK),
        )
    except RuntimeError as error:
        # Gloo's errors are plain ones.
        words = ("gloo", "nccl", "connection", "timed out", "socket")
        if not (isinstance(error, dist.DistError) or any(w in str(error).lower() for w in words)):
            raise
        raise ProcessLost(
            f"rank {rank}: another process of the run died or hangs ({reason_of(error)}); start the run "
            "again"
        ) from error
    finally:
        dist.destroy_process_group()
