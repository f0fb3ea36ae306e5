# SPDX-License-Identifier: Apache-2.0
"""Where a text ends: stop strings in streamed text, and the tokens that end it."""

from collections.abc import Sequence
from itertools import compress
from pathlib import Path

from sparse_bitnet.checkpoint.model_folder import read_json_if_there
from sparse_bitnet.errors import UserError


class StopStrings:
    """Passes streamed text on up to the first stop string, of which nothing is let through.

    The result does not depend on how the text is cut into pieces: of several stop strings the one that
    is complete first counts, of those complete at once the one that starts first.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        """Raises `UserError` for an empty string, which would end every text."""
        if not all(stop):
            raise UserError("a stop string is empty: leave it out")
        self._stop = tuple(stop)
        self._held = ""
        self._shown: list[bool] = []
        """Of each held character."""
        self.found: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str, *, is_shown: bool = True) -> str:
        """The text that can be shown now: no stop string begins in it. Nothing after a stop string.

        `is_shown`: False for a special token's name, which a stop string may contain and no text has.
        """
        if self.found is not None:
            return ""
        held = self._held + text
        self._shown += [is_shown] * len(text)
        ends = [
            (place + len(stop), place, stop)
            for stop in self._stop
            if (place := held.find(stop)) >= 0
        ]
        if ends:
            _, place, self.found = min(ends)
            return self._give(held[:place], "")
        keep = max((overlap(held, stop) for stop in self._stop), default=0)
        return self._give(held[: len(held) - keep], held[len(held) - keep :])

    def flush(self) -> str:
        """What was held back, when the text ended without a stop string."""
        return self._give(self._held, "")

    def _give(self, text: str, held: str) -> str:
        shown, self._shown = self._shown, self._shown[len(text) :]
        self._held = held
        return "".join(compress(text, shown))


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop`, itself longer, begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def end_tokens(folder: str | Path) -> frozenset[int]:
    """Tokens that end a text: `eos_token_id` of generation_config.json, else of config.json.

    Empty where neither names one. Raises `UserError` for one that is not a token number.
    """
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        found = read_json_if_there(path).get("eos_token_id")
        if found is None:
            continue
        tokens = found if isinstance(found, list) else [found]
        if not all(type(token) is int and token >= 0 for token in tokens):
            raise UserError(
                f"{path}: eos_token_id {found!r} is neither a token nor a list of tokens"
            )
        return frozenset(tokens)
    return frozenset()
