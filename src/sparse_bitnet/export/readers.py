# SPDX-License-Identifier: Apache-2.0
"""The tools that exports are for, as one interface: token ids of a text, log-probabilities of tokens.

Each is the real one: transformers' loader with whatever package the format needs, and llama.cpp
through llama-cpp-python.
"""

import contextlib
import importlib.metadata
import importlib.util
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparse_bitnet.checkpoint.load import from_pretrained, load_with
from sparse_bitnet.errors import UserError, library_errors_as
from sparse_bitnet.export.model_card import gguf_file_name
from sparse_bitnet.nn.convert import selected

_NEEDED = {
    "bitnet": ("accelerate", "accelerate"),
    "compressed-tensors": ("compressed_tensors", "compressed-tensors"),
    "gguf": ("llama_cpp", "llama-cpp-python"),
}


def absent_reader(format: str) -> str | None:
    """What to install before an export to `format` can be loaded back; None: all is there."""
    for prefix, (module, package) in _NEEDED.items():
        if format.startswith(prefix) and importlib.util.find_spec(module) is None:
            return f"{package}, which reads {format}, is not installed (pip install {package})"
    return None


@contextmanager
def open_reader(
    format: str, folder: Path, context_length: int
) -> Iterator["TransformersReader | LlamaCppReader"]:
    """Load an export with its real reader; memory is given back at the end of the block.

    Raises `UserError` when the reader refuses it.
    """
    if format.startswith("gguf"):
        reader = LlamaCppReader(folder / gguf_file_name(format), context_length)
        try:
            yield reader
        finally:
            reader.close()
    else:
        from transformers import AutoTokenizer

        tokenizer = load_with(AutoTokenizer.from_pretrained, folder)
        yield TransformersReader(folder, tokenizer, _reader_name(format))


def _reader_name(format: str) -> str:
    names = ["transformers"]
    if format.startswith("compressed-tensors"):
        names.append("compressed-tensors")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


class TransformersReader:
    """A folder under transformers' own loader, in float32 so that nothing is rounded on top: an export,
    or the trained model, whose masks and codes are selected once."""

    def __init__(self, folder: Path, tokenizer: Any, name: str = "sparse-bitnet") -> None:
        self.name, self._tokenizer = name, tokenizer
        with quiet_loading():
            self._model = from_pretrained(folder, dtype=torch.float32).eval()
            # compressed-tensors decompresses, with a progress bar, in the first forward.
            self.log_probabilities(np.zeros(1))

    def tokenise(self, text: str) -> list[int]:
        """Token ids, no special tokens added and none recognised in the text."""
        with library_errors_as("its tokenizer cannot encode the text"):
            return self._tokenizer(text, add_special_tokens=False).input_ids

    @torch.no_grad()
    def log_probabilities(self, tokens: np.ndarray) -> Tensor:
        """float32 [len(tokens), vocabulary]: of the token after each."""
        # transformers compiles parts of its bitnet layer, which needs a C++ compiler on a CPU.
        with torch.compiler.set_stance("force_eager"), selected(self._model):
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            logits = self._model(ids, use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), -1)


class LlamaCppReader:
    """A GGUF file under llama.cpp."""

    def __init__(self, path: Path, context_length: int) -> None:
        from llama_cpp import Llama

        self.name = f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}"
        try:
            self._model: Any = Llama(
                str(path),
                n_ctx=context_length,
                n_batch=context_length,
                n_threads=torch.get_num_threads(),
                logits_all=True,
                verbose=False,
            )
        except ValueError as error:
            raise UserError(f"llama.cpp refuses {path}: {error}") from error

    def tokenise(self, text: str) -> list[int]:
        """Token ids, no special tokens added and none recognised in the text."""
        return self._model.tokenize(text.encode(), add_bos=False, special=False)

    def log_probabilities(self, tokens: np.ndarray) -> Tensor:
        """float32 [len(tokens), vocabulary]: of the token after each."""
        self._model.reset()
        self._model.eval([int(token) for token in tokens])
        return torch.log_softmax(torch.from_numpy(self._model.scores[: len(tokens)]).clone(), -1)

    def close(self) -> None:
        """Free the model now: left to the interpreter's end, llama-cpp-python raises."""
        self._model.close()


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Without the progress bars of transformers and compressed-tensors; errors still raise."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
