# SPDX-License-Identifier: Apache-2.0
"""Saving and loading in the form of the Hugging Face hub, masters included.

The folder is an ordinary transformers checkpoint (config.json, model.safetensors, tokenizer) whose
config carries `quant_method: "sparse_bitnet"`, a version and the whole `SparseBitConfig`. Once
`sparse_bitnet` is imported, transformers' own `from_pretrained` gives the trained model back, bit for
bit; the master weights are stored, so training can continue from there. Packed folders load alike.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.checkpoint.load import load_with
from sparse_bitnet.checkpoint.model_folder import MASTERS_HELD, WITHOUT_IMPORT, finish_folder
from sparse_bitnet.checkpoint.packed_loading import finish_model_, open_packed, prepare_model_
from sparse_bitnet.checkpoint.weight_files import WeightFiles
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import atomic_folder, check_ours
from sparse_bitnet.nn.convert import FORMAT_VERSION, convert_, quantization_config, sparse_layers
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.packing.formats import QUANT_METHOD, check_version

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_REQUIRED_KEYS = ("version", "format", "modules_to_not_convert")


def read_format(entry: dict[str, Any], where: str = "config.json") -> SparseBitConfig:
    """The `SparseBitConfig` of a `quantization_config` entry.

    Args:
        entry: of a config.json.
        where: that file, for messages.

    Raises `UserError` for a missing or an unknown key, or a version newer than this package reads.
    """
    if missing := [key for key in _REQUIRED_KEYS if key not in entry]:
        raise UserError(f"{where}: quantization_config lacks {', '.join(missing)}")
    if unknown := sorted(entry.keys() - {"quant_method", *_REQUIRED_KEYS}):
        raise UserError(
            f"{where}: quantization_config has unknown {', '.join(unknown)}; upgrade sparse-bitnet"
        )
    kept = entry["modules_to_not_convert"]
    if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
        raise UserError(f"{where}: modules_to_not_convert is not a list of names")
    if not isinstance(entry["version"], int) or not 1 <= entry["version"] <= FORMAT_VERSION:
        raise UserError(
            f"{where}: sparse_bitnet format version {entry['version']} is not readable by this "
            f"release (it reads up to {FORMAT_VERSION}); upgrade sparse-bitnet"
        )
    try:
        return SparseBitConfig.from_dict(entry["format"])
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def save_pretrained(
    model: "PreTrainedModel",
    folder: str | Path,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> None:
    """Write a converted model, and its tokenizer if given, as a complete folder in one step.

    A checkpoint already in `folder` is replaced as a whole, other files beside it included.

    Raises `UserError` when the model holds no `SparseBitLinear`, `folder` holds something that is no
    checkpoint, or the disk is full; `folder` is then as before.
    """
    layers = sparse_layers(model)
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no SparseBitLinear to save; use convert_ first"
        )
    config = next(iter(layers.values())).config
    if any(layer.config != config for layer in layers.values()):
        raise UserError("layers differ in their format; one checkpoint holds one format")
    folder = Path(folder)
    check_ours(folder, ["config.json"], "a checkpoint")
    model.config.quantization_config = quantization_config(model, config)
    with atomic_folder(folder) as temporary:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        _check_comes_back(model, temporary)
        finish_folder(temporary, MASTERS_HELD)


def _check_weights(model: "PreTrainedModel", files: Sequence[str | Path] | None) -> None:
    """Raise `UserError` when a converted layer's weight is missing from the safetensors `files`, or
    of another shape there.

    transformers only warns about missing weights and would leave them random.
    """
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        return
    stored = WeightFiles([Path(file) for file in files]).shapes
    names = _loaded_names(model, stored)
    shapes = {names[name]: list(shape) for name, shape in stored.items()}
    # Of blocks that share weights only the first one's are stored.
    ties = model.all_tied_weights_keys
    for name, layer in sparse_layers(model).items():
        weight, expected = f"{name}.weight", list(layer.weight.shape)
        if (shape := shapes.get(ties.get(weight, weight))) is None:
            raise UserError(
                f"checkpoint lacks {weight}: the files are incomplete or of another model"
            )
        if shape != expected:
            raise UserError(f"checkpoint's {weight} is {shape}, its config.json asks {expected}")


def _loaded_names(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """Return the parameter into which transformers loads each stored name, by its own renaming."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    transforms = get_model_conversion_mapping(model)
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    renamings: list[Any] = [entry for entry in transforms if entry not in converters]
    own, prefix = dict.fromkeys(model.state_dict(), True), model.base_model_prefix
    return {name: rename_source_key(name, renamings, converters, prefix, own)[0] for name in stored}


