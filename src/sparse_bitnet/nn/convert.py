# SPDX-License-Identifier: Apache-2.0
"""Converts a model's linear layers to `SparseBitLinear` in place, and acts on all converted layers.

`convert_` recognises linear layers under any of their class names, and fused experts.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import GATES
from sparse_bitnet.nn.experts import SparseBitExperts, is_fused_experts, new_linear
from sparse_bitnet.nn.layer import SparseBitConfig, SparseBitLinear, select_layers_
from sparse_bitnet.nn.selection import select
from sparse_bitnet.nn.straight_through import InputQuantizer
from sparse_bitnet.nn.ternary_tables import TernaryHead, set_tables_

FilterFn = Callable[[nn.Module, str], bool]
Model = TypeVar("Model", bound=nn.Module)

_CONV1D = "transformers.pytorch_utils.Conv1D"
_LINEAR = ("transformers.models.falcon.modeling_falcon.FalconLinear",)
"""Subclasses of `nn.Linear` with its forward; other subclasses may compute something else."""


def convert_(
    model: Model,
    config: SparseBitConfig | str,
    filter_fn: FilterFn | None = None,
    *,
    calibration: Iterable[Tensor] | None = None,
) -> Model:
    """Replace linear layers by `SparseBitLinear` in place, sharing their parameters; return `model`.

    Args:
        model: a transformers model or any module made of `nn.Linear`.
        config: format of every converted layer, or its text form, such as "ternary-6:8".
        filter_fn: (module, full name) -> whether to convert this linear layer, or this module of fused
            experts. Default: all in the blocks, but never an embedding, an output head, a weight tied to
            one, one of `GATES`, Mamba's x_proj, dt_proj and out_proj, or an encoder of images or audio
            in a language model. The config's `dense_layers` stay dense in either case.
        calibration: batches of token ids, int64 [batch, sequence]. Scores such as `wanda` measure the
            inputs of the model as it is on them, so that it can be pruned without training.

    Convert a transformers model as a whole: `save_pretrained` does not store the format of a part.

    A converted layer gets the new config; a layer used in several places stays shared. The weights of
    GPT-2's `Conv1D` and fused experts become new parameters, so make the optimiser afterwards. Without
    `filter_fn` a warning names weights that stay dense. A transformers model's config gets the
    `quantization_config` with which it saves and loads.

    Raises `UserError` when nothing matches, a pattern or a quantizer's groups do not divide a layer,
    most matrix weights would stay dense, a transformers model would get a second format, a rotation
    meets shared weights, calibration has no effect, is not token ids or meets fused experts, or `model`
    is itself a linear layer; the model is then unchanged.
    """
    if isinstance(config, str):
        config = SparseBitConfig.parse(config)
    if is_linear(model):
        raise UserError(
            "convert_: a bare linear layer cannot be replaced in place; wrap it in a module"
        )
    chosen, bypassed = filter_fn, set[str]()
    if chosen is None:
        chosen, bypassed = _in_blocks(model), _bypassed_layers(model)
    candidates = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if is_linear(module) or is_fused_experts(module)
    }
    if filter_fn is None:
        config.check_dense_layers(candidates, type(model).__name__)
    targets = {
        name: module
        for name, module in candidates.items()
        if not config.keeps_dense(name) and name not in bypassed and chosen(module, name)
    }
    if not targets:
        raise UserError("convert_: no linear layer to convert: change filter_fn or dense_layers")
    for name, module in targets.items():
        of: Any = module
        if "forward" in vars(module):
            raise UserError(f"layer {name} has a forward of its own: convert before offloading")
        # Groups lie along rows, which a `Conv1D` stores as columns.
        along = -2 if _class_name(module) == _CONV1D else -1
        for weight in (of.gate_up_proj, of.down_proj) if is_fused_experts(module) else (of.weight,):
            _check_width(weight.shape[along], config, name)
    linear = {name: module for name, module in targets.items() if is_linear(module)}
    folded = linear if config.variant("activation").folds else {}
    owners = {id(module.weight): name for name, module in folded.items()}
    for parameter, weight in model.named_parameters(remove_duplicate=False):
        name, other = parameter.rpartition(".")[0], owners.get(id(weight), "")
        if other and model.get_submodule(name) is not linear[other]:
            raise UserError(
                f"layers {name} and {other} share their weight, which activation={config.activation} "
                "cannot rotate: leave both dense (dense_layers), or choose activation=int8"
            )
    if getattr(model, "peft_config", None):
        raise UserError("convert_: the model has adapters: convert it first, then add them")
    model_config: Any = getattr(model, "config", None)
    is_saved = hasattr(model, "save_pretrained") and hasattr(model_config, "to_dict")
    for name, sparse in sparse_layers(model).items() if is_saved else ():
        stays = name not in targets and not config.keeps_dense(name)
        if stays and replace(sparse.config, dense_layers=config.dense_layers) != config:
            raise UserError(
                f"convert_: layer {name} would stay {sparse.config} beside {config}, and a saved model "
                "has one format: convert both alike, or leave one dense (dense_layers)"
            )
    if calibration is not None and not config.variant("score").sees_inputs:
        raise UserError(
            f"convert_: calibration has no effect on score={config.score}, which does not measure "
            "inputs: leave it out, or choose score=wanda"
        )
    if calibration is not None and len(linear) < len(targets):
        raise UserError(
            "convert_: calibration does not reach fused experts; leave them dense (dense_layers), or "
            "convert the model to full-8:8 first, which splits them into layers"
        )
    if filter_fn is None:
        dense = {module for name, module in candidates.items() if config.keeps_dense(name)}
        _warn_of_dense_weights(model, set(targets.values()), dense)
    for name, sparse in sparse_layers(model).items():
        kept = name not in targets or sparse.config.activation == config.activation
        if config.keeps_dense(name) or not kept:
            sparse.check_basis()
    norms = {} if calibration is None else input_norms(model, linear, config, calibration)
    set_tables_(model, config.embeddings == "ternary")
    layers: dict[nn.Module, nn.Module] = {}
    for name, module in candidates.items():
        parent, _, child = name.rpartition(".")
        if name in targets and module not in layers:
            layers[module] = _converted(module, config, name)
        elif config.keeps_dense(name) and isinstance(module, SparseBitLinear):
            layers[module] = module.to_linear()
        if module in layers:
            hooks = {name: value for name, value in vars(module).items() if "_hook" in name}
            vars(layers[module]).update(hooks)  # whose handles still remove them
            owner: Any = model.get_submodule(parent)
            setattr(owner, child, layers[module])
            if isinstance(owner, nn.TransformerEncoderLayer):
                owner.activation_relu_or_gelu = 0  # its fast path multiplies past the layers
    for encoder in (each for each in model.modules() if isinstance(each, nn.TransformerEncoder)):
        encoder.use_nested_tensor = False  # which its layers get from it for that path alone
    for name, norm in norms.items():
        layer: Any = model.get_submodule(name)
        layer.input_norm.copy_(norm)
    if is_saved:  # other models may have been made from the same config
        own = copy.copy(model_config)
        for module in model.modules():
            if vars(module).get("config") is model_config:
                module.config = own
        cast(Any, model).config.quantization_config = quantization_config(model, config)
    return model


def _check_width(width: int, config: SparseBitConfig, name: str) -> None:
    """Raise `UserError`, naming the layer, if the format does not support rows of `width` weights."""
    config.pattern.check_divides(width, name)
    try:
        row = torch.ones(1, width, device="cpu")  # where the model may be on "meta"
        InputQuantizer(config).transform(row)
        if not config.is_plain:
            select(row, config)
    except UserError as error:
        raise UserError(
            f"layer {name}: {error}; choose another value, or leave the layer dense (--dense-layers, "
            "dense_layers)"
        ) from error


def _warn_of_dense_weights(model: nn.Module, owners: set[nn.Module], dense: set[nn.Module]) -> None:
    """Warn about weight matrices, or stacks of them, in the blocks that are neither converted nor
    `dense`, embeddings, convolutions or norms; raise `UserError` if they hold most weights."""
    in_blocks, sizes, total = _in_blocks(model), dict[str, int](), 0
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.modules.conv._ConvNd):
            continue
        for name, weight in module.named_parameters(prefix, recurse=False):
            if weight.dim() in (2, 3) and module in owners:
                total += weight.numel()
            elif weight.dim() in (2, 3) and module not in dense and in_blocks(module, name):
                sizes[name] = weight.numel()
    if not sizes:
        return
    left, largest = sum(sizes.values()), sorted(sizes, key=lambda name: -sizes[name])[:3]
    message = (
        f"convert_: {len(sizes)} matrices of {type(model).__name__} stay as they are, "
        f"{left / (total + left):.0%} of the weights of its blocks: {', '.join(largest)}"
        + (", ..." if len(sizes) > 3 else "")
    )
    if left > total:
        raise UserError(f"{message}; choose the layers to convert with filter_fn")
    warnings.warn(message, stacklevel=3)


def _in_blocks(model: nn.Module) -> FilterFn:
    """Return a filter for layers in repeated blocks; without blocks, for all but head and tied layers."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    heads = set(head.modules() if isinstance(head, nn.Module) else ())
    kinds = () if head is None else ("vision_config", "audio_config")
    others = [getattr(getattr(model, "config", None), kind, None) for kind in kinds]
    blocks, encoders = set[str](), set[str]()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name:
            blocks.add(f"{name}.")
        elif (own := getattr(module, "config", None)) and any(own is each for each in others):
            encoders.add(f"{name}.")

    def in_blocks(module: nn.Module, name: str) -> bool:
        is_gate = name.removesuffix(".weight").endswith(GATES)
        if module in heads or is_gate or id(getattr(module, "weight", None)) in embeddings:
            return False
        return name.startswith(tuple(blocks or [""])) and not name.startswith(tuple(encoders))

    return in_blocks


