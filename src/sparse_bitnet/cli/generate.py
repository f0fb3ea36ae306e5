# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet generate`: continue a prompt with any checkpoint, as it is computed."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparse_bitnet.cli.arguments import CheckpointArgument, command
from sparse_bitnet.cli.text_options import SpeculationOptions, TextOptions, read_text
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.errors import UserError, check_least

if TYPE_CHECKING:
    from sparse_bitnet.generation.text_batches import GenerateResult


@dataclass(kw_only=True)
class GenerateConfig:
    """What to continue."""

    prompt: str | None = None
    """Text to continue. Without this and without prompt-file: what is piped in."""

    prompt_file: str | None = None
    """File with the text to continue; - is standard input."""

    max_tokens: int = 64
    """Maximum number of tokens to add."""

    stats: bool = False
    """Print tokens a second at the end, on standard error."""


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
        checkpoint: packed folder, run folder, checkpoint folder, GGUF file, or any transformers folder or
            hub id.
        config: what to continue.
        text: how it goes on, and where it ends.
        speculation: what is guessed ahead of it.
        engine: what computes it.
    """
    from sparse_bitnet.generation.open_model import open_model

    check_least(config, max_tokens=1)
    options, grammar = text.generate_options(config.max_tokens), text.grammar()
    if config.prompt is not None and config.prompt_file is not None:
        raise UserError("give either --prompt or --prompt-file")
    model = open_model(checkpoint, engine)
    from sparse_bitnet.generation.text_batches import generate

    if model.note:
        print(f"through transformers: {model.note}", file=sys.stderr)
    guesses = speculation.open(model, engine)
    form = None if grammar is None else model.grammars(model.end_tokens).start(grammar)
    prompt = _prompt(config)
    tokens = model.first_tokens(prompt)
    print(prompt, end="", flush=True)
    try:
        result = generate(
            model.engine,
            [tokens],
            options,
            tokenizer=model.tokenizer,
            end_tokens=model.end_tokens,
            form=form,
            speculation=guesses,
            on_token=lambda number, token, piece: print(piece, end="", flush=True),
        )
    finally:
        print()  # what goes wrong is said on a line of its own
    if config.stats:
        print(statistics(result, model.engine_name), file=sys.stderr)
    model.engine.close()


def _prompt(config: GenerateConfig) -> str:
    if config.prompt is not None:
        return config.prompt
    if config.prompt_file is None and sys.stdin.isatty():
        raise UserError("nothing to continue: give --prompt TEXT, --prompt-file, or pipe text in")
    return read_text("--prompt-file", config.prompt_file or "-")


def statistics(result: "GenerateResult", engine_name: str) -> str:
    """One line: tokens and tokens a second of prompt and text."""
    (text,) = result.texts
    prefill, decode = result.prefill_rate, result.decode_rate
    guessed = result.guessed_tokens
    cached = f" ({text.cached_tokens:,} cached)" if text.cached_tokens else ""
    return (
        f"prompt {text.prompt_tokens:,} tokens{cached}"
        + (f", {prefill:,.1f} tokens/s" if prefill else "")
        + f"; text {len(text.tokens):,} tokens"
        + (f", {decode:,.1f} tokens/s" if decode else "")
        + (f"; guessed {guessed:,}, {result.accepted_tokens:,} came true" if guessed else "")
        + f"; ended by {text.finish_reason}; engine {engine_name}"
    )