def _convert_empty_(model: Any, entry: dict[str, Any], files: Sequence[str | Path] | None) -> None:
    """Make an empty model what was saved, and check that the files hold its layers."""
    # A base model without its head has the same names less the prefix.
    prefix = f"{model.base_model_prefix}."
    dense = {name.removeprefix(prefix) for name in entry["modules_to_not_convert"]}
    with warnings.catch_warnings(action="ignore"):
        convert_(
            model,
            read_format(entry),
            lambda module, name: name.removeprefix(prefix) not in dense,
            allow_partial=True,
        )
    _check_weights(model, files)


def _check_comes_back(model: "PreTrainedModel", folder: Path) -> None:
    """Raise `UserError` when the saved folder would not load, tried without memory for weights."""
    import torch

    config: Any = load_with(type(model.config).from_pretrained, folder)
    with torch.device("meta"):
        empty = type(model)._from_config(config)
        try:
            files = sorted(folder.glob("*.safetensors"))
            _convert_empty_(empty, config.quantization_config, files)
        except UserError as error:
            raise UserError(
                f"{type(model).__name__} cannot be saved so that it loads again: {error}"
            ) from error


def register() -> None:
    """Enter our two methods in transformers' registry of quantizers; a second call does nothing."""
    from transformers.quantizers.auto import (
        AUTO_QUANTIZER_MAPPING,
        register_quantization_config,
        register_quantizer,
    )
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    if QUANT_METHOD in AUTO_QUANTIZER_MAPPING:
        return

    def registered_entry(method: str, check: Callable[[dict[str, Any]], object]) -> None:
        @register_quantization_config(method)
        class Entry(QuantizationConfigMixin):
            """The `quantization_config` entry as transformers passes it around."""

            def __init__(self, quant_method: str = method, **entry: Any) -> None:
                check(entry)
                self.__dict__.update(entry, quant_method=quant_method)

    registered_entry("sparse_bitnet", read_format)
    registered_entry(QUANT_METHOD, lambda entry: check_version(entry, "config.json"))

    class Quantizer(HfQuantizer):
        requires_calibration = False
        is_trainable = is_qat_trainable = is_compileable = False

        def update_attn_implementation(self, config: Any) -> Any:
            # What `finish_folder` put there, to stop a loading without this quantizer.
            if config._attn_implementation in WITHOUT_IMPORT.values():
                config._attn_implementation = None
            return config

        update_tp_plan = update_attn_implementation  # of releases that lack the other

        def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
            return self.is_trainable

    @register_quantizer("sparse_bitnet")
    class MastersQuantizer(Quantizer):
        """Converts the empty model before its weights are read."""

        is_trainable = is_qat_trainable = is_compileable = True

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
            entry = self.quantization_config.to_dict()
            _convert_empty_(model, entry, kwargs.get("checkpoint_files"))

    @register_quantizer(QUANT_METHOD)
    class PackedQuantizer(Quantizer):
        """Replaces the layers of the empty model and decodes them when they are loaded.

        It saves nothing, which would lack checksums and metadata: copy the folder instead.
        """

        requires_calibration = True

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
            files = kwargs.get("checkpoint_files") or []
            if len(files) != 1 or not str(files[0]).endswith(".safetensors"):
                raise UserError("a packed model is one model.safetensors file; pack it again")
            file, self.metadata = open_packed(files[0])
            self.metadata.check_config_entry(self.quantization_config.to_dict(), str(files[0]))
            prepare_model_(model, file, self.metadata)

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
            finish_model_(model, self.metadata)
