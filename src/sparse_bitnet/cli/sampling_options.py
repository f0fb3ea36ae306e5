"""Sampling options as they appear on the command line of `generate` and `chat`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparse_bitnet.generation.generate import GenerateOptions


@dataclass(kw_only=True)
class TextOptions:
    """How a text goes on, and where it ends."""

    temperature: float = 0.8
    """0 always takes the most likely token."""

    top_k: int = 0
    """Draw from so many of the most likely tokens; 0: from all."""

    top_p: float = 0.95
    """Draw from the fewest of the most likely tokens that have this share of the probability."""

    min_p: float = 0.0
    """Draw from tokens at least so likely as this share of the most likely one's probability."""

    repetition_penalty: float = 1.0
    """Above 1 makes the tokens of prompt and text so far less likely."""

    frequency_penalty: float = 0.0
    """Above 0 makes the tokens of the text so far less likely, each time they come more so."""

    presence_penalty: float = 0.0
    """Above 0 makes the tokens of the text so far less likely."""

    seed: int = 0
    """Same seed, same text."""

    stop: tuple[str, ...] = ()
    """Strings that end the text."""

    def generate_options(self, max_new_tokens: int) -> "GenerateOptions":
        """Raises `UserError` that names an option outside its range."""
        from sparse_bitnet.generation.generate import GenerateOptions
        from sparse_bitnet.generation.sampling import SamplingOptions

        return GenerateOptions(
            max_new_tokens=max_new_tokens,
            stop=self.stop,
            sampling=SamplingOptions(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                frequency_penalty=self.frequency_penalty,
                presence_penalty=self.presence_penalty,
                seed=self.seed,
            ),
        )
