# SPDX-License-Identifier: Apache-2.0
"""The README.md of an export: what the model is, how it was trained, how to load it in each tool."""

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

_MOST_FILES = 8
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
)


def model_card(
    source: Checkpoint, format: str, embeddings: str | None, *, checked: Sequence[Row] = ()
) -> str:
    """The whole card as Markdown with a YAML head.

    Args:
        source: the trained model.
        format: a name of `FORMATS`.
        embeddings: precision of embeddings and head.
        checked: what `verify` measured, as rows; empty when it was not run.
    """
    try:
        training = _training_rows(read_record(source.folder))
    except (AttributeError, KeyError, TypeError, ValueError):
        training = []  # what lies there was not written by a run
    template = Path(__file__).with_name("model_card.md.j2").read_text("utf-8")
    card = jinja2.Template(
        template, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return card.render(
        source=source,
        is_ternary=source.format.weight == "ternary",
        format=format,
        embeddings=embeddings,
        is_gguf=format.startswith("gguf"),
        file=gguf_file_name(format),
        summary=FORMATS[format].summary,
        weights=sum(map(math.prod, source.layers.values())),
        others=sum(map(math.prod, source.others.values())),
        bits=_bits(source, format, embeddings),
        sizes=[(name, source.config.get(name)) for name in _SIZES],
        training=training,
        checked=checked,
        version=__version__,
    )


class TrainingRecord(NamedTuple):
    """Record of the run that a checkpoint belongs to; empty for a checkpoint outside a run folder."""

    config: dict[str, Any]
    """The run's TrainConfig as JSON."""
    result: dict[str, Any]
    """result.json, for the finished model only."""
    data_folder: Path | None
    """Folder of the prepared data, if it is still there."""


def read_record(folder: Path) -> TrainingRecord:
    """The record of the run that `folder` (its `final`, or a checkpoint) belongs to."""
    config = _optional(folder / "train_config.json")
    result: dict[str, Any] = {}
    if not config and folder.name == "final":
        config = _optional(folder.parent / "config.json")
        result = _optional(folder.parent / "result.json") if config else {}
    name, places = config.get("data"), []
    if isinstance(name, str) and 0 < len(name) < 1000:
        # The path may be relative to where `train` ran, which is a folder above the run.
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
        blocks = [(math.prod(shape), block_for(shape[1], wanted)) for shape in shapes]
        bits = sum(weights * 8 * block.nbytes / block.codes for weights, block in blocks)
        return bits / sum(weights for weights, _ in blocks)
    if format == "dense":
        return 32 if embeddings == "f32" else 16
    return 8 if format.endswith("w8a8") else 2


def _training_rows(record: TrainingRecord) -> list[Row]:
    config, result = record.config, record.result
    rows: list[Row] = []
    if config:
        tokens = config["batch_size"] * config["sequence_length"]
        rows += [
            ("start", config["init"] or f"random, seed {config['seed']}"),
            ("steps", f"{config['steps']:,} of {tokens:,} tokens"),
            ("sequence length", f"{config['sequence_length']:,}"),
            ("share of steps with the mask", f"{config['sparse_fraction']:g}"),
            (
                "learning rate",
                f"{config['learning_rate']:g}, {config['schedule']}, warm-up "
                f"{config['warmup_fraction']:.2g} of the steps",
            ),
            (
                "AdamW",
                f"betas {config['beta1']}, {config['beta2']}; epsilon {config['epsilon']:g}; weight "
                f"decay {config['weight_decay']:g}; gradient clipping {config['gradient_clip']:g}",
            ),
        ]
    if data := _data(record.data_folder):
        rows.append(("data", data))
    if result:
        rows += [
            ("validation perplexity", f"{result['validation_perplexity']:.3f}"),
            ("validation tokens", f"{result['validation_tokens']:,}"),
            ("zero fraction of the codes", f"{result['zero_fraction']:.3f}"),
        ]
    return rows


def _data(folder: Path | None) -> str:
    """Return the source of prepared data, from the settings in its manifest."""
    manifest = _optional(folder / "manifest.json") if folder else {}
    facts = []
    for key, value in manifest.get("settings", {}).get("source", {}).items():
        if key == "files" and isinstance(value, list):
            names = [file["name"] for file in value]
            value = ", ".join(names[:_MOST_FILES]) + " ..." * (len(names) > _MOST_FILES)
        if isinstance(value, str | int | float):
            facts.append(f"{key.replace('_', ' ')} {value}")
    return "; ".join(facts)


def gguf_file_name(format: str) -> str:
    """Return the name of the file inside a GGUF export's folder."""
    return f"model-{format.removeprefix('gguf-').upper()}.gguf"
