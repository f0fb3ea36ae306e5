# SPDX-License-Identifier: Apache-2.0
"""How far apart the losses of one run come when nothing but the order of its sums differs.

    python benchmarks/orders.py [--steps 100] [--record]

One process sums the gradients of its batch in four orders (micro-batches of 12, 6, 4 and 2 sequences);
two and three processes sum in orders of their own. Rounding alone differs: what several processes lie
apart from one, one lies apart from itself. `--record` writes the rows to benchmarks/results/.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from recorded import RESULTS

from sparse_bitnet.bench.record import append_records, result_file, where_measured
from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.training.metrics import METRICS_FILE, read_rows

BATCH = 12
ORDERS = [(1, 12), (1, 6), (1, 4), (1, 2), (2, 6), (3, 4)]
"""Processes, sequences a forward. The first is what the others are compared with."""


def losses(folder: Path, processes: int, micro: int, steps: int) -> list[float]:
    """Of every step of a run."""
    out = folder / f"{processes}-{micro}"
    command = [sys.executable, "-m"]
    if processes > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    options = {
        "model": "qwen2.5-0.3m",
        "data": folder / "data",
        "out": out,
        "steps": steps,
        "batch-size": BATCH,
        "micro-batch-size": micro,
        "sequence-length": 64,
        "checkpoint-every": 0,
        "precision": "float32",
        "validation-tokens": 1024,
        "threads": 1,
    }
    command += ["sparse_bitnet", "train"]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    subprocess.run(command, check=True, capture_output=True)
    return [row["loss"] for row in read_rows(out / METRICS_FILE) if "loss" in row]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--record", action="store_true", help="write rows to benchmarks/results")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = parse_source("python-stdlib", limit_bytes=600_000)
        prepare(source, folder / "data", vocab_size=512)
        reference = losses(folder, *ORDERS[0], options.steps)
        for processes, micro in ORDERS[1:]:
            found = losses(folder, processes, micro, options.steps)
            apart = [abs(one - other) for one, other in zip(found, reference, strict=True)]
            marks = [2, 5, 10, 20, 40, 60, 80, 100]
            rows.append(
                {
                    "processes": processes,
                    "micro_batch_size": micro,
                    "apart": {str(step): apart[step - 1] for step in marks if step <= len(apart)},
                    "most": max(apart),
                }
            )
            print(rows[-1], flush=True)
    if options.record:
        where = where_measured()
        append_records(result_file(RESULTS, "orders", where), rows, where)


if __name__ == "__main__":
    main()
