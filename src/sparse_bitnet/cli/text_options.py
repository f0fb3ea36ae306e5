# SPDX-License-Identifier: Apache-2.0
"""How a text goes on, on the command line of `generate` and `chat`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.sampling_options import SamplingOptions

if TYPE_CHECKING:
    from sparse_bitnet.generation.grammar import Grammar
    from sparse_bitnet.generation.text_batches import GenerateOptions


@dataclass(frozen=True, kw_only=True)
class TextOptions(SamplingOptions):
    """How a text goes on, and where it ends."""

    temperature: float = 0.8
    """0 always takes the most likely token."""

    top_p: float = 0.95
    """Draw from the smallest set of most likely tokens that has this share of the probability."""

    logit_bias: Annotated[tuple[tuple[int, float], ...], tyro.conf.Suppress] = ()

    stop: tuple[str, ...] = ()
    """Strings that end the text."""

    json_schema: str | None = None
    """The text is JSON of this schema: a file, or the schema itself; {} for any JSON."""

    regex: str | None = None
    """The text matches this regular expression as a whole."""

    grammar_file: str | None = None
    """The text follows the rules in this file: GBNF as of llama.cpp, or llguidance's Lark."""

    def generate_options(self, max_new_tokens: int) -> "GenerateOptions":
        """The same for a call."""
        from sparse_bitnet.generation.text_batches import GenerateOptions

        return GenerateOptions(max_new_tokens=max_new_tokens, stop=self.stop, sampling=self)

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
