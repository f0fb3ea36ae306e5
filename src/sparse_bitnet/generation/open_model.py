"""A checkpoint as people name it becomes an engine, a tokenizer and the tokens that end a text."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.engine.protocol import InferenceEngine
from sparse_bitnet.errors import EngineLacks, UserError
from sparse_bitnet.generation.stop import end_tokens
from sparse_bitnet.generation.text import TOKENIZER_FILE, TextTokenizer
from sparse_bitnet.model_folder import (
    CONFIG_FILE,
    quantization_entry,
    read_config,
    read_json_if_there,
)
from sparse_bitnet.packing.metadata import QUANT_METHOD


@dataclass(kw_only=True)
class OpenModel:
    """What is needed to generate text. `engine.close()` gives its memory back."""

    folder: str
    """The resolved folder or hub id."""

    engine: InferenceEngine
    engine_name: str
    """ "cpu", "gpu" or "transformers"."""

    note: str | None = None
    """Why "auto" took transformers for a packed model, or on a GPU; None where it did not."""

    tokenizer: TextTokenizer
    end_tokens: frozenset[int]


def open_model(checkpoint: str | Path, options: EngineOptions) -> OpenModel:
    """Load a checkpoint with the engine that `options` ask for.

    A packed model on the CPU engine needs neither torch nor transformers.

    Args:
        checkpoint: packed folder, run folder, checkpoint folder, or any transformers folder or hub id.

    Raises `UserError` for what cannot be loaded, and for a choice that cannot be honoured.
    """
    # A packed folder's before its weights: parsing takes memory for a moment, which these then use.
    early = _tokenizer(str(checkpoint)) if is_packed(checkpoint) else None
    opened = open_engine(checkpoint, options)
    try:
        tokenizer = early or _tokenizer(opened.folder)
        ends = end_tokens(opened.folder) or _end_of_tokenizer(opened.folder, tokenizer)
    except UserError:
        opened.engine.close()
        raise
    return OpenModel(
        folder=opened.folder,
        engine=opened.engine,
        engine_name=opened.engine_name,
        note=opened.note,
        tokenizer=tokenizer,
        end_tokens=ends,
    )


@dataclass(kw_only=True)
class OpenEngine:
    """An engine alone; fields as in `OpenModel`."""

    folder: str
    engine: InferenceEngine
    engine_name: str
    note: str | None = None


def open_engine(checkpoint: str | Path, options: EngineOptions) -> OpenEngine:
    """As `open_model`, without tokenizer."""
    if options.device == "cuda":
        return _on_gpu(checkpoint, options)
    note = None
    if options.engine == "auto" and is_packed(checkpoint):
        note = reason_against_cpu_engine(checkpoint)
    if options.engine == "cpu" or (
        options.engine == "auto" and note is None and is_packed(checkpoint)
    ):
        engine = _cpu_engine(checkpoint, options)
        return OpenEngine(folder=str(checkpoint), engine=engine, engine_name="cpu")
    why = note or ("--engine transformers" if options.engine != "auto" else "it is not packed")
    options.check_for_transformers(why)
    return _with_transformers(checkpoint, options, note)


def _cpu_engine(checkpoint: str | Path, options: EngineOptions) -> InferenceEngine:
    _check_extension()
    from sparse_bitnet.engine.engine import Engine

    return Engine.load(checkpoint, **options.of_cpu_engine())


def _on_gpu(checkpoint: str | Path, options: EngineOptions) -> OpenEngine:
    options.check_for_transformers("--device cuda")
    from sparse_bitnet.checkpoint.locate import resolve_checkpoint

    folder = resolve_checkpoint(checkpoint)
    from sparse_bitnet.engine.gpu.engine import GpuEngine, UnsuitedModel, check_device
    from sparse_bitnet.engine.reference import TransformersEngine

    check_device("cuda")
    room: dict[str, Any] = {
        "context_length": options.context_length,
        "cache_tokens": options.cache_tokens,
    }
    note = None
    if options.engine == "auto":
        try:
            engine = GpuEngine.load(folder, **room)
            return OpenEngine(folder=folder, engine=engine, engine_name="gpu")
        except UnsuitedModel as error:
            note = str(error)
    slow = TransformersEngine.load(folder, device="cuda", **room)
    return OpenEngine(folder=folder, engine=slow, engine_name="transformers", note=note)


def _check_extension() -> None:
    try:
        importlib.import_module("sparse_bitnet._cpu")
    except ImportError as error:
        raise UserError(
            f"the CPU engine was not built with this installation ({error}): install with a C++ "
            "compiler, without SPARSE_BITNET_PURE_PYTHON"
        ) from error


def reason_against_cpu_engine(checkpoint: str | Path) -> str | None:
    """Why the CPU engine cannot run a packed folder, as far as its header tells; None where it can.

    Raises `UserError` for one that is damaged: transformers would only find that later.
    """
    try:
        _check_extension()
    except UserError as error:
        return str(error)
    from sparse_bitnet.engine.model_file import open_model_file

    try:
        open_model_file(checkpoint)
    except EngineLacks as error:
        return str(error)
    return None


def position_count(folder: str | Path) -> int:
    """Positions of a local model by its config.json; 2048 where it does not say."""
    found = read_json_if_there(Path(folder) / CONFIG_FILE).get("max_position_embeddings")
    return found if type(found) is int and found > 0 else DEFAULT_POSITIONS


DEFAULT_POSITIONS = 2048


def _with_transformers(
    checkpoint: str | Path, options: EngineOptions, note: str | None
) -> OpenEngine:
    from sparse_bitnet.checkpoint.locate import resolve_checkpoint

    # First: importing transformers takes seconds, a mistyped name should not.
    folder = resolve_checkpoint(checkpoint)
    import torch

    from sparse_bitnet.engine.reference import TransformersEngine

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    engine = TransformersEngine.load(
        folder, context_length=options.context_length, cache_tokens=options.cache_tokens
    )
    return OpenEngine(folder=folder, engine=engine, engine_name="transformers", note=note)


def is_packed(checkpoint: str | Path) -> bool:
    """Whether it is a folder written by `sparse-bitnet pack`, by its config.json."""
    if not (Path(checkpoint) / CONFIG_FILE).is_file():
        return False
    return quantization_entry(read_config(checkpoint)).get("quant_method") == QUANT_METHOD


def _tokenizer(folder: str) -> TextTokenizer:
    if (Path(folder) / TOKENIZER_FILE).is_file() or is_packed(folder):
        return TextTokenizer.load(folder)
    from sparse_bitnet.data.tokenizer import load_tokenizer

    return TextTokenizer(load_tokenizer(folder).backend_tokenizer)


def _end_of_tokenizer(folder: str, tokenizer: TextTokenizer) -> frozenset[int]:
    """The end token that tokenizer_config.json names, if any."""
    named = read_json_if_there(Path(folder) / "tokenizer_config.json").get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    token = tokenizer.token_id(text) if isinstance(text, str) else None
    return frozenset() if token is None else frozenset({token})
