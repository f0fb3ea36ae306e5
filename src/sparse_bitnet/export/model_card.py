# SPDX-License-Identifier: Apache-2.0
"""Model card (README.md) of an export: what the model is, its training, how to load it in each tool."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from sparse_bitnet import __version__
from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.checkpoint.model_folder import read_json
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_config import FORMATS
from sparse_bitnet.packing.gguf_blocks import BLOCK_TYPES, block_for

Row = tuple[str, str]


def model_card(
    source: Checkpoint, format: str, embeddings: str | None, *, checked: Sequence[Row] = ()
) -> str:
    """Return the model card of an export as Markdown with a YAML head. `checked`: the rows of its
    verification, if there was one."""
    card = jinja2.Template(
        Path(__file__).with_name("model_card.md.j2").read_text("utf-8"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    values = {
        "source": source,
        "format": format,
        "embeddings": embeddings,
        "file": gguf_file_name(format),
        "summary": FORMATS[format][0],
        "weights": sum(map(math.prod, source.layers.values())),
        "others": sum(map(math.prod, source.others.values())),
        "bits": _bits(source, format, embeddings),
        "checked": checked,
        "version": __version__,
    }
    try:
        config, result, data = read_record(source.folder)
        manifest = _optional(data / "manifest.json") if data else {}
        return card.render(values, config=config, result=result, manifest=manifest)
    except (jinja2.UndefinedError, AttributeError, KeyError, TypeError, ValueError):
        # The files there were not written for a run.
        return card.render(values, config={}, result={}, manifest={})


class TrainingRecord(NamedTuple):
    """Record of the run that a checkpoint belongs to; empty for a checkpoint outside a run folder."""

    config: dict[str, Any]
    """The run's TrainConfig as JSON."""
    result: dict[str, Any]
    """result.json, for the finished model only."""
    data_folder: Path | None
    """Folder of the prepared data, if it is still there."""


def read_record(folder: Path) -> TrainingRecord:
    """Return the record of the run that `folder` (its `final`, or a checkpoint) belongs to."""
    config = _optional(folder / "train_config.json")
    result: dict[str, Any] = {}
    if not config and folder.name == "final":
        config = _optional(folder.parent / "config.json")
        result = _optional(folder.parent / "result.json") if config else {}
    name, places = config.get("data"), []
    if isinstance(name, str) and 0 < len(name) < 1000:
        # The path may be relative to the folder where `train` ran, which is above the run.
        places = [Path(name), *(above / name for above in folder.resolve().parents)]
    data = next((place for place in places if (place / "manifest.json").is_file()), None)
    return TrainingRecord(config, result, data)


def _optional(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except UserError:
        return {}


def _bits(source: Checkpoint, format: str, embeddings: str | None) -> float:
    if format.startswith("gguf"):
        wanted = BLOCK_TYPES[format.removeprefix("gguf-").upper()]
        shapes = source.layers.values()
        sizes = (block_for(columns, wanted).tensor_bytes(rows, columns) for rows, columns in shapes)
        return 8 * sum(sizes) / sum(map(math.prod, shapes))
    if format == "dense":
        return 32 if embeddings == "f32" else 16
    return 8 if format.endswith("w8a8") else 2


def gguf_file_name(format: str) -> str:
    """Return the name of the file inside a GGUF export's folder."""
    return f"model-{format.removeprefix('gguf-').upper()}.gguf"
