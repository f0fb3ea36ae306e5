# SPDX-License-Identifier: Apache-2.0
"""Preparing one text with many processes: each makes a folder of its own, the last one joins them.

Nothing is copied: the manifest of the whole names the shards inside the parts' folders, in the order of
parts, and takes over their checksums. A part that was interrupted continues like any preparation.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.data.documents import SPLITS, TRAIN, TextSource
from sparse_bitnet.data.manifest import (
    MANIFEST,
    TOKENIZER,
    Manifest,
    SplitManifest,
    check_shards,
)
from sparse_bitnet.data.near_duplicates import compare_splits
from sparse_bitnet.data.preparation import (
    DEFAULT_SHARD_TOKENS,
    check_settings,
    prepare,
    settings_of,
)
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
    assert 0 <= part < parts
    out = Path(out)
    folders = [out / f"part-{number:05d}-of-{parts:05d}" for number in range(parts)]
    if other := [path.name for path in out.glob("part-*-of-*") if path not in folders]:
        raise UserError(f"{out}: holds {other[0]}, of another number of parts; remove it")
    if (out / MANIFEST).exists() and not folders[part].is_dir():
        raise UserError(f"{out}: holds data that was not prepared in {parts} parts")
    sources = [part_of(source, number, parts) for number in range(parts)]
    loaded = load_tokenizer(tokenizer, eos_token=eos_token)
    settings = [settings_of(each, loaded, None, shard_tokens, chat) for each in sources]

    def finished() -> list[Manifest]:
        manifests = []
        for folder, asked in zip(folders, settings, strict=True):
            if (folder / MANIFEST).exists():
                manifests.append(Manifest.read(folder))
                check_settings(folder, manifests[-1].settings, asked)
        return manifests

    finished()  # a part of other settings is refused now, before hours of work
    prepare(
        sources[part],
        folders[part],
        tokenizer=loaded,
        shard_tokens=shard_tokens,
        chat=chat,
        is_part=True,
    )
    manifests = finished()
    return _join(out, folders, manifests) if len(manifests) == parts else None


def _join(out: Path, folders: list[Path], manifests: list[Manifest]) -> Manifest:
    """Write the manifest of all parts into `out`, which holds their folders; again does nothing.

    Raises `UserError` when one is damaged.
    """
    splits = {}
    for name in SPLITS:
        of_parts = [manifest.splits[name] for manifest in manifests]
        splits[name] = SplitManifest(
            documents=sum(each.documents for each in of_parts),
            tokens=sum(each.tokens for each in of_parts),
            text_bytes=sum(each.text_bytes for each in of_parts),
            shards=tuple(
                replace(shard, file=f"{folder.name}/{shard.file}")
                for folder, each in zip(folders, of_parts, strict=True)
                for shard in each.shards
            ),
        )
    settings = {"parts": [manifest.settings for manifest in manifests]}
    whole = replace(manifests[0], settings=settings, overlap=None, splits=splits)
    with locked_folder(out, wait=True):
        if (out / MANIFEST).exists():
            there = Manifest.read(out)  # of another process that ended last, too, or of before
            if there.settings == whole.settings and there.splits[TRAIN] == whole.splits[TRAIN]:
                return there
        remove_leftovers(out)
        for folder, manifest in zip(folders, manifests, strict=True):
            check_shards(folder, manifest.shards, np.dtype(manifest.dtype))
        if not (out / TOKENIZER).exists():
            with atomic_folder(out / TOKENIZER) as temporary:
                shutil.copytree(folders[0] / TOKENIZER, temporary, dirs_exist_ok=True)
        with Progress() as progress:
            line = progress.line("comparing the held-out text", "MB", 1e6)
            whole = compare_splits(out, whole, load_tokenizer(out / TOKENIZER), line)
        whole.write(out)
    return whole
