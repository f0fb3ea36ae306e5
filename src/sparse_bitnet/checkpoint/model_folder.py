# SPDX-License-Identifier: Apache-2.0
"""Reader of the files of an untrusted model folder. Imports no torch.

Files that a folder names must lie inside it, only regular files are opened, all files but the weights
have a size limit, and code in a folder is never run.
"""

import json
import os
import re
import shutil
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

from sparse_bitnet.checkpoint.config_fields import MOST_LAYERS, check_basis, check_fields
from sparse_bitnet.errors import UserError, library_errors_as, os_errors_as, reason_of

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
EXPORTED_FORMAT = "sparse_bitnet_format"
"""Key of config.json in which an export records the training format; other readers ignore it."""
LINEAR_NORMS = "linear_norms_epsilon"
"""Key of config.json of packed models that have a norm in each linear."""
WITHOUT_IMPORT = dict.fromkeys(
    ("attn_implementation", "_attn_implementation_internal"),
    "pip install sparse-bitnet, then import sparse_bitnet before from_pretrained",
)
"""Fields of config.json that make transformers fail unless `sparse_bitnet` is imported, which removes
them. Otherwise it would skip the unknown quant_method. The second is for releases up to 5.0."""
_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- sparse-bitnet
---

# A language model of sparse-bitnet

{held}

```sh
pip install ".[train]"  # in a clone of sparse-bitnet
```

```python
import sparse_bitnet  # before from_pretrained
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("THIS FOLDER")
```

`sparse-bitnet chat`, `generate` and `serve` take the folder too; `sparse-bitnet export` writes the
formats of other tools.
"""
MASTERS_HELD = (
    "model.safetensors holds its trained weights, dense and in full precision, from which masks and "
    "ternary codes are computed when it runs. Without `import sparse_bitnet`, transformers would run "
    "these dense weights: another, worse model."
)
TOKENIZER_FILES = (
    *("tokenizer*", "vocab*", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "additional_chat_templates/*.jinja"),
)

POOLING_FILES = "[1-9]_*/config.json"
"""Files that tell sentence-transformers, layer by layer, how to make a vector of a text."""

_LARGEST = 128 << 20
"""Most bytes of a file that holds no weights; published tokenizer.json have up to 33 MB."""
_READ_BELOW = ("[1-9]_*", "additional_chat_templates")
"""Sub-folders whose files are read."""
_SMALL_SUFFIXES = {".json", ".jinja", ".txt"}
_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:/([\w./-]+\.gguf))?(?:@([\w./-]+))?")
"""Hub id: OWNER/NAME, optionally a file in it and a revision."""
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "LICENSE*")
"""Patterns of a model's files; on the hub they also match in sub-folders."""
_COUNTS = ("_layers", "_layer", "_experts", "_blocks")
_METHODS = (None, "bitnet", "compressed-tensors", "sparse_bitnet", "sparse_bitnet_packed")
"""Quantisation methods that are read here; the settings of others are left to their readers."""
_BITNET = (
    *("quant_method", "linear_class", "quantization_mode", "modules_to_not_convert"),
    *("use_rms_norm", "rms_norm_eps"),
)
"""Settings of the method bitnet."""
_DECLARING = (".json", ".safetensors", ".bin", ".pt", ".npz")
"""Suffixes of files whose names can declare what weights mean."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return config.json of a model folder. Raises `UserError` as `read_json` does."""
    folder = Path(folder)
    if not (folder / CONFIG_FILE).exists() and (instead := gguf_inside(folder)):
        raise UserError(f"{folder} holds no {CONFIG_FILE}{instead}")
    return read_json(folder / CONFIG_FILE)


