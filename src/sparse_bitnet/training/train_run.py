# SPDX-License-Identifier: Apache-2.0
"""Train a run: gather its processes, read and build all of it, take the folder, go to the last step."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint
from sparse_bitnet.checkpoint.saved_steps import clean_run
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.progress import say
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import resolve_device
from sparse_bitnet.training.distributed import Launch, open_world
from sparse_bitnet.training.run_folder import Interrupted, RunResult, check_run, run_lock
from sparse_bitnet.training.schedule import format_of
from sparse_bitnet.training.trainer import OnStep, Trainer
from sparse_bitnet.training.validation import check_validation_data, identity_of

__all__ = ["Interrupted", "OnStep", "RunResult", "train"]


def train(
    config: TrainConfig, *, on_step: OnStep | None = None, launch: Launch | None = None
) -> RunResult:
    """Train, or continue, the run in `config.out` to its last step; a finished run returns at once.

    Under torchrun all processes call it with the same config; they share one run. A finished run is
    prolonged by a config of more steps: its schedules are then those of all steps together.

    Args:
        config: the run. A folder that holds a run must hold one of the same config.
        on_step: called after every step with its metrics and timing in one dict, in the first process.
        launch: how several processes share the work.

    Raises `UserError` for bad input, a locked folder, a loss that is not finite, or a process of the run
    that is gone; `Interrupted` after SIGINT or SIGTERM, when a checkpoint of the last whole step is on
    the disk. Input that is refused leaves no trace in the folder.
    """
    run = Path(config.out)
    format_of(config)
    with ExitStack() as held:
        world = held.enter_context(open_world(launch or Launch(), resolve_device(config.device)))
        data, finished = world.on_main(lambda: _check(run, config))
        if finished is not None:
            return finished
        trainer = Trainer(config, run, on_step, world)
        world.on_main(lambda: _take(run, config, data, held))
        return trainer.run_to_end(data)


def _check(run: Path, config: TrainConfig) -> tuple[dict[str, Any], RunResult | None]:
    dataset = TokenDataset.open(config.data, "train")
    check_validation_data(config)
    data = identity_of(config.data)
    finished = check_run(run, config, data)
    if finished is not None:
        return data, finished
    for name in dict.fromkeys(filter(None, (config.init, config.teacher))):
        found = find_checkpoint(name)
        if not dataset.check_tokenizer(found.folder, name):
            say(f"{name} has no tokenizer: that of {config.data} is taken for its own")
        if name == config.init and found.kind == "trained":
            before = SparseBitConfig.from_dict(found.entry["format"])
            if before != format_of(config):
                say(f"{name} is {before}: the run converts it to {config.format} (--format)")
    return data, None


def _take(run: Path, config: TrainConfig, data: dict[str, Any], held: ExitStack) -> None:
    held.enter_context(run_lock(run))
    check_run(run, config, data)
    clean_run(run)
