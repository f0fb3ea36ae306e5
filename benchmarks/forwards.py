# SPDX-License-Identifier: Apache-2.0
"""Whether training with the int8 forward gives the loss curves of the fake-quantised one.

    python benchmarks/forwards.py WORK_FOLDER            # a stopped call is continued in its folder

Trains a small model on the embedded text with both forwards, the same seeds and the same batches, and
compares them: whether int8 minus fake, one number a seed, is zero within the noise between seeds. Appends
rows to benchmarks/results/.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recorded import RESULTS
from rich.console import Console

from sparse_bitnet.bench.record import append_records, result_file
from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.provenance import provenance
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import resolve_device, resolve_dtype
from sparse_bitnet.training.metrics import METRICS_FILE, read_rows
from sparse_bitnet.training.train_run import train
from sparse_bitnet_paper.judge import Estimate

FORWARDS = ("fake", "int8")
WINDOWS = 20

Curve = Sequence[float]


def curve(losses: Sequence[float], windows: int = WINDOWS) -> list[float]:
    """Means of equal parts of a run, so that the batches' own noise does not hide a difference."""
    size = len(losses) // windows
    return [statistics.fmean(losses[i * size : (i + 1) * size]) for i in range(windows)]


def distance(a: Curve, b: Curve) -> float:
    """Root mean square of the difference of two curves."""
    return math.sqrt(statistics.fmean((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def compare(runs: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, Any]:
    """How far the forwards lie apart at one seed, and the seeds at one forward.

    Args:
        runs: (forward, seed) -> "curve" and "validation_loss", at least two seeds of both forwards.

    Rounding differences grow until two runs of one seed lie about as far apart as two seeds, so single
    curves cannot be compared by their distance alone. The forwards agree where the 95 % Student t
    interval of int8 minus fake, one number a seed, holds zero: of the curves' means and of the final
    validation losses.
    """
    seeds = sorted({seed for _, seed in runs})
    pairs = [(f, a, b) for f in FORWARDS for a, b in itertools.combinations(seeds, 2)]

    def curve_of(forward: str, seed: int) -> Curve:
        return runs[forward, seed]["curve"]

    def difference(what: Callable[[Mapping[str, Any]], float]) -> Estimate:
        values = tuple(what(runs["int8", s]) - what(runs["fake", s]) for s in seeds)
        return Estimate(values=values)

    training = difference(lambda run: statistics.fmean(run["curve"]))
    validation = difference(lambda run: run["validation_loss"])
    of_forwards = [distance(curve_of("int8", s), curve_of("fake", s)) for s in seeds]
    of_seeds = [distance(curve_of(f, a), curve_of(f, b)) for f, a, b in pairs]
    fake = [runs["fake", seed]["validation_loss"] for seed in seeds]
    return {
        "seeds": len(seeds),
        "curve_distance_of_forwards": statistics.fmean(of_forwards),
        "curve_distance_of_seeds": statistics.fmean(of_seeds),
        "training_difference": training.mean,
        "training_half_width": training.half_width,
        "validation_difference": validation.mean,
        "validation_half_width": validation.half_width,
        "validation_deviation_of_seeds": statistics.stdev(fake),
        "agree": all(abs(each.mean) <= each.half_width for each in (training, validation)),
    }


def train_one(config: TrainConfig) -> dict[str, Any]:
    """A finished run is read, not trained again."""
    result = train(config)
    run = Path(config.out)
    losses = [row["loss"] for row in read_rows(run / METRICS_FILE) if "loss" in row]
    return {
        "what": "run",
        "forward": config.forward,
        "seed": config.seed,
        "curve": curve(losses),
        "validation_loss": result.validation_loss,
        "flip_rate": result.flip_rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder of the data and the runs")
    parser.add_argument("--model", default="qwen2.5-1m", help="preset")
    parser.add_argument("--format", default="ternary-6:8")
    parser.add_argument("--source", default="python-stdlib", help="text to train on")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3, help="at least two: they are the noise")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--precision", choices=("auto", "bf16", "float32"), default="bf16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, help="JSON lines; benchmarks/results/ by default")
    options = parser.parse_args()
    if options.seeds < 2 or options.steps < WINDOWS:
        parser.error(f"needs at least 2 seeds and {WINDOWS} steps")
    data = options.work / "data"
    prepare(parse_source(options.source), data, vocab_size=2048)
    console, runs = Console(), {}
    for seed, forward in itertools.product(range(options.seeds), FORWARDS):
        config = TrainConfig(
            model=options.model,
            format=options.format,
            data=str(data),
            out=str(options.work / f"{forward}-{seed}"),
            seed=seed,
            steps=options.steps,
            batch_size=options.batch_size,
            precision=options.precision,
            device=options.device,
            forward=forward,
            checkpoint_every=100,
            keep_checkpoints=1,
        )
        runs[forward, seed] = row = train_one(config)
        console.print(f"{forward}, seed {seed}: validation loss {row['validation_loss']:.4f}")
    device = resolve_device(options.device)
    given = {
        "model": options.model,
        "format": options.format,
        "steps": options.steps,
        "tokens_per_step": config.tokens_per_step,
        "compute": str(resolve_dtype(options.precision, device)).removeprefix("torch."),
        "device": device.type,
    }
    found = {"what": "comparison", **compare(runs)}
    where = provenance()
    out = options.out or result_file(RESULTS, "forwards", where)
    append_records(out, [{**given, **row} for row in (*runs.values(), found)], where)
    console.print(
        f"int8 minus fake over {found['seeds']} seeds: training loss "
        f"{found['training_difference']:+.4f} +- {found['training_half_width']:.4f}, validation "
        f"{found['validation_difference']:+.4f} +- {found['validation_half_width']:.4f} (95 %); curves "
        f"lie {found['curve_distance_of_forwards']:.4f} apart, those of two seeds "
        f"{found['curve_distance_of_seeds']:.4f}. The forwards "
        f"{'agree within' if found['agree'] else 'differ by more than'} the noise between seeds."
    )
    console.print(f"written to {out}", soft_wrap=True)


if __name__ == "__main__":
    main()
