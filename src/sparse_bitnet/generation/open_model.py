# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as people name it becomes an engine, a tokenizer and the tokens that end a text."""

import importlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.checkpoint.model_folder import (
    CONFIG_FILE,
    is_gguf,
    quantization_entry,
    read_config,
    read_json_if_there,
)
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.errors import EngineLacks, UserError
from sparse_bitnet.generation.stop import end_tokens
from sparse_bitnet.generation.text import TOKENIZER_FILE, TextTokenizer, named_tokens
from sparse_bitnet.packing.metadata import QUANT_METHOD

if TYPE_CHECKING:
    from sparse_bitnet.engine.protocol import InferenceEngine
    from sparse_bitnet.generation.grammar import TokenGrammars


@dataclass(kw_only=True)
class OpenEngine:
    """An engine, and what it runs. `engine.close()` gives its memory back."""

    folder: str
    """The resolved folder or hub id."""

    engine: "InferenceEngine"
    engine_name: str
    """ "cpu" or "transformers"."""

    note: str | None = None
    """Why "auto" took transformers for a packed model; None where it did not."""


@dataclass(kw_only=True)
class OpenModel(OpenEngine):
    """What is needed to generate text."""

    tokenizer: TextTokenizer
    end_tokens: frozenset[int]

    def first_tokens(self, prompt: str) -> list[int]:
        """Return the prompt's tokens; for an empty prompt the token between documents.

        Raises `UserError` for an empty prompt where the model has no such token.
        """
        tokens = self.tokenizer.encode(prompt)
        if not tokens and not self.end_tokens:
            raise UserError(
                "the prompt is empty, and the model names no token that a text could follow"
            )
        return tokens or [min(self.end_tokens)]

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = 64,
        stop: Sequence[str] = (),
        temperature: float = 0.8,
        top_p: float = 0.95,
        **sampling: Any,
    ) -> str:
        """Return the text that follows a prompt, without the prompt.

        The defaults are those of `sparse-bitnet generate`, and so is the text.

        Args:
            prompt: the text to continue, as it is: no chat template is applied.
            max_tokens: maximum number of tokens to add.
            stop: strings that end the text and are no part of it.
            temperature: divides the logits; 0 always takes the most likely token.
            top_p: draw from the smallest set of most likely tokens with this share of the probability.
            sampling: further fields of `SamplingOptions`, such as `top_k` and `seed`.

        Raises `UserError` for a value out of its range and a prompt that the context does not hold.
        """
        from sparse_bitnet.generation.sampling_options import SamplingOptions
        from sparse_bitnet.generation.text_batches import GenerateOptions, generate

        drawn = SamplingOptions(temperature=temperature, top_p=top_p, **sampling)
        options = GenerateOptions(max_new_tokens=max_tokens, stop=tuple(stop), sampling=drawn)
        tokens = self.first_tokens(prompt)
        result = generate(
            self.engine, [tokens], options, tokenizer=self.tokenizer, end_tokens=self.end_tokens
        )
        return result.texts[0].text

    def grammars(self, end_tokens: frozenset[int]) -> "TokenGrammars":
        """For texts that these tokens may end."""
        from sparse_bitnet.generation.grammar import TokenGrammars

        return TokenGrammars(self.tokenizer, self.engine.vocab_size, end_tokens)


def open_model(checkpoint: str | Path, options: EngineOptions | None = None) -> OpenModel:
    """Load a checkpoint with the engine that `options` ask for, by default the fastest that can run it.

    A packed model on the CPU engine needs neither torch nor transformers.

    Args:
        checkpoint: packed folder, run folder, checkpoint folder, GGUF file, or any transformers folder or
            hub id. Ternary models of other tools are packed once (packed_once.py).
        options: the engine and its settings.

    Raises `UserError` for what cannot be loaded, and for a choice that cannot be honoured.
    """
    options = options or EngineOptions()
    checkpoint = _packed_if_ternary(checkpoint, options)
    early = None
    if is_packed(checkpoint):
        # Beside the import of numpy and of most of the engine; before the weights, which use the memory
        # that parsing takes for a moment.
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(_tokenizer, str(checkpoint))
            importlib.import_module("sparse_bitnet.engine.engine_model")
        early = reading.result()
    opened = _open_engine(checkpoint, options)
    try:
        tokenizer = early or _tokenizer(opened.folder)
        ends: set[int | None] = {*end_tokens(opened.folder)}
        if named := named_tokens(opened.folder).get("eos_token"):
            # That of a turn, where a model was made to chat without its config being told.
            ends.add(tokenizer.token_id(named))
    except UserError:
        opened.engine.close()
        raise
    known = frozenset(end for end in ends if end is not None and end < opened.engine.vocab_size)
    return OpenModel(**vars(opened), tokenizer=tokenizer, end_tokens=known)


