# SPDX-License-Identifier: Apache-2.0
"""Measurements as JSON lines, each with where and with what it was taken, and as tables."""

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.errors import os_errors_as
from sparse_bitnet.provenance import commit, cpu_hardware, versions

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(kw_only=True)
class BenchRow:
    """One measurement of one engine."""

    model: str
    pattern: str
    weight_format: str
    head: str
    kv_cache: str
    isa: str
    threads: int
    phase: str
    """"prefill" or "decode"."""
    tokens: int
    """Of the prompt; of decode the context, which a batch shares."""
    batch: int
    seconds: float
    """Median, of a prompt or of a step."""
    spread: float
    """Slowest over fastest round, minus 1."""
    rounds: int
    tokens_per_second: float
    """Of all sequences together."""
    step_bytes: float | None
    """Read by a decode step."""
    memory_share: float | None
    """`step_bytes` a second over the measured memory speed."""
    int8_share: float
    """Operations of the blocks over the measured int8 speed."""
    read_bytes_per_second: float
    int8_ops_per_second: float
    load_seconds: float
    resident_bytes: int | None
    """Of the engine's whole process, after the measurement's last round."""
    others_share: float | None
    """Processor time that other processes used during the run, of all there was."""


def where_measured() -> dict[str, Any]:
    """JSON-able: commit, hardware, versions and date (UTC). Imports no torch."""
    return {
        "commit": commit(),
        "hardware": cpu_hardware(),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def result_file(folder: Path, kind: str, where: Mapping[str, Any]) -> Path:
    """The JSON-lines file of one kind of measurement, made on one day on one machine.

    Args:
        folder: of the results.
        kind: "peers", "server", ...
        where: with "date" and "hardware".
    """
    hardware = re.sub(r"[^a-z0-9]+", "-", where["hardware"].lower()).strip("-")
    return folder / f"{where['date'][:10]}_{hardware}_{kind}.jsonl"


def check_records(path: Path | str) -> None:
    """Raise `UserError` where `append_records` could not write: for before the work, not after. Leaves
    nothing there."""
    path = Path(path)
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    with os_errors_as(f"cannot write {path}"):
        if there == path:
            open(path, "a").close()
        else:
            tempfile.TemporaryFile(dir=there).close()


def append_records(
    path: Path | str, rows: Iterable[Mapping[str, Any]], where: Mapping[str, Any]
) -> None:
    """Append a JSON line a row. Raises `UserError` when the file cannot be written."""
    text = "".join(json.dumps({**row, **where}) + "\n" for row in rows)
    with os_errors_as(f"cannot write {path}"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)


def table(rows: list[BenchRow]) -> "Table":
    """Tokens a second and shares of the roofline: a line a measurement, a column an engine."""
    from rich import box
    from rich.table import Table

    engines = list(dict.fromkeys(_engine(row) for row in rows))
    first = rows[0]
    found = Table(
        title=f"{first.model} {first.pattern}: tokens/s, share of the roofline",
        caption="mem: of the memory's read speed; int8: of the int8 speed. Medians of "
        f"{first.rounds} rounds. A batch shares its context.",
        box=box.SIMPLE_HEAD,
    )
    found.add_column("", no_wrap=True)
    for engine in engines:
        found.add_column(_engine_title(*engine), justify="right", no_wrap=True)
    cells = {(_measured(row), _engine(row)): _cell(row) for row in rows}
    for measured in dict.fromkeys(_measured(row) for row in rows):
        found.add_row(measured, *(cells.get((measured, engine), "-") for engine in engines))
    found.add_section()
    last = {_engine(row): row for row in rows if row.batch == 1}
    found.add_row("load, s", *(f"{last[engine].load_seconds:.2f}" for engine in engines))
    found.add_row("resident, MB", *(_megabytes(last[engine]) for engine in engines))
    found.add_row(
        "memory, GB/s", *(f"{last[engine].read_bytes_per_second / 1e9:.1f}" for engine in engines)
    )
    found.add_row(
        "int8, TOP/s", *(f"{last[engine].int8_ops_per_second / 1e12:.2f}" for engine in engines)
    )
    return found


def _engine(row: BenchRow) -> tuple[str, str, int, str]:
    return row.weight_format, row.head, row.threads, row.isa


def _engine_title(weight_format: str, head: str, threads: int, isa: str) -> str:
    return f"{weight_format}, head {head}\n{threads} thread{'s' * (threads > 1)}, {isa}"


def _measured(row: BenchRow) -> str:
    if row.phase == "prefill":
        return f"prefill {row.tokens}"
    return f"decode behind {row.tokens}, batch {row.batch}"


def _cell(row: BenchRow) -> str:
    memory = row.memory_share or 0.0
    name, share = ("mem", memory) if memory > row.int8_share else ("int8", row.int8_share)
    return f"{row.tokens_per_second:.1f}  {name} {share:4.0%}"


def _megabytes(row: BenchRow) -> str:
    return "-" if row.resident_bytes is None else f"{row.resident_bytes / 1e6:.0f}"
