# SPDX-License-Identifier: Apache-2.0
"""The processes of one run: who they are, what they sum, what they tell each other.

Started by torchrun (or anything that sets its environment variables), the same `train` command runs as
N processes on M machines; without it a run is a world of one, of which every sum is its own. The batch is
split over all processes; what is computed does not depend on their number.
"""

import contextlib
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparse_bitnet.errors import UserError, reason_of
from sparse_bitnet.training.rendezvous import rendezvous
from sparse_bitnet.training.watchdog import (
    ProcessLost,
    Watchdog,
    is_communication_error,
    launcher_store,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
POLL_SECONDS = 0.01
_LONGEST_TIMEOUT = 366 * 86400.0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a run is spread over processes. Changes nothing that is computed, so no part of its config."""

    shard: int | None = None
    """Processes over which a model is split; the rest replicate it. Default: all of them."""

    timeout_seconds: float = 600.0
    """Without a finished step for this long, a process gives up and names whom it waited for."""

    def __post_init__(self) -> None:
        if self.shard is not None and self.shard < 1:
            raise UserError(f"shard={self.shard}: must be above 0")
        if not 0 < self.timeout_seconds <= _LONGEST_TIMEOUT:
            raise UserError(
                f"timeout_seconds={self.timeout_seconds}: must be above 0, and a year at most"
            )


class ErrorElsewhere(UserError):
    """Another process failed with this message, which it prints itself."""


@dataclass
class World:
    """The processes of a run."""

    rank: int = 0
    size: int = 1
    mesh: "DeviceMesh | None" = None
    """[replicate, shard]; None in a world of one, whose model lies whole."""
    store: dist.Store = field(default_factory=dist.HashStore, repr=False)
    """Of these processes alone."""
    background_group: "dist.ProcessGroup | None" = field(default=None, repr=False)
    """For a thread beside the training: its own order of collectives, on the CPU."""
    watchdog: Watchdog | None = field(default=None, repr=False)
    _exchanges: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this process writes what a run has one of."""
        return self.rank == 0

    @property
    def model_mesh(self) -> "DeviceMesh":
        """The mesh over which a model lies: without replicas that of its shards alone, since sums over
        groups of one process would be collectives too."""
        assert self.mesh is not None
        return self.mesh if self.mesh.size(0) > 1 else self.mesh["shard"]

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

    def each(self, function: Callable[[], T]) -> list[T]:
        """What `function` returns in each process, in the order of ranks, however long one takes.

        A `UserError` of any of them is raised in all; `ProcessLost` when one dies meanwhile.
        """
        result, raised = None, None
        with self.busy():
            try:
                result = function()
            except UserError as error:
                raised = error
        self._exchanges += 1
        said, heard = (
            [f"{self._exchanges}/{what}/{rank}" for rank in range(self.size)]
            for what in ("said", "heard")
        )
        outcome = pickle.dumps((result, raised and str(raised)))
        self.store.set(said[self.rank], outcome)  # type: ignore[arg-type]
        self.wait_until(lambda: self.store.check(said))
        outcomes = [pickle.loads(text) for text in self.store.multi_get(said)]
        self.store.set(heard[self.rank], "")
        if self.is_main:  # whose end may be that of the store
            self.wait_until(lambda: self.store.check(heard))
        if raised is not None:
            raise raised
        for _, message in outcomes:
            if message is not None:
                raise ErrorElsewhere(message)
        return [result for result, _ in outcomes]

    def on_main(self, function: Callable[[], T]) -> T:
        """Call `function` in the first process alone; all get its result, or its `UserError`."""
        return self.each(function if self.is_main else lambda: None)[0]  # type: ignore[return-value]

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Wait for other processes as long as they live. Raises `ProcessLost` when one does not."""
        looked = time.monotonic()
        while not done():
            time.sleep(POLL_SECONDS)
            if self.watchdog is None:
                continue
            self.watchdog.progress()
            if time.monotonic() - looked > self.watchdog.timeout:
                if lost := self.watchdog.lost():
                    raise ProcessLost(f"rank {self.rank}: {lost}; start the run again")
                looked = time.monotonic()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Turn the loss of another process into a `ProcessLost` that names it."""
        if self.watchdog is None:
            yield
            return
        with self.watchdog as watchdog:
            try:
                yield
            except Exception as error:
                if not is_communication_error(error):
                    raise
                found = watchdog.diagnose() or f"all processes are alive ({reason_of(error)})"
                raise ProcessLost(f"rank {self.rank}: {found}; start the run again") from error

    def progress(self, step: int | None = None) -> None:
        """Tell the watchdog that this process gets on (and to which step)."""
        if self.watchdog is not None:
            self.watchdog.progress(step)

    def busy(self) -> contextlib.AbstractContextManager[None]:
        """Around work of this process alone that may take any time."""
        return contextlib.nullcontext() if self.watchdog is None else self.watchdog.busy()

    def fail(self, message: str) -> NoReturn:
        """Raise what went wrong in all processes alike; only the first one's is meant to be shown."""
        raise (UserError if self.is_main else ErrorElsewhere)(message)


@contextlib.contextmanager
def open_world(launch: Launch, device: torch.device) -> Iterator[World]:
    """The processes that the environment describes; the group ends with the block.

    Raises `UserError` when `launch.shard` does not divide their number, or not all of them come.
    """
    given = os.environ.get("WORLD_SIZE") or "1"
    if not (given.isdecimal() and int(given)):
        raise UserError(f"WORLD_SIZE={given}: the number of processes, which torchrun sets")
    size = int(given)
    shard = launch.shard or size
    if size % shard:
        those = f"{size} processes" if size > 1 else "one process"
        raise UserError(f"shard={shard} does not divide the {those} of this run")
    if size == 1:
        yield World()
        return
    if device.type == "cuda":
        local, gpus = os.environ.get("LOCAL_RANK") or "0", torch.cuda.device_count()
        if not (local.isdecimal() and int(local) < gpus):
            raise UserError(
                f"LOCAL_RANK={local}: this machine has {gpus} GPUs; start one process for each"
            )
        torch.cuda.set_device(int(local))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        rank = int(os.environ["RANK"])
        # That of torchrun's agent, or without one a store of rank 0.
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = launcher_store(launch.timeout_seconds, is_master=rank == 0 and not hosted)
        name = rendezvous(store, rank, size, launch.timeout_seconds)
        watchdog = Watchdog(rank, size, launch.timeout_seconds, name=name)
        # Collectives outlast the watchdog, which knows more to say of the same wait.
        timeout = timedelta(seconds=watchdog.longest_silence)
        own = dist.PrefixStore(f"processes/{name}", store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        raise UserError(
            f"rank {os.environ.get('RANK', '?')} on {socket.gethostname()}: no rendezvous of the {size} "
            f"processes within {launch.timeout_seconds:.0f} s ({reason_of(error)}); check MASTER_ADDR "
            "and that all were started"
        ) from error
    try:
        from torch.distributed.device_mesh import init_device_mesh

        yield World(
            rank=rank,
            size=size,
            mesh=init_device_mesh(
                device.type, (size // shard, shard), mesh_dim_names=("replicate", "shard")
            ),
            store=dist.PrefixStore(f"exchanges/{name}", store),
            # A checkpoint may take longer than a step; `World.wait_until` sees whether all live.
            background_group=dist.new_group(backend="gloo", timeout=timedelta(days=1)),
            watchdog=watchdog,
        )
    finally:
        dist.destroy_process_group()
