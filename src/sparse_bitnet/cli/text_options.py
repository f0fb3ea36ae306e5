# SPDX-License-Identifier: Apache-2.0
"""How a text goes on, on the command line of `generate` and `chat`."""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sparse_bitnet.cli.arguments import HIDDEN
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.sampling_options import SamplingOptions

if TYPE_CHECKING:
    from sparse_bitnet.engine.protocol import InferenceEngine
    from sparse_bitnet.generation.grammar import Grammar
    from sparse_bitnet.generation.open_model import OpenModel
    from sparse_bitnet.generation.speculation import Speculation
    from sparse_bitnet.generation.text_batches import GenerateOptions


@dataclass(frozen=True, kw_only=True)
class TextOptions(SamplingOptions):
    """How a text goes on, and where it ends."""

    temperature: float = 0.8
    """0 always takes the most likely token."""

    top_p: float = 0.95
    """Draw from the smallest set of most likely tokens that has this share of the probability."""

    logit_bias: Annotated[tuple[tuple[int, float], ...], HIDDEN] = ()

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
    """What a file holds, or standard input ("-"). Raises `UserError` that names the option."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option} {path}: {error}") from error


@dataclass(kw_only=True)
class SpeculationOptions:
    """Tokens that are guessed ahead: the same text, sooner where it repeats itself."""

    speculative_tokens: int = 7
    """Most tokens guessed ahead of a text and computed with its next one (cpu); as many as pay by what
    that takes on this machine. 0: none."""

    draft: str | None = None
    """A smaller packed model with the same tokenizer, to guess where the text itself does not (cpu)."""

    def __post_init__(self) -> None:
        """Raise `UserError` that names the option."""
        if not 0 <= self.speculative_tokens <= 63:
            raise UserError(f"--speculative-tokens {self.speculative_tokens}: must be 0 to 63")
        if self.draft is not None and self.speculative_tokens == 0:
            raise UserError("--draft guesses tokens: leave out --speculative-tokens 0")

    def open(self, model: "OpenModel", engine: EngineOptions) -> "Speculation | None":
        """For one scheduler of this model; None where nothing is to be guessed.

        Raises `UserError` for a draft model that does not fit, or that nothing could use.
        """
        from sparse_bitnet.generation.speculation import Speculation

        if not model.engine.batch_invariant:
            if self.draft is not None:
                raise UserError("--draft is an option of the CPU engine, which does not run here")
            return None
        if self.speculative_tokens == 0:
            return None
        draft = None if self.draft is None else self._open_draft(self.draft, model, engine)
        return Speculation(model.engine, most=self.speculative_tokens, draft=draft)

    def _open_draft(
        self, folder: str, model: "OpenModel", engine: EngineOptions
    ) -> "InferenceEngine":
        from sparse_bitnet.generation.open_model import is_packed, open_model

        if not os.path.exists(folder):
            raise UserError(f"--draft {folder}: there is no such folder")
        if not is_packed(folder):
            raise UserError(f"--draft {folder}: not a packed model; `sparse-bitnet pack` makes one")
        draft = open_model(folder, replace(engine, engine="cpu", context_length=None))
        if draft.tokenizer.vocabulary != model.tokenizer.vocabulary:
            draft.engine.close()
            raise UserError(
                f"--draft {folder}: its tokenizer is not that of the model; give a smaller model of the "
                "same family"
            )
        return draft.engine
