# SPDX-License-Identifier: Apache-2.0
"""Loading through transformers: a model's skeleton, the model with its weights, and its tokenizer."""

import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.checkpoint.gguf_file import GgufFile
from sparse_bitnet.checkpoint.gguf_tokenizer import write_tokenizer
from sparse_bitnet.checkpoint.model_folder import (
    CONFIG_FILE,
    TOKENIZER_FILES,
    WITHOUT_IMPORT,
    check_folder,
    check_layers,
    check_weights_as_stored,
    gguf_inside,
    is_gguf,
    local_folder,
    quantization_entry,
    read_json_if_there,
)
from sparse_bitnet.checkpoint.weight_files import refuse_wrapped
from sparse_bitnet.errors import UserError, library_errors_as
from sparse_bitnet.packing.formats import QUANT_METHOD

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def load_with(loader: Callable[..., Any], source: Any, **kwargs: Any) -> Any:
    """Load a model folder, a hub id or a config with one of transformers' loaders.

    Every such call of the package goes through here: the folder is checked first, and its code is never
    run. transformers would otherwise ask on stdin whether to run it.

    Args:
        loader: a function such as `AutoModelForCausalLM.from_pretrained`.
        source: first argument of `loader`.
        kwargs: further arguments of `loader`.
    """
    if isinstance(source, str | Path):
        source = local_folder(source)
        check_folder(source)
        check_layers(read_json_if_there(source / CONFIG_FILE), source)
    return loader(source, trust_remote_code=False, **kwargs)


def skeleton(config: dict[str, Any], folder: Path) -> "PreTrainedModel":
    """Build the causal LM of a folder's config.json on the meta device: names and shapes, no memory.

    Args:
        config: content of config.json.
        folder: the folder, or a file that holds config and weights.

    Raises `UserError` for an architecture that transformers does not know, and for sizes and settings
    from which it builds no model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    where = folder if folder.is_file() else folder / "config.json"
    failure = f"{where} describes no causal language model that transformers builds"
    with library_errors_as(failure), torch.device("meta"):
        # A copy: transformers completes nested entries in place.
        dropped = {"quantization_config", *WITHOUT_IMPORT}
        values = copy.deepcopy({key: config[key] for key in config if key not in dropped})
        return load_with(AutoModelForCausalLM.from_config, AutoConfig.for_model(**values))


def _check_fits(config: dict[str, Any], folder: Path) -> None:
    """Raise `UserError` for a config.json with more values than its weights can hold: transformers would
    allocate them all before it missed any."""
    files = [path for suffix in ("safetensors", "bin") for path in folder.glob(f"*.{suffix}")]
    held = sum(path.stat().st_size for path in files)
    if not held or quantization_entry(config).get("quant_method") == QUANT_METHOD:
        return
    try:
        model = skeleton(config, folder)
    except UserError:
        return  # for transformers to say
    asked = sum(parameter.numel() for parameter in model.parameters())
    if asked > 8 * held:
        raise UserError(
            f"{folder}: {CONFIG_FILE} asks for {asked:,} values, more than {held:,} bytes hold"
        )


def from_pretrained(path_or_id: str | Path, **kwargs: Any) -> "PreTrainedModel":
    """Load a causal LM from a folder or hub id through transformers: our checkpoints, or any dense model.

    Args:
        path_or_id: folder or hub id.
        kwargs: arguments of `AutoModelForCausalLM.from_pretrained`.

    Raises a one-line `UserError` for anything that prevents loading, including a missing weight
    (transformers alone would leave it random).
    """
    from transformers import AutoModelForCausalLM
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    folder = local_folder(path_or_id)
    config = read_json_if_there(folder / CONFIG_FILE)
    # With peft, transformers would load the model that an adapter names, from anywhere.
    check_weights_as_stored(config, folder)
    method = str((entry := quantization_entry(config)).get("quant_method"))
    if entry and not {method, f"{method}_4bit"} & AUTO_QUANTIZATION_CONFIG_MAPPING.keys():
        # transformers would skip it, and take the stored values for the weights.
        raise UserError(
            f"{folder / CONFIG_FILE}: neither sparse-bitnet nor transformers reads weights of "
            f"quant_method {method!r}"
        )
    _check_fits(config, folder)
    with library_errors_as(f"cannot load a model from {path_or_id}"):
        loaded: Any = load_with(
            AutoModelForCausalLM.from_pretrained, path_or_id, output_loading_info=True, **kwargs
        )
    model, info = loaded
    refuse_wrapped(info["unexpected_keys"], path_or_id)
    parts = {name.partition(".")[0] for name, _ in model.named_children()}
    for name in sorted(info["unexpected_keys"]):
        # A module of its own beside the model, such as a value head, changes nothing.
        if name.partition(".")[0] in parts:
            raise UserError(f"{path_or_id}: tensor {name} is not part of {type(model).__name__}")
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{path_or_id} lacks {missing[0]}{more}: the files are incomplete")
    if not model.all_tied_weights_keys:
        # Saved with the model: a release before 5 ties a separate head if the config says so.
        model.config.tie_word_embeddings = False
    return model


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder has a file that makes a tokenizer."""
    return any(any(folder.glob(file)) for file in ("tokenizer.json", "*.model", "vocab.*"))


