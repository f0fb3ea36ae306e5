# SPDX-License-Identifier: Apache-2.0
"""Rows in benchmarks/results/ and tables of them."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from sparse_bitnet.provenance import append_records, where_measured

RESULTS = Path(__file__).parent / "results"

Row = dict


class NothingRecorded(Exception):
    """Raised if there are no rows of a kind."""


def record(kind: str, rows: Iterable[Row], out: Path | None = None, **more: object) -> Path:
    """Append rows to `out`, by default to the file of their kind, day and machine in results/.

    `more` is written with where they were measured. Returns the file.
    """
    where = where_measured() | more
    hardware = re.sub(r"[^a-z0-9]+", "-", where["hardware"].lower()).strip("-")
    out = out or RESULTS / f"{where['date'][:10]}_{hardware}_{kind}.jsonl"
    append_records(out, rows, where)
    return out


def files(kind: str) -> list[Path]:
    """Return the result files of a kind, newest first. Raises `NothingRecorded` if there are none."""
    paths = sorted(RESULTS.glob(f"*_{kind}.jsonl"), reverse=True)
    if not paths:
        raise NothingRecorded(kind)
    return paths


def read(kind: str, **where: object) -> list[Row]:
    """Return rows of the newest run of a kind that has some with the given values. Raises
    `NothingRecorded`."""
    for path in files(kind):
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        if chosen := [row for row in rows if all(row[name] == where[name] for name in where)]:
            return chosen
    raise NothingRecorded(kind)


def markdown(
    head: Sequence[str], lines: Sequence[Sequence[str]], row: Row, command: str, note: str = ""
) -> str:
    """Return a table, and the hardware and versions of its measurement."""
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    table = "\n".join("| " + " | ".join(line) + " |" for line in rows)
    versions = row["versions"]
    where = f"{row['hardware']}, {row['date'][:10]}, commit {row['commit']}"
    return f"{table}\n\n`{command}` ({note}{where}, sparse-bitnet {versions['sparse-bitnet']})"


def filled(columns: Sequence[tuple[str, str]], rows: Sequence[Row], command: str) -> str:
    """Return `markdown` with one line per row: table heads, each with a format string for the row's
    values."""
    lines = [[cell.format_map(row) for _, cell in columns] for row in rows]
    where = {**max(rows, key=lambda row: row.get("date", ""))}
    for name, mark in (("commit", ", "), ("hardware", "; ")):
        where[name] = mark.join(dict.fromkeys(row[name] for row in rows if name in row))
    return markdown([head for head, _ in columns], lines, where, command)


def threads_heads(what: str, threads: Sequence[int]) -> list[str]:
    """Return a table head for each number of threads."""
    return [f"{what}, {count} thread{'s' * (count > 1)}" for count in threads]