def _bypassed_layers(model: nn.Module) -> set[str]:
    """Return the names of layers whose weights Mamba's code or kernels read without running them."""
    return {
        f"{name}.{layer}".lstrip(".")
        for name, module in model.named_modules(remove_duplicate=False)
        if hasattr(module, "A_log") and hasattr(module, "D")
        for layer in ("x_proj", "dt_proj", "out_proj")
    }


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a linear layer, under any class name, whose weight is not computed."""
    known = isinstance(module, SparseBitLinear) or type(module) in (nn.Linear, TernaryHead)
    known = known or _class_name(module) in (_CONV1D, *_LINEAR)
    return known and isinstance(module.weight, nn.Parameter)


def _converted(module: Any, config: SparseBitConfig, name: str) -> nn.Module:
    """Return a linear layer's replacement, with the same parameters, or experts', with new ones."""
    if is_fused_experts(module):
        return SparseBitExperts(module, config, name)
    linear = module
    if _class_name(module) == _CONV1D:
        linear = new_linear(module.weight.detach().t().contiguous(), module.weight, module)
        linear.bias = module.bias
    return SparseBitLinear.from_linear(linear, config, name)


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


@torch.no_grad()
def input_norms(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    config: SparseBitConfig,
    batches: Iterable[Tensor],
) -> dict[str, Tensor]:
    """Return the root mean square of each input feature, by full name, of all `layers` that some token
    reaches.

    The transform of the format, if any, comes first. Raises `UserError` for empty calibration data, and
    for an input that is not finite.
    """
    inputs = InputQuantizer(config)
    squares: dict[str, Tensor] = {}
    tokens = dict.fromkeys(layers, 0)

    def see(name: str, input: Tensor) -> None:
        x = inputs.transform(input.float()).flatten(0, -2)
        squares[name] = squares.get(name, 0) + x.square().sum(0, dtype=torch.float64)
        tokens[name] += len(x)

    with ExitStack() as hooks, evaluation_mode(model):
        for name, layer in layers.items():
            hook = layer.register_forward_pre_hook(lambda _, args, name=name: see(name, args[0]))
            hooks.callback(hook.remove)
        for batch in batches:
            if not isinstance(batch, Tensor) or batch.dtype != torch.int64 or batch.dim() != 2:
                raise UserError("convert_: calibration must be token ids, int64 [batch, sequence]")
            model(input_ids=batch.to(next(model.parameters()).device))
    if not any(tokens.values()):
        raise UserError("convert_: the calibration text is empty")
    # No token reaches some layers, for example an expert that is never chosen.
    norms = {name: (squares[name] / n).sqrt().float() for name, n in tokens.items() if n}
    for name, norm in norms.items():
        if not torch.isfinite(norm).all():
            raise UserError(f"convert_: layer {name} gets calibration inputs that are not finite")
    return norms


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode inside; afterwards each of its modules is in its previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def quantization_config(model: nn.Module, config: SparseBitConfig) -> dict:
    """Return the entry of a transformers config.json: method, version, format, and the dense layers."""
    dense = [
        name.replace("_orig_mod.", "")
        for name, module in model.named_modules()
        if (is_linear(module) or is_fused_experts(module))
        and not isinstance(module, SparseBitLinear)
    ]
    return config.config_entry(dense)


def sparse_layers(model: nn.Module) -> dict[str, SparseBitLinear]:
    """Return every `SparseBitLinear` by full name, in the order of `named_modules`."""
    return {
        name.replace("_orig_mod.", ""): module
        for name, module in model.named_modules()
        if isinstance(module, SparseBitLinear)
    }


@contextmanager
def selected(
    model: nn.Module | Iterable[SparseBitLinear], reduce: Callable[[Tensor], Tensor] | None = None
) -> Iterator[None]:
    """Make all forwards inside the block share one selection of masks and codes.

    Put it around the micro-batches of one optimiser step (and their activation recomputation), around an
    evaluation or around `generate`. Step the optimiser after it: a layer whose weight changes inside,
    except through `.data`, selects again in every forward. Nested use has no effect.

    When the block ends, layers in training mode add a score's extra gradient (unscale those of a
    `GradScaler` before) and update its input norms, which `reduce` sums over processes with other
    inputs; in evaluation mode, flip counts stay, too. `model` may also be some of the layers.
    """
    every = sparse_layers(model).values() if isinstance(model, nn.Module) else model
    layers = [layer for layer in every if not layer.is_selected]
    try:
        select_layers_(layers)
        yield
        end_step_(layers, reduce)
    finally:
        for layer in layers:
            layer.release_()


def end_step_(
    layers: Iterable[SparseBitLinear], reduce: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Call `SparseBitLinear.end_step_` once for all layers that are selected and in training mode."""
    first = dict[tuple[int, str], SparseBitLinear]()  # of the layers that share a weight
    for layer in layers:
        if layer.training and layer.is_selected and not layer.config.is_plain:
            key = (id(layer.weight), layer.config.score)
            layer.end_step_(reduce, first.setdefault(key, layer) is layer)


