# SPDX-License-Identifier: Apache-2.0
"""What is measured of generations, while they run and afterwards."""

from dataclasses import dataclass


class Observer:
    """What happens, for metrics. Called from the scheduler's thread."""

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A generation runs for the first time."""

    def token(self, seconds: float, first: bool) -> None:
        """A token came so long after the one before, or the first so long after arrival."""

    def guessed(self, tokens: int, accepted: int) -> None:
        """So many tokens were computed ahead (speculation.py), and so many of them came true."""

    def preempted(self) -> None:
        """A generation was paused for want of cache."""

    def ended(self, outcome: str, seconds: float) -> None:
        """A generation ended, so long after arrival."""


@dataclass(kw_only=True)
class Throughput:
    """Tokens computed, and the time it took. A step's is divided in proportion to its tokens."""

    prefill_tokens: int = 0
    """Of prompts."""

    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    """Drawn ones; the first of each text comes out of the prefill."""

    decode_seconds: float = 0.0
    guessed_tokens: int = 0
    """Computed ahead of those that were drawn."""

    accepted_tokens: int = 0
    """Of those, the ones that were drawn."""

    @property
    def prefill_rate(self) -> float | None:
        """Tokens a second; None where nothing was computed."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_tokens else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second, over all texts together."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else None
