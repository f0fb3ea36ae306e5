# SPDX-License-Identifier: Apache-2.0
"""Opens a checkpoint by the name a user gives: engine, tokenizer and end tokens. Ternary models of other
tools are packed once into the cache folder, so that the CPU engine runs them."""

import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet import __version__
from sparse_bitnet.checkpoint.model_folder import (
    CONFIG_FILE,
    HUB_FILES,
    POOLING_FILES,
    TOKENIZER_FILES,
    is_gguf,
    quantization_entry,
    read_config,
    read_json_if_there,
    stored_ends,
)
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.errors import Unsupported, UserError, os_errors_as, refuse_unused
from sparse_bitnet.files import make_folder
from sparse_bitnet.generation.sampling_options import SamplingOptions
from sparse_bitnet.generation.text import TOKENIZER_FILE, TextTokenizer, named_tokens
from sparse_bitnet.host import cache_folder
from sparse_bitnet.packing.formats import QUANT_METHOD

if TYPE_CHECKING:
    from sparse_bitnet.engine.protocol import InferenceEngine
    from sparse_bitnet.generation.grammar import TokenGrammars
    from sparse_bitnet.generation.prefix_cache import PrefixCache
    from sparse_bitnet.generation.request import Generation
    from sparse_bitnet.generation.speculation import Speculation

_REMEDY = "; use --engine transformers"
_NOT_PACKED = "the model is not packed"
_NOT_BUILT = (
    "the CPU engine was not built with this installation: install with a C++ compiler, without "
    "SPARSE_BITNET_PURE_PYTHON"
)


@dataclass(kw_only=True)
class OpenModel:
    """An opened model: engine, tokenizer and end tokens. `engine.close()` frees the memory."""

    folder: str
    """The resolved folder or hub id."""
    engine: "InferenceEngine"
    tokenizer: TextTokenizer
    end_tokens: frozenset[int]

    @property
    def engine_name(self) -> str:
        """The engine: "cpu" or "transformers"."""
        return "cpu" if self.engine.batch_invariant else "transformers"

    def first_tokens(self, prompt: str) -> list[int]:
        """Return the prompt's tokens; for an empty prompt the token between documents, if any."""
        return self.tokenizer.encode(prompt) or sorted(self.end_tokens)[:1]

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = 64,
        stop: str | Sequence[str] = (),
        temperature: float = 0.8,
        top_p: float = 0.95,
        **sampling: Any,
    ) -> str:
        """Return the text that follows a prompt, without the prompt, like `sparse-bitnet generate`.

        Args:
            prompt: text to continue; no chat template is applied.
            max_tokens: maximum number of tokens to generate.
            stop: stop string or strings; the text ends before the first of them.
            temperature: sampling temperature; 0 always takes the most likely token.
            top_p: sample from the smallest set of most likely tokens with this total probability.
            **sampling: more fields of `SamplingOptions`, such as `top_k` and `seed`.

        Raises `UserError` for a value out of its range and for a prompt that exceeds the context length.
        """
        drawn = SamplingOptions(temperature=temperature, top_p=top_p, **sampling)
        tokens = self.first_tokens(prompt)
        ends = (stop,) if isinstance(stop, str) else tuple(stop)
        return self.continue_tokens(tokens, max_tokens, sampling=drawn, stop=ends).text

    def continue_tokens(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        prefixes: "PrefixCache | None" = None,
        speculation: "Speculation | None" = None,
        on_text: Callable[[str], None] = lambda piece: None,
        **fields: Any,
    ) -> "Generation":
        """Generate tokens after a prompt.

        Args:
            prompt: token ids, at least one.
            max_tokens: maximum number of tokens to generate, at least one.
            prefixes: sequences of this engine from earlier calls; used as prefixes, and added to.
            speculation: source of draft tokens; the text is the same, but faster.
            on_text: called for each token with the text that can now be shown, often "".
            fields: further fields of the `GenerationRequest`.

        Raises `UserError` before any work for options out of their range and a prompt that the model
        cannot continue, as `Scheduler.run` does.
        """
        from sparse_bitnet.generation.request import GenerationRequest
        from sparse_bitnet.generation.scheduler import Scheduler

        if max_tokens < 1:
            raise UserError(f"max_tokens={max_tokens}: must be at least 1")
        request = GenerationRequest(
            prompt=prompt,
            max_tokens=max_tokens,
            tokenizer=self.tokenizer,
            stop_tokens=self.end_tokens,
            deliver=lambda generation, output: on_text(output.text),
            **fields,
        )
        scheduler = Scheduler(self.engine, prefixes=prefixes, speculation=speculation)
        (generation,) = scheduler.run([request])
        return generation

    def grammars(self) -> "TokenGrammars":
        """Return the factory of grammars in the model's tokens."""
        from sparse_bitnet.generation.grammar import TokenGrammars

        return TokenGrammars(self.tokenizer, self.engine.vocab_size, self.end_tokens)


