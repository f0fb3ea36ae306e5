# SPDX-License-Identifier: Apache-2.0
"""Sampling options as they appear on the command line of `generate` and `chat`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparse_bitnet.errors import UserError

if TYPE_CHECKING:
    from sparse_bitnet.generation.generate import GenerateOptions
    from sparse_bitnet.generation.grammar import Grammar


@dataclass(kw_only=True)
class TextOptions:
    """How a text goes on, and where it ends."""

    temperature: float = 0.8
    """0 always takes the most likely token."""

    top_k: int = 0
    """Number of most likely tokens to draw from; 0: all."""

    top_p: float = 0.95
    """Draw from the smallest set of most likely tokens that has this share of the probability."""

    min_p: float = 0.0
    """Draw from tokens at least as likely as this share of the most likely one's probability."""

    repetition_penalty: float = 1.0
    """Above 1 makes the tokens of prompt and text so far less likely."""

    frequency_penalty: float = 0.0
    """Above 0 makes the tokens of the text so far less likely, more so each time they appear."""

    presence_penalty: float = 0.0
    """Above 0 makes the tokens of the text so far less likely."""

    seed: int = 0
    """Same seed, same text."""

    stop: tuple[str, ...] = ()
    """Strings that end the text."""

    json_schema: str | None = None
    """The text is JSON of this schema: a file, or the schema itself; {} for any JSON."""

    regex: str | None = None
    """The text matches this regular expression as a whole."""

    grammar_file: str | None = None
    """The text follows the rules in this file: GBNF as of llama.cpp, or llguidance's Lark."""

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

    def grammar(self) -> "Grammar | None":
        """The form that the text has to have. Raises `UserError` for two of them, and for none."""
        given = {
            "--json-schema": self.json_schema,
            "--regex": self.regex,
            "--grammar-file": self.grammar_file,
        }
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise UserError(f"give either {' or '.join(names)}")
        if not names:
            return None
        from sparse_bitnet.generation.grammar import Grammar

        if self.regex is not None:
            return Grammar.regex(self.regex)
        if self.grammar_file is not None:
            return Grammar.rules(read_text("--grammar-file", self.grammar_file))
        text = str(self.json_schema)
        if not text.lstrip().startswith("{"):
            text = read_text("--json-schema", text)
        return Grammar.json_text(text)


def read_text(option: str, path: str) -> str:
    """What a file holds. Raises `UserError` that names the option."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option} {path}: {error}") from error
