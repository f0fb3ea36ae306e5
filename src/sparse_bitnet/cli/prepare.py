# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet prepare`: tokenise text into memory-mapped shards."""

import os
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from sparse_bitnet.cli.arguments import OutArgument, command
from sparse_bitnet.errors import UserError


@dataclass(kw_only=True)
class TokenizerConfig:
    """Tokenizer to load, or the size of one to train."""

    tokenizer: str | None = None
    """Tokenizer to use: folder or hub id of a tokenizer or model, folder of a run or of prepared data, or
    a GGUF file. Give this or --vocab-size."""

    vocab_size: int | None = None
    """Number of tokens of a byte-level BPE tokenizer to train on the text instead."""

    eos_token: str | None = None
    """Token that ends each document. Default: the tokenizer's own choice."""


@dataclass(kw_only=True)
class SourceConfig:
    """Text to read, part to hold out, and limits: the parameters of `parse_source`."""

    column: str | None = None
    """Column that holds the text. Default: "text". RefinedWeb has "content"; .txt files have none."""

    chat: bool = False
    """Read documents as conversations: lists of {"role", "content"} in the column "messages", or the
    columns of ShareGPT or Alpaca. They are formatted with --tokenizer's chat template, and only what the
    assistant says counts in the loss. Rows without a conversation are skipped and counted."""

    beside: str | None = None
    """Plain text to mix into the training conversations, given like SOURCE, with its text in the column
    "text". All its tokens count in the loss. Several sources, separated by commas, take turns."""

    beside_bytes: int | None = None
    """Read only the first N bytes of --beside's text, in equal parts from its sources."""

    validation: str | None = None
    """Text to hold out for validation, given like SOURCE, instead of part of SOURCE."""

    validation_fraction: float | None = None
    """Fraction of the documents (or of pieces of a few long ones) to hold out for validation, chosen by
    hash. Default: 0.03 for Python files, 0.01 for local files, 0.0005 for a hub data set."""

    limit_bytes: int | None = None
    """Stop after the document that reaches N bytes of text; a .txt or .md file is a few documents."""

    near_duplicates: bool = True
    """Keep near-duplicate documents on one side of the train/validation split; with --validation, skip
    documents of SOURCE that nearly repeat validation text. Hub data sets are not checked."""


@command("prepare")
def main(
    source: Annotated[str, "SOURCE"],
    out: OutArgument,
    tokenizer: TokenizerConfig,
    text: SourceConfig,
    shard_tokens: int = 1 << 27,
    from_model: str | None = None,
    conversations: int = 0,
    batch_size: int | None = None,
    seed: int = 0,
) -> None:
    """Tokenise SOURCE into the folder OUT, ready for `sparse-bitnet train --data OUT`.

    The same command resumes after an interruption, and verifies the shards of a finished folder. It
    detects a change in a file of SOURCE only from the name, the size, and 64 kB at both ends.

    Args:
        source: Text to tokenise: python-stdlib; python-packages; a .jsonl, .jsonl.zst, .jsonl.gz, .json,
            .csv, .parquet, .txt or .md file, a folder or quoted glob of such files, or several, separated
            by commas; or a hub data set, hub:OWNER/NAME[/CONFIG][@SPLIT].
        out: Folder to write.
        shard_tokens: Number of tokens per shard file.
        from_model: Chat model that first writes conversations to SOURCE, a .jsonl file. Implies --chat;
            its tokenizer is the default of --tokenizer.
        conversations: Number of conversations for --from-model to write.
        batch_size: Number of conversations sampled at once. Default: 32 on a CPU, 1024 on a GPU.
        seed: Random seed for --from-model.
    """
    from sparse_bitnet.data.documents import VALIDATION
    from sparse_bitnet.data.loader import Windows
    from sparse_bitnet.data.manifest import MANIFEST
    from sparse_bitnet.data.preparation import check_options, prepare
    from sparse_bitnet.data.shards import TokenDataset
    from sparse_bitnet.data.sources import parse_source
    from sparse_bitnet.files import check_ours
    from sparse_bitnet.training.config import TrainConfig

    options: dict[str, Any] = {**asdict(tokenizer), "shard_tokens": shard_tokens, "chat": text.chat}
    if from_model is not None:
        from sparse_bitnet.training.run_folder import run_lock
        from sparse_bitnet.training.teacher_chats import is_written, write_conversations

        text.chat = options["chat"] = True
        options["tokenizer"] = tokenizer.tokenizer or from_model
        if text.column not in (None, "messages"):
            raise UserError("--from-model writes the column messages: leave out --column")
        if Path(source).resolve().parent == Path(out).resolve():
            raise UserError(f"{source} cannot be written into {out}, a folder of prepared data")
        # A data set that nothing opens stands for the rows to come.
        parse_source("hub:rows/to-come", **asdict(text)).describe()
        check_options(**options)
        with ExitStack() as held:
            if not is_written(source, conversations):
                check_ours(Path(out), (), "prepared from these conversations")
                held.enter_context(run_lock(Path(out)))
            write_conversations(source, from_model, conversations, seed, batch_size)
    elif conversations or batch_size is not None or seed:
        raise UserError("--conversations, --batch-size and --seed need --from-model")
    started, is_there = time.monotonic(), os.path.exists(Path(out) / MANIFEST)
    manifest = prepare(parse_source(source, **asdict(text)), out, **options)
    kind = "JSON" if manifest.is_chat else "text"
    for name, split in manifest.splits.items():
        size = split.text_bytes
        shown = f"{size / 1e6:,.2f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"
        print(
            f"{name}: {_count(split.documents, 'document')}, {shown} of {kind}, "
            f"{split.tokens:,} tokens in {_count(len(split.shards), 'shard')}"
        )
        if manifest.is_chat and split.tokens:
            dataset = TokenDataset.open(out, name, verify=False)
            if unlearnt := Windows(dataset, TrainConfig.sequence_length).unlearnt():
                print(unlearnt)
    if manifest.overlap is not None:
        print(f"validation text: {manifest.overlap}")
    written = f"written in {time.monotonic() - started:.1f} s"
    what = "already there, shards verified" if is_there else written
    print(f"{out}: vocabulary {manifest.vocab_size:,}, {manifest.dtype}, {what}")
    if not manifest.splits[VALIDATION].tokens:
        print("no validation text: add --validation SOURCE or a larger --validation-fraction")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
