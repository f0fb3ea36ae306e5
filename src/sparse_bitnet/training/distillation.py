# SPDX-License-Identifier: Apache-2.0
"""Distillation: the teacher of a run, and the loss of its student.

    ce_weight * cross-entropy
    + logits_weight * T^2 * KL(teacher || student), both softened by the temperature T (Hinton et al.,
      2015)

The student starts from the teacher's weights. The teacher is not part of the model: it is not trained,
sharded or stored. It is a model in memory, or its highest logits on disk:

    manifest.json    teacher, tokens, k, and the CRC-32 of every finished part
    part-00000.bin   windows of the training text in the order of the run's first epoch; each token is k
                     token ids, little-endian uint16 (uint32 above 65,536 tokens), and k logits, float16

Logits are stored as log-probabilities (less their logsumexp). Parts are written one after another: an
interrupted call resumes, and a longer run with the same data order adds parts.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from sparse_bitnet.training.logits import capped, check_logits, hidden_states, logit_cap
from sparse_bitnet.training.loss import Soft, SummedLoss, default_chunk_tokens
from sparse_bitnet.training.model import check_positions

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
        """Load the teacher. Its logits are those of the first `vocab_size` rows of its head.

        Raises `UserError` for a model that cannot be loaded.
        """
        self.path, self.vocab_size = path, vocab_size
        self.model = find_checkpoint(path).load(dtype=dtype)
        self.model.requires_grad_(False).eval().to(device)

    @torch.no_grad()
    def hidden(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return `hidden_states` [tokens, hidden_size] of token ids [batch, sequence]."""
        with torch.autocast(input_ids.device.type, enabled=False):
            return hidden_states(self.model, input_ids, position_ids).flatten(0, 1)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [tokens, vocab_size] of some `hidden` states, in the model's type."""
        with torch.autocast(hidden.device.type, enabled=False):
            head = self.model.get_output_embeddings()
            logits = head(hidden.to(head.weight.dtype))[:, : self.vocab_size]
        cap = logit_cap(self.model)
        return logits if cap is None else capped(logits.float(), cap)