def open_engine(checkpoint: str | Path, options: EngineOptions) -> OpenEngine:
    """As `open_model`, without tokenizer."""
    return _open_engine(_packed_if_ternary(checkpoint, options), options)


def _packed_if_ternary(checkpoint: str | Path, options: EngineOptions) -> str | Path:
    if is_packed(checkpoint):
        return checkpoint
    from sparse_bitnet.generation.packed_once import packed_once

    return packed_once(checkpoint, options)


def _open_engine(checkpoint: str | Path, options: EngineOptions) -> OpenEngine:
    if is_gguf(checkpoint):
        from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint, unsuited

        raise unsuited(find_checkpoint(checkpoint))
    why, lacks = None, None if is_packed(checkpoint) else _architecture_lacks(checkpoint)
    if options.device == "cuda":
        why = "--device cuda"
    elif options.engine == "transformers":
        why = "--engine transformers"
    elif options.engine == "auto":
        why = lacks or reason_against_cpu_engine(checkpoint)
    if why is None:
        if lacks:
            raise EngineLacks(lacks)
        _check_extension()
        from sparse_bitnet.engine.engine import Engine

        engine = Engine.load(checkpoint, **options.of_cpu_engine())
        return OpenEngine(folder=str(checkpoint), engine=engine, engine_name="cpu")
    options.check_for_transformers(why)
    is_note = options.engine == "auto" and options.device != "cuda"
    is_note = is_note and bool(lacks or is_packed(checkpoint))
    return _through_pytorch(checkpoint, options, why if is_note else None)


def _through_pytorch(
    checkpoint: str | Path, options: EngineOptions, note: str | None
) -> OpenEngine:
    import torch

    from sparse_bitnet.engine.transformers_engine import TransformersEngine
    from sparse_bitnet.training.device import resolve_device

    room: dict[str, Any] = {
        "context_length": options.context_length,
        "cache_tokens": options.cache_tokens,
    }
    folder, device = str(checkpoint), options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        resolve_device(device)
    elif options.threads is not None:
        torch.set_num_threads(options.threads)
    engine = TransformersEngine.load(folder, device=device, **room)
    return OpenEngine(folder=folder, engine=engine, engine_name="transformers", note=note)


def _check_extension() -> None:
    try:
        importlib.import_module("sparse_bitnet._cpu")
    except ImportError as error:
        raise UserError(
            f"the CPU engine was not built with this installation ({error}): install with a C++ "
            "compiler, without SPARSE_BITNET_PURE_PYTHON"
        ) from error


def _architecture_lacks(checkpoint: str | Path) -> str | None:
    """What the CPU engine lacks of a folder's architecture, packed or not: experts, other layers."""
    from sparse_bitnet.engine.architecture import read_architecture

    path = Path(checkpoint) / CONFIG_FILE
    if not path.is_file():
        return None
    try:
        read_architecture(read_json_if_there(path), str(path))
    except EngineLacks as error:
        return str(error)
    except UserError:
        return None  # said where the model is read
    return None


def reason_against_cpu_engine(checkpoint: str | Path) -> str | None:
    """Why the CPU engine cannot run a checkpoint, as far as its header tells; None where it can.

    Raises `UserError` for a packed one that is damaged: transformers would only find that later.
    """
    if not is_packed(checkpoint):
        return "the model is not packed"
    try:
        _check_extension()
    except UserError as error:
        return str(error)
    from sparse_bitnet.engine.engine_model import open_engine_model

    try:
        open_engine_model(checkpoint)
    except EngineLacks as error:
        return str(error)
    return None


def position_count(folder: str | Path) -> int:
    """Positions of a local model by its config.json; 2048 where it does not say."""
    found = read_json_if_there(Path(folder) / CONFIG_FILE).get("max_position_embeddings")
    return found if type(found) is int and found > 0 else 2048


def is_packed(checkpoint: str | Path) -> bool:
    """Whether it is a folder written by `sparse-bitnet pack`, by its config.json."""
    # Unlike a path's method false, too, for names of which no file can be.
    if not os.path.isfile(os.path.join(checkpoint, CONFIG_FILE)):
        return False
    return quantization_entry(read_config(checkpoint)).get("quant_method") == QUANT_METHOD


def _tokenizer(folder: str) -> TextTokenizer:
    if (Path(folder) / TOKENIZER_FILE).is_file() or is_packed(folder):
        return TextTokenizer.load(folder)
    from sparse_bitnet.checkpoint.load import load_tokenizer

    return TextTokenizer(load_tokenizer(folder).backend_tokenizer)
