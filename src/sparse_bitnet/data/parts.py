# SPDX-License-Identifier: Apache-2.0
"""Preparing one text with many processes: each makes a folder of its own, the last one joins them.

Nothing is copied: the manifest of the whole names the shards inside the parts' folders, in the order of
parts, and takes over their checksums. A part that was interrupted goes on like any preparation.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.data.checksums import changed_shards, check_size, record_written, verify_shards
from sparse_bitnet.data.documents import SPLITS, TRAIN, TextSource
from sparse_bitnet.data.manifest import MANIFEST, TOKENIZER, Manifest, SplitManifest
from sparse_bitnet.data.overlap import compare_splits
from sparse_bitnet.data.preparation import DEFAULT_SHARD_TOKENS, prepare
from sparse_bitnet.data.preparation_state import check_settings
from sparse_bitnet.data.sources import part_of
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import atomic_folder, locked_folder, remove_leftovers
from sparse_bitnet.progress import Progress


def prepare_part(
    source: TextSource,
    out: Path | str,
    *,
    part: int,
    parts: int,
    tokenizer: Path | str,
    eos_token: str | None = None,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    chat: bool = False,
) -> Manifest | None:
    """Prepare one part of `source` into a folder inside `out`; the last one to end joins all.

    Args:
        source: the whole text, the same in all processes.
        out: folder shared by all processes.
        part, parts: which part, from 0, and of how many.
        tokenizer, eos_token, shard_tokens, chat: as `prepare` takes them, the same in all processes.

    Returns the manifest of the whole, or None while other parts are unfinished.

    Raises `UserError` as `prepare` and `part_of` do, and when parts were prepared differently.
    """
    out = Path(out)
    own = part_of(source, part, parts)
    folders = [part_folder(out, number, parts) for number in range(parts)]
    if other := [path.name for path in out.glob("part-*-of-*") if path not in folders]:
        raise UserError(f"{out}: holds {other[0]}, of another number of parts; remove it")
    if (out / MANIFEST).exists() and not part_folder(out, part, parts).is_dir():
        raise UserError(f"{out}: holds data that was not prepared in {parts} parts")
    sources = [part_of(source, number, parts).describe() for number in range(parts)]
    _check_sources(folders, sources)  # now, before hours of work
    prepare(
        own,
        folders[part],
        tokenizer=tokenizer,
        eos_token=eos_token,
        shard_tokens=shard_tokens,
        chat=chat,
        is_part=True,
    )
    if not all((folder / MANIFEST).exists() for folder in folders):
        return None
    _check_sources(folders, sources)
    return join(out, folders)


def part_folder(out: Path, part: int, parts: int) -> Path:
    """Where a part lies."""
    return out / f"part-{part:05d}-of-{parts:05d}"


def _check_sources(folders: list[Path], sources: list[dict[str, Any]]) -> None:
    """Raise `UserError` for a finished part that is none of this source, or of other options."""
    for folder, source in zip(folders, json.loads(json.dumps(sources)), strict=True):
        if (folder / MANIFEST).exists():
            there = Manifest.read(folder).settings.get("source")
            check_settings(folder, {"source": there}, {"source": source})


def join(out: Path, folders: list[Path]) -> Manifest:
    """Write the manifest of all parts into `out`, which holds their folders; again does nothing.

    Raises `UserError` when the parts differ in tokenizer, format or options, or one is damaged.
    """
    manifests = [Manifest.read(folder) for folder in folders]
    first = manifests[0]
    for folder, manifest in zip(folders, manifests, strict=True):
        same = ("version", "tokenizer_hash", "vocab_size", "dtype", "eos_token_id")
        for name in same:
            if getattr(manifest, name) != getattr(first, name):
                raise UserError(
                    f"{folder}: its {name} is not that of {folders[0].name}; remove it and prepare "
                    "this part again"
                )
        first_source = {"source": first.settings.get("source")}
        check_settings(folder, {**manifest.settings, **first_source}, first.settings)
    whole = replace(
        first,
        settings={"parts": [manifest.settings for manifest in manifests]},
        overlap=None,
        splits={name: _joined(name, folders, manifests) for name in SPLITS},
    )
    with locked_folder(out, wait=True):
        if (out / MANIFEST).exists():
            there = Manifest.read(out)  # of another process that ended last, too, or of before
            if there.settings == whole.settings and there.splits[TRAIN] == whole.splits[TRAIN]:
                return there
        remove_leftovers(out)
        for folder, manifest in zip(folders, manifests, strict=True):
            shards = [shard for split in manifest.splits.values() for shard in split.shards]
            for shard in shards:
                check_size(folder, shard, np.dtype(manifest.dtype))
            verify_shards(folder, changed_shards(folder, shards))
        if not (out / TOKENIZER).exists():
            with atomic_folder(out / TOKENIZER) as temporary:
                shutil.copytree(folders[0] / TOKENIZER, temporary, dirs_exist_ok=True)
        with Progress() as progress:
            line = progress.line("comparing the held-out text", "MB", 1e6)
            whole = compare_splits(out, whole, load_tokenizer(out / TOKENIZER), line)
        record_written(out, [shard for split in whole.splits.values() for shard in split.shards])
        whole.write(out)
    return whole


def _joined(split: str, folders: list[Path], manifests: list[Manifest]) -> SplitManifest:
    parts = [manifest.splits[split] for manifest in manifests]
    return SplitManifest(
        documents=sum(part.documents for part in parts),
        tokens=sum(part.tokens for part in parts),
        text_bytes=sum(part.text_bytes for part in parts),
        shards=tuple(
            replace(shard, file=f"{folder.name}/{shard.file}")
            for folder, part in zip(folders, parts, strict=True)
            for shard in part.shards
        ),
    )
