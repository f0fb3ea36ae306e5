# SPDX-License-Identifier: Apache-2.0
"""The teacher of a run: a model in memory, or its highest logits on disk, so that a student is trained
without it.

    manifest.json    whose logits of which tokens, k, and the CRC-32 of every part that is done
    part-00000.bin   windows of the training text in the order of the run's first epoch; each token is k
                     token ids, little-endian uint16 (uint32 from 65,536 tokens on), and k logits, float16

The logits are stored less their logsumexp, as log probabilities. Parts are written one after another: a
call that was cut off continues where it stopped, and a longer run of the same order adds to them.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

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
from sparse_bitnet.progress import Progress, say
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.loss import capped, default_chunk_tokens, hidden_states, logit_cap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MANIFEST = "manifest.json"
VERSION = 2
_PART_BYTES = 64 << 20


class Teacher:
    """A frozen causal LM on the device of its student."""

    def __init__(
        self, path: str | Path, dtype: torch.dtype, device: torch.device, vocab_size: int
    ) -> None:
        """Load it. Its logits are those of the first `vocab_size` rows of its head.

        Raises `UserError` for what does not load.
        """
        self.path, self.vocab_size = path, vocab_size
        self.model = find_checkpoint(path).load(dtype=dtype)
        self.model.requires_grad_(False).eval().to(device)

    @torch.no_grad()
    def hidden(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """`hidden_states` [tokens, hidden_size] of [batch, sequence]."""
        with torch.autocast(input_ids.device.type, enabled=False):
            return hidden_states(self.model, input_ids, position_ids).flatten(0, 1)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [tokens, vocab_size] of some of the `hidden` states."""
        with torch.autocast(hidden.device.type, enabled=False):
            logits = self.model.get_output_embeddings()(hidden)[:, : self.vocab_size].float()
        return capped(logits, logit_cap(self.model))


