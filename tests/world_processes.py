# SPDX-License-Identifier: Apache-2.0
"""Worlds of training processes: import once, then fork each requested world.

Run as a script it reads one JSON request a line: `configs` of one run after another, `size`, `shard`,
`timeout_seconds` and `faults`, what happens to which rank before which step. It answers with each rank's
exit code (negative: the signal that ended it) and output.
"""

import contextlib
import errno
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparse_bitnet.bench.child import Child, serve
from sparse_bitnet.presets import PRESETS, Shape
from sparse_bitnet.training.config import TrainConfig

TINY = Shape(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=128,
)
LIMIT_SECONDS = 300.0


class Worlds(Child):
    """The process that forks worlds; ends with the `with` block."""

    def __init__(self) -> None:
        # A forked rank has no pool of compilers.
        super().__init__([__file__], {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"})

    def run(
        self,
        *configs: TrainConfig,
        size: int,
        shard: int | None = None,
        timeout_seconds: float = 60.0,
        faults: dict[str, str] | None = None,
    ) -> list[tuple[int, str]]:
        """Train the configs one after another in a world; (exit code, output) of each rank.

        Args:
            faults: "rank:step" -> kill, stop (freeze),
                interrupt (SIGTERM), full disk; before the step, or at its checkpoint.
                "rank:export" -> slow: half as long again as the timeout.
        """
        request = {"configs": [asdict(config) for config in configs], "size": size, "shard": shard}
        request |= {"timeout_seconds": timeout_seconds, "faults": faults or {}}
        return [(code, text) for code, text in self.ask(request)["ranks"]]


def main() -> None:
    import rich.progress  # noqa: F401
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    import sparse_bitnet.training.trainer  # noqa: F401
    from sparse_bitnet.checkpoint.build_model import build_model
    from sparse_bitnet.layer_config import SparseBitConfig

    torch.set_num_threads(1)
    PRESETS["qwen2.5-1m"] = TINY
    build_model("qwen2.5-1m", SparseBitConfig())  # transformers makes a table with the first model
    serve(lambda request: {"ranks": run_world(request)})


def run_world(request: dict[str, Any]) -> list[tuple[int, str]]:
    # One port for each run: the store of the run before may not be gone yet.
    ports = [free_port() for _ in request["configs"]]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(request["size"])]
        children = []
        for rank, output in enumerate(outputs):
            child = os.fork()
            if child == 0:
                be_rank(rank, ports, request, output)
            children.append(child)
        codes = [wait(child) for child in all_ended(children)]
        return [(code, path.read_text()) for code, path in zip(codes, outputs, strict=True)]


def free_port() -> int:
    """A port nobody listens on, below those that the kernel hands out to any connection meanwhile."""
    handed_out = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    while True:
        port = random.randrange(10_000, max(int(handed_out[0]), 20_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def all_ended(children: list[int]) -> Iterator[int]:
    """The children in order, frozen and late ones killed when only they are left."""
    deadline = time.monotonic() + LIMIT_SECONDS
    left = list(children)
    while left and time.monotonic() < deadline:
        left = [child for child in left if not ended(child)]
        if all(state(child) == "T" for child in left):
            break
        time.sleep(0.05)
    for child in left:
        os.kill(child, signal.SIGKILL)
    yield from children


def state(child: int) -> str:
    return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]


def ended(child: int) -> bool:
    return state(child) == "Z"


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def be_rank(rank: int, ports: list[int], request: dict[str, Any], output: Path) -> None:
    """One process of a world, from its fork to its end."""
    code = 70
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        os.environ["WORLD_SIZE"] = str(request["size"])
        code = train_all(rank, ports, request)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def train_all(rank: int, ports: list[int], request: dict[str, Any]) -> int:
    from sparse_bitnet.errors import UserError
    from sparse_bitnet.training.trainer import Interrupted, train

    inject_faults(rank, request["faults"], request["timeout_seconds"])
    launch = {name: request[name] for name in ("shard", "timeout_seconds")}
    for port, config in zip(ports, request["configs"], strict=True):
        os.environ["MASTER_PORT"] = str(port)
        try:
            result = train(TrainConfig(**config), **launch)
        except Interrupted as stop:
            print(f"Interrupted: {stop}")
            return 130
        except UserError as error:
            print(f"{type(error).__name__}: {error}")
            return 2
        print(f"done {result.steps}")
    return 0


def inject_faults(rank: int, faults: dict[str, str], timeout_seconds: float) -> None:
    from torch.distributed.checkpoint import FileSystemWriter

    from sparse_bitnet.training import trainer
    from sparse_bitnet.training.trainer import Trainer, save_pretrained

    step_of = Trainer._step
    write_data = FileSystemWriter.write_data

    def step(self: Trainer, number: int) -> dict[str, Any]:
        match faults.get(f"{rank}:{number}"):
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "interrupt":
                os.kill(os.getpid(), signal.SIGTERM)
        return step_of(self, number)

    def write(self: FileSystemWriter, *arguments: Any) -> Any:
        step = int(Path(self.path).parent.name.rpartition("-")[2])
        if faults.get(f"{rank}:{step}") == "full disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_data(self, *arguments)

    def export(*arguments: Any, **options: Any) -> None:
        if faults.get(f"{rank}:export") == "slow":
            time.sleep(1.5 * timeout_seconds)
        save_pretrained(*arguments, **options)

    Trainer._step = step  # type: ignore[method-assign]
    trainer.save_pretrained = export
    FileSystemWriter.write_data = write  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
