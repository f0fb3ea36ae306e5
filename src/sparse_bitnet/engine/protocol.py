"""What text generation, the scheduler and lm-eval ask of an engine. Free of torch.

`engine.Engine` runs packed models in C++; `reference.TransformersEngine` any transformers model.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from sparse_bitnet.errors import UserError

WhichLogits = Literal["none", "last", "all"]


class ContextFull(UserError):
    """A sequence would pass the context length."""


class CacheFull(UserError):
    """The cache has no room for the tokens of a forward; closing sequences makes room."""


class CachedSequence(Protocol):
    """Tokens whose keys and values an engine holds."""

    @property
    def tokens(self) -> list[int]:
        """The tokens so far, a copy."""
        ...

    def __len__(self) -> int: ...

    def fork(self, length: int | None = None) -> "CachedSequence":
        """A new sequence that starts with the first `length` tokens (all) and shares their memory."""
        ...

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        ...

    def close(self) -> None:
        """Give the memory back; a second call does nothing."""
        ...


class InferenceEngine(Protocol):
    """A loaded model with a cache for many sequences. Used from one thread at a time."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int:
        """Most tokens of one sequence."""
        ...

    @property
    def free_tokens(self) -> int:
        """Tokens for which the cache has room, whole pages."""
        ...

    def new_sequence(self) -> CachedSequence: ...

    def forward(
        self,
        batch: Sequence[tuple[CachedSequence, Sequence[int]]],
        logits: WhichLogits = "last",
    ) -> list[np.ndarray]:
        """Append tokens to sequences and return float32 logits, one array for each entry of the batch:
        [vocab_size] after its last token ("last"), [tokens, vocab_size] ("all"), or an empty list
        ("none").

        Raises `ContextFull` or `CacheFull` before anything has changed.
        """
        ...

    def close(self) -> None: ...