class LogitCache:
    """The teacher's top logits of the windows that a run trains on, on disk."""

    def __init__(
        self,
        config: TrainConfig,
        fingerprint: str,
        loader: TokenLoader,
        vocab_size: int,
        dtype: torch.dtype,
    ) -> None:
        """Open the folder; nothing is written before `fill`. `fingerprint`, `dtype`: the teacher's.

        Raises `UserError` for another cache, other files, no permission, and a disk that is too small.
        """
        assert config.logit_cache is not None
        self.folder, self.cut = Path(config.logit_cache), loader.cut
        self.vocab_size, self.k = vocab_size, min(config.top_logits, vocab_size)
        self.length = length = loader.sequence_length
        ids = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
        self.token = np.dtype([("ids", ids, (self.k,)), ("logits", "<f2", (self.k,))])
        every = np.arange(loader.windows)
        self.order = permuted(every, loader.windows, seed=loader.seed, epoch=0)
        self.position = np.argsort(self.order)
        self.per_part = max(1, _PART_BYTES // (length * self.token.itemsize))
        used = min(loader.windows, config.steps * loader.batch_size)
        self.parts = -(-used // self.per_part)
        self.windows = min(loader.windows, self.parts * self.per_part)
        self.identity: dict[str, Any] = {
            "version": VERSION,
            "teacher": fingerprint,
            "dtype": str(dtype),
            "data": loader.dataset.identity(),
            "data_seed": loader.seed,
            "sequence_length": length,
            "k": self.k,
            "vocab_size": vocab_size,
        }
        stored = read_json_if_there(self.folder / MANIFEST)
        if "teacher" not in stored:
            check_ours(self.folder, [], "a logit cache")
            stored = self.identity
        for name, value in self.identity.items():
            if stored.get(name) != value:
                what = {"data": "text", "k": "top_logits"}.get(name, name.replace("_", " "))
                raise UserError(
                    f"{self.folder} is a cache of another {what}; choose another --logit-cache"
                )
        self.checksums: list[int] = stored.get("checksums", [])
        if not isinstance(self.checksums, list):
            raise UserError(f"{self.folder / MANIFEST} is damaged: remove the cache's folder")
        place = next(each for each in (self.folder, *self.folder.parents) if os.path.exists(each))
        missing = max(0, self.windows - len(self.checksums) * self.per_part) * length
        if missing and not (place.is_dir() and os.access(place, os.W_OK)):
            raise UserError(f"cannot write {self.folder}: {place} is not a writable folder")
        if (needed := missing * self.token.itemsize) > (free := shutil.disk_usage(place).free):
            raise UserError(
                f"--logit-cache {self.folder} needs {needed / 1e6:,.1f} MB more, and {free / 1e6:,.1f} "
                "MB are free there: choose another folder, or fewer --top-logits"
            )

    def fill(self, teacher: Teacher | None, batch: int) -> None:
        """Write the missing parts, if any, `batch` windows at a time, and verify all parts.

        Raises `UserError` for logits that are not finite, a full disk, and a damaged part.
        """
        total = self.windows * self.length
        if (done := len(self.checksums)) < self.parts:
            say(
                f"writing the teacher's logits to {self.folder}: {self.token.itemsize} bytes per token, "
                f"{total * self.token.itemsize / 1e6:,.1f} MB in total, {self.parts - done} files left"
            )
            assert teacher is not None
            try:
                make_folder(self.folder)
                self._write_manifest()
                with Progress(plain_lines=10) as progress:
                    line = progress.line("teacher's logits", "tokens")
                    for part in range(done, self.parts):
                        first = part * self.per_part
                        last, rows = min(self.windows, first + self.per_part), list[bytes]()
                        for start in range(first, last, batch):
                            end = min(last, start + batch)
                            rows.append(self._top(teacher, start, end))
                            line(end * self.length, total)
                        content = b"".join(rows)
                        write_atomic(self._path(part), content)
                        self.checksums.append(zlib_ng.crc32(content))
                        self._write_manifest()
            except KeyboardInterrupt:
                kept = f"{len(self.checksums)} of {self.parts} files of logits are kept"
                raise KeyboardInterrupt(f"stopped; {kept}; run the same command again") from None
        for part, checksum in enumerate(self.checksums):
            path = self._path(part)
            with os_errors_as(f"cannot read {path}"):
                if file_crc32(path) != checksum:
                    raise UserError(
                        f"{path} is damaged (its checksum differs): remove the cache's folder"
                    )

    def batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return token ids, int64, and logits, float32, of some windows, each [windows, sequence, k]."""
        places = [divmod(place, self.per_part) for place in self.position[windows].tolist()]
        maps = {
            part: np.memmap(self._path(part), self.token, "r") for part in {p for p, _ in places}
        }
        rows = np.stack([maps[part].reshape(-1, self.length)[row] for part, row in places])
        ids, logits = rows["ids"].astype(np.int64), rows["logits"].astype(np.float32)
        return torch.from_numpy(ids), torch.from_numpy(logits)

    def _top(self, teacher: Teacher, first: int, last: int) -> bytes:
        device = next(teacher.model.parameters()).device
        input_ids, _, *positions = (
            torch.from_numpy(each).to(device) for each in self.cut.batch(self.order[first:last])
        )
        tops, chunk = [], default_chunk_tokens(self.vocab_size)
        for states in teacher.hidden(input_ids, *positions).split(chunk):
            logits = teacher.logits(states).float().log_softmax(-1)
            if not torch.isfinite(logits).all():
                raise UserError(
                    f"teacher {teacher.path}: its logits are not finite in window {self.order[first]}"
                )
            tops.append(logits.topk(self.k, -1))
        values, ids = (torch.cat(each).cpu().numpy() for each in zip(*tops, strict=True))
        rows = np.empty(len(ids), self.token)
        rows["ids"], rows["logits"] = ids, values
        return rows.tobytes()

    def _path(self, part: int) -> Path:
        return self.folder / f"part-{part:05d}.bin"

    def _write_manifest(self) -> None:
        text = json.dumps({**self.identity, "checksums": self.checksums}, indent=1)
        write_atomic(self.folder / MANIFEST, text + "\n")


def find_teacher(
    config: TrainConfig,
    fingerprint: str,
    student: "PreTrainedModel",
    loader: TokenLoader,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_new: bool,
) -> tuple[Teacher | None, LogitCache | None]:
    """Return a run's teacher, and the cache of its logits, which the caller must `fill`.

    Either is None if the run has none. With a cache, the teacher is loaded for a new run (`is_new`) and
    for missing logits alone. `fingerprint`: the teacher's fingerprint.

    Raises `UserError` for a teacher that does not fit the student, and a cache of another one.
    """
    if config.teacher is None:
        return None, None
    if getattr(student.get_output_embeddings(), "bias", None) is not None:
        raise UserError(
            f"distillation does not support an output head with a bias ({type(student).__name__}): use "
            "`train --init`"
        )
    stored = find_checkpoint(config.teacher)
    check_positions(stored.model, config, f"teacher {config.teacher}")
    own, theirs = (each.get_output_embeddings().weight.shape[0] for each in (student, stored.model))
    if own != theirs and not loader.dataset.check_tokenizer(stored.folder, config.teacher):
        raise UserError(
            f"teacher {config.teacher} has a vocabulary of {theirs:,} tokens, the student one of "
            f"{own:,}, and the teacher's folder has no tokenizer that shows them to be the same: copy it "
            "there, or start from the teacher"
        )
    # With the same tokenizer, the larger head is padded.
    loader.dataset.check_vocab(rows := min(own, theirs))
    cache = LogitCache(config, fingerprint, loader, rows, dtype) if config.logit_cache else None
    if cache and len(cache.checksums) >= cache.parts and not is_new:
        return None, cache
    teacher = Teacher(config.teacher, dtype, device, rows)
    check_logits(teacher.model, loader.dataset.is_chat, f"teacher {config.teacher}, ")
    return teacher, cache


class DistillationLoss(SummedLoss):
    """`SummedLoss` of the student plus, in training, the distillation terms of the teacher."""

    def __init__(
        self,
        model: "PreTrainedModel",
        config: TrainConfig,
        teacher: Teacher | LogitCache,
        compiled: bool = False,
    ) -> None:
        """`teacher`: with a cache, its top logits come with every batch."""
        super().__init__(model, config.loss_chunk_tokens, compiled)
        self.config = config
        self._teacher = [teacher]  # in a list, it is not a submodule: neither split nor trained

    def apart(self, loss: float, divergence: float) -> dict[str, float]:
        """Return a step's KL at the temperature and its cross-entropy, if any, in nats a token."""
        config = self.config
        soft = config.logits_weight * config.temperature**2 * divergence
        shown = {"kl_divergence": divergence} if config.logits_weight else {}
        if config.ce_weight:
            shown["cross_entropy"] = (loss - soft) / config.ce_weight
        return shown

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        top: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`top`: token ids and logits of the teacher, [batch, sequence, k], when it is a cache."""
        if not self.model.training:
            return super().forward(input_ids, labels, position_ids)
        config, (teacher,) = self.config, self._teacher
        logits_of: Callable[[slice], Tensor]
        if isinstance(teacher, Teacher):
            states = teacher.hidden(input_ids, position_ids)

            def logits_of(rows: slice) -> Tensor:
                return teacher.logits(states[rows])
        else:
            assert top is not None
            ids, values = (each.flatten(0, 1) for each in top)

            def logits_of(rows: slice) -> Tensor:
                share = values[rows].float()
                none = share.new_full((len(share), teacher.vocab_size), -torch.inf)
                return none.scatter_(-1, ids[rows].long(), share)

        soft = Soft(logits_of, config.ce_weight, config.logits_weight, config.temperature)
        return super().forward(input_ids, labels, position_ids, soft)
