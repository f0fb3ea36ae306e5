# SPDX-License-Identifier: Apache-2.0
"""The light core in an empty environment: bytes of its packages, and processor time of commands there.

    python benchmarks/installed.py dist/sparse_bitnet-*.whl --model PACKED      # needs a package index

Processor time, because it depends less on what else a machine does; the least of several runs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from sparse_bitnet.bench.record import append_records, result_file, where_measured

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
SMALL = 2e6
"""Bytes; packages below this are counted together."""


def sizes(packages: Path) -> list[dict]:
    """Rows of the packages in a site-packages folder, the largest first."""
    code, bytecode = Counter(), Counter()
    for path in packages.rglob("*"):
        name = path.relative_to(packages).parts[0].partition("-")[0].partition(".")[0]
        if path.is_file() and name not in TOOLS:
            (bytecode if path.suffix == ".pyc" else code)[name] += path.stat().st_size
    for name in [name for name in code | bytecode if code[name] + bytecode[name] < SMALL]:
        code["others"] += code.pop(name, 0)
        bytecode["others"] += bytecode.pop(name, 0)
    rows = [{"package": name, "code": code[name], "bytecode": bytecode[name]} for name in code]
    return sorted(rows, key=lambda row: -row["code"] - row["bytecode"])


def processor_seconds(command: list[str], rounds: int = 1) -> float:
    """Of a command and its children, the least of some runs; fails where the command does."""
    seconds = []
    for _ in range(rounds):
        before = os.times()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        seconds.append(sum(after[2:4]) - sum(before[2:4]))
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--model", type=Path, help="packed model for a first token")
    parser.add_argument("--python", default=sys.executable, help="that the wheel is for")
    parser.add_argument("--out", type=Path, help="JSON lines; benchmarks/results/ by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([options.python, "-m", "venv", folder], check=True)
        python = f"{folder}/bin/python"
        install = [python, "-m", "pip", "install", "--quiet", "--constraint"]
        commands = {"pip install": [*install, str(ROOT / "constraints.txt"), str(options.wheel)]}
        program = [python, "-m", "sparse_bitnet"]
        commands |= {word: [*program, word] for word in ("--help", "models")}
        if options.model:
            one = ["--prompt", "hello", "--max-tokens", "1", "--threads", "1"]
            commands["generate, one token"] = [*program, "generate", str(options.model), *one]
        rows = []
        for name, command in commands.items():
            rounds = 1 if name == "pip install" else 7
            rows.append({"command": name, "processor_seconds": processor_seconds(command, rounds)})
        (packages,) = Path(folder).glob("lib/python*/site-packages")
        rows += sizes(packages)
    for row in rows:
        print(*row.values())
    where = where_measured()
    append_records(
        options.out or result_file(ROOT / "benchmarks/results", "installed", where), rows, where
    )


if __name__ == "__main__":
    main()
