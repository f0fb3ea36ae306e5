"""Trained or packed layers of a transformers model to their GPU form; q/k/v and gate/up become one.

A merged product runs where the first of its layers stood. The modules at the places of the others hand
out their slices, so the model's own code stays as it is.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sparse_bitnet.engine.gpu.linear import QuantizedTokens, RoutePolicy, TernaryLinear
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.layer import SparseBitLinear
from sparse_bitnet.nn.packed_linear import PackedSparseBitLinear

MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that share their input, in the order in which their parents call them."""


class FirstSlice(nn.Module):
    """Computes the merged product, returns its first slice and keeps the others for who asks next."""

    def __init__(self, linear: nn.Module, sizes: list[int]) -> None:
        super().__init__()
        self.linear, self.sizes = linear, sizes
        self.input: Tensor | QuantizedTokens | None = None
        self.slices: tuple[Tensor, ...] = ()

    def forward(self, input: Tensor | QuantizedTokens) -> Tensor:
        """[..., in_features] -> [..., sizes[0]]."""
        first, *rest = self.linear(input).split(self.sizes, -1)
        self.input, self.slices = input, tuple(rest)
        return first


class LaterSlice(nn.Module):
    """Returns its slice of the product that the first slice's module has just computed."""

    def __init__(self, first: FirstSlice, index: int, is_last: bool) -> None:
        super().__init__()
        # Not a submodule: it has one place in the model already.
        self.__dict__["first"] = first
        self.index, self.is_last = index, is_last

    def forward(self, input: Tensor | QuantizedTokens) -> Tensor:
        """[..., in_features] -> [..., sizes[index]]."""
        first: FirstSlice = self.__dict__["first"]
        if first.input is not input:
            return first.linear(input).split(first.sizes, -1)[self.index]
        result = first.slices[self.index - 1]
        if self.is_last:
            first.input, first.slices = None, ()
        return result


@torch.no_grad()
def prepare_(model: nn.Module, policy: RoutePolicy) -> nn.Module:
    """Replace every ternary int8 layer by its GPU form on the device it is on; returns `model`.

    Args:
        model: with `SparseBitLinear` (trained) or `PackedSparseBitLinear` (packed) layers.
        policy: which product for how many tokens.

    Raises `UserError`, naming the layer, for one without ternary weights and int8 activations, and
    when there is none at all.
    """
    targets = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, SparseBitLinear | PackedSparseBitLinear)
    }
    if not targets:
        raise UserError(f"{type(model).__name__} has no ternary layer to run on the GPU kernels")
    for name, module in targets.items():
        if (module.config.weight, module.config.activation) != ("ternary", "int8"):
            raise UserError(
                f"layer {name}: the GPU kernels take ternary weights and int8 activations, the format "
                f"is {module.config}"
            )
    dense = RoutePolicy(always="dense")
    for parent_name in sorted({name.rpartition(".")[0] for name in targets}):
        parent: Any = model.get_submodule(parent_name)
        children = {
            child: module for child, module in parent.named_children() if module in targets.values()
        }
        together = [names for names in MERGED if all(name in children for name in names)]
        alone = children.keys() - {name for names in together for name in names}
        for name in alone:
            setattr(parent, name, _ternary(children[name], policy, f"{parent_name}.{name}"))
        for names in together:
            parts = [_ternary(children[name], dense, f"{parent_name}.{name}") for name in names]
            put_merged_(parent, names, TernaryLinear.merged(parts, policy), parts)
    return model


def put_merged_(parent: Any, names: tuple[str, ...], linear: nn.Module, parts: list[Any]) -> None:
    """Put a layer that computes `parts` side by side at their places `names` in the parent."""
    first = FirstSlice(linear, [part.out_features for part in parts])
    setattr(parent, names[0], first)
    for index, name in enumerate(names[1:], 1):
        setattr(parent, name, LaterSlice(first, index, index == len(names) - 1))


def _ternary(module: Any, policy: RoutePolicy, name: str) -> TernaryLinear:
    if isinstance(module, SparseBitLinear):
        selection = module.select()
        codes, scale = selection.codes, selection.weight_scale
    else:
        codes, scale = module.decode_().codes, module.weight_scale
    assert codes is not None
    assert scale is not None
    return TernaryLinear(codes, scale, module.bias, module.config.pattern, policy, name=name)
