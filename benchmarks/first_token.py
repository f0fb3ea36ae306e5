# SPDX-License-Identifier: Apache-2.0
"""How long the first token of a packed model takes, from the command on, with its file in the page cache.

    python benchmarks/first_token.py PACKED --weight-format stored i2

`sparse-bitnet generate --max-tokens 1` with each form of the weights in turns, the best of each; stored
maps what lies in the file as it is multiplied. Appends rows to benchmarks/results/.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from sparse_bitnet.bench.record import append_records, result_file, where_measured

RESULTS = Path(__file__).parent / "results"
PROMPT = "The first token of this text"


def run_once(folder: Path, weight_format: str, head: str) -> dict[str, float]:
    """Seconds until the token is printed, processor time of the command, the system's part of that."""
    command = [sys.executable, "-m", "sparse_bitnet", "generate", str(folder), "--prompt", PROMPT]
    command += ["--max-tokens", "1", "--weight-format", weight_format, "--head", head]
    before, started = os.times(), time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(len(PROMPT) + 1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    if process.returncode:
        sys.exit(process.returncode)
    after = os.times()
    system = after.children_system - before.children_system
    user = after.children_user - before.children_user
    return {"seconds": seconds, "processor_seconds": user + system, "system_seconds": system}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="packed model")
    parser.add_argument("--weight-format", nargs="+", default=["stored", "i2"])
    parser.add_argument("--head", default="auto")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON lines; benchmarks/results/ by default")
    options = parser.parse_args()
    where = where_measured()
    best: dict[str, dict[str, float]] = {name: {} for name in options.weight_format}
    for _ in range(options.turns):
        for name, before in best.items():
            found = run_once(options.folder, name, options.head)
            best[name] = {key: min(found[key], before.get(key, found[key])) for key in found}
    rows = [
        {"model": options.folder.name, "weight_format": name, "head": options.head, **found}
        for name, found in best.items()
    ]
    append_records(options.out or result_file(RESULTS, "first-token", where), rows, where)
    Console().print(rows)


if __name__ == "__main__":
    main()
