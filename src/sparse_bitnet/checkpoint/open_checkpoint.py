"""What a user names -> the `Checkpoint` that it is: the one way in for every command."""

from pathlib import Path

from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.checkpoint.locate import resolve_checkpoint
from sparse_bitnet.checkpoint.model_folder import (
    CONFIG_FILE,
    local_folder,
    quantization_entry,
    read_config,
)
from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.metadata import QUANT_METHOD

_KINDS = {"sparse_bitnet": "trained", QUANT_METHOD: "packed", None: "dense"}
_FOREIGN = ("bitnet", "compressed-tensors")


def open_checkpoint(path: str | Path, *kinds: str) -> Checkpoint:
    """Open whatever a user names: a run folder, a model folder of ours or of another tool, a hub id.

    Args:
        path: of a run, its finished model or its latest checkpoint is opened.
        kinds: those that will do, "foreign" for all of other tools; default: any.

    Raises `UserError` for what is no model folder, is incomplete or damaged, and for another kind.
    """
    folder = local_folder(resolve_checkpoint(path))
    config = read_config(folder)
    method = quantization_entry(config).get("quant_method")
    known = isinstance(method, str | None) and (method in _KINDS or method in _FOREIGN)
    kind = _KINDS.get(method, "foreign") if known else ""
    if kind == "dense" and config.get("model_type") == "bitnet":
        kind = "foreign"
    if not known or (kinds and kind not in kinds):
        found = f"quant_method {method!r}" if method else "no quantization_config"
        raise UserError(f"{folder} ({found} in {CONFIG_FILE}) {_remedy(kind, kinds)}")
    if kind == "packed":
        from sparse_bitnet.checkpoint.packed import open_packed

        return open_packed(folder, config)
    if kind == "foreign":
        from sparse_bitnet.checkpoint.foreign import open_foreign

        return open_foreign(folder, config)
    from sparse_bitnet.checkpoint.trained import open_trained

    return open_trained(folder, config)


def open_ternary(path: str | Path) -> Checkpoint:
    """A trained checkpoint with ternary weights. Raises `UserError` for any other."""
    checkpoint = open_checkpoint(path, "trained")
    if checkpoint.format.weight != "ternary":
        raise UserError(
            f"{checkpoint.folder} holds full-precision weights ({checkpoint.format}), which no packed "
            "format holds: `sparse-bitnet export --format dense` writes them for other tools"
        )
    return checkpoint


def _remedy(kind: str, kinds: tuple[str, ...]) -> str:
    if kinds == ("foreign",):
        return f"is not importable: readable are {' and '.join(_FOREIGN)} with ternary codes"
    if kind == "packed" and kinds:
        return "is no trained checkpoint of sparse-bitnet: it is packed already"
    return "is no trained checkpoint of sparse-bitnet: `sparse-bitnet import` reads those of other tools"
