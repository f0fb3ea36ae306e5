"""From a model of `nn.Linear` to one of `SparseBitLinear`, in place, and its per-step selection."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from sparse_bitnet.errors import UserError
from sparse_bitnet.layer import SparseBitConfig, SparseBitLinear
from sparse_bitnet.layer_config import layer_matches

FORMAT_VERSION = 1
"""Version of the `quantization_config` entry that a converted model's config carries."""

FilterFn = Callable[[nn.Module, str], bool]
Model = TypeVar("Model", bound=nn.Module)


def convert_(model: Model, config: SparseBitConfig, filter_fn: FilterFn | None = None) -> Model:
    """Replace linear layers by `SparseBitLinear`, sharing their parameters; returns `model`.

    Args:
        model: a transformers model or any module made of `nn.Linear`.
        config: the format of every converted layer.
        filter_fn: (module, full name) -> whether to convert this `nn.Linear`. By default every
            linear of the blocks, never an embedding, an output head or a weight tied to one
            (`is_block_linear`). The config's `dense_layers` stay as they are in either case.

    A layer already converted takes the new config, a layer that stands at several places stays one.
    A transformers model's config gets the `quantization_config` with which it saves and loads.

    Raises `UserError` when nothing matches, a pattern does not divide a layer, or `model` is itself a
    linear layer; the model is then unchanged.
    """
    if isinstance(model, nn.Linear):
        raise UserError("convert_: a bare linear layer has no place to be replaced in; wrap it")
    chosen = _block_linears(model) if filter_fn is None else filter_fn
    linears = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) in (nn.Linear, SparseBitLinear)
    }
    for glob in config.dense_layers:
        if filter_fn is None and not any(layer_matches(name, glob) for name in linears):
            raise UserError(
                f"dense_layers {glob}: no linear layer of {type(model).__name__} has such a name"
                + (f"; one is called {next(iter(linears))}" if linears else "")
            )
    targets = {
        name: module
        for name, module in linears.items()
        if not config.keeps_dense(name) and chosen(module, name)
    }
    if not targets:
        raise UserError(
            f"convert_: no linear layer to convert in {type(model).__name__}; pass filter_fn"
        )
    for name, module in targets.items():
        config.pattern.check_divides(module.in_features, name)
    layers: dict[nn.Module, nn.Linear] = {}
    for name, module in linears.items():
        parent, _, child = name.rpartition(".")
        if name in targets and module not in layers:
            layers[module] = SparseBitLinear.from_linear(module, config, name)
        elif config.keeps_dense(name) and isinstance(module, SparseBitLinear):
            layers[module] = module.to_linear()
        if module in layers:
            setattr(model.get_submodule(parent), child, layers[module])
    model_config: Any = getattr(model, "config", None)
    if hasattr(model_config, "to_dict"):
        model_config.quantization_config = quantization_config(model, config)
    return model


def quantization_config(model: nn.Module, config: SparseBitConfig) -> dict:
    """The entry of a transformers config.json: method, version, format, and what stays dense."""
    dense = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    return {
        "quant_method": "sparse_bitnet",
        "version": FORMAT_VERSION,
        "format": config.to_dict(),
        "modules_to_not_convert": dense,
    }


def sparse_layers(model: nn.Module) -> dict[str, SparseBitLinear]:
    """Every `SparseBitLinear` by full name, in the order of `named_modules`."""
    return {
        name.replace("_orig_mod.", ""): module
        for name, module in model.named_modules()
        if isinstance(module, SparseBitLinear)
    }


@contextmanager
def selected(model: nn.Module) -> Iterator[None]:
    """Mask and codes of all layers, computed once and used by every forward inside the block.

    Put it around the micro-batches of one optimiser step (and their activation recomputation), around
    an evaluation or around `generate`. Weights must not change inside: a layer whose weight does
    selects anew in every forward. Nested use is a no-op. In evaluation mode the masks and flip
    counts of the training steps are left as they were.
    """
    layers = [layer for layer in sparse_layers(model).values() if not layer.is_selected]
    try:
        for layer in layers:
            layer.select_()
        yield
    finally:
        for layer in layers:
            layer.release_()


def set_dense_phase_(model: nn.Module, dense: bool) -> None:
    """Switch all masks off (dense-to-sparse, first phase) or on again."""
    for layer in sparse_layers(model).values():
        layer.dense_phase = dense


def set_integer_forward_(model: nn.Module, integer: bool) -> None:
    """Compute the forward products of all layers in int8 with int32 sums, or in floats (the default).

    Raises `UserError`, naming the layer, when one has no int8 operands to multiply.
    """
    layers = sparse_layers(model)
    for name, layer in layers.items():
        if integer and (layer.config.weight, layer.config.activation) != ("ternary", "int8"):
            raise UserError(
                f"layer {name}: an int8 forward needs ternary weights and int8 activations, the format "
                f"is {layer.config}; use the fake-quantised forward"
            )
    for layer in layers.values():
        layer.integer_forward = integer


def _block_linears(model: nn.Module) -> FilterFn:
    """Linears inside the repeated blocks; of a model without blocks, all but heads and ties."""
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    get_head: Any = getattr(model, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    blocks = {
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and name
    }

    def is_block_linear(module: nn.Module, name: str) -> bool:
        if module is head or id(module.weight) in embeddings:
            return False
        return not blocks or any(name.startswith(f"{block}.") for block in blocks)

    return is_block_linear
