# SPDX-License-Identifier: Apache-2.0
"""Loading through transformers: a model's skeleton, the model with its weights, and its tokenizer."""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.checkpoint.config_fields import LINEAR, of_all_layers, text_config_of
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
    is_hub_id,
    local_folder,
    quantization_entry,
    read_config,
    read_json_if_there,
)
from sparse_bitnet.errors import UserError, library_errors_as
from sparse_bitnet.packing.formats import QUANT_METHOD

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def open_folder(path_or_id: str | Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Return a model folder, its config.json and the `quantization_config` in it.

    Check first that every file may be opened (`check_file`) and that the number of layers is plausible.
    Raises `UserError`.
    """
    folder = local_folder(path_or_id)
    if is_hub_id(str(path_or_id)) and not (folder / CONFIG_FILE).exists():
        raise UserError(
            f"{path_or_id} has no {CONFIG_FILE}: name a GGUF file, {path_or_id}/FILE.gguf"
        )
    check_folder(folder)
    stored = text_config_of(read_config(folder))
    layers = stored.get("num_hidden_layers")
    several = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
    config = {k: of_all_layers(v, layers) if k in several else v for k, v in stored.items()}
    check_layers(config, folder)
    return folder, config, quantization_entry(config)


def load_with(loader: Callable[..., Any], source: Any, **kwargs: Any) -> Any:
    """Call a loader of transformers, such as `AutoTokenizer.from_pretrained`, on a folder or config.

    Every such call of the package goes through here: the folder is checked first, and its code is never
    run. transformers would otherwise ask on stdin whether to run it.
    """
    if isinstance(source, str | Path):
        source = local_folder(source)
        check_folder(source)
        check_layers(read_json_if_there(source / CONFIG_FILE), source)
    return loader(source, trust_remote_code=False, **kwargs)


def skeleton(config: dict[str, Any], folder: Path) -> "PreTrainedModel":
    """Build the causal LM of the config.json in a folder or GGUF file on the meta device, without memory.

    Raises `UserError` for an architecture that transformers does not know, and for sizes and settings
    from which it builds no model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    where = folder if folder.is_file() else folder / CONFIG_FILE
    failure = f"{where} describes no causal language model that transformers builds"
    with library_errors_as(failure), torch.device("meta"):
        dropped = {"quantization_config", *WITHOUT_IMPORT}
        text = json.dumps({key: config[key] for key in config if key not in dropped})
        values = json.loads(text, object_hook=_without_tags)  # a copy, which transformers completes
        return load_with(AutoModelForCausalLM.from_config, AutoConfig.for_model(**values))


def _without_tags(entry: dict[str, Any]) -> Any:
    """Return the number that transformers writes as {"__float__": "Infinity"}, or the entry itself."""
    return float(entry["__float__"]) if entry.keys() == {"__float__"} else entry


def from_pretrained(path_or_id: str | Path, **kwargs: Any) -> "PreTrainedModel":
    """Load a causal LM from a folder or hub id through transformers: our checkpoints, or any dense model.
    `kwargs` are those of `AutoModelForCausalLM.from_pretrained`.

    Raises a one-line `UserError` for anything that prevents loading, including a weight that is missing
    or of another shape (transformers alone would leave it random).
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    if (revision := kwargs.pop("revision", None)) and not Path(path_or_id).exists():
        path_or_id = f"{path_or_id}@{revision}"
    # With peft, transformers would load the model that an adapter names, from anywhere.
    folder, config, entry = open_folder(path_or_id)
    check_weights_as_stored(folder)
    method = str(entry.get("quant_method"))
    if entry and not {method, f"{method}_4bit"} & AUTO_QUANTIZATION_CONFIG_MAPPING.keys():
        # transformers would skip it, and take the stored values for the weights.
        raise UserError(
            f"{folder / CONFIG_FILE}: neither sparse-bitnet nor transformers reads weights of "
            f"quant_method {method!r}"
        )
    files = (*folder.glob("*.safetensors"), *folder.glob("*.bin"))
    held, needed = sum(path.stat().st_size for path in files), 0
    if held and method != QUANT_METHOD:
        with contextlib.suppress(UserError):  # which transformers raises again
            needed = sum(each.numel() for each in skeleton(config, folder).parameters())
    if needed > 8 * held:
        # transformers would allocate them all before it missed any.
        raise UserError(
            f"{folder}: {CONFIG_FILE} needs {needed:,} values, more than the {held:,} bytes there hold"
        )
    kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with library_errors_as(f"cannot load a model from {path_or_id}"):
        loaded: Any = load_with(AutoModelForCausalLM.from_pretrained, path_or_id, **kwargs)
    model, info = loaded
    parts = {name.partition(".")[0] for name, _ in model.named_children()}
    for name in sorted(info["unexpected_keys"]):
        # A module of its own beside the model, such as a value head, changes nothing.
        if name.partition(".")[0] in parts:
            raise UserError(f"{path_or_id}: tensor {name} is not part of {type(model).__name__}")
    for name in sorted(info["missing_keys"]):
        raise UserError(f"{path_or_id} lacks {name}: the files are incomplete")
    for name, shape, wanted in sorted(info["mismatched_keys"]):
        raise UserError(
            f"{path_or_id}: {name} is {list(shape)}, its {CONFIG_FILE} needs {list(wanted)}"
        )
    if method == "compressed-tensors":  # which decompresses in the first call of the whole model
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.int64, device=model.device))
    if not model.all_tied_weights_keys:
        # Saved with the model: a release before 5 ties a separate head if the config says so.
        model.config.tie_word_embeddings = False
    return model


def max_positions(model: "PreTrainedModel") -> int | None:
    """Return the maximum number of positions of a model; None if its config does not limit them."""
    config: Any = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", getattr(config, "max_seq_len", None))


def has_states(model: "PreTrainedModel") -> bool:
    """Whether layers keep a state of all earlier tokens: linear attention, state spaces, convolutions."""
    from torch.nn import Conv1d

    decoder, config = model.get_decoder(), model.config.get_text_config()
    layers = getattr(decoder, "layers", decoder).modules()
    linear = LINEAR in (getattr(config, "layer_types", None) or ())
    stateful = linear or getattr(model, "_is_stateful", False)
    return stateful or any(isinstance(each, Conv1d) for each in layers)


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder has a file that makes a tokenizer."""
    return any(any(folder.glob(file)) for file in ("tokenizer.json", "*.model", "vocab.*"))


def load_tokenizer(
    path_or_hub_id: str | os.PathLike[str], *, eos_token: str | int | None = None
) -> "PreTrainedTokenizerFast":
    """Return a fast transformers tokenizer, read from a folder or from the Hugging Face hub.

    A `tokenizer.json` is read as it stands. `AutoTokenizer` would rebuild it from the `config.json`
    beside it, with Qwen2's pre-tokenizer for a Qwen2 model, and may split other than in training.

    Args:
        path_or_hub_id: folder of a model, run or prepared data, GGUF file, or hub id.
        eos_token: token that ends a document, to replace the saved one (an instruction-tuned model's ends
            a turn); an id is not checked.

    Raises `UserError` if there is no tokenizer, it is not a fast one, or it has no (such) end token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if is_gguf(path_or_hub_id):
        path = Path(path_or_hub_id)
        with tempfile.TemporaryDirectory() as written:
            write_tokenizer(GgufFile(path).metadata, path, Path(written))
            return load_tokenizer(written, eos_token=eos_token)
    folder = local_folder(Path(path_or_hub_id), TOKENIZER_FILES)
    failure = f"no readable tokenizer in {path_or_hub_id}"
    if not has_tokenizer(folder):
        # A run has it in its model, before that in its data; prepared data have it in a folder.
        data = Path(str(read_json_if_there(folder / CONFIG_FILE).get("data")))
        inside = (folder / "final", folder / "tokenizer", data / "tokenizer")
        if not (places := [each for each in inside if has_tokenizer(each)]):
            raise UserError(f"{failure}: it has no tokenizer.json{gguf_inside(folder)}")
        folder = places[0]
    loader: Any = PreTrainedTokenizerFast if (folder / "tokenizer.json").exists() else AutoTokenizer
    with library_errors_as(failure):
        tokenizer = load_with(loader.from_pretrained, folder)
    if not tokenizer.is_fast:
        raise UserError(f"{path_or_hub_id}: not a fast tokenizer; save it with a tokenizer.json")
    if isinstance(eos_token, str) and eos_token not in tokenizer.get_vocab():
        raise UserError(f"{path_or_hub_id}: the vocabulary has no token {eos_token!r}")
    if eos_token is not None:
        by_id = isinstance(eos_token, int)
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos_token) if by_id else eos_token
    elif tokenizer.eos_token_id is None:
        raise UserError(
            f"{path_or_hub_id}: the tokenizer names no end-of-text token: give tokenizer_config.json "
            'an "eos_token", or, to prepare text, choose one with --eos-token'
        )
    return tokenizer