def quantization_entry(config: dict[str, Any]) -> dict[str, Any]:
    """Return the `quantization_config` of a config.json; empty if it has none."""
    entry = config.get("quantization_config")
    return entry if isinstance(entry, dict) else {}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `UserError` when the file is missing or holds something else."""
    raw = read_small(path)
    with library_errors_as(f"{path} is damaged: not readable as JSON"):
        content = json.loads(raw)
        if _SURROGATE.search(raw):
            # A lone surrogate would otherwise fail only when it is printed or written.
            json.dumps(content, ensure_ascii=False).encode()
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: not a JSON object")
    return content


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Read a JSON object as `read_json` does; return an empty one if the file is missing."""
    return read_json(path) if os.path.lexists(path) else {}


def stored_ends(folder: Path) -> Any:
    """Return `eos_token_id` of generation_config.json, else of config.json: a token, a list, or None."""
    for name in ("generation_config.json", CONFIG_FILE):
        if (ends := read_json_if_there(folder / name).get("eos_token_id")) is not None:
            return ends
    return None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON: indented, keys in the given order, with a newline at the end."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def finish_folder(folder: Path, held: str) -> None:
    """Make transformers fail on a folder of ours unless `sparse_bitnet` is imported, instead of running
    another model: config.json names an attention that no model has, and the model card says why. `held`
    are its sentences on what model.safetensors holds, and on what runs without the import."""
    write_json(folder / CONFIG_FILE, {**read_config(folder), **WITHOUT_IMPORT})
    (folder / "README.md").write_text(_CARD.format(held=held), encoding="utf-8")


def read_small(path: Path) -> bytes:
    """Read a whole file without weights. Raises `UserError` if it is missing or fails `check_file`."""
    if not os.path.lexists(path):
        raise UserError(f"{path.parent} holds no {path.name}")
    with os_errors_as(f"cannot read {path}"):
        check_file(path)
        return path.read_bytes()


def copy_files(source: Path, folder: Path, patterns: tuple[str, ...]) -> None:
    """Copy the files of a model folder that match one of the patterns, without their permissions."""
    for path in (path for pattern in patterns for path in source.glob(pattern)):
        if path.is_file():
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


def check_folder(folder: Path) -> None:
    """Run `check_file` on every file of a model folder, for libraries that open files themselves."""
    with os_errors_as(f"cannot read {folder}"):
        below = (path for name in _READ_BELOW for path in folder.glob(f"{name}/*"))
        for path in (*folder.iterdir(), *below):
            if not path.is_dir():
                check_file(path, folder)


def check_layers(config: dict[str, Any], folder: Path) -> None:
    """Raise `UserError` for a config.json with more layers than any model has: building them would take
    hours before a missing weight was noticed."""
    for key, value in config.items():
        if isinstance(value, dict) and key != "quantization_config":
            check_layers(value, folder)
        if isinstance(value, int) and key.endswith(_COUNTS) and value > MOST_LAYERS:
            raise UserError(
                f"{folder / CONFIG_FILE}: {key} is {value:,}, more than the {MOST_LAYERS:,} of any "
                "model here"
            )


def check_weights_as_stored(folder: Path, rotated_by: Collection[str] = ()) -> None:
    """Raise `UserError` for a folder whose weights cannot be used as they are: an adapter belongs to
    them, they are in a rotated basis, which files and settings in `rotated_by` may say, or a setting of
    the method bitnet is unknown."""
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} holds an adapter (adapter_config.json): merge it first")
    names = [path.name for path in folder.iterdir() if path.suffix in _DECLARING]
    check_basis(dict.fromkeys(names, True), str(folder), rotated_by)
    tables = [read_config(folder)]
    for table in tables:
        check_basis(table, str(folder / CONFIG_FILE), rotated_by if table is tables[0] else ())
        nested = [value for value in table.values() if isinstance(value, dict)]
        tables += [value for value in nested if value.get("quant_method") in _METHODS]
    for entry in map(quantization_entry, tables):
        if entry.get("quant_method") == "bitnet":
            check_fields(entry, _BITNET, f"{folder / CONFIG_FILE}: quantization_config")


