"""Saving and loading in the form of the Hugging Face hub, masters included.

The folder is an ordinary transformers checkpoint (config.json, model.safetensors, tokenizer) whose
config carries `quant_method: "sparse_bitnet"`, a version and the whole `SparseBitConfig`. Once
`sparse_bitnet` is imported, transformers' own `from_pretrained` gives the trained model back, bit for
bit; the master weights are stored, so training can go on from there.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.convert import FORMAT_VERSION, convert_, quantization_config, sparse_layers
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import atomic_folder
from sparse_bitnet.layer import SparseBitConfig
from sparse_bitnet.models import load_causal_lm
from sparse_bitnet.weight_files import WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

REQUIRED_KEYS = ("version", "format", "modules_to_not_convert")


def read_format(entry: dict[str, Any], where: str = "config.json") -> SparseBitConfig:
    """The `SparseBitConfig` of a `quantization_config` entry.

    Raises `UserError` for a missing key or a version newer than this package reads.
    """
    if missing := [key for key in REQUIRED_KEYS if key not in entry]:
        raise UserError(f"{where}: quantization_config lacks {', '.join(missing)}")
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
    if folder.exists() and not (folder / "config.json").is_file() and not _is_empty(folder):
        raise UserError(f"{folder} exists and holds no checkpoint; choose another folder")
    model.config.quantization_config = quantization_config(model, config)
    with atomic_folder(folder) as temporary:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)


def from_pretrained(path_or_id: str | Path, **kwargs: Any) -> "PreTrainedModel":
    """Load a checkpoint of ours (or any dense causal LM) through transformers.

    `kwargs` are those of `AutoModelForCausalLM.from_pretrained`.

    Raises `UserError`, one line, for whatever keeps it from loading, a missing weight included
    (transformers alone would leave it random).
    """
    return load_causal_lm(path_or_id, **kwargs)


def check_weights(model: "PreTrainedModel", files: list[str] | None) -> None:
    """Raise `UserError` when a converted layer's weight is missing from the safetensors `files`, or
    of another shape there.

    transformers only warns about missing weights and would leave them random.
    """
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        return
    prefix = f"{model.base_model_prefix}."
    stored = WeightFiles([Path(file) for file in files]).shapes
    shapes = {name.removeprefix(prefix): list(shape) for name, shape in stored.items()}
    for name, layer in sparse_layers(model).items():
        expected, found = (
            list(layer.weight.shape),
            shapes.get(f"{name.removeprefix(prefix)}.weight"),
        )
        if found is None:
            raise UserError(
                f"checkpoint lacks {name}.weight: the files are incomplete or of another model"
            )
        if found != expected:
            raise UserError(
                f"checkpoint's {name}.weight is {found}, its config.json asks {expected}"
            )


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def register() -> None:
    """Enter "sparse_bitnet" in transformers' quantizer registry (called when that is imported)."""
    from transformers.quantizers.auto import (
        AUTO_QUANTIZER_MAPPING,
        register_quantization_config,
        register_quantizer,
    )
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    if "sparse_bitnet" in AUTO_QUANTIZER_MAPPING:
        return

    @register_quantization_config("sparse_bitnet")
    class SparseBitQuantizationConfig(QuantizationConfigMixin):
        """The `quantization_config` entry as transformers passes it around."""

        def __init__(self, quant_method: str = "sparse_bitnet", **entry: Any) -> None:
            self.quant_method = quant_method  # type: ignore[assignment]
            read_format(entry)
            self.__dict__.update(entry)

    @register_quantizer("sparse_bitnet")
    class SparseBitQuantizer(HfQuantizer):
        """Converts the empty model before its weights are read."""

        requires_calibration = False

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
            entry = self.quantization_config.to_dict()
            # A base model without its head has the same names less the prefix.
            prefix = f"{model.base_model_prefix}."
            dense = {name.removeprefix(prefix) for name in entry["modules_to_not_convert"]}
            convert_(
                model,
                read_format(entry),
                lambda module, name: name.removeprefix(prefix) not in dense,
            )
            check_weights(model, kwargs.get("checkpoint_files"))

        @property
        def is_trainable(self) -> bool:
            return True

        @property
        def is_qat_trainable(self) -> bool:
            return True

        @property
        def is_compileable(self) -> bool:
            return True

        def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
            return True
