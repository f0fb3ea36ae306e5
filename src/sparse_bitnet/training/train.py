"""Train a run: find the other processes, take the folder, make one step after another."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sparse_bitnet.checkpoint import saved_steps
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.errors import UserError
from sparse_bitnet.layer import SparseBitConfig
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import resolve_device
from sparse_bitnet.training.distributed import Launch, open_world
from sparse_bitnet.training.run_folder import Interrupted, open_run, run_lock
from sparse_bitnet.training.trainer import OnStep, RunResult, Trainer, validation_loss

__all__ = ["Interrupted", "OnStep", "RunResult", "train", "validation_loss"]


def train(
    config: TrainConfig, *, on_step: OnStep | None = None, launch: Launch | None = None
) -> RunResult:
    """Train, or continue, the run in `config.out` to its last step; a finished run returns at once.

    Under torchrun all processes call it with the same config; they share one run.

    Args:
        config: the run. A folder that holds a run must hold one of the same config.
        on_step: called after every step with its metrics and timing in one dict, in the first process.
        launch: how several processes share the work.

    Raises `UserError` for bad input, a locked folder, a loss that is not finite, or a process of the run
    that is gone; `Interrupted` after SIGINT or SIGTERM, when a checkpoint of the last whole step is on
    the disk.
    """
    run = Path(config.out)
    SparseBitConfig.parse(config.format)
    with ExitStack() as held:
        world = held.enter_context(open_world(launch or Launch(), resolve_device(config.device)))
        with world.watch():
            finished = world.on_main(lambda: _claim(run, config, held))
            if finished is not None:
                return RunResult(**finished)
            trainer_class: type[Trainer] = Trainer
            if world.is_distributed:
                from sparse_bitnet.training.sharded_trainer import ShardedTrainer

                trainer_class = ShardedTrainer
            return trainer_class(config, run, on_step, world).run_to_end()


def _claim(run: Path, config: TrainConfig, held: ExitStack) -> dict[str, Any] | None:
    """Check the data, take the run folder for as long as `held`; the result of a finished run."""
    TokenDataset.open(config.data, "train")
    # Read at the end only: better missed now.
    held_out = TokenDataset.open(config.data, "validation", verify="never")
    if len(held_out) <= config.sequence_length:
        raise UserError(
            f"{config.data}: its {len(held_out):,} validation tokens are fewer than a sequence of "
            f"{config.sequence_length} and the token after it; prepare with --validation or a larger "
            "--validation-fraction"
        )
    open_run(run, config)
    held.enter_context(run_lock(run))
    saved_steps.clean_run(run)
    if (run / "result.json").is_file():
        return json.loads((run / "result.json").read_text())
    return None
