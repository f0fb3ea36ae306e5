# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet generate` and `sparse-bitnet chat`: texts of any checkpoint, as they are computed."""

import contextlib
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from sparse_bitnet.cli.arguments import HIDDEN, CheckpointArgument, command
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.errors import UserError, check_least, library_errors_as, os_errors_as
from sparse_bitnet.generation.sampling_options import SamplingOptions

if TYPE_CHECKING:
    from sparse_bitnet.generation.conversation import Conversation
    from sparse_bitnet.generation.grammar import Grammar
    from sparse_bitnet.generation.open_model import OpenModel
    from sparse_bitnet.generation.request import Generation
    from sparse_bitnet.generation.speculation import Speculation

HELP = "/reset starts over, /exit (or Ctrl-D) ends, Ctrl-C stops an answer"


@dataclass(frozen=True, kw_only=True)
class TextOptions(SamplingOptions):
    """Sampling, stop strings and structured output of a text."""

    GROUPS: ClassVar = {"temperature": "sampling", "json_schema": "structured output"}

    temperature: float = 0.8
    """Sampling temperature; 0: greedy, always the most likely token."""

    top_p: float = 0.95
    """Sample from the smallest set of most likely tokens with this total probability."""

    logit_bias: Annotated[tuple[tuple[int, float], ...], HIDDEN] = ()

    stop: tuple[str, ...] = ()
    """Stop strings: the text ends before the first of them."""

    json_schema: str | None = None
    """Structured output: JSON that satisfies this schema (a file, or the schema itself); {}: any JSON."""

    regex: str | None = None
    """Structured output: text that matches this regular expression as a whole."""

    grammar_file: str | None = None
    """Structured output: text that follows the grammar in this file (llama.cpp's GBNF, or Lark)."""

    def grammar(self) -> "Grammar | None":
        """Return the grammar of the text; None without one. Raises `UserError` for two, or a bad one."""
        names = ("json_schema", "regex", "grammar_file")
        given = [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"give either {' or '.join(given)}")
        if not given:
            return None
        from sparse_bitnet.generation.grammar import Grammar

        if self.regex is not None:
            return Grammar.regex(self.regex)
        if self.grammar_file is not None:
            return Grammar.rules(_read_text("--grammar-file", self.grammar_file))
        schema = str(self.json_schema)
        is_file = not schema.lstrip().startswith(("{", "[")) and schema not in ("true", "false")
        return Grammar.json_text(_read_text("--json-schema", schema) if is_file else schema)


@dataclass(kw_only=True)
class SpeculationOptions:
    """Options of speculative decoding, which gives the same text faster."""

    speculative_tokens: int = 7
    """Speculative decoding (cpu): maximum number of draft tokens checked per step. Fewer are used if that
    is faster on this machine. 0: off."""

    def __post_init__(self) -> None:
        if not 0 <= self.speculative_tokens <= 63:
            raise UserError(f"--speculative-tokens {self.speculative_tokens}: must be 0 to 63")

    def open(self, model: "OpenModel") -> "Speculation | None":
        """Return the speculation of one scheduler of this model; None on an engine without any, or for
        a model whose recurrent state rejected tokens would change."""
        from sparse_bitnet.generation.speculation import Speculation

        if not model.engine.batch_invariant or model.engine.most_states:
            return None
        return Speculation(model.engine, most=self.speculative_tokens)


@dataclass(kw_only=True)
class GenerateConfig:
    """The prompt, and the limits of its continuation."""

    GROUPS: ClassVar = {"prompt": "prompt"}

    prompt: str | None = None
    """Text to continue. Default: the text of --prompt-file, else of standard input."""

    prompt_file: str | None = None
    """File with the text to continue; - reads standard input."""

    max_tokens: int = 64
    """Maximum number of tokens to generate."""

    stats: bool = False
    """Print token counts and tokens per second to standard error at the end."""

    def read_prompt(self) -> str:
        """Return the prompt: the option, the file or standard input."""
        if self.prompt is not None:
            return self.prompt
        if self.prompt_file is None and sys.stdin.isatty():
            raise UserError(
                "nothing to continue: give --prompt TEXT, --prompt-file, or pipe text in"
            )
        return _read_text("--prompt-file", self.prompt_file or "-")