def open_model(checkpoint: str | Path, options: EngineOptions | None = None) -> OpenModel:
    """Load a checkpoint with the engine that `options` choose, by default the fastest that supports it.

    A packed model on the CPU engine needs neither torch nor transformers.

    Args:
        checkpoint: packed folder, run folder, checkpoint folder, GGUF file, or any transformers folder
            or hub id. Ternary models of other tools are packed once.

    Returns the `OpenModel`; its `engine.close()` frees the memory. Raises `UserError` for a checkpoint
    that cannot be loaded, and for an explicit choice that cannot be honoured.
    """
    options = options or EngineOptions()
    folder = runnable_folder(checkpoint, options)
    if is_packed(folder) or (Path(folder) / TOKENIZER_FILE).is_file():
        # In parallel with importing numpy and the engine; before the weights, which reuse the memory
        # that parsing takes for a moment.
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(TextTokenizer.load, folder)
            importlib.import_module("sparse_bitnet.engine.engine_model")
        tokenizer = reading.result()
    else:
        from sparse_bitnet.checkpoint.load import load_tokenizer

        tokenizer = TextTokenizer(load_tokenizer(folder).backend_tokenizer)
    ends: set[int | None] = {*end_tokens(folder)}
    if named := named_tokens(folder).get("eos_token"):
        # The end of a turn, in case a chat model's config does not list it.
        ends.add(tokenizer.token_id(named))
    engine = open_engine(folder, options)
    known = frozenset(end for end in ends if end is not None and end < engine.vocab_size)
    return OpenModel(folder=folder, engine=engine, tokenizer=tokenizer, end_tokens=known)


def end_tokens(folder: str | Path) -> frozenset[int]:
    """Return `eos_token_id` of generation_config.json, else of config.json; empty where neither has one.

    Raises `UserError` for one that is not a token number.
    """
    ends = stored_ends(Path(folder))
    tokens = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise UserError(
            f"{folder}: eos_token_id of generation_config.json or {CONFIG_FILE} is {ends!r}, neither a "
            "token nor a list of tokens"
        )
    return frozenset(tokens)


def open_engine(folder: str, options: EngineOptions) -> "InferenceEngine":
    """Load a folder of `runnable_folder`; if "auto" runs a packed model through transformers, say why on
    standard error. Raises `UserError` as `open_model`."""
    why = why_not_cpu(folder, options)
    if why is None:
        from sparse_bitnet.engine.engine import Engine

        return Engine.load(folder, **vars(options))
    names = ("weight_format", "head", "kv_cache", "activations")
    refuse_unused(options, names, f"only the CPU engine has it, which is not in use: {why}")
    if options.engine == "auto" and options.device != "cuda" and why != _NOT_PACKED:
        print(f"running through transformers: {why}", file=sys.stderr)

    import torch

    from sparse_bitnet.checkpoint.load import from_pretrained
    from sparse_bitnet.engine.transformers_engine import TransformersEngine
    from sparse_bitnet.nn.ternary_tables import round_tables_
    from sparse_bitnet.training.device import resolve_device

    device = resolve_device(options.device)
    if device.type == "cpu" and options.threads is not None:
        torch.set_num_threads(options.threads)
    model: Any = from_pretrained(folder, dtype=torch.float32)
    round_tables_(model.to(device))
    return TransformersEngine(
        model, context_length=options.context_length, cache_tokens=options.cache_tokens
    )


