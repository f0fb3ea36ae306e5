# SPDX-License-Identifier: Apache-2.0
"""Ternary models of other tools, packed once into the cache folder so that the CPU engine runs them."""

import hashlib
import sys
from pathlib import Path

from filelock import FileLock

from sparse_bitnet import __version__
from sparse_bitnet.checkpoint.checkpoint import StoredModel
from sparse_bitnet.checkpoint.model_folder import (
    CONFIG_FILE,
    HUB_FILES,
    POOLING_FILES,
    TOKENIZER_FILES,
    is_gguf,
)
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint, resolve_checkpoint
from sparse_bitnet.engine.architecture import read_architecture
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.errors import EngineLacks, os_errors_as
from sparse_bitnet.files import make_folder
from sparse_bitnet.host import cache_folder


def packed_once(checkpoint: str | Path, options: EngineOptions) -> str | Path:
    """What an engine runs for what a user names: the folder that it is, or the packed form of a foreign
    ternary model.

    A GGUF file is always packed; a folder where the CPU engine may run it and knows its architecture.
    What is packed already and unchanged since is not packed again.

    Raises `UserError` for what cannot be found or read.
    """
    name = resolve_checkpoint(checkpoint)
    if is_gguf(name) and (_target(Path(name)) / CONFIG_FILE).is_file():
        # Without reading its vocabulary again.
        return _target(Path(name))
    found = find_checkpoint(name)
    if found.kind == "packed":
        return found.folder
    if found.kind != "foreign" or not (found.folder.is_file() or _suits_cpu(found, options)):
        return found.folder
    target = _target(found.folder)
    make_folder(target.parent)
    with os_errors_as(f"cannot write {target}"):
        held = FileLock(f"{target}.lock").acquire()
    with held:
        if not (target / CONFIG_FILE).is_file():
            from sparse_bitnet.export.importer import import_checkpoint

            print(f"packing {checkpoint} into {target}, once", file=sys.stderr)
            import_checkpoint(name, target, packed="auto")
    return target


def _suits_cpu(found: StoredModel, options: EngineOptions) -> bool:
    if options.engine == "transformers" or options.device == "cuda":
        return False
    try:
        read_architecture(found.config, str(found.folder / CONFIG_FILE))
    except EngineLacks:
        return False
    return True


def _target(path: Path) -> Path:
    """The folder in the cache, another one whenever the files change."""
    patterns = (*HUB_FILES, *TOKENIZER_FILES, POOLING_FILES)
    found = {file for pattern in patterns for file in path.glob(pattern)}
    files = [path] if path.is_file() else sorted(found)
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    said = repr((__version__, str(path.resolve()), stats)).encode()
    return cache_folder() / "models" / f"{path.stem}-{hashlib.sha256(said).hexdigest()[:12]}"
