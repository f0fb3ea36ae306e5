# SPDX-License-Identifier: Apache-2.0
"""A teacher's highest logits on disk, so that a student is trained without it in memory.

    manifest.json    whose logits of which tokens, k, and the CRC-32 of every part that is done
    part-00000.bin   of windows of the training text in the order of the run's first epoch: token ids
                     [windows, sequence, k], little-endian uint16 (uint32 from 65,536 tokens on), then
                     logits of that shape, float16

A token takes k * 4 bytes, or k * 6 with a large vocabulary. The logits are stored less their logsumexp,
as log probabilities. Parts are written one after another: a call that was cut off goes on where it
stopped, and a longer run of the same order adds to them.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from zlib_ng import zlib_ng

from sparse_bitnet.checkpoint.model_folder import read_json_if_there
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint
from sparse_bitnet.data.loader import TokenLoader, permuted
from sparse_bitnet.data.shards import token_dtype
from sparse_bitnet.errors import UserError, os_errors_as
from sparse_bitnet.files import check_ours, file_crc32, make_folder, write_atomic
from sparse_bitnet.progress import OnProgress
from sparse_bitnet.training.loss import default_chunk_tokens
from sparse_bitnet.training.teacher_loss import Teacher

MANIFEST = "manifest.json"
VERSION = 1
_PART_BYTES = 64 << 20


class LogitCache:
    """The top logits of the windows that a run trains on."""

    def __init__(
        self, folder: Path, teacher: str, loader: TokenLoader, steps: int, *, k: int, vocab: int
    ) -> None:
        """Of the batches of `steps` steps.

        Raises `UserError` where the folder holds a cache of something else, or other files."""
        self.folder, self.cut = folder, loader.cut
        self.k, self.vocab_size = k, vocab
        self.length = length = loader.sequence_length
        self.ids = np.dtype(token_dtype(vocab)).newbyteorder("<")
        every = np.arange(loader.windows)
        self.order = permuted(every, loader.windows, seed=loader.seed, epoch=0)
        self.position = np.empty_like(self.order)
        self.position[self.order] = every
        self.bytes_per_token = k * (self.ids.itemsize + 2)
        self.per_part = max(1, _PART_BYTES // (length * self.bytes_per_token))
        self.parts = -(-min(loader.windows, steps * loader.batch_size) // self.per_part)
        self.windows = min(loader.windows, self.parts * self.per_part)
        self.identity = {
            "version": VERSION,
            "teacher": fingerprint(teacher),
            "data": loader.dataset.identity(),
            "data_seed": loader.seed,
            "sequence_length": length,
            "k": k,
            "vocab_size": vocab,
        }
        self.checksums: list[int] = []
        stored = read_json_if_there(folder / MANIFEST)
        if "teacher" in stored:
            self._check(stored)
            self.checksums = stored["checksums"]
        else:  # a call that was killed before its first manifest leaves a part
            check_ours(folder, [] if stored else [self._path(0).name], "a logit cache")
        self._maps: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def is_complete(self) -> bool:
        """Whether every part has been written."""
        return len(self.checksums) >= self.parts

    @property
    def bytes(self) -> int:
        """Of all parts together."""
        return self.windows * self.length * self.bytes_per_token

    def fill(
        self, teacher: Teacher, batch: int, progress: OnProgress = lambda done, total: None
    ) -> None:
        """Write the parts that are missing; `progress` counts tokens.

        Raises `UserError` where the teacher's logits are not finite, or the disk is full.
        """
        make_folder(self.folder)
        for part in range(len(self.checksums), self.parts):
            first = part * self.per_part
            last = min(self.windows, first + self.per_part)
            ids: list[np.ndarray] = []
            values: list[np.ndarray] = []
            for start in range(first, last, batch):
                top = self._top(teacher, start, min(last, start + batch))
                progress(min(last, start + batch) * self.length, self.windows * self.length)
                ids.append(top[0])
                values.append(top[1])
            content = b"".join(array.tobytes() for array in (*ids, *values))
            write_atomic(self._path(part), content)
            self.checksums.append(zlib_ng.crc32(content))
            text = json.dumps({**self.identity, "checksums": self.checksums}, indent=1)
            write_atomic(self.folder / MANIFEST, text + "\n")

    def verify(self) -> None:
        """Raise `UserError` for a part that is missing or damaged, and for one that is still to come."""
        if not self.is_complete:
            raise UserError(
                f"{self.folder}: {len(self.checksums)} of {self.parts} parts are written"
            )
        for part, checksum in enumerate(self.checksums):
            path = self._path(part)
            with os_errors_as(f"cannot read {path}"):
                found = file_crc32(path)
            if found != checksum:
                raise UserError(
                    f"{path} is damaged (its checksum differs): remove the cache's folder"
                )

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        """(ids int64, logits float32), each [windows, sequence, k]."""
        found = []
        for position in self.position[windows].tolist():
            ids, values = self._map(position // self.per_part)
            found.append((ids[position % self.per_part], values[position % self.per_part]))
        ids, values = (np.stack(each) for each in zip(*found, strict=True))
        return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(values.astype(np.float32))

    def _top(self, teacher: Teacher, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        device = next(teacher.model.parameters()).device
        input_ids, _, *positions = (
            torch.from_numpy(each).to(device) for each in self.cut.batch(self.order[first:last])
        )
        tops, chunk = [], default_chunk_tokens(self.vocab_size)
        for states in teacher.hidden(input_ids, *positions).split(chunk):
            logits = teacher.logits(states).log_softmax(-1)
            if not torch.isfinite(logits).all():
                raise UserError(
                    f"teacher {teacher.path}: its logits are not finite in window {self.order[first]}"
                )
            tops.append(logits.topk(self.k, -1))
        values, ids = (torch.cat(each) for each in zip(*tops, strict=True))
        shape = (last - first, self.length, self.k)
        return (
            ids.view(shape).cpu().numpy().astype(self.ids),
            values.view(shape).cpu().numpy().astype("<f2"),
        )

    def _path(self, part: int) -> Path:
        return self.folder / f"part-{part:05d}.bin"

    def _map(self, part: int) -> tuple[np.ndarray, np.ndarray]:
        if part not in self._maps:
            count = min(len(self.order) - part * self.per_part, self.per_part)
            shape = (count, self.length, self.k)
            raw = np.memmap(self._path(part), np.uint8, "r")
            split = int(np.prod(shape)) * self.ids.itemsize
            self._maps[part] = (
                raw[:split].view(self.ids).reshape(shape),
                raw[split:].view("<f2").reshape(shape),
            )
        return self._maps[part]

    def _check(self, stored: dict[str, Any]) -> None:
        for name, value in self.identity.items():
            if stored.get(name) != value:
                what = {"data": "text", "k": "top_logits"}.get(name, name.replace("_", " "))
                raise UserError(
                    f"{self.folder} is a cache of another {what}; choose another --logit-cache"
                )
        sums = stored.get("checksums")
        if not isinstance(sums, list):
            raise UserError(f"{self.folder / MANIFEST} is damaged: remove the cache's folder")


def fingerprint(teacher: str) -> str:
    """16 hexadecimal digits of a model's config and weights."""
    folder, content = find_checkpoint(teacher).folder, hashlib.blake2b(digest_size=8)
    weights = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    for path in [folder] if folder.is_file() else sorted([folder / "config.json", *weights]):
        with os_errors_as(f"cannot read {path}"), open(path, "rb") as file:
            while block := file.read(1 << 24):
                content.update(block)
    return content.hexdigest()
