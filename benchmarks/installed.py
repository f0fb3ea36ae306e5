# SPDX-License-Identifier: Apache-2.0
"""The light core in an empty environment: bytes of its packages, and how long commands take there.

    python benchmarks/installed.py dist/sparse_bitnet-*.whl --model PACKED...   # needs a package index

Processor time too, because it depends less on what else a machine does; the least of several runs each.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from recorded import record

from sparse_bitnet.provenance import versions

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
SMALL = 2e6
"""Bytes; packages below this are counted together."""
ROUNDS = 15
PROMPT = "hello"


def sizes(packages: Path) -> list[dict]:
    """Return rows of the packages in a site-packages folder, the largest first."""
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


def timed(command: list[str], rounds: int = 1, *, shows: int | None = None) -> dict:
    """Seconds and processor seconds of a command and its children, the least of some runs; with `shows`
    only until it has printed more than so many bytes. Fails where the command does."""
    runs = []
    for _ in range(rounds):
        begin, printed = time.perf_counter(), 0
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            while shows is None or printed <= shows:
                if not (part := os.read(process.stdout.fileno(), 4096)):
                    break
                printed += len(part)
            seconds = time.perf_counter() - begin
            if shows is not None:
                process.kill()
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0 if shows is None else printed > shows, command
        runs.append((seconds, used.ru_utime + used.ru_stime))
    least = map(min, zip(*runs, strict=True))
    return dict(zip(("seconds", "processor_seconds"), least, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--model", type=Path, nargs="*", default=[], help="packed, for a first token"
    )
    parser.add_argument("--python", default=sys.executable, help="that the wheel is for")
    parser.add_argument("--out", type=Path, help="JSON lines; benchmarks/results/ by default")
    options = parser.parse_args()
    ask = "import platform; print(platform.python_version())"
    told = subprocess.run([options.python, "-c", ask], check=True, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([options.python, "-m", "venv", folder], check=True)
        python = f"{folder}/bin/python"
        install = [python, "-m", "pip", "install", "--quiet", "--constraint"]
        commands = {"pip install": [*install, str(ROOT / "constraints.txt"), str(options.wheel)]}
        program = [python, "-m", "sparse_bitnet"]
        commands |= {word: [*program, word] for word in ("--help", "models")}
        rows = []
        for name, command in commands.items():
            rows.append({"command": name, **timed(command, 1 if name == "pip install" else ROUNDS)})
        for model in options.model:
            words = json.loads((model / "config.json").read_text())["vocab_size"]
            one = [*program, "generate", str(model), "--prompt", PROMPT, "--threads", "1"]
            name = f"generate, first token, {words:,} words"
            rows.append({"command": name, **timed(one, ROUNDS, shows=len(PROMPT))})
        (packages,) = Path(folder).glob("lib/python*/site-packages")
        rows += sizes(packages)
    for row in rows:
        print(*row.values())
    record("installed", rows, options.out, versions=versions() | {"python": told.stdout.strip()})


if __name__ == "__main__":
    main()