@command("generate")
def main(
    checkpoint: CheckpointArgument,
    config: GenerateConfig,
    text: TextOptions,
    speculation: SpeculationOptions,
    engine: EngineOptions,
) -> None:
    """Continue a prompt with a checkpoint.

    Args:
        checkpoint: Packed folder, run folder, checkpoint folder, GGUF file, or any transformers folder or
            hub id (OWNER/NAME@REVISION, OWNER/NAME/FILE.gguf).
    """
    check_least(config, max_tokens=1)
    grammar = text.grammar()
    if config.prompt is not None and config.prompt_file is not None:
        raise UserError("give either --prompt or --prompt-file")
    from sparse_bitnet.generation.open_model import open_model

    model = open_model(checkpoint, engine)
    drafts = speculation.open(model)
    matcher = None if grammar is None else model.grammars().start(grammar)
    prompt = config.read_prompt()
    tokens = model.first_tokens(prompt)
    before = [prompt]  # shown with the first token: until then the prompt can be refused

    def show(piece: str) -> None:
        print(*before, piece, sep="", end="", flush=True)
        before.clear()

    try:
        written = model.continue_tokens(
            tokens,
            config.max_tokens,
            sampling=text,
            stop=text.stop,
            grammar=matcher,
            speculation=drafts,
            on_text=show,
        )
    finally:
        if not before:
            print()  # an error gets a line of its own
    if config.stats:
        _print_statistics(written, model.engine_name)
    model.engine.close()


def _read_text(option: str, path: str) -> str:
    """Return the text of a file, or of standard input ("-"). Raises `UserError` that names the option."""
    with library_errors_as(f"{option} {path}"), os_errors_as(f"{option}: cannot read {path}"):
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")


def _print_statistics(text: "Generation", engine_name: str) -> None:
    prefill, decode = text.prefill_rate, text.decode_rate
    drafted = text.draft_tokens
    cached = f" ({text.cached_tokens:,} cached)" if text.cached_tokens else ""
    print(
        f"prompt {text.prompt_tokens:,} tokens{cached}"
        + (f", {prefill:,.1f} tokens/s" if prefill else "")
        + f"; generated {len(text.tokens):,} tokens"
        + (f", {decode:,.1f} tokens/s" if decode else "")
        + (f"; {drafted:,} draft tokens, {text.accepted_tokens:,} accepted" if drafted else "")
        + f"; ended by {text.finish_reason}; engine {engine_name}",
        file=sys.stderr,
    )


@dataclass(kw_only=True)
class ChatConfig:
    """Options of the conversation."""

    GROUPS: ClassVar = {"system": "conversation"}

    system: str | None = None
    """System prompt: instructions at the start of the conversation."""

    max_tokens: int = 512
    """Maximum length of an answer, in tokens."""

    stats: bool = False
    """Print token counts and tokens per second to standard error after each answer."""


@command("chat")
def chat(
    checkpoint: CheckpointArgument,
    config: ChatConfig,
    text: TextOptions,
    speculation: SpeculationOptions,
    engine: EngineOptions,
) -> None:
    """Talk with a chat model in the terminal, one line per message.

    Args:
        checkpoint: Packed folder, run folder, checkpoint folder, GGUF file, or any transformers
            folder or hub id (OWNER/NAME@REVISION, OWNER/NAME/FILE.gguf). The model needs a chat template.
    """
    check_least(config, max_tokens=1)
    grammar = text.grammar()
    from sparse_bitnet.generation.conversation import Conversation
    from sparse_bitnet.generation.open_model import open_model

    model, is_terminal = open_model(checkpoint, engine), sys.stdin.isatty()
    with contextlib.closing(model.engine):
        conversation = Conversation(
            model,
            max_tokens=config.max_tokens,
            system=config.system,
            sampling=text,
            speculation=speculation.open(model),
            stop=text.stop,
            grammar=None if grammar is None else model.grammars().start(grammar),
        )
        if is_terminal:
            print(HELP)
        while (line := _next_line(is_terminal)) not in (None, "/exit"):
            if line == "/reset":
                conversation.reset()
            elif line and line.startswith("/"):
                print(f"{line.split()[0]} is unknown: {HELP}", file=sys.stderr)
            elif line:
                _answer(conversation, line, config, model.engine_name)


def _next_line(is_terminal: bool) -> str | None:
    """Return the next line, None at the end of the input. Ctrl-C discards the line."""
    while True:
        try:
            return input("> " if is_terminal else "").strip()
        except UnicodeDecodeError as error:
            raise UserError(f"standard input: {error}") from error
        except EOFError:
            if is_terminal:
                print()
            return None
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print(f"\n{HELP}")


def _answer(conversation: "Conversation", line: str, config: ChatConfig, engine_name: str) -> None:
    """Print the answer to a line. If there is none, for example because the template refuses the chat,
    print the error and continue the conversation."""
    from sparse_bitnet.engine.protocol import ContextFull

    try:
        text = conversation.answer(line, on_text=partial(print, end="", flush=True))
    except KeyboardInterrupt:
        print(" [stopped]")
        return
    except UserError as error:
        hint = " (/reset starts over)" if isinstance(error, ContextFull) else ""
        print(f"sparse-bitnet: {error}{hint}", file=sys.stderr)
        return
    is_full = len(text.tokens) < config.max_tokens
    limit = "the context is full, /reset starts over" if is_full else "--max-tokens"
    print(f" [cut off: {limit}]" if text.finish_reason == "length" else "")
    if config.stats:
        _print_statistics(text, engine_name)
