# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet prepare`: tokenise text into memory-mapped shards."""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from sparse_bitnet.cli.arguments import OutArgument, command


@dataclass(kw_only=True)
class TokenizerConfig:
    """Tokenizer to load, or the size of one to train."""

    tokenizer: str | None = None
    """Tokenizer to use: folder or hub id of a transformers tokenizer, folder of a model, run or prepared
    data, or a GGUF file. Give this or --vocab-size."""

    vocab_size: int | None = None
    """Train a byte-level BPE tokenizer with this many tokens on the text instead."""

    eos_token: str | None = None
    """Token that ends each document. Default: the tokenizer's own choice."""


@dataclass(kw_only=True)
class SourceConfig:
    """Text to read, part to hold out, and limits: the parameters of `parse_source`."""

    column: str | None = None
    """Column of the text. Default: "text"; RefinedWeb has "content". A .txt file is one document."""

    chat: bool = False
    """Read documents as conversations, lists of {"role", "content"} in the column "messages", with the
    chat template of --tokenizer. Training then learns what the assistant says. ShareGPT's and Alpaca's
    columns work too; rows without a conversation are skipped and counted."""

    validation: str | None = None
    """Source of the validation text (written like SOURCE), instead of a part of SOURCE."""

    validation_fraction: float | None = None
    """Fraction of the documents (of pieces, if they are few and long) held out for validation, chosen by
    hash. Default: 0.03 for Python files, 0.01 for local documents, 0.0005 for a hub data set."""

    limit_bytes: int | None = None
    """Stop after this many bytes of text of SOURCE."""

    near_duplicates: bool = True
    """Put near-duplicate documents on the same side of the split; with --validation, skip those of SOURCE
    that are near duplicates of it. Not for hub data sets, which are read only once."""


@command("prepare")
def main(
    source: Annotated[str, "SOURCE"],
    out: OutArgument,
    tokenizer: TokenizerConfig,
    text: SourceConfig,
    shard_tokens: int = 1 << 27,
) -> None:
    """Tokenise SOURCE into the folder OUT, ready for `sparse-bitnet train --data OUT`.

    After an interruption, the same command resumes. In a finished folder it verifies the shards.

    Args:
        source: Text to tokenise: python-stdlib; python-packages; a .jsonl, .jsonl.zst, .jsonl.gz, .json,
            .csv, .parquet, .txt or .md file, a folder or quoted glob of them, several joined by commas;
            or a hub data set, hub:OWNER/NAME[/CONFIG][@SPLIT].
        out: Folder to write.
        shard_tokens: Number of tokens per shard file.
    """
    from sparse_bitnet.data.documents import VALIDATION
    from sparse_bitnet.data.loader import Windows
    from sparse_bitnet.data.manifest import MANIFEST
    from sparse_bitnet.data.preparation import prepare
    from sparse_bitnet.data.shards import TokenDataset
    from sparse_bitnet.data.sources import parse_source
    from sparse_bitnet.training.config import TrainConfig

    started, is_there = time.monotonic(), os.path.exists(Path(out) / MANIFEST)
    options: dict[str, Any] = {**asdict(tokenizer), "shard_tokens": shard_tokens, "chat": text.chat}
    manifest = prepare(parse_source(source, **asdict(text)), out, **options)
    for name, split in manifest.splits.items():
        size = split.text_bytes
        shown = f"{size / 1e6:,.2f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"
        print(
            f"{name}: {_count(split.documents, 'document')}, {shown} of text, "
            f"{split.tokens:,} tokens in {_count(len(split.shards), 'shard')}"
        )
    if manifest.overlap is not None:
        print(f"held-out text: {manifest.overlap}")
    what = "already there" if is_there else f"written in {time.monotonic() - started:.1f} s"
    print(f"{out}: vocabulary {manifest.vocab_size:,}, {manifest.dtype}, {what}")
    for name in manifest.splits if manifest.is_chat else ():
        if manifest.splits[name].tokens:
            dataset = TokenDataset.open(out, name, verify=False)
            if unlearnt := Windows(dataset, TrainConfig.sequence_length).unlearnt():
                print(unlearnt)
    if not manifest.splits[VALIDATION].tokens:
        print("no validation text: add --validation SOURCE or a larger --validation-fraction")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