def load_tokenizer(
    path_or_hub_id: str | os.PathLike[str], *, eos_token: str | int | None = None
) -> "PreTrainedTokenizerFast":
    """A fast transformers tokenizer from a folder or from the Hugging Face hub.

    Where there is a `tokenizer.json`, it is taken as it stands. `AutoTokenizer` would rebuild it from
    the `config.json` beside it (in the folder of a Qwen2 model: as a Qwen2Tokenizer, with Qwen2's
    pre-tokenizer and normaliser) and so may tokenise differently from what the model was trained on.

    Args:
        path_or_hub_id: folder of a model, run or prepared data, GGUF file, or hub id such as
            "Qwen/Qwen2.5-0.5B".
        eos_token: token that ends a document, to replace the saved one (an instruction-tuned model's ends
            a turn); an id is not checked.

    Raises:
        UserError: no tokenizer, not a fast tokenizer, or no (such) end token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if is_gguf(path_or_hub_id):
        path = Path(path_or_hub_id)
        with tempfile.TemporaryDirectory() as written:
            write_tokenizer(GgufFile(path).metadata, path, Path(written))
            return load_tokenizer(written, eos_token=eos_token)
    folder = local_folder(Path(path_or_hub_id), TOKENIZER_FILES)
    if not has_tokenizer(folder):
        # A run has it in its model, before that in its data; prepared data have it in a folder.
        data = Path(str(read_json_if_there(folder / CONFIG_FILE).get("data")))
        inside = (folder / "final", folder / "tokenizer", data / "tokenizer")
        folder = next((each for each in inside if has_tokenizer(each)), folder)
    if not has_tokenizer(folder):
        said = f"no readable tokenizer in {path_or_hub_id}: it has no tokenizer.json"
        raise UserError(said + gguf_inside(folder))
    exact = (folder / "tokenizer.json").exists()
    loader: Any = PreTrainedTokenizerFast if exact else AutoTokenizer
    with library_errors_as(f"no readable tokenizer in {path_or_hub_id}"):
        tokenizer = load_with(loader.from_pretrained, folder)
    if not tokenizer.is_fast:
        raise UserError(f"{path_or_hub_id}: not a fast tokenizer; save it with a tokenizer.json")
    if isinstance(eos_token, int):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos_token)
        return tokenizer
    if eos_token is not None:
        if eos_token not in tokenizer.get_vocab():
            raise UserError(f"{path_or_hub_id}: the vocabulary has no token {eos_token!r}")
        tokenizer.eos_token = eos_token
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{path_or_hub_id}: the tokenizer names no end-of-text token: give tokenizer_config.json "
            'an "eos_token", or, to prepare text, choose one with --eos-token'
        )
    return tokenizer