def check_file(path: Path, folder: Path | None = None) -> None:
    """Raise `UserError` for a file that is a device or a pipe, a link that leads out of `folder` (its own
    by default), or too large for one without weights; `OSError` for one that is missing."""
    folder, real = (folder or path.parent).resolve(), path.resolve(strict=True)
    # The hub's cache keeps the files of a snapshot beside it, once for all snapshots.
    caches = [above.parent / "blobs" for above in folder.parents[:2] if above.name == "snapshots"]
    if not any(real.is_relative_to(place) for place in (folder, *caches)):
        raise UserError(f"{path} is a link to {real}, out of its folder: copy the file there")
    status = real.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise UserError(f"{path} is not a regular file")
    is_read = path.suffix in _SMALL_SUFFIXES and path.name != "trainer_state.json"
    if is_read and status.st_size > _LARGEST:
        raise UserError(
            f"{path} has {status.st_size:,} bytes, more than the maximum of {_LARGEST:,}"
        )


def leads_outside(name: object) -> bool:
    """Whether a file name in a folder's index is not the name of a file below that folder."""
    if not isinstance(name, str) or not name or "\0" in name:
        return True
    return Path(name).is_absolute() or ".." in Path(name).parts


def file_inside(folder: Path, name: str, index: str = INDEX_FILE) -> Path:
    """Return the path of a file that a folder's `index` names. Raises `UserError` if the name leads out
    of the folder, or if the file is missing or fails `check_file`."""
    if leads_outside(name):
        raise UserError(f"{folder / index} names {name!r}, which is not a file in its folder")
    with os_errors_as(f"{folder / name} is named in {index} but is not there"):
        check_file(folder / name, folder)
    return folder / name


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a GGUF file, by its first bytes, in either byte order, or by its suffix."""
    if not os.path.isfile(path):
        return False
    with os_errors_as(f"cannot read {path}"), open(path, "rb") as file:
        return file.read(4) in (b"GGUF", b"FUGG") or Path(path).suffix == ".gguf"


def gguf_inside(folder: Path) -> str:
    """Return a hint naming a GGUF file in a folder or in a model's hub cache; empty without one."""
    files = sorted(file for name in ("*", "snapshots/*/*") for file in folder.glob(f"{name}.gguf"))
    return f"; it holds {files[0]}: name that file" if files else ""


def is_hub_id(name: str) -> bool:
    """Whether a name can mean a model of the hub: OWNER/NAME, where OWNER is not a local folder; a file
    OWNER/NAME/FILE.gguf of one; either with @REVISION behind it."""
    return bool(_HUB_ID.fullmatch(name)) and not Path(name.partition("/")[0]).exists()


def local_folder(path_or_id: str | Path, patterns: tuple[str, ...] = HUB_FILES) -> Path:
    """Return a local path: a folder unchanged; for a hub id, its files that match `patterns`, downloaded
    or cached; for a file on the hub, that file.

    Raises `UserError` at once for any other name, and for a model that the hub does not provide.
    """
    folder = Path(path_or_id)
    if folder.is_dir():
        return folder
    named = _HUB_ID.fullmatch(str(path_or_id))
    if named is None or not is_hub_id(str(path_or_id)):
        raise UserError(f"no such folder: {path_or_id}")
    from huggingface_hub import hf_hub_download, snapshot_download

    repository, file, revision = named.groups()
    try:
        # One request that fails at once without network.
        if file is not None:
            return Path(hf_hub_download(repository, file, revision=revision))
        wanted = list(patterns)
        return Path(snapshot_download(repository, revision=revision, allow_patterns=wanted))
    except Exception as error:
        asked = filter(None, (repository, file, revision and f"--revision {revision}"))
        raise UserError(
            f"no such folder: {path_or_id}, and the hub does not provide it ({reason_of(error)}); "
            f"without a network, download it on another machine: hf download {' '.join(asked)}"
        ) from error