def set_phase_(layers: Iterable[SparseBitLinear], kept: int | None, blend: float = 1.0) -> None:
    """Set how many weights of a group the next steps keep (None: the pattern's n; m: no mask, as before
    a sparse phase), and the share of quantised values in their forwards."""
    for layer in layers:
        layer.kept, layer.blend = kept, blend


def set_integer_forward_(model: nn.Module, integer: bool) -> None:
    """Compute the forward products of all layers in int8 with int32 sums, or in floats (the default).

    Raises `UserError`, naming the layer, when one does not multiply int8 operands of one scale.
    """
    layers = sparse_layers(model)
    for name, layer in layers.items() if integer else ():
        config = layer.config
        has_codes = (config.weight, config.activation) == ("ternary", "int8")
        # Only trying a registered quantiser shows how many scales it returns.
        rows = torch.zeros(2, layer.in_features)
        one_scale = not config.variant("schedule").blends and (
            config.is_plain or getattr(select(rows, config).weight_scale, "ndim", 0) == 0
        )
        if not (has_codes and one_scale):
            raise UserError(
                f"layer {name}: --forward int8 needs ternary weights with one scale per matrix, int8 "
                f"activations and no blending; the format is {config}: use --forward fake"
            )
    for layer in layers.values():
        layer.integer_forward = integer
