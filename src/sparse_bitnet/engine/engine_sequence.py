"""The part that sequences of engines over transformers models share: their tokens, open until closed."""

from collections.abc import Iterable, Sequence

from sparse_bitnet.engine.protocol import CachedSequence, ContextFull


class EngineSequence:
    """The tokens that an engine has computed for one sequence."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._is_open = True

    @property
    def tokens(self) -> list[int]:
        return list(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, tokens: Iterable[int]) -> None:
        """Of the engine, after it has computed them."""
        self._tokens += [int(token) for token in tokens]

    def check_open(self) -> None:
        """Raise `ValueError` after `close`."""
        if not self._is_open:
            raise ValueError("the sequence is closed")

    def _check(self, length: int) -> None:
        """Raise `ValueError` after `close`, and for a length that the sequence does not have."""
        self.check_open()
        if not 0 <= length <= len(self):
            raise ValueError(f"length {length}: the sequence has {len(self)} tokens")


def check_distinct(batch: Sequence[tuple[CachedSequence, Sequence[int]]]) -> None:
    """Raise `ValueError` for a sequence that occurs twice in a batch of `InferenceEngine.forward`."""
    if len({id(sequence) for sequence, _ in batch}) < len(batch):
        raise ValueError("a sequence occurs twice in the batch")


def check_entry(
    sequence: EngineSequence, tokens: Sequence[int], vocab_size: int, context_length: int
) -> None:
    """One entry of such a batch.

    Raises `ValueError` for a closed sequence, no tokens and one outside the vocabulary, `ContextFull`
    where the context does not hold them.
    """
    sequence.check_open()
    if not len(tokens) or not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ValueError(f"needs one or more tokens, each in 0..{vocab_size - 1}")
    if len(sequence) + len(tokens) > context_length:
        raise ContextFull(
            f"{len(sequence) + len(tokens)} tokens: the context holds {context_length}"
        )
