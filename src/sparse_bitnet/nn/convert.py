# SPDX-License-Identifier: Apache-2.0
"""From a model of `nn.Linear` to one of `SparseBitLinear`, in place, and its per-step selection."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.calibration import input_norms
from sparse_bitnet.nn.convertible import (
    converted,
    in_features_of,
    is_fused_experts,
    is_linear,
    matrices,
)
from sparse_bitnet.nn.layer import SparseBitConfig, SparseBitLinear
from sparse_bitnet.nn.saved_names import lost_weights
from sparse_bitnet.nn.selection import check_quantizer, select

FORMAT_VERSION = 1
"""Version of the `quantization_config` entry that a converted model's config carries."""

FilterFn = Callable[[nn.Module, str], bool]
Model = TypeVar("Model", bound=nn.Module)


def convert_(
    model: Model,
    config: SparseBitConfig | str,
    filter_fn: FilterFn | None = None,
    *,
    allow_partial: bool = False,
    calibration: Iterable[Tensor] | None = None,
) -> Model:
    """Replace linear layers by `SparseBitLinear`, sharing their parameters; returns `model`.

    Args:
        model: a transformers model or any module made of `nn.Linear`.
        config: the format of every converted layer, or its text, such as "ternary-6:8".
        filter_fn: (module, full name) -> whether to convert this linear layer, or this module of fused
            experts. By default every one of the blocks, never an embedding, an output head or a weight
            tied to one. The config's `dense_layers` stay as they are in either case.
        allow_partial: accept that most of the matrix weights stay as they are.
        calibration: token ids, int64 [batch, sequence] each: text whose inputs scores as `wanda` take
            from the model as it was, so that it is pruned without training.

    A layer already converted takes the new config; a layer that stands at several places stays one. The
    weights of GPT-2's `Conv1D` and fused experts become new parameters, so make the optimiser afterwards.
    A warning names what stays as it is without `filter_fn`. A transformers model's config gets the
    `quantization_config` with which it saves and loads.

    Raises `UserError` when nothing matches, a pattern or a quantizer's groups do not divide a layer, most
    matrix weights would stay, or `model` is itself a linear layer; the model is then unchanged.
    """
    if isinstance(config, str):
        config = SparseBitConfig.parse(config)
    if is_linear(model):
        raise UserError(
            "convert_: a bare linear layer cannot be replaced in place; wrap it in a module"
        )
    chosen = _in_blocks(model) if filter_fn is None else filter_fn
    found = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if is_linear(module) or is_fused_experts(module)
    }
    if filter_fn is None:
        config.check_dense_layers(found, type(model).__name__)
    targets = {
        name: module
        for name, module in found.items()
        if not config.keeps_dense(name) and chosen(module, name)
    }
    if not targets:
        raise UserError(
            f"convert_: no linear layer to convert in {type(model).__name__}; pass filter_fn"
        )
    first: dict[int, str] = {}
    for name, module in targets.items():
        for width in in_features_of(module):
            first.setdefault(width, name)
    for width, name in first.items():
        config.pattern.check_divides(width, name)
        check_quantizer(config, width, name)
    linear = {name: module for name, module in targets.items() if is_linear(module)}
    sees_inputs = config.variant("score").entry.sees_inputs
    if calibration is not None and sees_inputs and len(linear) < len(targets):
        raise UserError(
            "convert_: calibration does not reach fused experts; leave them dense (dense_layers), or "
            "convert the model to full-8:8 first, which takes them apart"
        )
    asked = set(found.values()) if filter_fn is not None else set(targets.values())
    asked |= {module for name, module in found.items() if config.keeps_dense(name)}
    _tell_what_stays(model, targets, asked, allow_partial)
    norms = {} if calibration is None else input_norms(model, linear, config, calibration)
    layers: dict[nn.Module, nn.Module] = {}
    for name, module in found.items():
        parent, _, child = name.rpartition(".")
        if name in targets and module not in layers:
            layers[module] = converted(module, config, name)
        elif config.keeps_dense(name) and isinstance(module, SparseBitLinear):
            layers[module] = module.to_linear()
        if module in layers:
            setattr(model.get_submodule(parent), child, layers[module])
    for name, norm in norms.items():
        layer: Any = model.get_submodule(name)
        if layer.input_norm is not None:
            layer.input_norm.copy_(norm)
    if lost := lost_weights(model, [f"{name}.weight" for name in sparse_layers(model)]):
        warnings.warn(
            f"convert_: {type(model).__name__} as transformers saves it would not load again: "
            f"{lost[0]} is stored under another name, one of {len(lost)} such weights",
            stacklevel=2,
        )
    model_config: Any = getattr(model, "config", None)
    if hasattr(model_config, "to_dict"):
        model_config.quantization_config = quantization_config(model, config)
    return model