class LogitCache:
    """The top logits of the windows that a run trains on."""

    def __init__(self, config: TrainConfig, loader: TokenLoader, vocab_size: int) -> None:
        """Read what is there; nothing is written before `fill`.

        Raises `UserError` when the folder holds a cache of something else, or other files.
        """
        assert config.teacher is not None
        assert config.logit_cache is not None
        self.folder, self.teacher, self.cut = Path(config.logit_cache), config.teacher, loader.cut
        self.vocab_size, self.k = vocab_size, min(config.top_logits, vocab_size)
        self.length = length = loader.sequence_length
        ids = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
        self.token = np.dtype([("ids", ids, (self.k,)), ("logits", "<f2", (self.k,))])
        every = np.arange(loader.windows)
        self.order = permuted(every, loader.windows, seed=loader.seed, epoch=0)
        self.position = np.empty_like(self.order)
        self.position[self.order] = every
        self.per_part = max(1, _PART_BYTES // (length * self.token.itemsize))
        used = min(loader.windows, config.steps * loader.batch_size)
        self.parts = -(-used // self.per_part)
        self.windows = min(loader.windows, self.parts * self.per_part)
        self.identity = {
            "version": VERSION,
            "teacher": fingerprint(config.teacher),
            "data": loader.dataset.identity(),
            "data_seed": loader.seed,
            "sequence_length": length,
            "k": self.k,
            "vocab_size": vocab_size,
        }
        self.checksums: list[int] = []
        self._maps: dict[int, np.ndarray] = {}
        stored = read_json_if_there(self.folder / MANIFEST)
        if "teacher" not in stored:
            # A call that was killed before its first manifest leaves a part.
            check_ours(self.folder, [] if stored else [self._path(0).name], "a logit cache")
            return
        for name, value in self.identity.items():
            if stored.get(name) != value:
                what = {"data": "text", "k": "top_logits"}.get(name, name.replace("_", " "))
                raise UserError(
                    f"{self.folder} is a cache of another {what}; choose another --logit-cache"
                )
        self.checksums = stored.get("checksums", [])
        if not isinstance(self.checksums, list):
            raise UserError(f"{self.folder / MANIFEST} is damaged: remove the cache's folder")

    def fill(self, dtype: torch.dtype, device: torch.device, batch: int) -> None:
        """Write the parts that are missing, `batch` windows at a time, and verify all of them.

        Raises `UserError` for logits that are not finite, a full disk, and a damaged part.
        """
        total = self.windows * self.length
        if (done := len(self.checksums)) < self.parts:
            say(
                f"{self.folder}: {self.token.itemsize} bytes a token, "
                f"{total * self.token.itemsize / 1e6:,.1f} MB of the teacher's logits, "
                f"{self.parts - done} parts to write"
            )
            teacher = Teacher(self.teacher, dtype, device, self.vocab_size)
            make_folder(self.folder)
            with Progress(plain_lines=10) as progress:
                line = progress.line("teacher's logits", "tokens")
                for part in range(done, self.parts):
                    first = part * self.per_part
                    last = min(self.windows, first + self.per_part)
                    rows = np.empty((last - first, self.length), self.token)
                    for start in range(first, last, batch):
                        end = min(last, start + batch)
                        rows[start - first : end - first] = self._top(teacher, start, end)
                        line(end * self.length, total)
                    content = rows.tobytes()
                    write_atomic(self._path(part), content)
                    self.checksums.append(zlib_ng.crc32(content))
                    text = json.dumps({**self.identity, "checksums": self.checksums}, indent=1)
                    write_atomic(self.folder / MANIFEST, text + "\n")
        for part, checksum in enumerate(self.checksums):
            path = self._path(part)
            with os_errors_as(f"cannot read {path}"):
                if file_crc32(path) != checksum:
                    raise UserError(
                        f"{path} is damaged (its checksum differs): remove the cache's folder"
                    )

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        """(ids int64, logits float32), each [windows, sequence, k]."""
        places = [divmod(place, self.per_part) for place in self.position[windows].tolist()]
        rows = np.stack([self._part(part)[row] for part, row in places])
        ids, logits = rows["ids"].astype(np.int64), rows["logits"].astype(np.float32)
        return torch.from_numpy(ids), torch.from_numpy(logits)

    def _top(self, teacher: Teacher, first: int, last: int) -> np.ndarray:
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
        values, ids = (torch.cat(each).cpu().numpy() for each in zip(*tops, strict=True))
        rows = np.empty(len(ids), self.token)
        rows["ids"], rows["logits"] = ids, values
        return rows.reshape(last - first, self.length)

    def _path(self, part: int) -> Path:
        return self.folder / f"part-{part:05d}.bin"

    def _part(self, part: int) -> np.ndarray:
        if part not in self._maps:
            mapped = np.memmap(self._path(part), self.token, "r")
            self._maps[part] = mapped.reshape(-1, self.length)
        return self._maps[part]


def find_teacher(
    config: TrainConfig,
    student: "PreTrainedModel",
    loader: TokenLoader,
    dtype: torch.dtype,
    device: torch.device,
) -> Teacher | LogitCache:
    """Return the teacher of a run, or the cache of its logits, which is to be filled.

    Raises `UserError` for a teacher that does not fit the student, and a cache of another one.
    """
    assert config.teacher is not None
    stored = find_checkpoint(config.teacher)
    own, theirs = head_rows(student), head_rows(stored.model())
    if own != theirs and not loader.dataset.check_tokenizer(stored.folder, config.teacher):
        raise UserError(
            f"teacher {config.teacher} has a vocabulary of {theirs:,} tokens, the student one of "
            f"{own:,}, and no tokenizer of the teacher says that they are the same: copy it there, or "
            "start from the teacher"
        )
    # With one tokenizer, the larger head is padded.
    loader.dataset.check_vocab(rows := min(own, theirs))
    if config.logit_cache is not None:
        return LogitCache(config, loader, rows)
    return Teacher(config.teacher, dtype, device, rows)


def head_rows(model: "PreTrainedModel") -> int:
    """Rows of a model's output head: its vocabulary, and what it is padded with."""
    return model.get_output_embeddings().weight.shape[0]


def fingerprint(teacher: str) -> str:
    """16 hexadecimal digits of a model's config and weights."""
    folder, content = find_checkpoint(teacher).folder, hashlib.blake2b(digest_size=8)
    weights = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    for path in [folder] if folder.is_file() else sorted([folder / "config.json", *weights]):
        with os_errors_as(f"cannot read {path}"), open(path, "rb") as file:
            while block := file.read(1 << 24):
                content.update(block)
    return content.hexdigest()
