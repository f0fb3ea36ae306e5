# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet chat`: a conversation in the terminal."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparse_bitnet.cli.arguments import CheckpointArgument, command
from sparse_bitnet.cli.generate import statistics
from sparse_bitnet.cli.text_options import SpeculationOptions, TextOptions
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.errors import UserError, check_least

if TYPE_CHECKING:
    from sparse_bitnet.generation.conversation import Conversation
    from sparse_bitnet.generation.text_batches import GenerateResult

HELP = "/reset starts over, /exit (or Ctrl-D) ends, Ctrl-C stops an answer"


@dataclass(kw_only=True)
class ChatConfig:
    """The conversation."""

    system: str | None = None
    """Instructions that come before the conversation."""

    max_tokens: int = 512
    """Maximum length of an answer, in tokens."""

    stats: bool = False
    """Print tokens a second after each answer, on standard error."""


@command("chat")
def main(
    checkpoint: CheckpointArgument,
    config: ChatConfig,
    text: TextOptions,
    speculation: SpeculationOptions,
    engine: EngineOptions,
) -> None:
    """Talk with a chat model, one line at a time.

    Args:
        checkpoint: packed folder, run folder, checkpoint folder, GGUF file, or any transformers
            folder or hub id (OWNER/NAME@REVISION, OWNER/NAME/FILE.gguf); with a chat template.
        config: the conversation.
        text: how answers go on, and where they end.
        speculation: what is guessed ahead of them.
        engine: what computes them.
    """
    from sparse_bitnet.generation.conversation import Conversation

    check_least(config, max_tokens=1)
    options, grammar = text.generate_options(config.max_tokens), text.grammar()
    conversation = Conversation.open(
        checkpoint, engine, options, system=config.system, grammar=grammar
    )
    try:
        conversation.speculation = speculation.open(conversation.model, engine)
    except BaseException:
        conversation.close()
        raise
    if conversation.model.note:
        print(f"through transformers: {conversation.model.note}", file=sys.stderr)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(HELP)
    try:
        while (line := _next_line(is_terminal)) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                conversation.reset()
            elif line.startswith("/"):
                print(f"{line.split()[0]} is unknown: {HELP}", file=sys.stderr)
            elif line:
                _answer(conversation, line, config)
    finally:
        conversation.close()


def _next_line(is_terminal: bool) -> str | None:
    """None at the end of the input; Ctrl-C gives up the line."""
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


def _answer(conversation: "Conversation", line: str, config: ChatConfig) -> None:
    from sparse_bitnet.engine.protocol import ContextFull

    with _interrupt_flag() as is_interrupted:
        try:
            result = conversation.answer(
                line,
                on_text=lambda piece: print(piece, end="", flush=True),
                is_cancelled=is_interrupted,
            )
        except ContextFull as error:
            print(f"sparse-bitnet: {error} (/reset starts over)", file=sys.stderr)
            return
        except UserError as error:
            # A chat that the template refuses, say: the conversation goes on.
            print(f"sparse-bitnet: {error}", file=sys.stderr)
            return
    print(_ending(result, config.max_tokens))
    if config.stats:
        print(statistics(result, conversation.model.engine_name), file=sys.stderr)


def _ending(result: "GenerateResult", max_new_tokens: int) -> str:
    """What to add to an answer that did not end by itself."""
    (text,) = result.texts
    if text.finish_reason == "length" and len(text.tokens) < max_new_tokens:
        return " [cut off: the context is full, /reset starts over]"
    endings = {"cancelled": " [stopped]", "length": " [cut off: --max-tokens]"}
    return endings.get(text.finish_reason or "", "")


@contextlib.contextmanager
def _interrupt_flag() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C only makes the yielded function say yes."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
