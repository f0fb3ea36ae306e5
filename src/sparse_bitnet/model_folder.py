"""The JSON files of a model folder, read without trust, with one set of messages. No torch."""

import json
from pathlib import Path
from typing import Any

from sparse_bitnet.errors import UserError

CONFIG_FILE = "config.json"


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a model folder. Raises `UserError` as `read_json` does."""
    return read_json(Path(folder) / CONFIG_FILE)


def quantization_entry(config: dict[str, Any]) -> dict[str, Any]:
    """The `quantization_config` of a config.json; empty where it has none."""
    entry = config.get("quantization_config")
    return entry if isinstance(entry, dict) else {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises `UserError` when the file is missing or holds something else."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path.parent} holds no {path.name}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: not a JSON object")
    return content


def read_json_if_there(path: Path) -> dict[str, Any]:
    """As `read_json`; empty where the file is missing."""
    return read_json(path) if path.exists() else {}
