# SPDX-License-Identifier: Apache-2.0
"""Training speed of this checkout and of another one: a few steps of each in turn, on one thread.

    python benchmarks/training_speed.py DATA OTHER [SIZE...]     # OTHER: a built checkout of other code

Each checkout trains a ternary 6:8 model in a process of its own: this one compiled, the other one with
its defaults. Processor time is measured, so that other work on the machine matters little. DATA is
prepared text with a vocabulary of 1,024. Appends one row per size to benchmarks/results/.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from recorded import record

TURN, WARM = 15, 3
"""Steps of a turn, and those at its beginning that do not count: the other's data fill the caches."""

STEPS = {"qwen2.5-0.3m": 13440, "qwen2.5-0.5m": 6840, "qwen2.5-1m": 6480}
"""Model sizes, with the length of a run: a long one is compiled."""

ROOT = Path(__file__).resolve().parent.parent
CHILD = """
import importlib.util, json, sys, time
if not importlib.util.find_spec("sparse_bitnet").origin.startswith(sys.argv[2]):
    # What an editable install puts in front of PYTHONPATH.
    sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in type(each).__module__]
import sparse_bitnet._cpu
assert sparse_bitnet.__file__.startswith(sys.argv[2]), sparse_bitnet.__file__
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.trainer import train
config = TrainConfig(**json.loads(sys.argv[1]))
began = 0.0
def on_step(row):
    global began
    print(json.dumps([time.process_time() - began, row["loss"]]), file=sys.stderr, flush=True)
    if not sys.stdin.readline():
        raise SystemExit
    began = time.process_time()
train(config, on_step=on_step)
"""


class Child:
    """One checkout in a child process, which trains a step on request."""

    def __init__(self, source: Path, config: dict[str, Any]) -> None:
        paths = {"PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", CHILD, json.dumps(config), str(source.resolve())]
        pipe = {name: subprocess.PIPE for name in ("stdin", "stderr")}
        self.process = subprocess.Popen(
            command, env=os.environ | paths, text=True, stdout=subprocess.DEVNULL, **pipe
        )

    def step(self) -> tuple[float, float]:
        """Processor seconds and loss of the step that was asked for; asks for the next."""
        said = []
        for line in self.process.stderr:
            if line.startswith("["):
                self.process.stdin.write("\n")
                self.process.stdin.flush()
                seconds, loss = json.loads(line)
                return seconds, loss
            said.append(line)
        raise SystemExit("".join(said))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("sizes", nargs="*")
    parser.add_argument("--turns", type=int, default=16)
    options = parser.parse_args()
    common = dict(
        format="ternary-6:8",
        batch_size=8,
        sequence_length=256,
        learning_rate=6e-3,
        threads=1,
        layer_metrics_every=0,
        checkpoint_every=0,
        validation_every=0,
    )
    for model, steps in STEPS.items():
        if options.sizes and model not in options.sizes:
            continue
        with tempfile.TemporaryDirectory() as folder:
            config = {**common, "model": model, "steps": steps, "data": str(options.data)}
            children = {
                "here": Child(ROOT, {**config, "compile": "on", "out": f"{folder}/here"}),
                "other": Child(options.other, {**config, "out": f"{folder}/other"}),
            }
            timed = {name: [] for name in children}
            for _ in range(options.turns):
                for name, child in children.items():
                    turn = [child.step() for _ in range(TURN)]
                    timed[name].append(turn[WARM:])
            for child in children.values():
                child.process.kill()
        # A median a turn; the first is of a cold start.
        taken = {
            name: [statistics.median(seconds for seconds, _ in turn) for turn in turns[1:]]
            for name, turns in timed.items()
        }
        ratios = [old / new for old, new in zip(taken["other"], taken["here"], strict=True)]
        head = subprocess.check_output(["git", "-C", options.other, "rev-parse", "HEAD"], text=True)
        row = {
            "model": model,
            "other_commit": head[:12],
            "tokens_per_second": {
                name: 2048 / statistics.median(seconds) for name, seconds in taken.items()
            },
            "times_as_fast": statistics.median(ratios),
            "last_losses": {name: each[-1][-1][1] for name, each in timed.items()},
        }
        record("training-speed", [row])
        print(row, flush=True)


if __name__ == "__main__":
    main()
