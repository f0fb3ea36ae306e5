# SPDX-License-Identifier: Apache-2.0
"""Measurements as JSON lines, each with where and with what it was taken."""

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparse_bitnet.errors import os_errors_as
from sparse_bitnet.provenance import commit, cpu_hardware, versions


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
    """Check that `append_records` can write here, before the work. Raises `UserError`; leaves nothing."""
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