def _tell_what_stays(
    model: nn.Module, targets: dict[str, nn.Module], asked: set[nn.Module], allow_partial: bool
) -> None:
    """Warn of matrices of the blocks that nobody asked to leave alone; refuse when they are most."""
    in_blocks = _in_blocks(model)
    owners = set(targets.values())
    sizes: dict[str, int] = {}
    total = 0
    for name, weight, module in matrices(model):
        if module in owners:
            total += weight.numel()
        elif module not in asked and in_blocks(module, name):
            sizes[name] = weight.numel()
    if not sizes:
        return
    left, largest = sum(sizes.values()), sorted(sizes, key=lambda name: -sizes[name])[:3]
    message = (
        f"convert_: {len(sizes)} matrices of {type(model).__name__} stay as they are, "
        f"{left / (total + left):.0%} of the weights of its blocks: {', '.join(largest)}"
        + (", ..." if len(sizes) > 3 else "")
    )
    if left > total and not allow_partial:
        raise UserError(f"{message}; pass allow_partial=True to accept that")
    warnings.warn(message, stacklevel=3)


def quantization_config(model: nn.Module, config: SparseBitConfig) -> dict:
    """The entry of a transformers config.json: method, version, format, and what stays dense."""
    dense = [
        name
        for name, module in model.named_modules()
        if (is_linear(module) or is_fused_experts(module))
        and not isinstance(module, SparseBitLinear)
    ]
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
def selected(model: nn.Module, reduce: Callable[[Tensor], Tensor] | None = None) -> Iterator[None]:
    """Mask and codes of all layers, computed once and used by every forward inside the block.

    Put it around the micro-batches of one optimiser step (and their activation recomputation), around
    an evaluation or around `generate`. Weights must not change inside: a layer whose weight does,
    except through `.data`, selects anew in every forward. Nested use is a no-op. In evaluation mode the
    masks and flip counts of the training steps are left as they were.

    What a score adds to the gradient, and the norms of inputs that it follows, are reckoned where the
    block ends; `reduce` sums the latter over processes with other inputs.
    """
    with selected_layers(sparse_layers(model).values(), reduce):
        yield


@contextmanager
def selected_layers(
    layers: Iterable[SparseBitLinear], reduce: Callable[[Tensor], Tensor] | None = None
) -> Iterator[None]:
    """`selected` of these layers."""
    layers = [layer for layer in layers if not layer.is_selected]
    try:
        for layer in layers:
            layer.select_()
        yield
        end_step_(layers, reduce)
    finally:
        for layer in layers:
            layer.release_()


def end_step_(
    layers: Iterable[SparseBitLinear], reduce: Callable[[Tensor], Tensor] | None = None
) -> None:
    """`SparseBitLinear.end_step_` of all layers that are still selected, in training mode, once."""
    for layer in layers:
        if layer.training and layer.is_selected and not layer.config.is_plain:
            layer.end_step_(reduce)


def set_phase_(layers: Iterable[SparseBitLinear], kept: int | None, blend: float = 1.0) -> None:
    """How many weights of a group the next steps keep (None: the pattern's; all of them: no mask, as
    before a sparse phase), and the share of quantised values in their forwards."""
    for layer in layers:
        layer.kept, layer.blend = kept, blend


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
        if integer and not _has_one_scale(layer):
            raise UserError(
                f"layer {name}: an int8 forward takes one scale a matrix and no blending, the format is "
                f"{layer.config}; use the fake-quantised forward"
            )
    for layer in layers.values():
        layer.integer_forward = integer


def _has_one_scale(layer: SparseBitLinear) -> bool:
    """Whether every step multiplies with codes of one scale."""
    if layer.config.variant("schedule").entry.blends:
        return False
    # What a registered quantiser gives shows only in a weight.
    rows = torch.zeros(2, layer.in_features)
    return layer.config.is_plain or select(rows, layer.config).value is None


def _in_blocks(model: nn.Module) -> FilterFn:
    """What lies inside the repeated blocks; of a model without blocks, all but heads and ties."""
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    get_head: Any = getattr(model, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    blocks = {
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and name
    }

    def in_blocks(module: nn.Module, name: str) -> bool:
        if module is head or id(getattr(module, "weight", None)) in embeddings:
            return False
        return not blocks or any(name.startswith(f"{block}.") for block in blocks)

    return in_blocks
