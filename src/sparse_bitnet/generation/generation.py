"""What is asked of text generation, and what comes out of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.sampling import SamplingOptions
from sparse_bitnet.generation.stop import StopStrings

FinishReason = Literal["stop", "length", "cancelled"]

OnToken = Callable[[int, int, str], None]
"""Called with the number of the prompt, the token, and the text that can now be shown (often "")."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What is wanted of each prompt."""

    max_new_tokens: int = 64
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    """Each prompt draws with this seed: its text does not depend on the prompts beside it."""

    stop: tuple[str, ...] = ()
    """Strings that end the text and are no part of it."""

    def __post_init__(self) -> None:
        """Raise `UserError` that names the option."""
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens={self.max_new_tokens}: must be at least 1")
        StopStrings(self.stop)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What became of one prompt."""

    tokens: list[int]
    """All tokens drawn, with the one that ended the text."""

    text: str
    """Without stop string and special tokens."""

    finish_reason: FinishReason
    """ "stop": an end token or a stop string; "length": `max_new_tokens` were drawn."""

    prompt_tokens: int
    cached_tokens: int
    """Of those, the ones that did not have to be computed."""


@dataclass(kw_only=True)
class GenerateResult:
    """The texts, in the order of the prompts, and how fast they came."""

    texts: list[Generation]
    prefill_tokens: int = 0
    """Prompt tokens computed."""

    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    """Tokens drawn after the first of each text, which belongs to prefill."""

    decode_seconds: float = 0.0

    @property
    def prefill_rate(self) -> float | None:
        """Tokens a second; None where nothing was computed."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_tokens else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second, over all texts together."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else None
