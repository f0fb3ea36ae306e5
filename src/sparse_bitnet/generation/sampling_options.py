# SPDX-License-Identifier: Apache-2.0
"""Sampling options of commands and requests. Imports nothing heavy."""

from dataclasses import dataclass

from sparse_bitnet.errors import UserError

RANGES = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
}
"""Accepted ranges, on the command line and by the server. Larger values would overflow float32 and gain
nothing: a penalty of 100 already forbids, a temperature of 100 makes all tokens equally likely."""

_GREEDY_BELOW = 1e-4
"""Lower temperatures always choose the likeliest token, and would make logits overflow."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen. The defaults draw from the model's own distribution."""

    temperature: float = 1.0
    """Divisor of the logits; 0, like any value below 0.0001, always takes the most likely token."""

    top_k: int = 0
    """Sample from this many most likely tokens; 0: all."""

    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens with this total probability."""

    min_p: float = 0.0
    """Sample from tokens with at least this fraction of the most likely token's probability."""

    repetition_penalty: float = 1.0
    """Penalty for tokens in the prompt or the text so far: above 1 makes them less likely; 1: off."""

    frequency_penalty: float = 0.0
    """Amount subtracted from a token's logit for each time the generated text has it."""

    presence_penalty: float = 0.0
    """Amount subtracted once from the logit of each token that the generated text has."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Numbers to add to the logits of tokens; each token once."""

    seed: int = 0
    """Random seed for sampling; the same seed gives the same text."""

    def __post_init__(self) -> None:
        """Raise `UserError` that names the option and its range."""
        whole = {"top_k": (0, 2**63 - 1), "seed": (0, 2**64 - 1)}
        for name, (least, most) in (RANGES | whole).items():
            if not least <= (value := getattr(self, name)) <= most:
                raise UserError(f"{name}={value}: must be {least} to {most}")

    @property
    def is_greedy(self) -> bool:
        """Whether only the most likely token is ever taken."""
        return self.temperature < _GREEDY_BELOW