def why_not_cpu(folder: str | Path, options: EngineOptions) -> str | None:
    """Return the reason why the CPU engine cannot run a folder, as far as options and headers show; None
    if it can.

    Raises `UserError` for a damaged packed folder, which transformers would find only later, and if
    `options` require that engine and it lacks what the model needs.
    """
    from sparse_bitnet.engine.architecture import read_architecture

    if options.device == "cuda":
        return "--device cuda"
    if options.engine == "transformers":
        return "--engine transformers"
    packed, path = is_packed(folder), Path(folder) / CONFIG_FILE
    if not packed and options.engine == "auto":
        return _NOT_PACKED
    try:
        importlib.import_module("sparse_bitnet._cpu")
        if packed:
            from sparse_bitnet.engine.engine_model import open_engine_model

            open_engine_model(folder)
        elif path.is_file():
            # For a model that only needs packing, `Engine.load` says so.
            read_architecture(read_json_if_there(path), str(path))
    except (ImportError, Unsupported) as error:
        lacks = error if isinstance(error, Unsupported) else Unsupported(f"{_NOT_BUILT} ({error})")
        if options.engine == "cpu":
            raise lacks from None
        return str(lacks).removesuffix(_REMEDY)
    return None


def is_packed(checkpoint: str | Path) -> bool:
    """Whether the config.json of a folder says that `sparse-bitnet pack` wrote it."""
    # Unlike `Path.is_file`, this is false for names that no file can have.
    if not os.path.isfile(os.path.join(checkpoint, CONFIG_FILE)):
        return False
    return quantization_entry(read_config(checkpoint)).get("quant_method") == QUANT_METHOD


def runnable_folder(checkpoint: str | Path, options: EngineOptions) -> str:
    """Return the folder or hub id that an engine runs for the name a user gives: the folder itself, or
    the packed form of another tool's ternary model, in the cache folder.

    A GGUF file is always packed; a folder only if the CPU engine may run it and supports its
    architecture. An unchanged model is not packed again.

    Raises `UserError` for a model that cannot be found, read or packed.
    """
    if is_packed(checkpoint):
        return str(checkpoint)
    from sparse_bitnet.checkpoint.open_checkpoint import (
        find_checkpoint,
        resolve_checkpoint,
        unsuited,
    )
    from sparse_bitnet.engine.architecture import read_architecture

    name = resolve_checkpoint(checkpoint)
    if is_gguf(name) and (_packed_folder(Path(name)) / CONFIG_FILE).is_file():
        return str(_packed_folder(Path(name)))  # without reading its vocabulary again
    model = find_checkpoint(name)
    is_file = model.folder.is_file()
    if model.kind != "foreign" and is_file:
        raise unsuited(model)
    leaves_it = options.engine == "transformers" or options.device == "cuda"
    if model.kind != "foreign" or (leaves_it and not is_file):
        return str(model.folder)
    if not is_file:
        try:
            read_architecture(model.config, str(model.folder))
        except Unsupported as error:
            reason = str(error).removesuffix(_REMEDY)
            print(f"running through transformers: {reason}", file=sys.stderr)
            return str(model.folder)
    from filelock import FileLock

    target = _packed_folder(model.folder)
    make_folder(target.parent)
    with os_errors_as(f"cannot write {target}"), FileLock(f"{target}.lock"):
        if not (target / CONFIG_FILE).is_file():
            from sparse_bitnet.export.importer import import_checkpoint

            print(f"packing {checkpoint} into {target} for this and later runs", file=sys.stderr)
            import_checkpoint(name, target, packed="auto")
    return str(target)


def _packed_folder(path: Path) -> Path:
    """Return the folder in the cache, a new one whenever the files or the packing of them change."""
    patterns = (*HUB_FILES, *TOKENIZER_FILES, POOLING_FILES)
    files = [path] if path.is_file() else sorted({f for one in patterns for f in path.glob(one)})
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = repr((__version__, 2, str(path.resolve()), stats)).encode()
    return cache_folder() / "models" / f"{path.stem}-{hashlib.sha256(key).hexdigest()[:12]}"
