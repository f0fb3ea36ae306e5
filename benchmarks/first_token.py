# SPDX-License-Identifier: Apache-2.0
"""How long the first token of a packed model takes, from the command on, with its file in the page cache.

    python benchmarks/first_token.py PACKED --weight-format stored i2

`sparse-bitnet generate` with each form of the weights in turns, the best of each; stored
maps what lies in the file as it is multiplied. Appends rows to benchmarks/results/.
"""

import argparse
import sys
from pathlib import Path

from installed import timed
from recorded import RESULTS
from rich.console import Console

from sparse_bitnet.bench.record import append_records, result_file, where_measured

PROMPT = "The first token of this text"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="packed model")
    parser.add_argument("--weight-format", nargs="+", default=["stored", "i2"])
    parser.add_argument("--head", default="auto")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON lines; benchmarks/results/ by default")
    options = parser.parse_args()
    where = where_measured()
    program = [sys.executable, "-m", "sparse_bitnet", "generate", str(options.folder)]
    program += ["--prompt", PROMPT, "--head", options.head, "--weight-format"]
    best: dict[str, dict[str, float]] = {name: {} for name in options.weight_format}
    for _ in range(options.turns):
        for name, before in best.items():
            found = timed([*program, name], shows=len(PROMPT))
            best[name] = {key: min(found[key], before.get(key, found[key])) for key in found}
    rows = [
        {"model": options.folder.name, "weight_format": name, "head": options.head, **found}
        for name, found in best.items()
    ]
    append_records(options.out or result_file(RESULTS, "first-token", where), rows, where)
    Console().print(rows)


if __name__ == "__main__":
    main()
